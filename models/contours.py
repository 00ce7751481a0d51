"""A contour detector that needs no training: its weights are written down, after the first stages of vision."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIRECTIONS = 16  # of the brightness gradient, all round the circle
COLOURS = torch.tensor(  # projections of (R, G, B): brightness, red-green, blue-yellow, and red alone
    [[0.299, 0.587, 0.114], [0.5, -0.5, 0.0], [-0.25, -0.25, 0.5], [0.5, -0.25, -0.25]]
)
WIDTH = DIRECTIONS * len(COLOURS)


def contour_net(depth: int = 4) -> nn.Sequential:
    """A network of `depth` 3x3 layers of 64 channels and a 1x1 head: colour image to oriented contours.

    Input [N,3,H,W], 0 to 1. Output [N,3,H,W]: contour strength, and strength times the cosine and the sine of twice the
    contour's angle. The first layer differentiates four colour projections in 16 directions; each layer after it
    strengthens responses that continue along their contour and weakens those that other directions contradict.
    """
    if depth < 1:
        raise ValueError(f"sbnet: contour_net: depth: expected at least 1, got {depth}")
    angles = torch.arange(DIRECTIONS) * (2 * math.pi / DIRECTIONS)  # of the gradient
    layers: list[nn.Module] = []
    for weight, bias in [_derivatives(angles), *[_continuation(angles)] * (depth - 1)]:
        layers += [_conv(weight, bias), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, _conv(_head(angles), torch.zeros(3))).eval()


def _conv(weight: Tensor, bias: Tensor) -> nn.Conv2d:
    outputs, inputs, size, _ = weight.shape
    conv = nn.Conv2d(inputs, outputs, size, padding=size // 2)
    conv.weight.data.copy_(weight)
    conv.bias.data.copy_(bias)  # type: ignore[union-attr]
    return conv


def _offsets() -> tuple[Tensor, Tensor]:
    """(y, x) of the 3x3 taps, [3,3] each."""
    y, x = torch.meshgrid(torch.arange(-1.0, 2), torch.arange(-1.0, 2), indexing="ij")
    return y, x


def _derivatives(angles: Tensor) -> tuple[Tensor, Tensor]:
    """[64,3,3,3]: derivatives of a Gaussian along each direction, of each colour projection."""
    y, x = _offsets()
    along = torch.cos(angles)[:, None, None] * x + torch.sin(angles)[:, None, None] * y
    kernel = along * torch.exp(-(x * x + y * y) / 2)
    kernel = kernel / kernel.clamp(min=0).sum((1, 2), keepdim=True)  # an edge from 0 to 1 answers 1
    weight = torch.einsum("dyx,pc->pdcyx", kernel, COLOURS).reshape(WIDTH, 3, 3, 3)
    return weight, torch.full((WIDTH,), -0.01)


def _continuation(angles: Tensor) -> tuple[Tensor, Tensor]:
    """[64,64,3,3]: each channel gathers its like along its contour, less what lies across it."""
    y, x = _offsets()
    across = torch.cos(angles)[:, None, None] * x + torch.sin(angles)[:, None, None] * y
    line = torch.exp(-(x * x + y * y) / 2 - 4 * across**2)  # an ellipse along the contour
    line = line / line.sum((1, 2), keepdim=True)
    likeness = torch.exp(4 * (torch.cos(angles[:, None] - angles) - 1))
    likeness = likeness / likeness.sum(1, keepdim=True)
    coupling = 1.25 * likeness - 0.25 / DIRECTIONS  # rows sum to 1: straight contours keep their strength
    colours = torch.full((len(COLOURS), len(COLOURS)), 0.05) + 0.8 * torch.eye(len(COLOURS))
    weight = torch.einsum("pq,de,dyx->pdqeyx", colours, coupling, line).reshape(WIDTH, WIDTH, 3, 3)
    return weight, torch.full((WIDTH,), -0.003)


def _head(angles: Tensor) -> Tensor:
    """[3,64,1,1]: strength, and the contour's angle (a right angle from the gradient's) as a double-angle vector."""
    contour = 2 * (angles + math.pi / 2)
    rows = torch.stack([torch.ones_like(angles), contour.cos(), contour.sin()]) / 4
    return rows.repeat(1, len(COLOURS))[:, :, None, None]


def paint_contours(output: Tensor) -> Tensor:
    """Picture of an output of `contour_net`: [N,3,H,W] to [N,H,W,3] uint8. Hue is the contour's angle."""
    if output.is_cuda:
        kernel = _paint_kernel(output.device) if output.dtype == torch.float16 else None
        rows = output.detach().movedim(1, 3)
        return _painted(rows.float()) if kernel is None else _painted_by(kernel, rows.contiguous())
    rows = output.movedim(1, 3).float()
    picture = torch.zeros(rows.shape, dtype=torch.uint8)
    drawn = rows[..., 0] > 0  # the rest is black
    picture[drawn] = _painted(rows[drawn])
    return picture


def _painted(rows: Tensor) -> Tensor:
    """[...,3] uint8 of (strength, cosine, sine): each colour is full within 60 degrees of its own hue, and a quarter
    from 120 degrees on."""
    angle = F.normalize(rows[..., 1:], dim=-1)
    colours = F.linear(angle, *_wheel(rows.device)).clamp_(0.25, 1)
    value = (rows[..., :1] * (2 * 255**2)).clamp_(0, 255**2).sqrt_()
    return colours.mul_(value).byte()


# What _painted computes, a pixel a thread: as PyTorch's ops it takes 14 passes over the frame in float32, three times
# as long as the network takes for what moved.
_PAINT = r"""
#include <cuda_fp16.h>
extern "C" __global__ void paint(const __half* from, unsigned char* to, int n) {
  int k = blockIdx.x * blockDim.x + threadIdx.x;
  if (k >= n) return;
  float s = __half2float(from[3*k]), c = __half2float(from[3*k+1]), m = __half2float(from[3*k+2]);
  float inv = 1.0f / fmaxf(sqrtf(c * c + m * m), 1e-12f), u = .75f * c * inv, v = .75f * .8660254f * m * inv;
  float value = sqrtf(fminf(fmaxf(s * 130050.0f, 0.0f), 65025.0f));
  to[3*k] = (unsigned char)(fminf(fmaxf(0.625f + u, .25f), 1.f) * value);
  to[3*k+1] = (unsigned char)(fminf(fmaxf(0.625f - .5f * u + v, .25f), 1.f) * value);
  to[3*k+2] = (unsigned char)(fminf(fmaxf(0.625f - .5f * u - v, .25f), 1.f) * value);
}"""
_THREADS = 256


@functools.cache
def _paint_kernel(device: torch.device) -> Any:
    """_PAINT for a device, compiled at first use by the NVRTC that PyTorch ships; None, and a warning, where that is
    missing or refuses."""
    compiler = getattr(torch.cuda, "_compile_kernel", None)  # not public yet: nothing but speed may depend on it
    if compiler is None:
        return None
    try:
        with torch.cuda.device(device):
            return compiler(_PAINT, "paint")
    except (OSError, RuntimeError, TypeError) as error:  # no NVRTC; no headers; another signature
        reason = str(error).partition("\n")[0]
        warnings.warn(f"sbnet: paint_contours: painted by PyTorch's ops, which take longer: {reason}", stacklevel=4)
        return None


def _painted_by(kernel: Any, rows: Tensor) -> Tensor:
    """rows: [...,3] float16, contiguous."""
    picture = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    pixels = rows.numel() // 3
    if pixels:
        with torch.cuda.device(rows.device):
            blocks = -(-pixels // _THREADS)
            kernel(grid=(blocks, 1, 1), block=(_THREADS, 1, 1), args=[rows, picture, pixels])
    return picture


@functools.cache  # a CUDA graph reads them where they are
def _wheel(device: torch.device) -> tuple[Tensor, Tensor]:
    """Weight and bias of red, green and blue, for the cosine and sine of a hue."""
    hues = torch.arange(3) * (2 * math.pi / 3)
    return 0.75 * torch.stack([hues.cos(), hues.sin()], 1).to(device), torch.full((3,), 0.625, device=device)
