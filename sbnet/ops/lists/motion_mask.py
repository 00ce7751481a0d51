"""motion_mask: the pixels whose brightness left a running background."""

from __future__ import annotations

import torch
from torch import Tensor

from sbnet.ops.common import mark_written, refuse_gradient, refuse_meta_mix, require_tensor

_ops = torch.ops.sbnet


def motion_mask(
    frame: Tensor, background: Tensor, threshold: float = 0.08, rate: float = 0.5, cut: float = 0.15, smooth: int = 5
) -> tuple[Tensor, Tensor]:
    """(mask [N,H,W] bool, the next background): where brightness, averaged over a box, is more than `threshold` from
    the background.

    Where the mean distance over an image is greater than `cut`, or NaN, the image is a cut: all of it is motion, and
    the background starts again from it. Otherwise it follows by `rate`. All is decided on the device, in two launches.

    Args:
        frame: [N,C,H,W] uint8 (0 to 255) or float32, float16, bfloat16 (0 to 1), any layout: a decoder's [H,W,3] bytes
            are `torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)`.
        background: [N,H,W] float32, contiguous; of infinities before the first frame.
        threshold, cut: differences of brightness, of a range of 1.
        rate: share by which the background follows, more than 0 and at most 1.
        smooth: side of the box in pixels, odd, at most 31; at the border, the pixels inside count.

    >>> background = torch.full((1, 48, 80), torch.inf)  # unknown as yet: all of the first frame moves
    >>> moved, background = sbnet.motion_mask(torch.rand(1, 3, 48, 80), background)
    >>> moved.all()
    tensor(True)
    """
    require_tensor("motion_mask", "frame", frame)
    require_tensor("motion_mask", "background", background)
    return _ops.motion_mask(frame.detach(), background.detach(), threshold, rate, cut, smooth)


def motion_mask_(
    frame: Tensor, background: Tensor, threshold: float = 0.08, rate: float = 0.5, cut: float = 0.15, smooth: int = 5
) -> Tensor:
    """`motion_mask` that writes the next background into `background`, and returns the mask.

    >>> background = torch.full((1, 48, 80), torch.inf)
    >>> sbnet.motion_mask_(torch.rand(1, 3, 48, 80), background).shape  # and background is of this frame
    torch.Size([1, 48, 80])
    """
    require_tensor("motion_mask_", "frame", frame)
    require_tensor("motion_mask_", "background", background)
    refuse_gradient("motion_mask_", "motion_mask", background)
    mask = _ops.motion_mask_(frame.detach(), background, threshold, rate, cut, smooth)
    mark_written(background)
    return mask


def _mask_like(op: str, frame: Tensor, background: Tensor) -> Tensor:
    refuse_meta_mix(op, frame, background)
    torch._check(
        frame.dim() == 4 and background.dim() == 3,
        lambda: (
            f"sbnet::{op}: expected frame [N,C,H,W] and background [N,H,W], got {tuple(frame.shape)} and "
            f"{tuple(background.shape)}"
        ),
    )
    return frame.new_empty((frame.shape[0], *frame.shape[2:]), dtype=torch.bool)


@torch.library.register_fake("sbnet::motion_mask")
def _motion_mask_fake(
    frame: Tensor, background: Tensor, threshold: float, rate: float, cut: float, smooth: int
) -> tuple[Tensor, Tensor]:
    return _mask_like("motion_mask", frame, background), torch.empty_like(background)


@torch.library.register_fake("sbnet::motion_mask_")
def _motion_mask_in_place_fake(
    frame: Tensor, background: Tensor, threshold: float, rate: float, cut: float, smooth: int
) -> Tensor:
    return _mask_like("motion_mask_", frame, background)
