"""Networks with every kind of int8 layer, and frames for them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.networks import conv

SIZE = (40, 56)
BLOCK = 4


class Chain(nn.Module):
    """All that an int8 layer may have: folded normalisation, ReLU, a stride, PReLU, SiLU, no activation, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 3, padding=1)
        self.a, self.b = conv(12, 16), nn.Sequential(nn.Conv2d(16, 20, 3, 2, 1), nn.PReLU(20))
        self.c, self.d = nn.Sequential(nn.Conv2d(20, 20, 1), nn.SiLU()), nn.Conv2d(20, 20, 3, padding=1, bias=False)
        self.last = nn.Conv2d(20, 5, 3, padding=1)
        self.b[1].weight.data = torch.linspace(-0.2, 0.4, 20)

    def forward(self, x):
        x = self.b(self.a(F.relu(self.first(x))))
        return self.last(F.relu(self.d(self.c(x)) + x))


class Grouped(nn.Module):
    """Depthwise layers and groups: between layers of int8, behind a pool, and of few channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 20, 1)
        self.deep, self.groups = (
            nn.Conv2d(20, 20, 3, 2, 1, groups=20),
            nn.Conv2d(20, 20, 3, padding=1, groups=2, bias=False),
        )
        self.between, self.narrow = (
            nn.Conv2d(20, 20, 5, padding=2, groups=20),
            nn.Conv2d(20, 20, 3, padding=1, groups=5),
        )
        self.last = nn.Conv2d(20, 5, 3, padding=1)

    def forward(self, x):
        x = F.relu6(self.deep(F.relu(self.wide(F.relu(self.first(x))))))
        x = F.max_pool2d(F.relu(self.groups(x) + x), 3, 1, 1)
        return self.last(F.relu(self.narrow(F.relu(self.between(x)))))


def frames(count: int = 2, batch: int = 2, density: float = 0.004):
    return (
        [torch.randn(batch, 3, *SIZE).contiguous(memory_format=torch.channels_last) for _ in range(count)],
        [torch.rand(batch, *SIZE) < density for _ in range(count)],
    )
