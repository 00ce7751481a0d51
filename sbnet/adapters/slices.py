"""Rectangles of a picture that hold what is active, for detectors that take pictures and no masks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.apps.pipeline.frames import Frame
from sbnet.masks.base import Mask
from sbnet.ops.frames.components import connected_components

Rectangle = tuple[int, int, int, int]  # x0, y0, x1, y1


@dataclass(frozen=True)
class Slices:
    """Which slices are made of a mask.

    Attributes:
        block: side of the blocks that the mask is reduced to; active blocks that touch are one slice.
        margin: pixels around them, so that what lies across a border is seen whole, and between parts of a long slice.
        least, most: sides of a slice; a longer one is cut into parts, and parts without an active block are dropped.
    """

    block: int = 32
    margin: int = 32
    least: int = 64
    most: int = 640

    def __post_init__(self) -> None:
        if self.block < 1 or self.margin < 0 or self.least < 1 or self.most <= 2 * self.margin:
            raise ValueError(f"sbnet: Slices: expected block, least >= 1, margin >= 0, most > 2 margin, got {self}")

    def __call__(self, mask: Tensor) -> list[Rectangle]:
        """The slices of a mask [H,W] bool, from the top down: each set pixel lies in one of them."""
        height, width = mask.shape
        blocks = F.max_pool2d(mask[None].float(), self.block, ceil_mode=True)[0].cpu() > 0
        boxes, _, _, count = connected_components(blocks[None].float(), 0.5, capacity=max(1, blocks.numel()))
        found = []
        for left, top, right, bottom in boxes[0, : int(count)].tolist():
            x, y = self._span(left, right, width), self._span(top, bottom, height)
            found.append((x[0], y[0], x[1], y[1]))
        return sorted(
            (part for whole in _joined(found) for part in self._parts(whole, mask)), key=lambda r: (r[1], r[0])
        )

    def _span(self, first: int, end: int, length: int) -> tuple[int, int]:
        """Pixels of blocks first to end, with the margin, and as many as `least` where the picture has them."""
        low, high = first * self.block - self.margin, end * self.block + self.margin
        missing = max(0, self.least - (high - low))
        low, high = low - missing // 2, high + missing - missing // 2
        return max(0, low), min(length, high)

    def _parts(self, whole: Rectangle, mask: Tensor) -> Iterator[Rectangle]:
        x0, y0, x1, y1 = whole
        columns, rows = self._cuts(x0, x1), self._cuts(y0, y1)
        for top, bottom in rows:
            for left, right in columns:
                if len(rows) * len(columns) == 1 or mask[top:bottom, left:right].any():
                    yield left, top, right, bottom

    def _cuts(self, low: int, high: int) -> list[tuple[int, int]]:
        if high - low <= self.most:
            return [(low, high)]
        step = self.most - 2 * self.margin
        starts = [*range(low, high - self.most, step), high - self.most]
        return [(start, start + self.most) for start in starts]


def _joined(rectangles: list[Rectangle]) -> list[Rectangle]:
    """Those that overlap made one, until none do."""
    left = list(rectangles)
    done: list[Rectangle] = []
    while left:
        a = left.pop()
        others = [b for b in left + done if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]]
        if not others:
            done.append(a)
            continue
        left, done = ([b for b in group if b not in others] for group in (left, done))
        corners = np.array([a, *others])
        (x0, y0), (x1, y1) = corners[:, :2].min(0).tolist(), corners[:, 2:].max(0).tolist()
        left.append((x0, y0, x1, y1))
    return done


def slices_of(picture: np.ndarray, mask: Mask, slices: Slices) -> list[Rectangle]:
    """The slices of a picture [H,W,C] where a mask is set."""
    return slices(mask(Frame(0, picture).tensor(torch.device("cpu"), torch.float32))[0])
