"""Masks from what a frame's own pixels are: data, tissue, ink, anything at all; and from a small network's view."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbnet.masks.base import Function, Mask, resized
from sbnet.masks.motion import MOST_SMOOTH
from sbnet.ops.lists.motion_mask import motion_mask_

BINS = 256


class Nodata(Mask):
    """Pixels that hold data: not `value` in all channels, and not NaN.

    Args:
        value: of missing pixels, in the frame's own numbers (bytes are 0 to 1 by then).
    """

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def __call__(self, x: Tensor) -> Tensor:
        return ((x != self.value) & ~x.isnan()).any(1)


def otsu(values: Tensor) -> Tensor:
    """The threshold between two classes of values, 0 to 1, that leaves each the least variance (Otsu 1979): a scalar on
    their device, so that nothing waits for it."""
    return _between(histogram(values))


def histogram(values: Tensor) -> Tensor:
    """[BINS] float64: how many values, 0 to 1, lie at each level."""
    at = (values.float().clamp(0, 1) * (BINS - 1)).round().long().flatten()
    counts = torch.zeros(BINS, dtype=torch.float64, device=values.device)
    return counts.scatter_add_(0, at, torch.ones_like(at, dtype=torch.float64))


def _between(counts: Tensor) -> Tensor:
    """Otsu's threshold of a histogram."""
    levels = torch.arange(BINS, dtype=torch.float64, device=counts.device)
    below, total = counts.cumsum(0), counts.sum()
    mass, whole = (counts * levels).cumsum(0), (counts * levels).sum()
    spread = (whole * below - total * mass).square() / (below * (total - below)).clamp(min=1e-9)
    best = spread >= spread.max() * (1 - 1e-12)  # in the middle of a gap between the classes
    return (levels * best).sum() / best.sum() / (BINS - 1)


class Tissue(Mask):
    """Stained tissue on a bright slide: saturation above Otsu's threshold, found on a thumbnail.

    Args:
        scale: pixels of the frame a pixel of the thumbnail.
        least: saturation below which nothing is tissue, so that an empty slide stays empty.
    """

    def __init__(self, scale: int = 8, least: float = 0.05) -> None:
        if scale < 1:
            raise ValueError(f"sbnet: Tissue: scale: expected at least 1, got {scale}")
        self.scale, self.least = scale, least
        self._limit: Tensor | None = None  # of a picture that comes in tiles

    @property
    def surveys(self) -> bool:
        return True

    def survey(self, tiles: Iterable[Tensor]) -> None:
        counts = sum(
            (histogram(self._saturation(tile)) for tile in tiles), start=torch.zeros(BINS, dtype=torch.float64)
        )
        self._limit = _between(counts)

    def reset(self) -> None:
        self._limit = None

    def _saturation(self, x: Tensor) -> Tensor:
        """[N,h,w] of the thumbnail."""
        small = F.avg_pool2d(x.float(), self.scale, ceil_mode=True) if self.scale > 1 else x.float()
        high, low = small.amax(1), small.amin(1)
        return (high - low) / high.clamp(min=1e-3)

    def __call__(self, x: Tensor) -> Tensor:
        saturation = self._saturation(x)
        limits = [otsu(one) for one in saturation] if self._limit is None else [self._limit] * len(saturation)
        limit = torch.stack(limits).to(x.device).clamp(min=self.least)
        return resized(saturation > limit[:, None, None], (int(x.shape[2]), int(x.shape[3])))


class Ink(Mask):
    """Writing on a page: pixels that differ from the brightness around them by more than `threshold`.

    Args:
        window: side of the neighbourhood, odd, at most 31.
    """

    def __init__(self, threshold: float = 0.15, window: int = MOST_SMOOTH) -> None:
        if not 1 <= window <= MOST_SMOOTH or window % 2 == 0:
            raise ValueError(f"sbnet: Ink: window: expected an odd number of pixels, 1 to {MOST_SMOOTH}, got {window}")
        self.threshold, self.window = threshold, window

    @property
    def captured(self) -> bool:
        return True

    def __call__(self, x: Tensor) -> Tensor:
        x = x.float() if x.dtype == torch.float64 else x
        around = torch.zeros(x.shape[0], *x.shape[2:], device=x.device)
        motion_mask_(x, around, rate=1.0, cut=torch.inf, smooth=self.window)  # the background becomes the mean of boxes
        return motion_mask_(x, around, self.threshold, 1.0, torch.inf, 1)


class Occupied(Mask):
    """Cells of a grid that hold anything: not 0 in some channel (bird's-eye views of LiDAR). On a CPU frames that come
    with them (`Frame.occupied`) are not read."""

    def __init__(self) -> None:
        self._known: Tensor | None = None  # [H,W] bool, of the next frame

    def see(self, frame: Any) -> None:
        self._known = frame.occupied

    def reset(self) -> None:
        self._known = None

    @property
    def captured(self) -> bool:
        return True

    def __call__(self, x: Tensor) -> Tensor:
        if self._known is not None and not x.is_cuda and (1, *self._known.shape) == (x.shape[0], *x.shape[2:]):
            return self._known[None]
        return (x.amax(1) != 0) | (x.amin(1) != 0)  # a third of the time of (x != 0).any(1)


class Alpha(Mask):
    """Pixels of a picture that are not transparent.

    Args:
        least: share of opacity from which on a pixel counts.
    """

    def __init__(self, least: float = 0.0) -> None:
        self.least = least
        self._alpha: Tensor | None = None

    def see(self, frame: Any) -> None:
        pixels = frame.pixels
        self._alpha = None
        if isinstance(pixels, np.ndarray) and pixels.ndim == 3 and pixels.shape[2] == 4:
            self._alpha = torch.from_numpy(pixels[..., 3].copy())

    def __call__(self, x: Tensor) -> Tensor:
        if self._alpha is None:
            return torch.ones(x.shape[0], *x.shape[2:], dtype=torch.bool, device=x.device)
        full = 1.0 if self._alpha.is_floating_point() else 255.0
        return (self._alpha.to(x.device).float() / full > self.least)[None].expand(x.shape[0], -1, -1)


class Thumbnail(Mask):
    """What a network finds on a smaller picture of the frame.

    Args:
        network: x [N,C,h,w] -> scores [N,K,h',w'], any size; the greatest of K counts.
        scale: pixels of the frame a pixel of the small picture.
        threshold: scores above it are set.
    """

    def __init__(self, network: nn.Module | Callable[[Tensor], Tensor], scale: int = 4, threshold: float = 0.5) -> None:
        if scale < 1:
            raise ValueError(f"sbnet: Thumbnail: scale: expected at least 1, got {scale}")
        self.network, self.scale, self.threshold = network, scale, threshold

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        scores = self.network(F.avg_pool2d(x, self.scale, ceil_mode=True) if self.scale > 1 else x)
        if not isinstance(scores, Tensor) or scores.dim() != 4 or scores.shape[0] != x.shape[0]:
            came = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"sbnet: Thumbnail: network: expected scores [{x.shape[0]},K,h,w], got {came}")
        return resized((scores > self.threshold).any(1), (int(x.shape[2]), int(x.shape[3])))


def everything() -> Mask:
    """All pixels."""
    return Function(lambda x: torch.ones(x.shape[0], *x.shape[2:], dtype=torch.bool, device=x.device))
