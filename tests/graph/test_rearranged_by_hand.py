"""Shuffles of channels and space to depth that networks write as views and a permute."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sbnet
from sbnet.graph.oracle import PlaneMasks, masked_oracle
from support.contract import assert_holds, poison

SIZE = (32, 48)


def unshuffled(order, r=2):
    def run(x):
        n, c, h, w = x.shape
        return x.view(n, c, h // r, r, w // r, r).permute(order).reshape(n, c * r * r, h // r, w // r)

    return run


def swapped(x):
    n, c, h, w = x.shape
    return x.view(n, 4, c // 4, h, w).transpose(1, 2).reshape(x.shape)


# the same by PyTorch's functions
FORMS = {
    "space to depth": (unshuffled((0, 1, 3, 5, 2, 4)), lambda x: F.pixel_unshuffle(x, 2)),
    "by 4": (unshuffled((0, 1, 3, 5, 2, 4), 4), lambda x: F.pixel_unshuffle(x, 4)),
    "space to depth, pixels first": (
        unshuffled((0, 3, 5, 1, 2, 4)),
        lambda x: F.channel_shuffle(F.pixel_unshuffle(x, 2), x.shape[1]),
    ),
    "channels": (swapped, lambda x: F.channel_shuffle(x, 4)),
}


class Between(nn.Module):
    """A function between two convolutions."""

    def __init__(self, function, channels):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.function = nn.Conv2d(3, 16, 3, padding=1), function
        self.last = nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, x):
        return self.last(self.function(self.first(x).relu()))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("name", FORMS)
def test_what_is_written_as_views_is_the_layer(name, n):
    by_hand, function = FORMS[name]
    x = torch.randn(n, 3, *SIZE)
    net = Between(by_hand, function(torch.empty(1, 16, *SIZE)).shape[1]).eval()
    other = Between(function, net.last.in_channels).eval()
    assert torch.equal(net(x), other(x))
    run = sbnet.sparsify(net, x, block=4)
    assert [node.kind for node in run.plan.graph.nodes] == ["conv", "rearrange", "conv"]
    mask = torch.zeros(n, *SIZE)
    mask[:, 5:14, 20:30] = 1
    run(x, mask)
    poison(run)
    planes = PlaneMasks(mask, 4)
    assert_holds(run(x, mask), masked_oracle(net, [x], planes), masked_oracle(net.double(), [x.double()], planes))


@pytest.mark.parametrize("name", FORMS)
def test_views_of_the_input_are_not_masked(name):
    """As TResNet's first layer reads it."""
    function, x = FORMS[name][0], torch.randn(2, 4, *SIZE)
    net = Between(function, function(x).shape[1]).eval()
    net.first, net.last = nn.Identity(), nn.Conv2d(net.last.in_channels, 4, 3, padding=1)
    mask = torch.zeros(2, *SIZE)
    mask[:, 5:14, 20:30] = 1
    run, planes = sbnet.sparsify(net, x.abs(), block=4), PlaneMasks(mask, 4)
    x = x.abs()
    assert_holds(run(x, mask), masked_oracle(net, [x], planes), masked_oracle(net.double(), [x.double()], planes))


def transposed(x):
    """Columns before rows: no such layer."""
    n, c, h, w = x.shape
    return x.view(n, c, h // 2, 2, w // 2, 2).permute(0, 1, 5, 3, 2, 4).reshape(n, c * 4, h // 2, w // 2)


def uneven(x):
    n, c, h, w = x.shape
    return x.view(n, c, h // 2, 2, w // 4, 4).permute(0, 1, 3, 5, 2, 4).reshape(n, c * 8, h // 2, w // 4)


def otherwise_viewed(x):
    n, c, h, w = x.shape
    return x.view(n, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(n, c * 4, h // 4, w)


@pytest.mark.parametrize("function", [transposed, uneven, otherwise_viewed])
def test_other_views_are_none(function):
    x = torch.randn(1, 3, *SIZE)
    net = Between(function, function(torch.empty(1, 16, *SIZE)).shape[1]).eval()
    run = sbnet.sparsify(net, x, block=4)
    assert "rearrange" not in [node.kind for node in run.plan.graph.nodes]
    got = run(x, torch.ones(1, *SIZE))
    assert_holds(got, net(x), net.double()(x.double()))
