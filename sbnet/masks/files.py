"""Masks from files: a picture of one for all frames, a film or a folder of one a frame."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sbnet.masks.base import Mask, resized


class Recorded(Mask):
    """Bright pixels (at least half) of a picture, or of the picture of the same index in a film, folder or glob. With
    one picture it is that of all frames; a film or folder that ends before the frames do keeps its last.

    Args:
        path: a picture, a film, a folder or a glob.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from sbnet.apps.pipeline.sources import open_source

        self._source = open_source(path)
        self._frames: Iterator[Any] | None = None
        self._now: Tensor | None = None  # [1,h,w]
        self._at, self._wanted = -1, -1
        self._counting = True

    def reset(self) -> None:
        close = getattr(self._frames, "close", None)
        if close is not None:
            close()
        self._frames, self._now, self._at, self._wanted, self._counting = None, None, -1, -1, True

    def see(self, frame: Any) -> None:
        self._wanted, self._counting = frame.index, False

    def __call__(self, x: Tensor) -> Tensor:
        if self._counting:  # called outside a pipeline: one picture a call
            self._wanted += 1
        if self._frames is None:
            self._frames = iter(self._source)
        while self._at < self._wanted:
            frame = next(self._frames, None)
            if frame is None:
                break
            if frame.fault:
                raise ValueError(f"sbnet: Recorded: {self._source.name}: {frame.name}: {frame.fault}")
            self._at, self._now = frame.index, torch.from_numpy(frame.picture().max(2) >= 128)[None]
        if self._now is None:
            raise ValueError(f"sbnet: Recorded: {self._source.name}: has no frames")
        now = resized(self._now.to(x.device), (int(x.shape[2]), int(x.shape[3])))
        return now.expand(x.shape[0], -1, -1)
