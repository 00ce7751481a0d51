"""OpenAI's sparse_attention: its functions and modes, q, k and v as [batch, positions, heads * D]."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sbnet.compat.blocksparse.transformer import BlocksparseTransformer
from sbnet.ops.attention.attention import block_attention
from sbnet.ops.attention.layout import AttentionLayout

MODES = "all, local, strided or (blocksparse) fixed"


def get_attn_mask(n: int, attn_mode: str, local_attn_ctx: int | None = None) -> Tensor:
    """[1, 1, n, n] float32: 1 where a query (row) sees a key; attn_mode "all", "local" or "strided"."""
    layout = _layout("get_attn_mask", attn_mode, local_attn_ctx)
    if attn_mode != "strided":
        return layout.visible(1, n, n).reshape(1, 1, n, n).float()
    at = torch.arange(n)
    distance = at[:, None] - at
    return ((distance >= 0) & (distance % _context("get_attn_mask", local_attn_ctx) == 0)).float()[None, None]


def strided_transpose(x: Tensor, n_ctx: int, local_attn_ctx: int, blocksize: int) -> Tensor:
    """x [batch, n_ctx, ...] with position i * local_attn_ctx + j moved to j * (n_ctx / local_attn_ctx) + i."""
    rows = n_ctx // local_attn_ctx
    if n_ctx % local_attn_ctx or rows % blocksize:
        raise ValueError(
            f"strided_transpose: n_ctx: expected a multiple of {local_attn_ctx} times {blocksize}, got {n_ctx}"
        )
    return x.unflatten(1, (rows, local_attn_ctx)).transpose(1, 2).flatten(1, 2)


def split_states(x: Tensor, n: int) -> Tensor:
    """[..., n * D] as [..., n, D]."""
    return x.unflatten(-1, (n, -1))


def merge_states(x: Tensor) -> Tensor:
    """[..., n, D] as [..., n * D]."""
    return x.flatten(-2)


def split_heads(x: Tensor, n: int) -> Tensor:
    """[batch, positions, n * D] as [batch, n, positions, D]."""
    return split_states(x, n).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[batch, n, positions, D] as [batch, positions, n * D]."""
    return merge_states(x.transpose(1, 2))


def attention_impl(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    attn_mode: str,
    local_attn_ctx: int | None = None,
    *,
    recompute: bool = False,
) -> Tensor:
    """Causal attention of q, k, v [B, T, heads * D]: attn_mode "all", "local" or "strided" over local_attn_ctx.

    recompute: keep q, k and v alone for the backward pass, and run the forward again there. Any number of positions and
    any D; what block-sparse kernels do not take (D other than a multiple of 8 from 16 to 256, positions that are no
    multiple of a stride) PyTorch's dense attention computes, under a mask.

    >>> y = attention_impl(q, k, v, heads=4, attn_mode="strided", local_attn_ctx=32)
    """
    layout = _layout("attention_impl", attn_mode, local_attn_ctx)
    width, positions = q.shape[-1] // max(heads, 1), k.shape[1]
    whole = attn_mode != "strided" or positions % _context("attention_impl", local_attn_ctx) == 0
    if width % 8 == 0 and 16 <= width <= 256 and whole:
        return _run(q, k, v, layout, heads, recompute)
    mask = get_attn_mask(positions, attn_mode, local_attn_ctx).bool().to(q.device)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        left, right, values = (split_heads(t, heads) for t in (q, k, v))
        return merge_heads(F.scaled_dot_product_attention(left, right, values, attn_mask=mask))

    return checkpoint(dense, q, k, v, use_reentrant=False) if recompute else dense(q, k, v)


def blocksparse_attention_impl(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    attn_mode: str,
    local_attn_ctx: int | None = None,
    blocksize: int = 32,
    num_verts: int | None = None,
    vertsize: int | None = None,
    *,
    recompute: bool = False,
) -> Tensor:
    """As `attention_impl`, and attn_mode "fixed": `num_verts` groups of heads, each with `vertsize` blocks a chunk."""
    op = "blocksparse_attention_impl"
    if attn_mode == "fixed":
        layout = AttentionLayout.fixed(_context(op, local_attn_ctx), num_verts or 1, vertsize or 1, blocksize)
    else:
        if q.shape[1] % blocksize:
            raise ValueError(f"{op}: blocksize: expected a divisor of {q.shape[1]} positions, got {blocksize}")
        layout = _layout(op, attn_mode, local_attn_ctx)
    return _run(q, k, v, layout, heads, recompute)


def get_blocksparse_obj(
    n_ctx: int,
    n_heads: int,
    attn_mode: str,
    blocksize: int = 32,
    local_attn_ctx: int | None = None,
    num_verts: int = 4,
    vertsize: int = 1,
) -> BlocksparseTransformer:
    """The three steps of an attn_mode as an object; "strided" is of positions that went through `strided_transpose`."""
    op = "get_blocksparse_obj"
    if n_ctx % blocksize:
        raise ValueError(f"{op}: blocksize: expected a divisor of {n_ctx} positions, got {blocksize}")
    if attn_mode == "fixed":
        layout = AttentionLayout.fixed(_context(op, local_attn_ctx), num_verts, vertsize, blocksize)
        visible = layout.visible(n_heads, n_ctx, n_ctx)
    elif attn_mode == "strided":
        rows = n_ctx // _context(op, local_attn_ctx)
        if rows == 0 or rows % blocksize or n_ctx % rows:
            raise ValueError(f"{op}: local_attn_ctx: expected {n_ctx} over it to be a multiple of {blocksize}")
        chunk = torch.arange(n_ctx) // rows
        visible = (chunk[:, None] == chunk) & torch.ones(n_ctx, n_ctx, dtype=torch.bool).tril()
    else:
        visible = _layout(op, attn_mode, local_attn_ctx).visible(1, n_ctx, n_ctx)
    pixels = visible.reshape(-1, n_ctx, n_ctx).numpy()
    tiles = pixels.reshape(len(pixels), n_ctx // blocksize, blocksize, n_ctx // blocksize, blocksize).swapaxes(2, 3)

    def callback(blk_shape: tuple[int, int], head_idx: int, qry_idx: int, key_idx: int, blk_idx: int) -> np.ndarray:
        return tiles[head_idx, qry_idx, key_idx]

    blocks = np.asarray(tiles.any((3, 4)))
    return BlocksparseTransformer(blocks if len(blocks) > 1 else blocks[0], blocksize, n_heads, callback)


def get_callback(attn_mode: str, local_attn_ctx: int | None = None) -> Callable[..., np.ndarray]:
    """callback(block shape, head, query block, key block, block) -> the elements of a block that count, as bools."""
    if attn_mode not in ("all", "local", "strided", "fixed"):
        raise ValueError(f"get_callback: attn_mode: expected {MODES}, got {attn_mode!r}")
    reach = _context("get_callback", local_attn_ctx) if attn_mode == "local" else None

    def callback(blk_shape: tuple[int, int], head_idx: int, qry_idx: int, key_idx: int, blk_idx: int) -> np.ndarray:
        queries = blk_shape[0] * qry_idx + np.arange(blk_shape[0])[:, None]
        keys = blk_shape[1] * key_idx + np.arange(blk_shape[1])
        if reach is not None:
            return (keys <= queries) & (keys + reach > queries)
        return keys <= queries if qry_idx == key_idx else np.ones(blk_shape, bool)

    return callback


def _context(op: str, local_attn_ctx: int | None) -> int:
    if local_attn_ctx is None:
        raise ValueError(f"{op}: local_attn_ctx: expected a number of positions, got None")
    return local_attn_ctx


def _layout(op: str, attn_mode: str, local_attn_ctx: int | None) -> AttentionLayout:
    if attn_mode == "all":
        return AttentionLayout.causal()
    if attn_mode == "local":
        return AttentionLayout.local(_context(op, local_attn_ctx))
    if attn_mode == "strided":
        return AttentionLayout.strided(_context(op, local_attn_ctx))
    raise ValueError(f"{op}: attn_mode: expected {MODES}, got {attn_mode!r}")


def _run(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, heads: int, recompute: bool) -> Tensor:
    run: Any = functools.partial(block_attention, layout=layout, heads=heads)
    return checkpoint(run, q, k, v, use_reentrant=False) if recompute else run(q, k, v)
