"""A network of every kind of op, functional and in place: what compile, export and stream tests run."""

import torch
import torch.nn.functional as F

from sbnet import (
    BlockGrid,
    fringe,
    reduce_mask,
    sparse_avg_pool2d,
    sparse_avg_pool2d_,
    sparse_conv2d,
    sparse_conv2d_,
    sparse_gather,
    sparse_max_pool2d,
    sparse_max_pool2d_,
    sparse_scatter,
    sparse_scatter_,
)
from support.helpers import assert_same_active, laid_out


class Chain(torch.nn.Module):
    """reduce_mask -> gather -> conv -> scatter, then the fused form with its fringe and a residual."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = torch.nn.Parameter(torch.randn(8, 8, 3, 3, generator=generator) / 8)
        self.second = torch.nn.Parameter(torch.randn(8, 8, 3, 3, generator=generator) / 8)
        self.bias = torch.nn.Parameter(torch.randn(8, generator=generator))

    def forward(self, x, mask):
        grid = BlockGrid.cover(x.shape[2:], 8)
        active = reduce_mask(mask, grid, 0.9)
        blocks = F.conv2d(sparse_gather(x, active, grid=grid.conv_input(3, 1, 1)), self.first)
        y = sparse_scatter(blocks.relu(), active, x * 0)
        y = sparse_max_pool2d(sparse_avg_pool2d(y, active, 3, 1, 1), active, 3, 1, 1)
        return sparse_conv2d(y, self.second, self.bias, active, padding=1, activation="relu", residual=x), active


class InPlace(Chain):
    def forward(self, x, mask):
        with torch.no_grad():
            active = reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8), 0.9)
            edge = fringe(active, active, x.shape[2:], 3, 1, 1)
            first, second = torch.full_like(x, 7.0), torch.zeros_like(x)
            sparse_conv2d_(x, self.first, None, active, second, padding=1, activation="relu", fringe=edge)
            sparse_max_pool2d_(second, active, first, 3, 1, 1, fringe=edge)
            sparse_avg_pool2d_(first, active, second, 3, 1, 1, fringe=edge)
            sparse_conv2d_(second, self.first, None, active, first, padding=1, activation="relu", fringe=edge)
            sparse_conv2d_(first, self.second, self.bias, active, second, padding=1, residual=x)
            return sparse_scatter_(sparse_gather(second, active), active, torch.zeros_like(x), add=True), active


def chain_inputs(device, size=(20, 27), seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = laid_out(torch.randn(2, 8, *size, generator=generator), "channels_last").to(device)
    return x, torch.rand(2, *size, generator=generator).pow(0.1 + seed).to(device)


def assert_same_chain(got, want):
    assert_same_active(got[1], want[1])
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4)
