"""A contour detector that needs no training: its weights are written down, after the first stages of vision."""

from __future__ import annotations

import functools
import math

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
        raise ValueError(f"sbnet: contour_net: depth: {depth}; at least 1 is wanted")
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
    rows = output.movedim(1, 3).float()
    if rows.is_cuda:
        return _painted(rows)
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


@functools.cache  # a CUDA graph reads them where they are
def _wheel(device: torch.device) -> tuple[Tensor, Tensor]:
    """Weight and bias of red, green and blue, for the cosine and sine of a hue."""
    hues = torch.arange(3) * (2 * math.pi / 3)
    return 0.75 * torch.stack([hues.cos(), hues.sin()], 1).to(device), torch.full((3,), 0.625, device=device)
