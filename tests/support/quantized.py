"""Networks with every kind of int8 layer, frames for them, and the same networks in float64, rounded by PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import sbnet
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


class Fake:
    """The chain under the masked contract in float64; `ranges`: those that it rounds to dtype at, else None."""

    floats = "first", "last"

    def __init__(self, net, ranges=None, dtype="int8"):
        self.net, self.ranges, self.dtype, self.seen = net, ranges, dtype, {}

    def layer(self, name, conv, x, masks, act, norm=None, residual=None):
        weight, bias = conv.weight.double(), 0.0 if conv.bias is None else conv.bias.double()[:, None, None]
        if norm is not None:
            factor = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
            weight = weight * factor[:, None, None, None]
            bias = ((norm.bias - norm.running_mean * factor).double())[:, None, None]
        self.seen[name] = float(x.abs().max())
        if self.ranges is not None and name not in self.floats:
            x = rounded(x, self.ranges[name], self.dtype)
            weight = rounded(weight, weight.abs().amax((1, 2, 3), keepdim=True), self.dtype)
        y = F.conv2d(x, weight, None, conv.stride, conv.padding, groups=conv.groups) + bias
        y = act(y if residual is None else y + residual)
        return torch.where(active_of(masks, tuple(y.shape[2:])).pixel_mask(y.shape[2:]), y, 0.0)

    def __call__(self, x, masks):
        net, same = self.net, nn.Identity()
        x = self.layer("first", net.first, x.double(), masks, F.relu)
        x = self.layer("a.0", net.a[0], x, masks, F.relu, net.a[1])
        x = self.layer("b.0", net.b[0], x, masks, lambda y: F.prelu(y, net.b[1].weight.double()))
        shortcut = x if self.ranges is None else rounded(x, self.ranges["c.0"], self.dtype)
        x = self.layer("c.0", net.c[0], x, masks, F.silu)
        x = self.layer("d", net.d, x, masks, F.relu, residual=shortcut)
        return self.layer("last", net.last, x, masks, same)


class FakeGrouped(Fake):
    """The same of `Grouped`."""

    floats = "first", "between", "narrow", "last"

    def __call__(self, x, masks):
        net, same = self.net, nn.Identity()
        x = self.layer("first", net.first, x.double(), masks, F.relu)
        x = self.layer("wide", net.wide, x, masks, F.relu)
        x = self.layer("deep", net.deep, x, masks, F.relu6)
        shortcut = x if self.ranges is None else rounded(x, self.ranges["groups"], self.dtype)
        x = self.layer("groups", net.groups, x, masks, F.relu, residual=shortcut)
        x = F.max_pool2d(x, 3, 1, 1) * active_of(masks, tuple(x.shape[2:])).pixel_mask(x.shape[2:])
        x = self.layer("narrow", net.narrow, self.layer("between", net.between, x, masks, F.relu), masks, F.relu)
        return self.layer("last", net.last, x, masks, same)


def rounded(x, largest, dtype):
    if dtype == "int8":
        return (x * 127 / largest).round().clamp(-128, 127) * largest / 127
    return (x * 448 / largest).clamp(-448, 448).to(torch.float8_e4m3fn).double() * largest / 448


def active_of(mask, size):
    on_plane = F.adaptive_max_pool2d(mask[:, None].float(), size)[:, 0]
    return sbnet.reduce_mask(on_plane, sbnet.BlockGrid.cover(size, BLOCK))
