"""Pictures as hardware decoders leave them, NV12 in device memory, and their colours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# FFmpeg's numbers of matrices -> what swscale multiplies chroma by (V to red, U to blue, U and V to green), 16 bits of
# fraction, for levels of 16 to 240.
CHROMA = {
    1: (117489, 138438, 13975, 34925),
    4: (104448, 132798, 24759, 53109),
    5: (104597, 132201, 25675, 53279),
    7: (117579, 136230, 16907, 35559),
    9: (110013, 140363, 12277, 42626),
}


@dataclass(frozen=True)
class Look:
    """How planes are to be shown.

    Attributes:
        matrix: of CHROMA.
        full: levels are 0 to 255, not 16 to 235.
        turned, over, across: transposed first, then mirrored up and down, then left and right.
        size: (height, width) that the picture is scaled to, once it is upright.
    """

    matrix: int = 5
    full: bool = False
    turned: bool = False
    over: bool = False
    across: bool = False
    size: tuple[int, int] | None = None

    def shape_of(self, planes: Tensor) -> tuple[int, int]:
        """(height, width) of the picture that planes [3H/2,W] show."""
        if self.size is not None:
            return self.size
        height, width = planes.shape[0] * 2 // 3, planes.shape[1]
        return (width, height) if self.turned else (height, width)


@dataclass
class Surface:
    """A picture on a device, which may not be there yet.

    Attributes:
        planes: [3H/2,W] uint8, H and W even: luma, below it U and V in turn for each 2x2 pixels.
        ready: an event of the stream that writes them; None: they are there.
    """

    planes: Tensor
    look: Look
    ready: Any = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of `rgb`."""
        return (*self.look.shape_of(self.planes), 3)

    def wait(self) -> Tensor:
        """planes, which what the current stream is given from now on may read."""
        if self.ready is not None:
            current = torch.cuda.current_stream(self.planes.device)
            current.wait_event(self.ready)
            self.planes.record_stream(current)
        return self.planes

    def rgb(self) -> Tensor:
        """[H,W,3] uint8 on its device."""
        return rgb_of(self.wait(), self.look)


def rgb_of(planes: Tensor, look: Look) -> Tensor:
    """[...,H,W,3] uint8 of planes [...,3H/2,W]: to the bit what FFmpeg's swscale makes of them on x86-64, unless it is
    scaled.

    Swscale multiplies 16-bit integers and keeps the upper halves of the products. Those of a byte by its factors are
    integers of less than 24 bits, so float32 holds them exactly; CUDA graphs may hold all of this.
    """
    batch, (height, width) = planes.shape[:-2], (planes.shape[-2] * 2 // 3, planes.shape[-1])
    planes = planes.reshape(-1, *planes.shape[-2:])
    luma, (red, blue, green_u, green_v) = _factors(look)
    y = _upper(planes[:, :height].float().sub_(0 if look.full else 16), luma)
    chroma = planes[:, height:].reshape(-1, height // 2, width // 2, 2).float().sub_(128)
    u, v = chroma[..., 0], chroma[..., 1]
    tint = torch.stack([_upper(v, red), _upper(u, green_u) + _upper(v, green_v), _upper(u, blue)], 3)
    shown = y.view(-1, height // 2, 2, width // 2, 2, 1) + tint[:, :, None, :, None]
    rgb = shown.clamp_(0, 255).view(-1, height, width, 3)
    if look.turned:
        rgb = rgb.transpose(1, 2)
    if look.over or look.across:
        rgb = rgb.flip([axis for axis, mirrored in ((1, look.over), (2, look.across)) if mirrored])
    if look.size is not None and rgb.shape[1:3] != look.size:
        x = F.interpolate(rgb.movedim(3, 1), size=look.size, mode="bilinear", antialias=True)
        rgb = x.movedim(1, 3).add(0.5)
    return rgb.to(torch.uint8).contiguous().view(*batch, *rgb.shape[1:])


def _upper(values: Tensor, factor: int) -> Tensor:
    """Of 8 times whole numbers, times a factor of 16 bits, the upper half; whole numbers as floats."""
    return values.mul(factor / (1 << 13)).floor_()


def _factors(look: Look) -> tuple[int, tuple[int, int, int, int]]:
    """As swscale rounds them to 13 bits of fraction: of luma, and of V to red, U to blue, U and V to green."""
    red, blue, green_u, green_v = CHROMA[look.matrix]
    luma = 1 << 16 if look.full else (1 << 16) * 255 // 219
    chroma = [red, blue, -green_u, -green_v]
    if look.full:
        chroma = [int(factor * 224 / 255) for factor in chroma]
    rounded = [min(max((factor << 13) + (1 << 15) >> 16, -(1 << 15)), (1 << 15) - 1) for factor in (luma, *chroma)]
    return rounded[0], (rounded[1], rounded[2], rounded[3], rounded[4])
