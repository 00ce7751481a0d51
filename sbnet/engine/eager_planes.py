"""The planes of a context of `sbnet.masked`: by size their lists of active blocks, and the pixels next to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sbnet.active import ActiveBlocks, Fringe
from sbnet.engine.modes import open_of
from sbnet.geometry import Pair, to_pair
from sbnet.masks.grow import grow
from sbnet.ops import mask_pyramid
from sbnet.ops.common import mask_planes

WIDE_PLANE, WIDE_BLOCK, NARROW_BLOCK = 128, 16, 8  # of block="auto": a side, and the blocks of larger and smaller ones


# The planes that were met inside contexts with masks of a size and a block: a training step meets them again.
_TOGETHER: dict[Any, list[Pair]] = {}
MOST_TOGETHER = 12


class Planes(TorchFunctionMode):
    """Arguments as `sbnet.masked` has them."""

    def __init__(self, mask: Tensor, block: Any, margin: int, capacity: float | None) -> None:
        super().__init__()
        self.mask = grow(mask_planes("masked", mask), margin)
        if isinstance(block, str) and block != "auto":
            raise ValueError(f'sbnet: masked: block: expected an int, a pair or "auto", got {block!r}')
        self.block = None if isinstance(block, str) else to_pair(block, "masked: block")
        if capacity is not None and not 0 < capacity <= 1:
            raise ValueError(f"sbnet: masked: capacity: expected a share above 0 and up to 1, got {capacity}")
        self.capacity = capacity
        self._lists: dict[Pair, ActiveBlocks] = {}
        self._rings: dict[Pair, Fringe] = {}
        self._planes: set[Pair] = set()  # met in this context

    def active(self, size: Sequence[int]) -> ActiveBlocks:
        """The active blocks of a plane of (height, width)."""
        key = int(size[0]), int(size[1])
        self._planes.add(key)
        if key not in self._lists:
            if open_of(self) is None:
                found = mask_pyramid(self.mask, [(*key, self._block_of(key))]).planes[0]
                self._lists[key] = found if self.capacity is None else _first_of(found, self.capacity)
            else:
                self._list_planes(key)
        return self._lists[key]

    def _list_planes(self, key: Pair) -> None:
        """The lists of a plane and of those that it was met with before: one call for all of a network's."""
        together = _TOGETHER.setdefault((tuple(self.mask.shape[1:]), self.block), [])
        if key not in together and len(together) < MOST_TOGETHER:
            together.append(key)
        wanted = [key, *(size for size in together if size != key and size not in self._lists)]
        rings = [(k, [(k, 3, 1, 1)]) for k in range(len(wanted))]
        pyramid = mask_pyramid(self.mask, [(*size, self._block_of(size)) for size in wanted], fringes=rings)
        for size, plane, ring in zip(wanted, pyramid.planes, pyramid.fringes, strict=True):
            self._lists[size], self._rings[size] = plane, ring

    def _block_of(self, size: Pair) -> Any:
        if self.block is not None:
            return self.block
        return WIDE_BLOCK if min(size) >= WIDE_PLANE else NARROW_BLOCK

    def ring(self, size: Sequence[int]) -> Fringe:
        """The pixels of a plane next to its active blocks."""
        self.active(size)
        return self._rings[int(size[0]), int(size[1])]

    def missed(self) -> dict[Pair, int]:
        """Of each plane that was met, how many active blocks did not fit the capacity. Reads the device."""
        return {size: int(a.total) - int(a.count) for size, a in self._lists.items() if size in self._planes}

    def planes(self) -> list[Pair]:
        """(height, width) of the feature maps that were met."""
        return list(self._planes)

    def met(self, size: Sequence[int]) -> bool:
        """Were there feature maps of this size?"""
        return tuple(map(int, size)) in self._planes


def _first_of(active: ActiveBlocks, capacity: float) -> ActiveBlocks:
    """The first blocks of a list, as many as a share of all."""
    rows = max(1, int(capacity * active.capacity))
    block_map = torch.where(active.block_map < rows, active.block_map, -1)
    return ActiveBlocks(active.indices[:rows], active.count.clamp(max=rows), active.total, block_map, active.grid)
