"""The exact contract's demand: the pixels that a window reads, against the gradient of a convolution of ones."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

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
