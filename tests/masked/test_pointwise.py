"""sparse_pointwise: programs of steps against PyTorch's ops, and the programs that a network's ops become."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sbnet
from sbnet import BlockGrid, fringe, reference, sparse_pointwise, sparse_pointwise_
from sbnet.ops.masked.pointwise import BINARY, STEPS
from support.helpers import assert_as_accurate_as_torch, assert_bitwise, laid_out, random_active, tensor
from support.layer_checks import assert_gradients, assert_in_place

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PLANE = (13, 18)
NUMBERS = {"clamp": "-0.4 inf", "leaky_relu": "0.2", "elu": "0.7", "softplus": "1.5 2"}
POSITIVE = ("log", "sqrt", "rsqrt")
PROGRAMS = {name: f"{name} {'a' if name in BINARY else NUMBERS.get(name, '')}".strip() for name in STEPS}
PROGRAMS |= {name: f"abs; add 0.1; {name}" for name in POSITIVE}
PROGRAMS |= {
    "": "",
    "numbers": "mul -2; add 0.5; rsub 1; max 0.25",
    "swish by hand": "save s; sigmoid; mul s",
    "two saved": "save s; tanh; save t; mul a; sub t; load b; div 3; add s; mul t",
    "squeeze-excite": "mul c; add a; hardswish",
    "affine": "mul b; add d; prelu b",
}


def make(device, dtype, channels=8, layout="channels_last", density=0.5, block=8):
    x = laid_out(tensor((2, channels, *PLANE), dtype, device), layout)
    a = laid_out(tensor((2, channels, *PLANE), dtype, device), layout) + 2
    channel, gate = tensor((1, channels, 1, 1), dtype, device), tensor((2, channels, 1, 1), dtype, device)
    one = tensor((2, 1, *PLANE), dtype, device)
    return x, (a, channel, gate, one), random_active(BlockGrid.cover(PLANE, block), 2, density, device)


def check(x, others, active, program):
    got = sparse_pointwise(x, active, program, *others)
    theirs = reference.sparse_pointwise(x, active, program, *others)
    exact = reference.sparse_pointwise(x.double(), active, program, *(t.double() for t in others))
    assert_as_accurate_as_torch(got, theirs, exact)
    assert_in_place(lambda into: sparse_pointwise_(x, active, program, *others, out=into), got, active)
    return got


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_accurate_as_pytorch_in_both_forms(device, name):
    for dtype in DTYPES:
        got = check(*make(device, dtype), PROGRAMS[name])
        assert got.stride() == torch.empty_like(got, memory_format=torch.channels_last).stride()


@pytest.mark.parametrize("layout", ["contiguous", "channel_slice", "channels_last"])
def test_any_memory_and_channels(device, layout):
    for channels in (1, 5, 16, 72):
        for name in ("two saved", "squeeze-excite", "affine"):
            check(*make(device, torch.float16, channels, layout, 0.4, (3, 16)), PROGRAMS[name])


@pytest.mark.parametrize("channels", [1, 3, 6])
@pytest.mark.parametrize("block", [8, (3, 16), 10, 40], ids=str)
def test_rows_of_pictures_in_words(device, block, channels):
    """Rows of 3 channels are read in words of more than one pixel, where rows and blocks hold whole ones."""
    for dtype in DTYPES:
        x, a = (laid_out(tensor((2, channels, 13, 24), dtype, device), "channels_last") for _ in range(2))
        gate, image, row = (tensor(s, dtype, device) for s in ((2, channels, 1, 1), (2, 1, 1, 1), (1, 1, 13, 1)))
        active = random_active(BlockGrid.cover((13, 24), block), 2, 0.5, device)
        edge = fringe(active, random_active(BlockGrid.cover((13, 24), 4), 2, 0.5, device), (13, 24), 3, 1, 1)
        for program in ("mul a; add x", "mul a; mul b", "add c; mul d"):
            others, inside = (a, gate, image, row), active.pixel_mask((13, 24))
            exact = reference.sparse_pointwise(x.double(), active, program, *(t.double() for t in others))
            into = torch.full_like(x, 7.0)
            sparse_pointwise_(x, active, program, *others, out=into, fringe=edge)
            got = torch.where(inside, into, 0)
            assert_as_accurate_as_torch(got, reference.sparse_pointwise(x, active, program, *others), exact)
            want = torch.full_like(into, 7.0).permute(0, 2, 3, 1).reshape(-1, channels)
            want[edge.pixels[: int(edge.count)].long()] = 0
            want = want.view(2, 13, 24, -1).permute(0, 3, 1, 2)
            assert_bitwise(into, torch.where(inside, got, want))


def check_all():
    for program in PROGRAMS.values():
        for dtype in DTYPES:
            check(*make("cpu", dtype, 12), program)


def test_values_that_are_not_finite(device):
    """NaN passes through, infinities as in PyTorch."""
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0], device=device).view(1, 4, 1, 1)
    active = random_active(BlockGrid.cover((1, 1), 4), 1, 1.0, device)
    for name, program in PROGRAMS.items():
        if name in ("relu", "relu6", "leaky_relu", "tanh", "sigmoid", "hardsigmoid", "clamp", "elu", "max", "prelu"):
            operand = torch.full_like(x, 0.5)
            got, want = (f(x, active, program, operand) for f in (sparse_pointwise, reference.sparse_pointwise))
            torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("name", ["two saved", "squeeze-excite", "affine", "mish"])
def test_gradients(device, name):
    x, others, active = make(device, torch.float64)
    ours, theirs = (
        lambda x, *others, op=op: op(x, active, PROGRAMS[name], *others)
        for op in (sparse_pointwise, reference.sparse_pointwise)
    )
    assert_gradients(ours, theirs, [x, *others])


@pytest.mark.parametrize("program", ["log; mul a", "rdiv a; add b", "sqrt; mul a"])
def test_gradients_are_those_of_active_blocks_alone(device, program):
    """Whatever lies outside, as the zeros there that these steps have no gradient of."""
    x, (_, a, _, b), active = make(device, torch.float32)
    inside = active.pixel_mask(PLANE)

    def grads(x):
        leaves = [t.detach().clone().requires_grad_() for t in (x, a, b)]
        y = sparse_pointwise(leaves[0], active, program, *leaves[1:])
        return torch.autograd.grad(y.sum(), leaves, allow_unused=True, materialize_grads=True)

    x = x.abs() + 0.1
    for outside in (0.0, torch.nan):
        got = grads(torch.where(inside, x, outside))
        assert not torch.where(inside, 0, got[0]).any()
        want = grads(x)
        assert_bitwise(got[0], want[0])
        for one, sums in zip(got[1:], want[1:], strict=True):  # in the order that a GPU likes
            torch.testing.assert_close(one, sums)


BAD = [
    ("tan", (), "program: expected a step's name, got 'tan'"),
    ("add", (), "program: add: expected an operand"),
    ("add e", (), "program: add: expected x, a, b, c, d, s, t or a number, got 'e'"),
    ("add 1x", (), "program: add: expected"),
    ("add a 3", (), "program: add: expected no more, got '3'"),
    ("clamp 1", (), "program: clamp: expected 2 numbers"),
    ("save a", (), "program: save: expected s or t"),
    ("mul s", (), "program: expected s to be saved before it is read"),
    (";;relu", (), "program: expected a step"),
    ("; ".join(["relu"] * 25), (), "program: expected at most 24 steps"),
    ("relu " * 20, (), "program: relu: expected no more"),
    ("a" * 500, (), "program: expected a step's name, got 'aaa"),
    ("add b", (torch.zeros(1),), "a: expected 4 dimensions, got 1"),
    ("add b", (torch.zeros(1, 1, 1, 1),), "b: expected a tensor, which the program reads, got none"),
    ("add a", (torch.zeros(1, 3, 1, 1),), "a: shape: expected"),
    ("add a", (torch.zeros(1, 8, 1, 1).half(),), "a: dtype: expected that of x"),
    ("add a", (None,), "a: expected .*, got NoneType"),
    ("add a", (torch.zeros(1, 8, 1, 1),) * 5, "others: expected at most 4"),
    (3, (), "program: expected a string"),
]


@pytest.mark.parametrize(("program", "others", "pattern"), BAD, ids=[str(k) for k in range(len(BAD))])
def test_bad_input_names_the_op_that_was_called(device, program, others, pattern):
    x, _, active = make(device, torch.float32)
    others = [t.to(device) if isinstance(t, torch.Tensor) else t for t in others]
    errors = (RuntimeError, ValueError, TypeError)
    with pytest.raises(errors, match=f"sbnet::sparse_pointwise: ({pattern})"):
        sparse_pointwise(x, active, program, *others)
    with pytest.raises(errors, match=f"sbnet::sparse_pointwise_: ({pattern})"):
        sparse_pointwise_(x, active, program, *others, out=torch.empty_like(x))
    a = torch.zeros_like(x)
    with pytest.raises(RuntimeError, match="sbnet::sparse_pointwise_: out: expected memory of its own, got that of a"):
        sparse_pointwise_(x, active, "add a", a, out=a)


# ---- networks


class Gates(nn.Module):
    """What decoders and attention gates put between convolutions."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.slopes, self.squeeze = nn.PReLU(8), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        y = self.slopes(self.first(x))
        gate = torch.sigmoid(self.squeeze(F.adaptive_avg_pool2d(y, 1)))
        z = F.mish(self.second(y) * gate + y * 0.5)
        return torch.tanh(z).clamp(min=-0.5) - F.elu(self.second(z), 0.7) / (1 + z * z)


@pytest.mark.parametrize("mode", ["masked", "exact", "cached"])
def test_networks_run_them(device, mode):
    x, mask = torch.randn(2, 3, 40, 56, device=device), torch.zeros(2, 40, 56, device=device)
    mask[0, 10:20, 30:40] = 1
    net = Gates().to(device).eval()
    run = sbnet.sparsify(net, x, block=8, mode=mode)
    pixels = [node for node in run.plan.graph.nodes if node.kind == "pointwise"]
    assert pixels
    assert all("program" in node.options for node in pixels)
    with torch.no_grad():
        dense, exact = net(x), copy.deepcopy(net).double()(x.double())
    assert_as_accurate_as_torch(run(x, torch.ones_like(mask)), dense, exact)
    if mode == "masked":
        assert torch.isfinite(run(x, mask)).all()


OPS = {
    "rsub": lambda x, y: 1 - x, "alpha": lambda x, y: torch.add(x, y, alpha=2), "rdiv": lambda x, y: y / (1 + x * x),
    "clamps": lambda x, y: x.clamp_min(-0.1) + x.clamp_max(0.2) + F.hardtanh(y, -0.3, 0.4),
    "powers": lambda x, y: x**2 + (y * y).sqrt() + (x * x + 1).rsqrt(), "minimum": lambda x, y: torch.minimum(x, y),
    "softplus": lambda x, y: F.softplus(x, 2, 1) * F.logsigmoid(y),
    "gelu": lambda x, y: F.gelu(x * y, approximate="tanh"),
    "many": lambda x, y: (x.tanh() * y.sigmoid() + x.exp() * y.abs()) / (x.square() + y.square() + 1),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_what_a_program_must_not_change(name):
    """Whether or not an expression becomes a program, it keeps its value."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x):
            return OPS[name](self.one(x), self.two(x))

    x, net = torch.randn(1, 3, 16, 24), Net().eval()
    with torch.no_grad():
        torch.testing.assert_close(sbnet.sparsify(net, x, block=8)(x, torch.ones(1, 16, 24)), net(x))
