"""Chains of convolutions, which a CPU runs tile by tile: the bits of the layers one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sbnet
from support.contract import poison
from support.helpers import assert_bitwise
from support.networks import lively

SIZE = (118, 134)  # ends within a block, and has 4 MB and more of hidden pixels


def conv(inputs, outputs, kernel=1, stride=1, groups=1, activation=nn.ReLU6):
    layers = [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)]
    return nn.Sequential(*layers, nn.BatchNorm2d(outputs), *([activation()] if activation else []))


class Inverted(nn.Module):
    """An inverted residual block; squeeze: its depthwise layer's result has a second reader."""

    def __init__(self, inputs, hidden, outputs, kernel=3, stride=1, activation=nn.ReLU6, squeeze=False) -> None:
        super().__init__()
        self.expand = conv(inputs, hidden, activation=activation) if hidden != inputs else nn.Identity()
        self.depthwise = conv(hidden, hidden, kernel, stride, hidden, activation)
        self.squeeze = nn.Conv2d(hidden, hidden, 1) if squeeze else None
        self.project = conv(hidden, outputs, activation=None)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x):
        y = self.depthwise(self.expand(x))
        if self.squeeze is not None:
            y = y * self.squeeze(y.mean((2, 3), keepdim=True)).sigmoid()
        y = self.project(y)
        return x + y if self.adds else y


NETS = {
    "residual": lambda: nn.Sequential(conv(3, 16, 3), Inverted(16, 96, 16), Inverted(16, 144, 16)),
    "stride": lambda: nn.Sequential(conv(3, 16, 3), Inverted(16, 96, 24, 5, 2), conv(24, 8, 3)),
    "no expansion": lambda: nn.Sequential(conv(3, 128, 3), Inverted(128, 128, 24), conv(24, 8, 3)),
    "squeeze": lambda: nn.Sequential(conv(3, 16, 3), Inverted(16, 96, 24, activation=nn.SiLU, squeeze=True)),
}


def masks(batch=1):
    """All pixels, none, scattered ones, a rectangle that ends within blocks."""
    corner = torch.zeros(batch, *SIZE, dtype=torch.bool)
    corner[:, 3:101, 20:133] = True
    scattered = torch.rand(batch, *SIZE) < 0.004
    return [torch.ones_like(corner), torch.zeros_like(corner), scattered, corner]


def layered(net, x, mask, **options):
    """By an executor that runs each layer by itself."""
    run = sbnet.sparsify(net, x, **options)
    run(x, mask)
    executor = run.executor
    executor._records, executor._lasting, executor._noted_nodes, executor._noted_lists = False, set(), None, None
    assert executor.chains
    return run(x, mask)


@pytest.mark.parametrize("block", [4, 8, 32, (10, 17)], ids=str)
@pytest.mark.parametrize("name", NETS)
def test_same_bits_as_layers(name, block):
    torch.manual_seed(0)
    net, x = lively(NETS[name]()), torch.randn(1, 3, *SIZE).contiguous(memory_format=torch.channels_last)
    run = sbnet.sparsify(net, x, block=block)
    run(x, masks()[0])
    executor = run.executor
    assert executor._noted_nodes.joined == len(executor.chains) == (2 if name == "residual" else 1)
    for k, mask in enumerate(masks()):
        wanted = layered(net, x, mask, block=block).clone()
        poison(run)
        assert_bitwise(run(x, mask), wanted, f"mask {k}")


@pytest.mark.parametrize(("block", "tiles"), [(8, True), ((8, 40), True), (4, False), ((4, 40), False)], ids=str)
def test_blocks_that_are_mostly_rim_run_as_layers(block, tiles):
    """Tile by tile, hidden pixels never come to their tensor."""
    net, x = lively(NETS["residual"]()), torch.randn(1, 3, *SIZE).contiguous(memory_format=torch.channels_last)
    run, mask = sbnet.sparsify(net, x, block=block), masks()[0]
    run(x, mask)
    executor = run.executor
    last = list(executor.chains)[-1]  # of the two chains, whose hidden tensors nothing overwrites
    hidden = executor.tensors[last.args[0]]
    hidden.fill_(7.25)
    run(x, mask)
    assert bool((hidden == 7.25).all()) is tiles


def test_outputs_with_another_consumer_are_written():
    """Hidden pixels that are an output too, and those of contracts that keep them, belong to no chain."""

    class Tapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Inverted(16, 96, 16)

        def forward(self, x):
            hidden = self.block.expand(x)
            return hidden, self.block.project(self.block.depthwise(hidden))

    net, x = lively(Tapped()), torch.randn(1, 16, *SIZE)
    run, mask = sbnet.sparsify(net, x, block=16), masks()[3]
    run(x, mask)
    executor = run.executor
    assert list(executor.chains.values()) == [2]  # without the layer that widens
    first = [y.clone() for y in run(x, mask)]
    poison(run)
    for a, b in zip(run(x, mask), first, strict=True):
        assert_bitwise(a, b)
    for mode in ("cached", "exact"):
        run = sbnet.sparsify(lively(Inverted(16, 96, 16)), x, block=16, mode=mode)
        run(x, mask)
        assert not run.executor.chains
