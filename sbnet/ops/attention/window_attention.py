"""window_attention_: attention within windows of a plane, among its active pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet._library import window_attention_takes
from sbnet.active import ActiveBlocks
from sbnet.ops.common import check_active, empty4, refuse_gradient, refuse_meta_mix, require_active
from sbnet.ops.masked.layer import in_place_fake, no_gradient

_OP = "window_attention_"
TENSORS = "active_keys", "bias", "row_table", "column_table", "scales", "k_fill", "v_fill"
DEFAULTS: dict[str, Any] = {**dict.fromkeys(TENSORS), "starts": (0, 0, 0), "normalize": 0.0}


def window_attention_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    keys: Tensor,
    active: ActiveBlocks,
    out: Tensor,
    *,
    starts: Sequence[int] = (0, 0, 0),
    heads: int,
    dim: int,
    value_dim: int,
    scale: float,
    active_keys: Tensor | None = None,
    bias: Tensor | None = None,
    row_table: Tensor | None = None,
    column_table: Tensor | None = None,
    scales: Tensor | None = None,
    normalize: float = 0.0,
    k_fill: Tensor | None = None,
    v_fill: Tensor | None = None,
    row_order: Tensor | None = None,
    row_lengths: Tensor | None = None,
    key_order: Tensor | None = None,
    key_lengths: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T + bias) v within windows, written to the active pixels of `out`; others keep what they hold.

    Keys that are not active do not exist, those of padding do. A pixel whose window has no key gets zeros.

    Args:
        q: [N,C,H,W] channels_last, float32, float16 or bfloat16.
        k, v: [N,C',H',W'] of q's dtype. Any of the three may be the same tensor.
        rows: [windows,rows] int64, which pixel each row of each window is, from 1 on; 0: padding.
        keys: [windows,keys] int64, the same of keys; at most 8192 of them.
        active: blocks of H x W.
        out: [N,heads * value_dim,H,W] channels_last, overlapping none of them.
        starts: the first channels of q, k and v.
        heads, dim, value_dim: heads of `dim` channels of q and k and `value_dim` of v, multiples of 8 up to 128.
        scale: of the scores.
        active_keys: [N,H' * W'] bool, where keys are of another plane than q.
        bias: [1 or windows,heads,rows,keys], float32 or q's dtype.
        row_table, column_table: [R,R,dim] and [C,C,dim] of q's dtype: the bias of row i C + j for key k C + l is
            q . (row_table[i,k] + column_table[j,l]).
        scales: numbers of heads, float32 or q's dtype, by which scores are multiplied before a bias is added.
        normalize: queries and keys are divided by their length, or by this where that is more; 0: they are not.
        row_order, row_lengths, key_order, key_lengths: what `pack_tokens` lists of the planes, where one window has all
            pixels in their order: CUDA's kernels need not list them.
        k_fill, v_fill: keys [heads * dim] and values [heads * value_dim] of padding, else zeros.

    Returns:
        out. Records no gradient.

    Raises:
        RuntimeError, ValueError, TypeError: wrong shapes, dtypes, devices, memory formats.
    """
    require_active(_OP, active)
    check_active(_OP, active)
    refuse_gradient(_OP, "scaled_dot_product_attention", q, k, v, out)
    torch.ops.sbnet.window_attention_(
        q, k, v, rows, keys, active.block_map, active_keys, bias, row_table, column_table, scales, k_fill, v_fill,
        row_order, row_lengths, key_order, key_lengths, active.grid.numbers(), list(starts), heads, dim, value_dim,
        scale, normalize, out,
    )  # fmt: skip
    return out


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, keys: Tensor, active: ActiveBlocks, **options: Any
) -> Tensor:
    """What `window_attention_` writes, and zeros elsewhere; options are its own. Records no gradient."""
    require_active("window_attention", active)
    check_active("window_attention", active)
    o = {**DEFAULTS, **options}
    return torch.ops.sbnet.window_attention(
        q, k, v, rows, keys, active.block_map, *(o[name] for name in TENSORS), active.grid.numbers(),
        list(o["starts"]), o["heads"], o["dim"], o["value_dim"], o["scale"], o["normalize"],
    )  # fmt: skip


def takes(
    dtype: torch.dtype, starts: Sequence[int], dim: int, value_dim: int, keys: int, tables: Sequence[int] = ()
) -> bool:
    """Do the ops take such heads and windows? tables: rows and columns of the tables."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16) or any(start % 8 for start in starts):
        return False
    return window_attention_takes(dtype == torch.float32, dim, value_dim, keys, *(tables or (0, 0)))


@torch.library.register_fake("sbnet::window_attention")
def _fake(q: Tensor, *arguments: Any) -> Tensor:
    refuse_meta_mix("window_attention", q, *arguments)
    _, _, heads, _, value_dim, *_ = arguments[-7:]
    return empty4(q, (q.shape[0], heads * value_dim, *q.shape[2:]), True)


in_place_fake(_OP)
no_gradient("window_attention")
