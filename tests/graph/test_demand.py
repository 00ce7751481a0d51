"""The exact contract's demand: the pixels that a window reads, against the gradient of a convolution of ones."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sbnet
from sbnet.geometry import Window
from sbnet.graph.passes.demand import _read

WINDOWS = list(itertools.product((1, 2, 3, 7), (1, 2, 3), (0, 1, 3), (1, 2)))  # kernel size, stride, padding, dilation


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("size", [(14, 17), (15, 16)], ids=str)
def test_what_a_window_reads(window, size):
    k, stride, padding, dilation = window
    x = torch.zeros(2, 1, *size, requires_grad=True)
    y = F.conv2d(x, torch.ones(1, 1, k, k), None, stride, padding, dilation)
    wanted = (torch.rand_like(y) < 0.1).float()
    wanted[1] = 1
    y.backward(wanted)
    assert torch.equal(_read(size, wanted, Window.conv(*window), False), (x.grad > 0).float())


@pytest.mark.parametrize(
    ("kernel", "padding"), [((1, 5), (0, 2)), ((5, 1), (1, 0)), ((3, 7), (0, 3)), ((7, 2), (3, 0))]
)
def test_windows_that_are_not_square(kernel, padding):
    size = (14, 17)
    x = torch.zeros(1, 1, *size, requires_grad=True)
    y = F.conv2d(x, torch.ones(1, 1, *kernel), None, 1, padding)
    wanted = (torch.rand_like(y) < 0.05).float()
    y.backward(wanted)
    assert torch.equal(_read(size, wanted, Window.conv(kernel, (1, 1), padding), False), (x.grad > 0).float())


@pytest.mark.parametrize("out", [(2, 3), (4, 5), (5, 17), (14, 1), (20, 3)], ids=str)
def test_what_an_adaptive_pool_reads(out):
    size = (14, 17)
    x = torch.zeros(1, 1, *size, requires_grad=True)
    y = F.adaptive_avg_pool2d(x, out)
    wanted = (torch.rand_like(y) < 0.2).float()
    y.backward(wanted)
    assert torch.equal(_read(size, wanted, Window.adaptive(size, out), False), (x.grad > 0).float())


@pytest.mark.parametrize(
    "pool", [nn.AdaptiveAvgPool2d((4, 5)), nn.AdaptiveMaxPool2d((4, 5))], ids=lambda p: p._get_name()
)
def test_wide_pools_demand_their_windows_alone(pool):
    """In exact mode, of a network that goes down by more than 4 and up again."""
    torch.manual_seed(0)
    up = nn.Upsample(size=(48, 60), mode="nearest")
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), pool, up, nn.Conv2d(8, 3, 1)).eval()
    x = torch.rand(1, 3, 48, 60).contiguous(memory_format=torch.channels_last)
    mask = torch.zeros(1, 48, 60, dtype=torch.bool)
    mask[:, 13:15, 13:25] = True  # pixels of two windows of 12x12
    run = sbnet.sparsify(net, x, mode="exact", block=4)
    with torch.no_grad():
        wanted = net(x)
    run(torch.full_like(x, 7.0), ~mask)  # what is left of another frame
    found = run(x, mask)
    assert (found - wanted).abs()[mask[:, None].expand_as(found)].max() < 1e-5
    shares = [float((active.block_map >= 0).float().mean()) for active in run.active if active.block_map.numel() > 9]
    assert max(shares) < 0.3
