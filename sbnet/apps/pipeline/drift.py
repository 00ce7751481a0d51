"""Slow changes beneath kept results. An upscaler passes them on almost unchanged: they are added, not computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.geometry import Pair

if TYPE_CHECKING:
    from sbnet.apps.pipeline.frames import Frame
    from sbnet.apps.pipeline.networks import Network


class Drift:
    """What frames differ by from those that each pixel of a kept picture was computed from, enlarged to the picture.

    A threshold lets brightness wander beneath it. Blocks of different age then meet in steps, which are seen on flat
    walls; with this on top of it the kept picture follows, exactly where a change is a constant. All of it is work on
    tensors that stay where they are, for CUDA graphs.

    Attributes:
        apart: [N,C,H,W], what frames differ by. age: [N,1,H,W] int32, how many frames ago each pixel was computed.
            fresh: [N,1,H,W] bool, those of the last call.

    Args:
        scale: by which pictures are larger than frames.
        pad: pixels by which the network's input is wider than frames, on each side.

    >>> drift = Drift(2, pad=7)
    >>> picture = cut(run(widened, mask)) + drift(frame, run, (572, 1308))
    """

    def __init__(self, scale: int, pad: int) -> None:
        self.scale, self.pad = scale, pad
        self._held: Tensor | None = None  # the pixels that the kept picture was made of
        self.apart = self.age = self.fresh = torch.empty(0)

    def __call__(self, x: Tensor, run: Any, size: Pair) -> Tensor:
        """[N,C,scale H,scale W], 0 where the picture is new.

        Args:
            x: [N,C,H,W], frames as they came, of the last call of `run`.
            run: a SparseRun in cached mode.
            size: height and width of the feature map that it returned.
        """
        held = self._held
        if held is None or (held.shape, held.dtype, held.device) != (x.shape, x.dtype, x.device):
            held = self._held = torch.zeros_like(x, memory_format=torch.contiguous_format)
            self.apart, self.age = torch.empty_like(held), torch.zeros_like(x[:, :1], dtype=torch.int32)
        fresh = self.fresh = self._computed(x, run, size)
        torch.where(fresh, x, held, out=held)
        torch.sub(x, held, out=self.apart)
        self.age.add_(1).masked_fill_(fresh, 0)
        return F.interpolate(self.apart, scale_factor=float(self.scale), mode="bilinear")

    def _computed(self, x: Tensor, run: Any, size: Pair) -> Tensor:
        """[N,1,H,W] bool, the pixels whose picture the last call computed."""
        active, step = run.active_of(size), size[0] // run.shape[2]
        hits = active.block_map >= 0
        for axis in (1, 2):
            pixels = torch.arange(x.shape[1 + axis], device=x.device)
            hits = hits.index_select(axis, (pixels + self.pad) * step // active.grid.bsize[axis - 1])
        return hits[:, None]

    def pictures(
        self, network: Network, output: Any, wanted: Any, frame: Frame, drift: Tensor, likeness: Likeness
    ) -> tuple[Tensor, Tensor]:
        """[N,3,H,W], 0 to 1, the network's pictures with what the last call gave, and those of the dense network, of
        which `likeness` hears."""
        pairs = []
        for k in range(len(drift)):
            one = slice(k, k + 1)
            got = network.finished(output[one], frame, drift[one])[0].float() / 255
            dense = network.finished(wanted[one].to(output), frame)[0].float() / 255
            likeness.add(got, dense, self.age[k, 0])
            pairs.append((got.movedim(2, 0), dense.movedim(2, 0)))
        got, dense = (torch.stack(list(side)) for side in zip(*pairs, strict=True))
        return got, dense


def place_of(frame: Frame, at: Sequence[int], drift: Drift | None) -> str:
    """A pixel at (n, channel, row, column) in words, and of a kept picture how far the frame had moved there unseen,
    and which threshold would have seen it."""
    if len(at) != 4:
        return ""
    found = f"in frame {frame.index} " if frame.index >= 0 else ""
    found += f"at row {at[2]}, column {at[3]} of the {'output' if drift is None else 'picture'}"
    if drift is None:
        return found
    moved = 255 * float(drift.apart[at[0], :, at[2] // drift.scale, at[3] // drift.scale].abs().amax())
    if not moved:
        return f"{found}, which was computed"
    return (
        f"{found}, which was kept: the frame had changed there by {moved:.0f} of 255, which changed:"
        f"{max(0, math.ceil(round(moved, 2)) - 1)} would have marked"
    )


@dataclass
class Likeness:
    """How kept pictures compare with the dense network's, over the frames that `add` was given.

    Attributes:
        squares, pixels: sum of squared differences, of a range of 1, and over how many numbers.
        steps, dense_steps: sums of differences between neighbours that were computed in different frames, in both
            pictures. borders: over how many numbers.
        newest: seams of the frame that came last.
    """

    squares: float = 0.0
    pixels: int = 0
    steps: float = 0.0
    dense_steps: float = 0.0
    borders: int = 0
    newest: float = math.nan

    def add(self, got: Tensor, wanted: Tensor, age: Tensor) -> None:
        """got, wanted: pictures [H,W,3], 0 to 1. age: [h,w] of the frame, which they enlarge."""
        before = self.steps, self.dense_steps
        self.squares += float((got - wanted).square().sum(dtype=torch.float64))
        self.pixels += got.numel()
        age = age[None, None].float()
        age = F.interpolate(age, size=got.shape[:2])[0, 0]
        for axis in (0, 1):
            border = age.diff(dim=axis) != 0
            self.steps += float(got.diff(dim=axis)[border].abs().sum())
            self.dense_steps += float(wanted.diff(dim=axis)[border].abs().sum())
            self.borders += 3 * int(border.sum())
        steps, dense = self.steps - before[0], self.dense_steps - before[1]
        self.newest = _ratio(steps, dense)

    @property
    def psnr(self) -> float:
        """Decibels of the range over the rms difference."""
        return -10 * math.log10(self.squares / self.pixels) if self.squares else math.inf

    @property
    def seams(self) -> float:
        """Mean step across the borders of kept blocks, over that of the dense picture at the same places; NaN without
        borders."""
        return _ratio(self.steps, self.dense_steps)

    def seams_in_words(self) -> tuple[str, str]:
        if not self.borders:
            return "none", "no kept block met a new one"
        own, dense = (255 * total / self.borders for total in (self.steps, self.dense_steps))
        what = f"mean steps of {own:.2f} of 255 across the borders of kept blocks, {dense:.2f} in the dense picture"
        return f"{self.seams:.2f}x", what


def _ratio(steps: float, dense: float) -> float:
    return steps / dense if dense else math.inf if steps else math.nan
