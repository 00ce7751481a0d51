"""Pictures as decoders leave them, luma and chroma apart, and their colours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.apps import video
from sbnet.ops.frames.yuv_to_rgb import yuv_to_rgb_

FORMATS = ("yuv420p", "yuvj420p")  # of FFmpeg: 8 bits, chroma of 2x2 pixels
NARROW = 32  # columns below which FFmpeg rounds in another way

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
        planar: all of U lies before all of V (FFmpeg's yuv420p), not U and V in turn (NV12).
        turned, over, across: transposed first, then mirrored up and down, then left and right.
        size: (height, width) that the picture is scaled to, once it is upright.
    """

    matrix: int = 5
    full: bool = False
    planar: bool = False
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
    """A picture on a device, which may not be there yet, or in pinned memory on its way to one.

    Attributes:
        planes: [3H/2,W] uint8, H and W even: luma, below it U and V for each 2x2 pixels.
        source: the stream that writes them; None: they are there.
        shown: the picture as the host's decoder shows it, [H,W,3] uint8, where there is such a one.
    """

    planes: Tensor
    look: Look
    source: Any = None
    shown: Callable[[], np.ndarray] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of `rgb`."""
        return (*self.look.shape_of(self.planes), 3)

    def wait(self) -> Tensor:
        """planes, which what the current stream is given from now on may read."""
        if self.source is not None:
            current = torch.cuda.current_stream(self.planes.device)
            current.wait_stream(self.source)
            self.planes.record_stream(current)
        return self.planes

    def rgb(self, device: torch.device | None = None) -> Tensor:
        """[H,W,3] uint8 on a device; None: on its own."""
        planes = self.wait()
        return rgb_of(planes if device is None else planes.to(device, non_blocking=True), self.look)


def look_of(tagged: Any, pixels: str, frame: Any, size: tuple[int, int] | None = None, planar: bool = False) -> Look:
    """How the planes of a film's frames are shown.

    Args:
        tagged: what tells their colours, a frame of PyAV's or a stream's context.
        pixels: FFmpeg's name of their format.
        frame: one that tells how it is turned, where one is known.
        size: as of Look.
    """
    full = int(tagged.color_range) == video.FULL or pixels == "yuvj420p"
    matrix = video.matrix_of(int(tagged.colorspace), tagged.height, tagged.width)
    return Look(video.SCALERS[matrix], full, planar, *video.orientation_of(frame), size)


def surface_of(frame: Any, upright: video.Upright) -> Surface | None:
    """A frame of PyAV's, its planes in pinned memory where there is a GPU, which makes its colours: a film's reader
    converts nothing and half of the bytes go there. None of a frame whose colours FFmpeg alone makes."""
    height, width = frame.height, frame.width
    if frame.format.name not in FORMATS or height % 2 or width % 2 or width < NARROW:
        return None
    planes = torch.empty(3 * height // 2, width, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    rest = planes.numpy().reshape(-1)
    for plane in frame.planes:
        rows = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[: plane.height, : plane.width]
        np.copyto(rest[: rows.size].reshape(rows.shape), rows)
        rest = rest[rows.size :]
    look = look_of(frame, frame.format.name, frame, planar=True)
    return Surface(planes, look, shown=lambda: upright(frame))


def rgb_of(planes: Tensor, look: Look) -> Tensor:
    """[...,H,W,3] uint8 of planes [...,3H/2,W]: to the bit what FFmpeg's swscale makes of them on x86-64, unless it is
    scaled. CUDA graphs may hold all of this."""
    batch = planes.shape[:-2]
    rgb = _colours(planes.reshape(-1, *planes.shape[-2:]), look, torch.uint8)
    if look.size is not None and rgb.shape[2:] != look.size:
        x = F.interpolate(rgb.float(), size=look.size, mode="bilinear", antialias=True)
        rgb = x.add(0.5).to(torch.uint8)
    rgb = rgb.movedim(1, 3).contiguous()
    return rgb.view(*batch, *rgb.shape[1:])


def unit_of(planes: Tensor, look: Look, dtype: torch.dtype, border: tuple[int, int] = (0, 0)) -> Tensor:
    """[N,3,H,W] channels_last, the bytes of `rgb_of` of planes [N,3H/2,W] as a network takes them, 0 to 1.

    Args:
        look: one that scales nothing.
        border: rows below and columns on the right that repeat the picture's border.
    """
    return _colours(planes, look, dtype, border)


def _colours(planes: Tensor, look: Look, dtype: torch.dtype, border: tuple[int, int] = (0, 0)) -> Tensor:
    """[N,3,H,W] channels_last of planes [N,3H/2,W], upright, not scaled."""
    luma, (red, blue, green_u, green_v) = _factors(look.matrix, look.full)
    black = 0 if look.full else 16
    numbers = (luma, red, blue, green_u, green_v, black, look.planar, look.turned, look.over, look.across)
    height, width = replace(look, size=None).shape_of(planes[0])
    rgb = torch.empty(
        len(planes), 3, height + border[0], width + border[1], dtype=dtype, device=planes.device,
        memory_format=torch.channels_last,
    )  # fmt: skip
    yuv_to_rgb_(planes.contiguous(), [int(n) for n in numbers], rgb)
    return rgb


def _factors(matrix: int, full: bool) -> tuple[int, tuple[int, int, int, int]]:
    """As swscale rounds them to 13 bits of fraction: of luma, and of V to red, U to blue, U and V to green."""
    red, blue, green_u, green_v = CHROMA[matrix]
    luma = 1 << 16 if full else (1 << 16) * 255 // 219
    chroma = [red, blue, -green_u, -green_v]
    if full:
        chroma = [int(factor * 224 / 255) for factor in chroma]
    rounded = [min(max((factor << 13) + (1 << 15) >> 16, -(1 << 15)), (1 << 15) - 1) for factor in (luma, *chroma)]
    return rounded[0], (rounded[1], rounded[2], rounded[3], rounded[4])
