"""Bottleneck blocks that a runner runs as one op: the same result, and what they need not write is not there."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import sbnet
from sbnet import _library
from sbnet._library import kernel_capability
from sbnet.engine import compare, masked_oracle, plane_masks
from sbnet.graph.oracle import PlaneMasks
from sbnet.graph.oracle import masked_oracle as graph_oracle
from sbnet.graph.passes import bottleneck
from sbnet.nn import SparseBottleneck, SparseConv2d
from support.contract import assert_holds, poison
from support.networks import lively
from support.runs import run_of


class Blocks(nn.Module):
    """A 1x1 convolution and two bottleneck blocks."""

    def __init__(self):
        super().__init__()
        self.first = SparseConv2d(3, 32, 1)
        self.blocks = nn.ModuleList(SparseBottleneck(32, 8) for _ in range(2))

    def forward(self, x, active=None):
        x = self.first(x, active)
        for block in self.blocks:
            x = block(x, active)
        return x


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(bottleneck, "one_kernel", lambda *_: True)


def kinds(runner):
    return [node.kind for node in runner.plan.graph.nodes]


def network():
    net = Blocks().eval()
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            parameter.data.uniform_(-0.5, 0.5)
    return net


@pytest.mark.parametrize("density", [0.0, 0.02, 1.0])
def test_blocks_run_as_one(always, density):
    net, planes = network(), [(37, 45, 8)]
    runner = run_of(net, (37, 45), 8, batch=2)
    assert kinds(runner) == ["conv", "bottleneck", "bottleneck"]
    assert len(runner.executor.buffers) == 3  # of the first layer and the two blocks: an output has its own
    for seed in (1, 2):  # a mask after another: nothing is left of the one before
        torch.manual_seed(seed)
        x, mask = torch.randn(2, 3, 37, 45), torch.rand(2, 37, 45) < density
        want = masked_oracle(net, x, plane_masks(mask, planes))
        torch.testing.assert_close(runner(x, mask), want)


def test_the_same_steps_one_by_one(always, monkeypatch):
    net = network()
    x, mask = torch.randn(1, 3, 24, 24), torch.rand(1, 24, 24) < 0.05
    together = run_of(net, (24, 24))
    monkeypatch.setattr(bottleneck, "one_kernel", lambda *_: False)
    apart = run_of(net, (24, 24))
    assert "bottleneck" not in kinds(apart)
    assert len(apart.executor.storage.fringes) > len(together.executor.storage.fringes)
    torch.testing.assert_close(together(x, mask), apart(x, mask))


class Plain(nn.Module):
    """A residual block as people write it."""

    def __init__(self, *slopes):
        super().__init__()
        self.narrow, self.middle = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.wide, self.norms = nn.Conv2d(8, 16, 1), nn.ModuleList(nn.BatchNorm2d(c) for c in (8, 8, 16))
        self.acts = [nn.LeakyReLU(slope) for slope in slopes] or [nn.ReLU()] * 3

    def forward(self, x):
        y = self.acts[0](self.norms[0](self.narrow(x)))
        y = self.acts[1](self.norms[1](self.middle(y)))
        return self.acts[2](self.norms[2](self.wide(y)) + x)


def test_blocks_of_other_peoples_networks(always, device):
    """`sparsify` takes them together too, under the masked contract alone."""
    net = lively(nn.Sequential(nn.Conv2d(3, 16, 1), Plain(), Plain())).to(device)
    x = torch.randn(2, 3, 24, 40, device=device)
    for mode in ("masked", "exact", "cached"):
        run = sbnet.sparsify(net, x, block=8, mode=mode)
        assert kinds(run) == (["conv", *["bottleneck"] * 2] if mode == "masked" else ["conv"] * 7)
    run = sbnet.sparsify(net, x, block=8)
    for density in (1.0, 0.01):
        mask = torch.rand(2, 24, 40, device=device) < density
        poison(run)
        want = graph_oracle(net, [x], PlaneMasks(mask, 8))
        exact = graph_oracle(copy.deepcopy(net).double(), [x.double()], PlaneMasks(mask, 8))
        assert_holds(run(x, mask), want, exact)


@pytest.mark.parametrize(
    ("slopes", "fused"), [((0.3, 0.3, 0.3), True), ((0.3, 0.3, 0.2), False), ((0.2, 0.3, 0.3), False)]
)
def test_the_slope_of_leaky_activations(always, slopes, fused):
    """One for the whole block, and not the default."""
    net, x, mask = (
        lively(nn.Sequential(nn.Conv2d(3, 16, 1), Plain(*slopes))),
        torch.randn(1, 3, 24, 40),
        torch.ones(1, 24, 40),
    )
    run = sbnet.sparsify(net, x, block=8)
    assert ("bottleneck" in kinds(run)) == fused
    with torch.no_grad():
        assert_holds(run(x, mask), net(x), copy.deepcopy(net).double()(x.double()))


class Peeking(Blocks):
    """Returns what lies within a block."""

    def forward(self, x, active=None):
        x = self.first(x, active)
        middle = self.blocks[0].conv1(x, active, activation="relu")
        y = self.blocks[0].conv2(middle, active, activation="relu")
        return self.blocks[0].conv3(y, active, activation="relu", residual=x), middle


def test_blocks_with_a_hook_or_another_consumer_run_step_by_step(always):
    runner = run_of(Peeking(), (24, 24))
    assert "bottleneck" not in kinds(runner)


@pytest.mark.parametrize(
    ("capability", "dtype", "channels", "hidden", "block", "batch", "fused"),
    [
        ((9, 0), torch.float16, 256, 64, 16, 8, True),
        ((9, 0), torch.bfloat16, 512, 96, (8, 24), 8, True),
        ((9, 0), torch.float16, 512, 128, 8, 1, True),
        ((9, 0), torch.float16, 512, 128, 8, 8, False),  # wide, and more than 16 cells a multiprocessor
        ((9, 0), torch.float32, 256, 64, 16, 1, False),
        ((9, 0), torch.float16, 256, 64, 12, 1, False),
        ((9, 0), torch.float16, 250, 64, 16, 1, False),
        ((9, 0), torch.float16, 520, 64, 16, 1, False),
        ((9, 0), torch.float16, 512, 136, 8, 1, False),
        ((8, 0), torch.float16, 256, 64, 16, 1, False),
    ],
)
def test_where_one_kernel_pays(monkeypatch, capability, dtype, channels, hidden, block, batch, fused):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(_library, "PORTABLE", False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    first, last = (SimpleNamespace(dtype=dtype, shape=(batch, c, 200, 352)) for c in (hidden, channels))
    assert bottleneck.one_kernel(torch.device("cuda"), first, last, (200, 352, block)) == fused


@pytest.mark.parametrize(("hidden", "fused"), [(64, True), (96, True), (104, False), (128, False)])
def test_for_a_device_that_is_not_known_yet(hidden, fused):
    """An exported model: the blocks that gain whatever the device, and however many tiles there are."""
    first, last = (SimpleNamespace(dtype=torch.float16, shape=(8, c, 200, 352)) for c in (hidden, 512))
    assert bottleneck.one_kernel(None, first, last, (200, 352, 8)) == fused


def test_elsewhere_than_on_cuda():
    value = SimpleNamespace(dtype=torch.float16, shape=(1, 64, 24, 24))
    assert not bottleneck.one_kernel(torch.device("cpu"), value, value, (24, 24, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("density", [0.02, 1.0])
def test_on_hopper(density, dtype):
    planes = [(100, 90, 8)]
    net = network().to("cuda", dtype)
    x = torch.randn(2, 3, 100, 90, device="cuda").to(dtype).contiguous(memory_format=torch.channels_last)
    mask = torch.rand(2, 100, 90, device="cuda") < density
    runner = run_of(net, (100, 90), batch=2, device="cuda", dtype=dtype)
    assert ("bottleneck" in kinds(runner)) == (kernel_capability(0) == 90)
    assert compare(runner(x, mask), net, x, plane_masks(mask, planes)).holds
