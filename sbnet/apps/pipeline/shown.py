"""Active blocks as people see them: of the frame, where the network's own are of another plane."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sbnet.geometry import Pair

SHOWN = 16  # side of the blocks that are shown where the network's own are not the frame's


class ShownBlocks:
    """`shown(hits, block, plane, given, frame, pad)` tells which blocks of a frame, SHOWN pixels a side, hold a pixel
    that an active block of a plane covers. It goes from blocks to blocks: pixels take as long as many a layer. Tables
    of sizes alone stay where they are, for CUDA graphs, while those do.

    >>> hits = torch.rand(36, 48) > 0.9
    >>> shown = ShownBlocks()(hits, (8, 8), plane=(288, 384), given=(576, 768), frame=(570, 768), pad=0)  # [36, 48]
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._tables: list[Tensor] = []

    def __call__(self, hits: Tensor, block: Pair, plane: Pair, given: Pair, frame: Pair, pad: int) -> Tensor:
        """[rows,columns] bool.

        Args:
            hits: [blocks down, blocks across] bool, which blocks of the plane are active; they tile it.
            block, plane: height and width. A pixel of the plane stands for those of `given` whose window of adaptive
                pooling holds it.
            given: height and width of the network's input: of the frame, `pad` pixels above and on its left, and what
                is added below and on its right.
        """
        key = block, plane, given, frame, pad, hits.device
        if key != self._key:
            tables = (_shared(*sides, pad) for sides in zip(frame, given, plane, block, strict=True))
            self._key, self._tables = key, [table.to(hits.device) for table in tables]
        rows, columns = self._tables
        return rows @ hits.float() @ columns.t() > 0


def _shared(frame: int, given: int, plane: int, block: int, pad: int) -> Tensor:
    """[shown blocks, blocks of the plane] float, along one axis: 1 where they share a pixel."""
    first = torch.arange(0, frame, SHOWN)[:, None] + pad
    end = (first + SHOWN).clamp(max=frame + pad)
    low = first * plane // given
    high = -(end * plane // -given) - 1  # rounded up: the last pixel that the last window holds
    blocks = torch.arange(-(-plane // block))
    return ((blocks >= low // block) & (blocks <= high // block)).float()
