"""Results held against the masked contract in float64, within a share of the run's time and so much memory.

Samples are cut out while the pipeline runs, around what is active, and checked once its time is known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sbnet.apps.pipeline.summary import LEAST, Summary
from sbnet.engine.oracle import compare, plane_masks
from sbnet.geometry import Pair

MEMORY = 500e6  # bytes that a check may take
KEPT = 8  # samples
INNER = 16  # side of the least area that is compared, in pixels
SLOW = 3e9  # products a second in float64, until it was measured


@dataclass
class Sample:
    """A window of a frame, what the network gave there, and the contract's masks of it.

    Attributes:
        x, y: [1,C,h,w] of the input; [1,K,h',w'] of the output.
        masks: of each plane's window.
        open: which sides (above, below, left, right) are cut: there the network would have seen more.
        at: a pixel (row, column) of the window that is active.
    """

    x: Tensor
    y: Tensor
    masks: Mapping[Pair, Tensor]
    open: tuple[bool, bool, bool, bool]
    at: Pair


class Checks:
    """`keep` a sample of some frames, then `conclude` with the run's time: the summary says what was found.

    Args:
        share: of the run's time that checks may take.
    """

    def __init__(self, model: Any, share: float, summary: Summary) -> None:
        self.model, self.share, self.summary = model, share, summary
        self.samples: list[Sample] = []
        convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)] if isinstance(model, nn.Module) else []
        # PyTorch's float64 convolution on a CPU unfolds its input.
        kernels = [math.prod(c.kernel_size) for c in convs]
        per_conv = [(k + 2) * c.in_channels + 4 * c.out_channels for k, c in zip(kernels, convs, strict=True)]
        self._bytes = 12.0 * max(per_conv, default=1024)  # a pixel
        self._products = 2.0 * sum(c.weight.numel() for c in convs) or 1e5  # a pixel, in both dtypes

    def keep(self, x: Tensor, y: Any, mask: Tensor, planes: Any, halo: int | None) -> None:
        """A window of a frame [1,C,H,W] whose mask [1,H,W] is neither empty nor whole; of others nothing.

        Args:
            planes: of the run. halo: pixels of x that the network sees beside a pixel, None: all of x.
        """
        if not isinstance(y, Tensor) or y.dim() != 4:
            self.summary.unchecked = "expected one feature map as the output"
            return
        if len(self.samples) == KEPT or not self.share:
            return
        active = torch.nonzero(mask[0])
        if not len(active) or len(active) == mask.numel():
            return
        pixels = int(MEMORY / self._bytes)
        at = active[(7919 * len(self.samples)) % len(active)].tolist()
        sample = Sample(x, y, plane_masks(mask, planes), (False,) * 4, (at[0], at[1]))
        found = self._window(sample, pixels, halo)
        if found is None:
            self.summary.unchecked = f"more than {MEMORY / 1e6:.0f} MB for a window of the frame"
            return
        self._halo = halo
        self.samples.append(
            Sample(
                found.x.clone(), found.y.clone(), {k: m.clone() for k, m in found.masks.items()}, found.open, found.at
            )
        )

    def conclude(self, seconds: float) -> None:
        """Checks what was kept, in at most its share of so many seconds."""
        if not self.share:
            self.summary.unchecked = "not asked for"
            return
        self.summary.unchecked = self.summary.unchecked or "no frame had a mask that is neither empty nor whole"
        if self.samples and len(self.samples) < LEAST:
            self.summary.unchecked = f"{len(self.samples)} samples, at least {LEAST} are needed"
        left, rate = self.share * seconds, self._products / SLOW
        for done, sample in enumerate(self.samples):
            allowed = left / max(LEAST - done, 1) / rate
            # The first is as small as it may be: it tells how long checks take here.
            found = self._window(sample, allowed, self._halo, least=not done)
            if found is None:
                self.summary.unchecked = f"it would take more than {self.share:.0%} of the run"
                return
            begin = time.perf_counter()
            self.summary.check(compare(found.y, self.model, found.x, found.masks, self._inner(found)))
            self.summary.windows.append((found.x.shape[2], found.x.shape[3]))
            spent = time.perf_counter() - begin
            left, rate = left - spent, spent / (found.x.shape[2] * found.x.shape[3])

    def _window(self, sample: Sample, pixels: float, halo: int | None, least: bool = False) -> Sample | None:
        """The sample, or the largest window of it of so many pixels that has something inside, or None. least: the
        smallest such window instead."""
        height, width = sample.x.shape[2:]
        whole = sample if height * width <= pixels else None
        if whole is not None and not least:
            return whole
        sizes = [*sample.masks, (sample.y.shape[2], sample.y.shape[3])]
        scales = [_scale(length, n) for size in sizes for length, n in zip((height, width), size, strict=True)]
        if halo is None or None in scales:
            return whole
        align = math.lcm(*(s for s in scales if s))
        side = int(max(pixels, 0.0) ** 0.5) // align * align
        smallest = (-(-INNER // align) + 2 * -(-halo // align)) * align
        if side < smallest or smallest >= max(height, width):
            return whole
        side = smallest if least else side
        (top, bottom), (left, right) = (
            _span(at, side, length, align) for at, length in zip(sample.at, (height, width), strict=True)
        )
        cut = sample.open[0] or top > 0, sample.open[1] or bottom < height, sample.open[2] or left > 0, (
            sample.open[3] or right < width
        )  # fmt: skip

        def part(v: Tensor) -> Tensor:
            down, across = _scale(height, v.shape[2]) or 1, _scale(width, v.shape[3]) or 1
            return v[:, :, top // down : -(-bottom // down), left // across : -(-right // across)]

        parts = [part(m) for m in sample.masks.values()]
        masks = {(m.shape[2], m.shape[3]): m for m in parts}
        if len(masks) < len(sample.masks):
            return None  # planes that a window makes one
        return Sample(part(sample.x), part(sample.y), masks, cut, (sample.at[0] - top, sample.at[1] - left))

    def _inner(self, sample: Sample) -> tuple[slice, slice]:
        """Rows and columns of the output that what was cut off has no part in."""
        ends = []
        for axis in (0, 1):
            n, length = sample.y.shape[2 + axis], sample.x.shape[2 + axis]
            border = -(-(self._halo or 0) // (_scale(length, n) or 1))
            low, high = sample.open[2 * axis], sample.open[2 * axis + 1]
            ends.append(slice(border if low else 0, n - border if high else n))
        return ends[0], ends[1]


def _scale(length: int, size: int) -> int | None:
    """Pixels of the frame a pixel of a plane, a whole number; None where it is none."""
    scale = round(length / size)
    return scale if scale >= 1 and -(-length // scale) == size else None


def _span(at: int, side: int, length: int, align: int) -> Pair:
    """(first, end) of a window around `at`: it begins at a multiple, and ends at one or where the frame does."""
    if side >= length:
        return 0, length
    first = min(max(at - side // 2, 0), length - side) // align * align
    return first, min(first + side, length)
