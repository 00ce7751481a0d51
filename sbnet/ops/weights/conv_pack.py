"""Filters of a block-sparse convolution, packed once for many calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sbnet.ops.common import refuse_meta_mix, require_tensor
from sbnet.ops.weights.conv_layout import ConvLayout
from sbnet.select import packed_filter_bytes

_ops = torch.ops.sbnet


def pack_blocksparse_filters(filters: Tensor, layout: ConvLayout, transposed: bool = False) -> Tensor:
    """Filters in the order in which this device's kernels read them, for many calls: `packed` of `blocksparse_conv`,
    `blocksparse_conv_active` and, transposed, `blocksparse_deconv`.

    A copy of what the filters hold now: make it anew after they have been written, and do not store it. Calls refuse
    one of another size; other values they cannot tell. The bits of a convolution are the same with and without.

    Args:
        filters: as those calls take them.
        layout: theirs, too.

    Returns:
        [bytes] uint8; empty where kernels read filters as they are, which is everywhere but on Hopper GPUs with halves
        and square blocks of a grid (`ConvLayout.block_size`).

    >>> layout = sbnet.ConvLayout([[range(0, 16), range(0, 32)]], (3, 3))
    >>> filters = torch.randn(layout.filter_shape)
    >>> packed = sbnet.pack_blocksparse_filters(filters, layout)
    >>> y = sbnet.blocksparse_conv(x, filters, layout, packed=packed)
    """
    op = "pack_blocksparse_filters"
    require_tensor(op, "filters", filters)
    if filters.numel() != layout.weights:
        raise ValueError(f"sbnet::{op}: filters: expected {layout.weights} elements, got {filters.numel()}")
    tables, numbers = layout.on(filters.device, swapped=transposed)
    return _ops.pack_blocksparse_filters(filters.reshape(-1), tables, numbers, transposed)


def require_pack(op: str, packed: Tensor | None, x: Tensor, layout: ConvLayout) -> None:
    """Refuses what csrc/torch_binding/weights/conv.cpp refuses, for calls that need no pack.

    Raises:
        ValueError: not a pack's size or dtype.
        RuntimeError: another device than x's.
    """
    if packed is None:
        return
    if packed.device != x.device:
        raise RuntimeError(f"sbnet::{op}: packed: expected {x.device}, the device of x, got {packed.device}")
    wanted = packed_filter_bytes(layout.on(x.device)[1], x.dtype, False, x.device)
    if packed.dtype != torch.uint8 or packed.numel() != wanted or not packed.is_contiguous():
        raise ValueError(
            f"sbnet::{op}: packed: expected pack_blocksparse_filters(filters, layout), {wanted} bytes, "
            f"got {packed.numel()} elements of {packed.dtype}"
        )


class KeptPack:
    """The pack of a layer's filters, made anew after every write that PyTorch counts."""

    def __init__(self) -> None:
        self._key: Any = None
        self._packed: Tensor | None = None

    def of(self, filters: Tensor, layout: ConvLayout, transposed: bool = False) -> Tensor | None:
        """For a call at once, on the current stream; None where calls pack by themselves: with gradients or autocast
        on, in traced graphs, and in CUDA graphs, which would go on with the filters of today."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or filters.is_inference() or not _packs(filters):
            return None
        key = (filters.data_ptr(), filters._version, filters.dtype, layout, transposed, _stream(filters))
        if self._packed is None or key != self._key:
            self._key, self._packed = key, pack_blocksparse_filters(filters, layout, transposed)
        return self._packed

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]


def _packs(filters: Tensor) -> bool:
    return filters.is_cuda and not torch.is_autocast_enabled("cuda") and not torch.cuda.is_current_stream_capturing()


def _stream(filters: Tensor) -> int:
    return torch.cuda.current_stream(filters.device).cuda_stream if filters.is_cuda else 0


@torch.library.register_fake("sbnet::pack_blocksparse_filters")
def _pack_fake(weight: Tensor, tables: Tensor, layout: list[int], transposed: bool) -> Tensor:
    refuse_meta_mix("pack_blocksparse_filters", weight, tables)
    torch._check(
        tuple(weight.shape) == (layout[5],),
        lambda: f"sbnet::pack_blocksparse_filters: weight: expected [{layout[5]}], got {list(weight.shape)}",
    )
    return weight.new_empty(packed_filter_bytes(layout, weight.dtype, transposed, weight.device), dtype=torch.uint8)
