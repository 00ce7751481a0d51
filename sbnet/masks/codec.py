"""Masks out of what a film's codec did: the blocks that it moved, or coded anew."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sbnet.masks.base import Mask, resized

CELL = 8  # pixels; codecs that export vectors have blocks of 8 or 16


@dataclass
class Motion:
    """Motion vectors of a frame.

    Attributes:
        cells: [h,w] float32, of each cell of CELL pixels of the frame as it is stored the longest vector, in pixels;
            infinite where there is none: it was coded without reference to other frames.
        size: (height, width) of the stored frame.
        turned, over, across: how it is shown: transposed first, then mirrored up and down, then left and right.
    """

    cells: np.ndarray
    size: tuple[int, int]
    turned: bool = False
    over: bool = False
    across: bool = False

    def moved(self, least: float, device: torch.device) -> Tensor:
        """[H,W] bool, upright: pixels whose vector is longer than `least`, or that have none."""
        found = torch.from_numpy(self.cells > least).to(device)
        for axis in (0, 1):
            found = found.repeat_interleave(CELL, axis)
        found = found[: self.size[0], : self.size[1]]
        found = found.t() if self.turned else found
        return found.flip([axis for axis, mirrored in enumerate((self.over, self.across)) if mirrored])


def motion_of(vectors: np.ndarray | None, size: tuple[int, int], *shown: bool) -> Motion:
    """A frame's Motion.

    Args:
        vectors: FFmpeg's, a record each; None: it has none, as a key frame.
        size: (height, width) of the stored frame.
        shown: whether it is turned, and mirrored up and down, and left and right.
    """
    rows, columns = (-(-n // CELL) for n in size)
    cells = np.full((rows + 2, columns + 2), -1, np.float32)  # blocks at the border reach beyond it
    if vectors is not None and len(vectors):
        scale = np.maximum(vectors["motion_scale"], 1)
        length = np.hypot(vectors["motion_x"], vectors["motion_y"]) / scale
        high, wide = (np.maximum(vectors[side].astype(int) // CELL, 1) for side in "hw")
        top = np.clip((vectors["dst_y"] - vectors["h"].astype(int) // 2) // CELL, 0, rows)
        left = np.clip((vectors["dst_x"] - vectors["w"].astype(int) // 2) // CELL, 0, columns)
        for down in range(int(min(high.max(), 2))):
            for right in range(int(min(wide.max(), 2))):
                fits = (high > down) & (wide > right)
                np.maximum.at(cells, (top[fits] + down, left[fits] + right), length[fits])
    cells = cells[:rows, :columns]
    return Motion(np.where(cells < 0, np.float32(math.inf), cells), size, *shown)


class Codec(Mask):
    """Blocks of a film that its codec moved by more than `least` pixels, or coded without reference to other frames: a
    key frame is all motion. It costs next to nothing, and knows no changes of brightness that stand still: what a codec
    adds to a block that it did not move is not told.

    FFmpeg exports the vectors of H.264 and MPEG-1, 2 and 4, on the host alone; of HEVC, VP9 and AV1 it does not.

    Args:
        least: length of a vector, in pixels.
    """

    def __init__(self, least: float = 0.25) -> None:
        if not 0 <= least < math.inf:
            raise ValueError(f"sbnet: Codec: least: expected pixels, at least 0, got {least}")
        self.least = least
        self._now: Motion | None = None

    @property
    def reads_vectors(self) -> bool:
        return True

    def see(self, frame: Any) -> None:
        self._now = frame.motion

    def reset(self) -> None:
        self._now = None

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] != 1 or self._now is None:
            raise ValueError(
                "sbnet: Codec: expected a frame of a film with motion vectors, of H.264 or MPEG-1, 2 or 4, got none: "
                "FFmpeg exports none of other codecs"
            )
        return resized(self._now.moved(self.least, x.device)[None], (int(x.shape[2]), int(x.shape[3])))
