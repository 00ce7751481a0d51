"""Motion masks: what changed against a running background, or since it was last computed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.geometry import to_pair
from sbnet.masks.base import Mask


class MotionMask(Mask):
    """Pixels whose brightness left a running background by more than a threshold.

    The first frame is all motion, and so is a cut: there the background starts again from the frame. Everything happens
    on the frame's device, in memory that stays where it is; nothing is read on the host, so a CUDA graph can hold it.

    Args:
        size: (H, W) of the frames; without one, that of the first frame, and of any later one that differs.
        threshold: brightness difference that counts as motion, of a range of 1.
        rate: share by which the background follows each frame; 1 compares with the frame before.
        cut: mean difference over the frame from which on it counts as a cut.
        smooth: side of the box, in pixels, over which brightness is averaged first (odd; against noise).
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
        if not 0 < rate <= 1:
            raise ValueError(f"sbnet: MotionMask: rate: {rate}; more than 0 and at most 1 is wanted")
        if smooth < 1 or smooth % 2 == 0:
            raise ValueError(f"sbnet: MotionMask: smooth: {smooth}; an odd number of pixels is wanted")
        self.threshold, self.rate, self.cut, self.smooth = threshold, rate, cut, smooth
        self._fixed = size is not None
        self.background = torch.empty(1, *to_pair(size or (1, 1), "MotionMask: size"), device=device)
        self.reset()

    def reset(self) -> None:
        """Forget the background: the next frame is all motion."""
        self.background.fill_(torch.inf)  # an infinite difference is a cut

    @torch.no_grad()
    def __call__(self, frame: Tensor) -> Tensor:
        """[1,H,W] bool: where `frame` ([1,3,H,W] floating, 0 to 1) moved; the background then follows it."""
        if not self._fixed and frame.dim() == 4 and frame.shape[2:] != self.background.shape[1:]:
            self.background = torch.full((1, *frame.shape[2:]), torch.inf, device=frame.device)
        wanted = (1, 3, *self.background.shape[1:])
        if tuple(frame.shape) != wanted or not frame.is_floating_point():
            raise ValueError(
                f"sbnet: MotionMask: frame: {tuple(frame.shape)} {frame.dtype}; {wanted}, floating, 0 to 1, is wanted"
            )
        side = self.smooth
        brightness = frame.mean(1, dtype=torch.float32)
        brightness = F.avg_pool2d(brightness, side, 1, side // 2, count_include_pad=False)
        change = (brightness - self.background).abs_()
        is_cut = ~(change.mean() <= self.cut)  # a frame with NaN is one, too: the background must not keep it
        mask = (change > self.threshold) | is_cut
        followed = torch.lerp(self.background, brightness, self.rate)
        self.background.copy_(torch.where(is_cut, brightness, followed))
        return mask


class Changed(Mask):
    """Pixels that differ from what was last computed of them, for cached networks: outside the mask no pixel of the
    frame is further than `threshold` from the one that the kept result was made of.

    Args:
        threshold: difference of a channel, of a range of 1; 0 keeps what is equal and no more.

    >>> mask = sbnet.masks.Changed(8 / 255)
    """

    def __init__(self, threshold: float = 0.0) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(f"sbnet: Changed: threshold: expected 0 to 1, got {threshold}")
        self.threshold = threshold
        self._used: Tensor | None = None

    def reset(self) -> None:
        self._used = None

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        if self._used is None or self._used.shape != x.shape or self._used.device != x.device:
            self._used = x.clone()
            return torch.ones(x.shape[0], *x.shape[2:], dtype=torch.bool, device=x.device)
        same = (x - self._used).abs_().amax(1) <= self.threshold  # NaN is a change
        self._used = torch.where(same[:, None], self._used, x)
        return ~same
