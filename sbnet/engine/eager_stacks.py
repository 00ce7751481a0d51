"""What a context of `sbnet.masked` with a capacity saves for the backward pass: stacks of active blocks."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sbnet.engine.eager import masked

_ops = torch.ops.sbnet


class Stacks(torch.autograd.graph.saved_tensors_hooks):
    """What is saved of feature maps that are 0 outside of the active blocks: stacks of those blocks.

    Maps are known by their memory, as long as the tensor that was noted is there: what autograd saves of it is another.
    """

    def __init__(self, mode: masked) -> None:
        self._mode, self._noted = weakref.proxy(mode), {}  # type: ignore[var-annotated]
        super().__init__(self._pack, self._unpack)

    def note(self, x: Tensor) -> None:
        at = x.data_ptr()
        self._noted[at] = (tuple(x.shape), x.stride(), x.dtype)
        weakref.finalize(x, self._noted.pop, at, None)

    def _pack(self, x: Tensor) -> Any:
        if self._noted.get(x.data_ptr()) != (tuple(x.shape), x.stride(), x.dtype) or not x.numel():
            return x
        active = self._mode.active(x.shape[2:])
        grid = active.grid.numbers()
        lists = (active.indices, active.count, active.block_map)
        with torch.no_grad():
            return _ops.sparse_gather(x.detach(), *lists, grid, False, True), lists, grid, x.shape, x.stride()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        blocks, lists, grid, shape, stride = packed
        base = blocks.new_zeros(shape[0], shape[2], shape[3], shape[1]).permute(0, 3, 1, 2)
        if stride[1] != 1:
            base = blocks.new_zeros(shape)
        with torch.no_grad():
            return _ops.sparse_scatter(blocks, *lists, base, grid, False, False, False)
