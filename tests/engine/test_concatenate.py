"""Dense concatenations: in the order in which the operands lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sbnet
from sbnet.engine.executor import concatenate


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
def test_concatenations_keep_the_order_in_memory(order):
    given = [torch.rand(2, n, 5).permute(order) for n in (3, 4)]
    dim = order.index(1)
    got = concatenate(given, dim)
    assert torch.equal(got, torch.cat(given, dim))
    assert got.permute([order.index(k) for k in range(3)]).is_contiguous()
    mixed = [given[0], given[1].contiguous().clone(memory_format=torch.contiguous_format)]  # no order in common
    assert torch.equal(concatenate(mixed, dim - 3), torch.cat(mixed, dim))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 3, stride=2, padding=1)

    def forward(self, x):
        return torch.cat([self.fine(x).flatten(2), self.coarse(x).flatten(2)], 2)


def test_heads_of_a_detector_side_by_side_are_not_transposed():
    net, x = Heads().eval(), torch.rand(1, 3, 16, 24)
    got = sbnet.sparsify(net, x, block=8)(x, torch.ones(1, 16, 24))
    with torch.no_grad():
        torch.testing.assert_close(got, net(x))
    assert got.transpose(1, 2).is_contiguous()
