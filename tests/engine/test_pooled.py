"""Global pools, gates and classifiers on a CPU: recorded, by sbnet's ops, and as accurate as PyTorch's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sbnet
from sbnet.engine.pooled import product
from sbnet.engine.recording import Recording
from sbnet.graph.oracle import PlaneMasks, masked_oracle
from sbnet.graph.passes.pooled import is_product, pooled
from support.contract import assert_holds, poison
from support.helpers import assert_as_accurate_as_torch, tensor
from support.networks import conv, lively

SIZE = (24, 40)


class Gated(nn.Module):
    """A gate of squeeze and excitation, then a classifier; by: what pools, act: between the gate's layers."""

    def __init__(self, act=nn.ReLU, by="avg", bias=True) -> None:
        super().__init__()
        self.stem, self.act, self.by = conv(3, 40), act(), by
        self.squeeze, self.excite = nn.Conv2d(40, 10, 1, bias=bias), nn.Conv2d(10, 40, 1, bias=bias)
        self.last = conv(40, 72, 1)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(72, 130, bias=bias), act(), nn.Linear(130, 33, bias=bias))

    def pool(self, x):
        if self.by == "mean":
            return x.mean((2, 3))[:, :, None, None]
        return F.adaptive_max_pool2d(x, 1) if self.by == "max" else F.adaptive_avg_pool2d(x, (1, 1))

    def forward(self, x):
        x = self.stem(x)
        x = x * self.excite(self.act(self.squeeze(self.pool(x)))).sigmoid()
        return self.head(self.pool(self.last(x)))


NETS = {
    "relu": Gated,
    "hardswish, max": lambda: Gated(nn.Hardswish, "max"),
    "silu, no bias": lambda: Gated(nn.SiLU, "avg", False),
    "mean": lambda: Gated(nn.Hardsigmoid, "mean"),
}


def masks(batch):
    """All pixels, none, some of one sample alone."""
    some = torch.zeros(batch, *SIZE, dtype=torch.bool)
    some[0, 3:20, 5:17] = True
    return [torch.ones_like(some), torch.zeros_like(some), some]


def unrecorded(run, *args):
    """By an executor whose every node is looked at."""
    executor = run.executor
    executor.step = executor.step
    try:
        return run(*args, copy=True)
    finally:
        del executor.step


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", NETS)
def test_by_recorded_ops_and_as_accurate_as_pytorchs(name, batch):
    torch.manual_seed(0)
    net, x = lively(NETS[name]()), torch.randn(batch, 3, *SIZE)
    run = sbnet.sparsify(net, x, block=8)
    for mask in masks(batch):
        run(x, mask)
        poison(run)
        got = run(x, mask, copy=True)
        of = PlaneMasks(mask, {plane[:2]: plane[2] for plane in run.planes})
        exact = masked_oracle(copy.deepcopy(net).double(), [x.double()], of)
        assert_holds(got, masked_oracle(net, [x], of), exact)
        assert torch.equal(got, unrecorded(run, x, mask))
    first, *rest = run.executor._noted_nodes._parts
    assert first.kind == "conv"  # reads the caller's frame
    assert [type(part) for part in rest] == [Recording]


def test_weights_written_later_are_taken():
    torch.manual_seed(0)
    net, x = lively(Gated()), torch.randn(1, 3, *SIZE)
    run, mask = sbnet.sparsify(net, x, block=8), masks(1)[2]
    before = run(x, mask, copy=True)
    with torch.no_grad():
        net.head[1].weight.mul_(0.5)
        net.head[3].weight.data = torch.randn_like(net.head[3].weight)  # lies elsewhere
        net.excite.bias.add_(1)
    wanted = sbnet.sparsify(net, x, block=8)(x, mask)
    assert torch.equal(run(x, mask), wanted)
    assert not torch.equal(before, wanted)


class Other(nn.Module):
    """After a global pool, what is no product or view of the vectors as they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.grouped = conv(3, 8), nn.Conv2d(8, 8, 1, groups=2)
        self.padded, self.last = nn.Conv2d(8, 8, 1, padding=1, stride=3), nn.Linear(8, 8)

    def forward(self, x):
        y = F.adaptive_avg_pool2d(self.stem(x), 1)
        flat = y.flatten(1)
        return self.grouped(y), self.padded(y), flat.t(), self.last(flat.t()), flat + flat, F.relu(flat).clamp(0.1)


def test_what_is_left_to_pytorch():
    net, x = lively(Other()), torch.randn(8, 3, *SIZE)
    run = sbnet.sparsify(net, x, block=8)
    assert sorted(form.kind for form in pooled(run.plan).values()) == ["pool", "program", "view"]
    for mask in masks(8):
        of = PlaneMasks(mask, {plane[:2]: plane[2] for plane in run.planes})
        exact = masked_oracle(copy.deepcopy(net).double(), [x.double()], of)
        assert_holds(run(x, mask), masked_oracle(net, [x], of), exact)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_product_is_a_convolution_of_one_pixel(device, dtype, bias):
    x, weight = tensor((2, 40, 1, 1), dtype, device), tensor((24, 40, 1, 1), dtype, device)
    b = tensor((24,), dtype, device) if bias else None
    got = product(x, weight.contiguous(memory_format=torch.channels_last), b)
    assert got.stride() == (24, 1, 24, 24)
    exact = F.conv2d(x.double(), weight.double(), None if b is None else b.double())
    assert_as_accurate_as_torch(got, F.conv2d(x, weight, b), exact)


def test_which_convolutions_are_products():
    def taken(net: nn.Module) -> list[int]:
        nodes = sbnet.sparsify(lively(net), torch.randn(8, 3, *SIZE), block=8).plan.graph.nodes
        return [n.output.shape[1] for n in nodes if n.kind == "aten" and is_product(n)]

    assert taken(Gated()) == [10, 40]
    assert not taken(Other())  # in groups, with padding
