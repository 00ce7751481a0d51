"""yuv_to_rgb_: a decoder's planes become a network's input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sbnet.ops.masked.layer import in_place_fake

_ops = torch.ops.sbnet


def yuv_to_rgb_(planes: Tensor, look: Sequence[int], rgb: Tensor) -> None:
    """Writes the colours of planes into `rgb`, to the bit as FFmpeg's swscale makes them on x86-64, in one pass.

    Args:
        planes: [N,3H/2,W] uint8, contiguous, H and W even: luma, below it U and V for each 2x2 pixels.
        look: what levels are multiplied by, 13 bits of fraction (luma, V to red, U to blue, U and V to green); the
            level that is black; whether all of U lies before all of V; how the picture is shown: transposed, then
            mirrored up and down, then left and right.
        rgb: [N,3,h,w] in channels_last: uint8, 0 to 255, or float16, bfloat16 or float32, 0 to 1. What it has beyond
            the picture on the right and below repeats its border.
    """
    _ops.yuv_to_rgb_(planes, list(look), rgb)


in_place_fake("yuv_to_rgb_")
