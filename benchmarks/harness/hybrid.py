"""Backbone and encoder of RT-DETR (Zhao et al., 2024) with its layers and widths, written for this benchmark: attention
among the pixels of the coarsest plane alone, then a path up and one down over three planes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def layer(i: int, o: int, k: int = 1, s: int = 1, act: bool = True) -> nn.Sequential:
    conv = nn.Conv2d(i, o, k, s, k // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(o), *([nn.SiLU()] if act else []))


class RepVGG(nn.Module):
    """A 3x3 and a 1x1 layer side by side, as they are trained."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.wide, self.narrow = layer(c, c, 3, act=False), layer(c, c, act=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.wide(x) + self.narrow(x))


class Fusion(nn.Module):
    """Two planes of c channels, joined."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.first, self.second = layer(2 * c, c), layer(2 * c, c)
        self.blocks = nn.Sequential(RepVGG(c), RepVGG(c), RepVGG(c))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        both = torch.cat([x, y], 1)
        return self.blocks(self.first(both)) + self.second(both)


def positions(height: int, width: int, channels: int) -> Tensor:
    """[1,height * width,channels]: sines and cosines of columns, then of rows."""
    rates = 10000.0 ** -(torch.arange(channels // 4) / (channels // 4))
    rows, columns = torch.arange(height).float()[:, None] * rates, torch.arange(width).float()[:, None] * rates
    y = torch.cat([rows.sin(), rows.cos()], 1)[:, None].expand(height, width, -1)
    x = torch.cat([columns.sin(), columns.cos()], 1)[None].expand(height, width, -1)
    return torch.cat([x, y], 2).flatten(0, 1)[None]


class Attention(nn.Module):
    """A transformer layer over all pixels, whose queries and keys know where they are; norms come last."""

    positions: Tensor

    def __init__(self, c: int, heads: int, hidden: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(c, c) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(c), nn.LayerNorm(c)
        self.mlp = nn.Sequential(nn.Linear(c, hidden), nn.GELU(), nn.Linear(hidden, c))
        self.register_buffer("positions", positions(*size, c))

    def forward(self, plane: Tensor) -> Tensor:
        x = plane.flatten(2).transpose(1, 2)
        placed = x + self.positions
        q, k, v = (
            t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in (self.q(placed), self.k(placed), self.v(x))
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(y))
        x = self.norm2(x + self.mlp(x))
        return x.transpose(1, 2).reshape(plane.shape)


class Hybrid(nn.Module):
    """A backbone's planes of strides 8, 16 and 32 to three planes of c channels.

    Args:
        backbone: torchvision's ResNet.
        side: of its images.
    """

    def __init__(self, backbone: nn.Module, side: int, c: int = 256, heads: int = 8, hidden: int = 1024) -> None:
        super().__init__()
        parts = dict(backbone.named_children())
        self.stem = nn.Sequential(*(parts[name] for name in ("conv1", "bn1", "relu", "maxpool", "layer1")))
        self.stages = nn.ModuleList(parts[name] for name in ("layer2", "layer3", "layer4"))
        with torch.no_grad():
            x, widths = self.stem.eval()(torch.zeros(1, 3, 64, 64)), []
            for stage in self.stages:
                x = stage.eval()(x)
                widths.append(x.shape[1])
        self.inputs = nn.ModuleList(layer(width, c, act=False) for width in widths)
        self.attention = Attention(c, heads, hidden, (side // 32, side // 32))
        self.lateral = nn.ModuleList(layer(c, c) for _ in range(2))
        self.up = nn.ModuleList(Fusion(c) for _ in range(2))
        self.shrink = nn.ModuleList(layer(c, c, 3, 2) for _ in range(2))
        self.down = nn.ModuleList(Fusion(c) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        x, planes = self.stem(x), []
        for stage, narrow in zip(self.stages, self.inputs, strict=True):
            x = stage(x)
            planes.append(narrow(x))
        coarse = self.attention(planes[2])
        tops = []
        for plane, lateral, fusion in zip(planes[1::-1], self.lateral, self.up, strict=True):
            top = lateral(coarse)
            tops.append(top)
            coarse = fusion(F.interpolate(top, scale_factor=2.0), plane)
        outputs = [coarse]
        for top, shrink, fusion in zip(tops[::-1], self.shrink, self.down, strict=True):
            outputs.append(fusion(shrink(outputs[-1]), top))
        return outputs
