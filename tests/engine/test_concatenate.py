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


class Anchors(Heads):
    """Anchors of every pixel side by side, as RetinaNet gives them, of two planes."""

    def forward(self, x):
        rows = [head(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4) for head in (self.fine, self.coarse)]
        return torch.cat(rows, 1)


@pytest.mark.parametrize("kind", [Heads, Anchors])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mode", ["masked", "cached"])
def test_feature_maps_are_written_where_their_concatenation_wants_them(kind, batch, mode, monkeypatch):
    """No copy, the same bits as with one, and a result that the caller wrote into is not taken for clean."""
    net, x = kind().eval(), torch.rand(batch, 3, 16, 24)
    masks = [torch.ones(batch, 16, 24, dtype=torch.bool), *(torch.rand(batch, 16, 24) > 0.98 for _ in range(2))]
    with monkeypatch.context() as apart:
        apart.setattr("sbnet.graph.passes.storage.joined_rows", lambda plan, place: {})
        run = sbnet.sparsify(net, x, block=8, mode=mode)
        want = [run(x + k, mask, copy=True) for k, mask in enumerate(masks)]

    def copied(*_):
        raise AssertionError("a copy")

    monkeypatch.setattr("sbnet.engine.executor.concatenate", copied)
    run = sbnet.sparsify(net, x, block=8, mode=mode)
    for k, mask in enumerate(masks):
        got = run(x + k, mask)
        assert torch.equal(got, want[k])
        if mode == "masked":
            got.fill_(float("nan"))
    assert got[0].stride() == want[0][0].stride()


@pytest.mark.parametrize("twice", [False, True])
def test_feature_maps_that_cannot_lie_so_are_copied(twice):
    """One that is joined twice, and one whose channels are not its fastest dimension there."""

    class Net(Heads):
        def forward(self, x):
            a, b = self.fine(x), self.coarse(x)
            if twice:
                return torch.cat([a.flatten(2), b.flatten(2)], 2), torch.cat([b.flatten(2), a.flatten(2)], 2)
            return torch.cat([a.flatten(1), b.flatten(1)], 1)

    net, x = Net().eval(), torch.rand(2, 3, 16, 24)
    run = sbnet.sparsify(net, x, block=8)
    with torch.no_grad():
        torch.testing.assert_close(run(x, torch.ones(2, 16, 24)), net(x))
