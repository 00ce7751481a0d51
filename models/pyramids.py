"""Networks that come down from fine planes and go up again: U-Net, feature pyramid, a bird's-eye detector. Plain
modules that `sbnet.sparsify` takes, with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _conv(before: int, after: int, side: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, side, stride, side // 2, bias=False), nn.BatchNorm2d(after), nn.ReLU()
    )


class UNet(nn.Module):
    """U-Net (Ronneberger et al., arXiv 1505.04597) with padded convolutions: [N,C,H,W] to [N,classes,H,W]. H and W are
    multiples of 2 ** (len(widths) - 1)."""

    def __init__(self, channels: int = 3, classes: int = 2, widths: Sequence[int] = (32, 64, 128, 256)) -> None:
        super().__init__()
        ends = [channels, *widths]
        self.down = nn.ModuleList(
            nn.Sequential(_conv(a, b), _conv(b, b)) for a, b in zip(ends, widths, strict=False)
        )  # fmt: skip
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairwise(widths))
        self.join = nn.ModuleList(nn.Sequential(_conv(2 * a, a), _conv(a, a)) for a in widths[:-1])
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, layer in enumerate(self.down):
            x = layer(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for level in reversed(range(len(self.up))):
            x = self.join[level](torch.cat([kept[level], self.up[level](x)], 1))
        return self.head(x)


class FPN(nn.Module):
    """A feature pyramid (Lin et al., arXiv 1612.03144): maps of the backbone's widths, each half as large as the one
    before, to maps of one width, finest first."""

    def __init__(self, widths: Sequence[int], width: int = 256) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(n, width, 1) for n in widths)
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in widths)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        found = [lateral(x) for lateral, x in zip(self.lateral, maps, strict=True)]
        for level in reversed(range(len(found) - 1)):
            found[level] = found[level] + F.interpolate(found[level + 1], scale_factor=2.0, mode="nearest")
        return [smooth(x) for smooth, x in zip(self.smooth, found, strict=True)]


class _Residual(nn.Module):
    """A bottleneck block: 1x1, 3x3, 1x1 and a shortcut."""

    def __init__(self, before: int, hidden: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.first, self.second = _conv(before, hidden, 1), _conv(hidden, hidden, 3, stride)
        self.third = nn.Sequential(nn.Conv2d(hidden, after, 1, bias=False), nn.BatchNorm2d(after))
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.third(self.second(self.first(x))) + self.shortcut(x))


class BirdsEyeDetector(nn.Module):
    """A detector on bird's-eye views of LiDAR like PIXOR (Yang et al., arXiv 1902.06326), SBNet's own use: residual
    stages down to a sixteenth, transposed convolutions up to a quarter, a head of four 3x3 layers. Untrained.

    Input [N,C,H,W], multiples of 16 (`sbnet.masks.BirdsEye`). Output: scores [N,1,H/4,W/4], and [N,6,H/4,W/4]: cosine
    and sine of the heading, centre, logarithms of width and length.
    """

    def __init__(self, channels: int = 36, blocks: Sequence[int] = (3, 6, 6, 4)) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(channels, 32), _conv(32, 32))
        stages, before = [], 32
        for count, hidden in zip(blocks, (24, 48, 64, 96), strict=True):
            after = 4 * hidden
            layers = [_Residual(before, hidden, after, 2)]
            layers += [_Residual(after, hidden, after) for _ in range(count - 1)]
            stages.append(nn.Sequential(*layers))
            before = after
        self.stages = nn.ModuleList(stages)
        self.lateral = nn.ModuleList([nn.Conv2d(384, 196, 1), nn.Conv2d(256, 128, 1), nn.Conv2d(192, 96, 1)])
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(196, 128, 3, 2, 1, 1), nn.ConvTranspose2d(128, 96, 3, 2, 1, 1)]
        )  # fmt: skip
        self.head = nn.Sequential(*(_conv(96, 96) for _ in range(4)))
        self.score, self.box = nn.Conv2d(96, 1, 3, padding=1), nn.Conv2d(96, 6, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        maps = []
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        y = self.lateral[0](maps[3])
        y = self.lateral[1](maps[2]) + self.up[0](y)
        y = self.lateral[2](maps[1]) + self.up[1](y)
        y = self.head(y)
        return self.score(y), self.box(y)
