"""Masks from files: a picture of one for all frames, a film or a folder of one a frame."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sbnet.masks.base import Mask, resized

LABELS = 32  # dark levels, at most, that are labels and no shades


def marked(picture: Any, size: Any = None) -> np.ndarray:
    """[H,W] bool of a picture of Pillow's: what it marks (`Recorded`)."""
    from PIL import ImageOps

    lossy = picture.format == "JPEG"
    picture = ImageOps.exif_transpose(picture)
    alpha = np.asarray(picture.convert("RGBA"))[..., 3] >= 128 if picture.has_transparency_data else None
    if picture.mode in ("P", "PA"):
        found = np.asarray(picture.getchannel(0)) != 0
        return found if alpha is None else found & alpha
    if picture.mode in ("LA", "RGBA", "La", "RGBa"):
        colours = np.asarray(picture.convert("RGB")).reshape(-1, 3)
        if alpha is not None and (colours == colours[0]).all():
            return alpha
    numbers = picture if picture.mode[0] in "IF1L" and picture.mode != "LA" else picture.convert("RGB")
    found = _set(np.asarray(numbers), lossy)
    return found if alpha is None else found & alpha


def _set(values: np.ndarray, lossy: bool) -> np.ndarray:
    """[H,W] bool of [H,W] or [H,W,C] numbers: those from half of their range on, or, of a few dark levels, all but 0.
    lossy: what made them leaves shades in the dark."""
    values = values.max(2) if values.ndim == 3 else values
    if values.dtype == np.bool_:
        return values.copy()  # Pillow's own memory is not to be written
    most = values.max(initial=0)
    if values.dtype.kind == "f":
        return values >= (0.5 if most <= 1 else 128)
    half = 128 if values.dtype == np.uint8 or most <= 255 else 32768 if most <= 65535 else 1 << 31
    dark = not lossy and most < 128 and len(np.unique(values)) <= LABELS
    return values != 0 if dark else values >= half


class Recorded(Mask):
    """Bright pixels (at least half) of a picture, or of the picture of the same index in a film, folder or glob. With
    one picture it is that of all frames; a film or folder that ends before the frames do keeps its last. Of pictures of
    labels, with a palette or of a few dark levels (0 and 1), all but 0 is set; of a picture of one colour what is
    opaque, of others what is bright and opaque.

    Args:
        path: a picture, a film, a folder or a glob.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from sbnet.apps.pipeline.sources import open_source

        self._source = open_source(path, pixels=marked)
        self._frames: Iterator[Any] | None = None
        self._now: Tensor | None = None  # [1,h,w]
        self._at, self._wanted = -1, -1
        self._counting = True

    @property
    def files(self) -> Sequence[Any]:
        return self._source.files

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
            self._at, self._now = frame.index, torch.from_numpy(_set(frame.pixels, lossy=True))[None]
        if self._now is None:
            raise ValueError(f"sbnet: Recorded: {self._source.name}: has no frames")
        now = resized(self._now.to(x.device), (int(x.shape[2]), int(x.shape[3])))
        return now.expand(x.shape[0], -1, -1)
