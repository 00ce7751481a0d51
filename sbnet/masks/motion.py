"""Motion masks: what changed against a running background, or since it was last computed."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from sbnet.geometry import to_pair
from sbnet.masks.base import Mask
from sbnet.masks.grow import grow
from sbnet.ops.lists.motion_mask import motion_mask, motion_mask_

MOST_SMOOTH = 31  # of the op


class MotionMask(Mask):
    """Pixels whose brightness left a running background by more than a threshold.

    The first frame is all motion, and so is a cut: there the background starts again from the frame. Everything happens
    on the frame's device, in one op (`sbnet.motion_mask_`) and in memory that stays where it is; nothing is read on the
    host, so a CUDA graph can hold it.

    Args:
        size: (H, W) of the frames; without one, that of the first frame, and of any later one that differs.
        threshold: brightness difference that counts as motion, of a range of 1.
        rate: share by which the background follows each frame; 1 compares with the frame before.
        cut: mean difference over the frame from which on it counts as a cut.
        smooth: side of the box, in pixels, over which brightness is averaged first (odd, at most 31; against noise).
        device: where the frames are.

    >>> motion = MotionMask((400, 704))
    >>> mask = motion(torch.rand(1, 3, 400, 704))  # [1, 400, 704] bool
    """

    def __init__(
        self,
        size: tuple[int, int] | None = None,
        threshold: float = 0.08,
        rate: float = 0.5,
        cut: float = 0.15,
        smooth: int = 5,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(f"sbnet: MotionMask: threshold: expected 0 to 1, got {threshold:g}")
        if not 0 < rate <= 1:
            raise ValueError(f"sbnet: MotionMask: rate: expected more than 0 and at most 1, got {rate}")
        if not 1 <= smooth <= MOST_SMOOTH or smooth % 2 == 0:
            raise ValueError(f"sbnet: MotionMask: smooth: expected an odd number, 1 to {MOST_SMOOTH}, got {smooth}")
        self.threshold, self.rate, self.cut, self.smooth = threshold, rate, cut, smooth
        self._fixed = size is not None
        self.background = torch.empty(1, *to_pair(size or (1, 1), "MotionMask: size"), device=device)
        self.reset()

    @property
    def captured(self) -> bool:
        return True

    def reset(self) -> None:
        """Forget the background: the next frame is all motion."""
        self.background.fill_(torch.inf)  # an infinite difference is a cut

    @torch.no_grad()
    def __call__(self, frame: Tensor) -> Tensor:
        """[N,H,W] bool: where `frame` ([N,3,H,W]; floating, 0 to 1, or uint8) moved; the background then follows it."""
        shape = (frame.shape[0], *frame.shape[2:]) if frame.dim() == 4 else ()
        if not self._fixed and shape and (shape, frame.device) != (self.background.shape, self.background.device):
            self.background = torch.full(shape, torch.inf, device=frame.device)
        known = frame.is_floating_point() or frame.dtype == torch.uint8
        if shape != self.background.shape or frame.shape[1] != 3 or not known:
            batch, *size = self.background.shape
            raise ValueError(
                f"sbnet: MotionMask: frame: expected {(batch, 3, *size)}, uint8 or floating, 0 to 1, got "
                f"{tuple(frame.shape)} {frame.dtype}"
            )
        frame = frame.float() if frame.dtype == torch.float64 else frame
        return motion_mask_(frame, self.background, self.threshold, self.rate, self.cut, self.smooth)


def joined_motion(masks: Sequence[Mask], x: Tensor) -> MotionMask | None:
    """One mask for frames x [N,3,H,W], an image for each of N masks: their own backgrounds are its images from now on.
    None where they are not all plain MotionMasks of the same numbers."""
    numbers = [(one.threshold, one.rate, one.cut, one.smooth) for one in masks if type(one) is MotionMask]
    if len(numbers) < len(masks) or len(set(numbers)) > 1 or len(masks) != len(x):
        return None
    joint = MotionMask((int(x.shape[2]), int(x.shape[3])), *numbers[0], device=x.device)
    joint.background = torch.full((len(masks), *x.shape[2:]), torch.inf, device=x.device)
    for k, one in enumerate(masks):
        assert isinstance(one, MotionMask)
        one.background = joint.background[k : k + 1]
    return joint


class Changed(Mask):
    """Pixels that differ from what was last computed of them, for cached networks: outside the mask no pixel of the
    frame is further than `threshold` from the one that the kept result was made of; smoothed, no mean over a box is,
    and where one is, all of the box has changed.

    Args:
        threshold: difference of a channel, of a range of 1; 0 keeps what is equal and no more.
        smooth: side of the box, in pixels, over which differences are averaged first (odd; against noise).

    >>> mask = sbnet.masks.Changed(8 / 255)
    """

    def __init__(self, threshold: float = 0.0, smooth: int = 1) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(f"sbnet: Changed: threshold: expected 0 to 1, got {threshold}")
        if not 1 <= smooth <= MOST_SMOOTH or smooth % 2 == 0:
            raise ValueError(f"sbnet: Changed: smooth: expected an odd number, 1 to {MOST_SMOOTH}, got {smooth}")
        self.threshold, self.smooth = threshold, smooth
        self._used: Tensor | None = None  # plane by plane: comparisons over three interleaved channels use no vectors
        self._told = False
        self._apart = self._nothing = torch.empty(0)  # scratch

    @property
    def captured(self) -> bool:
        return True

    def reset(self) -> None:
        if self._used is not None:
            self._used.fill_(torch.nan)  # from which every pixel differs

    def expect(self, told: bool) -> None:
        self._told = told

    @torch.no_grad()
    def computed(self, x: Tensor, where: Tensor) -> None:
        if self._used is not None:
            torch.where(where, x, self._used, out=self._used)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        used = self._used
        if used is None or (used.shape, used.device, used.dtype) != (x.shape, x.device, x.dtype):
            used = self._used = torch.full_like(x, torch.nan, memory_format=torch.contiguous_format)
            self._apart = torch.empty_like(used)
            if self.smooth > 1:
                self._nothing = torch.zeros(x.shape[0] * x.shape[1], *x.shape[2:], device=x.device)
        apart = torch.sub(x, used, out=self._apart)
        if self.smooth == 1:
            found = ~(apart.abs_().amax(1) <= self.threshold)  # NaN is a change
        else:
            # Differences as frames of one channel against a background of nothing. NaN, as before the first frame,
            # makes one a cut: all of it.
            planes = apart.view(-1, 1, *x.shape[2:])
            planes = planes.float() if planes.dtype == torch.float64 else planes
            # Of a box all pixels count as changed: what is left of it would be over the threshold in frame after frame.
            numbers = 1.0, torch.inf, self.smooth
            if x.is_cuda:  # few launches: a mean over channels and a box is above 0 where one of them is set
                moved = motion_mask(planes, self._nothing, self.threshold, *numbers)[0].view(x.shape)
                found = motion_mask(moved.view(torch.uint8), self._nothing[: x.shape[0]], 0.0, *numbers)[0]
            else:  # no fresh memory
                moved = motion_mask_(planes, self._nothing.zero_(), self.threshold, *numbers).view(x.shape)
                found = grow(functools.reduce(torch.logical_or, moved.unbind(1)), self.smooth // 2)
        if not self._told:
            self.computed(x, found[:, None])
        return found


class Refresh(Mask):
    """Each tile of the frame in one of so many frames, a strip of neighbours at a time, whatever happens there: joined
    to another mask it bounds how old results that are kept grow, at a cost that is the same in every frame.

    Args:
        frames: from one turn of a tile to its next.
        tile: side of a tile in pixels; the larger, the less of what is computed is the halo around it.

    >>> mask = sbnet.masks.Changed(12 / 255, 5) | sbnet.masks.Refresh(50)
    """

    def __init__(self, frames: int = 50, tile: int = 96) -> None:
        if frames < 1 or tile < 1:
            raise ValueError(f"sbnet: Refresh: expected at least one frame and pixel, got {frames} and {tile}")
        self.frames, self.tile = frames, tile
        self._turns = torch.empty(0, dtype=torch.int32)  # [H,W], the frame of `frames` in which a pixel has its turn
        self._now = torch.empty(0, dtype=torch.int32)

    @property
    def captured(self) -> bool:
        return True

    def reset(self) -> None:
        self._now.zero_()

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        if self._turns.shape != (height, width) or self._turns.device != x.device:
            across = -(-width // self.tile)
            rows, columns = (torch.arange(n) // self.tile for n in (height, width))
            tiles = across * -(-height // self.tile)
            turns = (rows[:, None] * across + columns) * self.frames // tiles
            self._turns = turns.to(x.device, torch.int32)
            self._now = torch.zeros((), dtype=torch.int32, device=x.device)
        found = (self._turns == self._now).expand(len(x), -1, -1).contiguous()
        self._now.add_(1).remainder_(self.frames)
        return found
