"""sparse_squeeze_excite2d: the definition in PyTorch, and the pass that finds such gates in networks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sbnet
from sbnet import BlockGrid, reference
from sbnet.engine.executor import Executor
from sbnet.graph.capture import capture
from sbnet.graph.constants import Constants
from sbnet.graph.oracle import PlaneMasks, masked_oracle
from sbnet.graph.passes import optimise
from sbnet.graph.passes.gates import gates_that_scale, join_gates
from sbnet.graph.plan import plan
from support.helpers import assert_as_accurate_as_torch, laid_out, random_active, tensor

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def drawn(channels, hidden, dtype, device):
    weight1 = tensor((hidden, channels), dtype, device) / channels**0.5
    weight2 = tensor((channels, hidden), dtype, device) / hidden**0.5
    return weight1, tensor((hidden,), dtype, device), weight2, tensor((channels,), dtype, device)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "channel_slice"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("channels", "hidden"), [(72, 24), (960, 240), (5, 3), (600, 7)])
def test_definition(channels, hidden, dtype, layout, device):
    for steps in ({}, {"activation": "silu", "gate": "hardsigmoid"}, {"activation": "hardswish", "gate": "relu"}):
        x = laid_out(tensor((2, channels, 21, 34), dtype, device), layout)
        active = random_active(BlockGrid.cover((21, 34), 8), 2, 0.4, device)
        x = torch.where(active.pixel_mask((21, 34)), x + 1, torch.nan)  # read in active blocks alone
        layers = drawn(channels, hidden, dtype, device)
        got = sbnet.sparse_squeeze_excite2d(x, active, *layers, **steps)
        exact = reference.sparse_squeeze_excite2d(x.double(), active, *(t.double() for t in layers), **steps)
        theirs = reference.sparse_squeeze_excite2d(x, active, *layers, **steps)
        assert got.shape == (2, channels, 1, 1)
        assert got.dtype == dtype
        assert_as_accurate_as_torch(got, theirs, exact)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "channel_slice"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((2, 72, 21, 34), 8), ((20, 16, 12, 12), 4), ((1, 5, 9, 9), 3), ((1, 480, 36, 44), 8), ((1, 1512, 20, 20), 4),
        ((300, 960, 4, 4), 2), ((1, 24, 150, 170), 16), ((16, 64, 40, 40), 64),
    ],
    ids=str,
)  # fmt: skip
def test_scaling_in_place(shape, block, dtype, layout, device):
    """x times its gate, where blocks are active; the rest of `out` stays."""
    x = laid_out(tensor(shape, dtype, device), layout)
    for density in (0.0, 0.4, 1.0):
        active = random_active(BlockGrid.cover(shape[2:], block), shape[0], density, device)
        layers = drawn(shape[1], 8, dtype, device)
        gate = sbnet.sparse_squeeze_excite2d(x, active, *layers)
        out = torch.full_like(x, 7.0)
        assert sbnet.sparse_squeeze_excite2d_(x, active, *layers, out) is None
        assert torch.equal(out, torch.where(active.pixel_mask(shape[2:]), x * gate, 7.0))
    with pytest.raises(RuntimeError, match="squeeze_excite2d.*out: expected memory of its own, got that of x"):
        sbnet.sparse_squeeze_excite2d_(x, active, *layers, x)


def test_biases_may_be_missing_or_float32(device):
    x = tensor((1, 16, 12, 12), torch.float16, device)
    active = random_active(BlockGrid.cover((12, 12), 4), 1, 0.5, device)
    weight1, bias1, weight2, bias2 = drawn(16, 8, torch.float16, device)
    zero1, zero2 = torch.zeros_like(bias1), torch.zeros_like(bias2)
    plain = sbnet.sparse_squeeze_excite2d(x, active, weight1, zero1, weight2, zero2)
    assert torch.equal(plain, sbnet.sparse_squeeze_excite2d(x, active, weight1, None, weight2, None))
    halves = sbnet.sparse_squeeze_excite2d(x, active, weight1, bias1, weight2, bias2)
    assert torch.equal(halves, sbnet.sparse_squeeze_excite2d(x, active, weight1, bias1.float(), weight2, bias2.float()))


def test_nothing_active_is_the_gate_of_zeros(device):
    x = torch.full((1, 16, 12, 12), torch.nan, device=device)
    active = random_active(BlockGrid.cover((12, 12), 4), 1, 0.0, device)
    weight1, bias1, weight2, bias2 = drawn(16, 8, torch.float32, device)
    got = sbnet.sparse_squeeze_excite2d(x, active, weight1, bias1, weight2, bias2)
    torch.testing.assert_close(got[0, :, 0, 0], torch.sigmoid(F.linear(F.relu(bias1), weight2, bias2)))


def test_bad_input_says_what_was_expected():
    x = torch.rand(1, 16, 12, 12)
    active = random_active(BlockGrid.cover((12, 12), 4), 1, 0.5)
    weight1, bias1, weight2, bias2 = drawn(16, 8, torch.float32, "cpu")
    for given, message in (
        ((weight2, bias1, weight2, bias2), r"weight1: expected \[16,16\]"),
        ((weight1, bias1, weight1, bias2), r"weight2: expected \[16,8\]"),
        ((weight1.half(), bias1, weight2, bias2), "weight1: expected .* of x's dtype"),
        ((weight1, bias2, weight2, bias2), "bias1"),
        ((weight1, bias1, weight2, bias2.double()), "bias2"),
    ):
        with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
            sbnet.sparse_squeeze_excite2d(x, active, *given)
    steps = "gate: expected relu, silu, hardswish, sigmoid or hardsigmoid, got 'tanh'"
    with pytest.raises((RuntimeError, ValueError), match=steps):
        sbnet.sparse_squeeze_excite2d(x, active, weight1, bias1, weight2, bias2, gate="tanh")


class Gated(nn.Module):
    """Two gates, as networks have them: convolutions of a plane of one pixel, linear layers of a vector."""

    def __init__(self, c: int = 16) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(c, 4, 1)
        self.squeeze, self.excite = nn.Conv2d(c, 8, 1), nn.Conv2d(8, c, 1)
        self.fc1, self.fc2 = nn.Linear(c, 4), nn.Linear(4, c, bias=False)

    def forward(self, x):
        x = self.stem(x)
        x = x * F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        gate = torch.sigmoid(self.fc2(F.silu(self.fc1(x.mean((2, 3))))))
        return self.last(x * gate[:, :, None, None])


class Watched(Gated):
    """One whose hidden numbers are returned, too, and one that pools maxima."""

    def forward(self, x):
        x = self.stem(x)
        hidden = F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))
        most = torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_max_pool2d(x, 1)))))
        return x * torch.sigmoid(self.excite(hidden)), hidden, self.last(x * most)


def planned(net, x, mode="masked"):
    return join_gates(plan(optimise(capture(net, (x,))), "auto", mode))


@pytest.mark.parametrize("batch", [1, 3])
def test_gates_of_a_network_become_one_node(batch):
    torch.manual_seed(1)
    net, x = Gated().eval(), torch.rand(batch, 3, 40, 56)
    mask = torch.zeros(batch, 40, 56, dtype=torch.bool)
    mask[:, 5:20, 10:30] = True
    made = planned(net, x)
    gates = [node for node in made.graph.nodes if node.kind == "squeeze_excite"]
    steps = [(gate.options["activation"], gate.options["gate"]) for gate in gates]
    assert steps == [("relu", "hardsigmoid"), ("silu", "sigmoid")]
    assert not any(node.kind == "adaptive_pool" for node in made.graph.nodes)
    executor = Executor(made, Constants(made.graph, x.device, x.dtype))
    with torch.no_grad():
        (got,) = executor([x], mask)
        executor._scaling = gates_that_scale(made, executor.storage)  # as on a GPU
        executor._scaled = set(executor._scaling.values())
        assert [gate.options["gate"] for gate in executor._scaling] == ["hardsigmoid"]
        before, executor._noted_nodes = got.clone(), None
        executor.forget()
        (got,) = executor([x], mask)
    assert torch.equal(got, before)
    of = PlaneMasks(mask, {plane[:2]: plane[2] for plane in made.planes})
    theirs, exact = masked_oracle(net, [x], of), masked_oracle(Gated.double(net), [x.double()], of)
    assert_as_accurate_as_torch(got, theirs, exact)


def test_what_others_read_stays():
    made = planned(Watched().eval(), torch.rand(1, 3, 40, 56))
    assert not any(node.kind == "squeeze_excite" for node in made.graph.nodes)


def test_the_cached_contract_keeps_pools_of_all_pixels():
    made = planned(Gated().eval(), torch.rand(1, 3, 40, 56), "cached")
    assert not any(node.kind == "squeeze_excite" for node in made.graph.nodes)
