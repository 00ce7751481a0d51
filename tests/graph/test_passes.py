"""Where a pass must hold back, and what it makes where it need not: small networks against the contracts."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import sbnet
from sbnet.graph.axes import op_name
from sbnet.graph.ir import Graph, Node, Value
from sbnet.graph.oracle import CachedOracle, PlaneMasks, exact_pixels, masked_oracle
from sbnet.graph.passes import fold_affine, fuse_activations, fuse_residuals, merge_branches
from support.contract import assert_holds, poison
from support.networks import lively
from support.planned import for_cuda
from support.small_nets import SIZE, C, Net, layer


def shortcuts(f, x):
    """Sums whose operands are read again, before and after them, by layers that read beyond a pixel."""
    a = f[0](x)
    b = f[1](a) + a
    c = f[2](b) + x
    d = f[3](c) + b
    return f[4](d + a)


def own_input(f, x):
    for one in f:
        x = one(x) + x
    return x


def later(f, x):
    a = f[0](x)
    return f[1](f[2](x) + a) + f[3](a)


def several_sums(f, x):
    return f[0](x) + x + f[1](x.tanh())


def sums_after_activations(f, x):
    """Shortcuts around an activation, as YOLO's and MobileNet's blocks have them, and what only looks like one."""
    a = F.silu(f[0](x)) + x
    b = a + F.relu(f[1](F.silu(f[2](a))))
    c = F.silu(f[3](b)) + F.hardswish(f[4](b))
    taken = F.gelu(f[5](c))
    return F.relu(F.leaky_relu(f[6](c), 0.2) + a), taken + taken, taken * 2, f[7](f[0](c)) + c


def widths(f, x):
    """Buffers of three sizes, which tensors take turns in."""
    y = f[0](x)
    z = f[2](f[1](y))
    return f[4](f[3](z) + y) + x


def taken_and_read(f, x):
    y = f[0](x)
    return y, f[1](y).relu(), f[1](y)


def many_users(f, x):
    """Of a convolution that a normalisation, an activation and a sum follow."""
    y = f[0](x)
    return f[1](y) + f[2](y.relu()), f[3](f[4](y) + x), f[0](y) + y


def two_activations(f, x):
    return F.relu(F.silu(f[0](x))), F.silu(F.relu(f[1](x)) - 0.5), F.hardswish(f[0](x)).sigmoid()


def chain_of_affines(f, x):
    y = F.max_pool2d(x, 3, 1, 1)
    return torch.tanh(f[0](f[1](y))), F.relu(f[1](f[0](y))), torch.tanh(F.relu(f[0](y))), f[0](f[2](x))


def hard_swishes(f, x):
    """As they are written, and what only looks like one."""
    a, b, c, d = f[0](x), f[1](x), f[2](x), f[3](x)
    taken, third = F.relu6(d + 3), c * 2
    scaled = F.relu6(third + 3) / 6
    return (
        a * F.relu6(a + 3) / 6, F.relu6(b + 3) / 6 * b, torch.clamp(3 + c, 0, 6) * c * (1 / 6), d * taken / 6, taken,
        f[0](a) * F.relu6(f[1](a) + 3) / 6, b * F.relu6(b + 2) / 6, c * F.relu6(c + 3) / 5,
        third * scaled, scaled,
    )  # fmt: skip


def forward_affines(f, x):
    """PP-OCR's blocks, and affine functions that no convolution can take: others read them, or zeros stand beside."""
    y = f[1](F.relu(f[0](x)) * 0.7 + 0.3)
    z = F.silu(y) - 0.2
    return (
        f[3](F.hardswish(f[2](y)) * 1.5 - 1),
        f[4](z),
        f[5](F.silu(f[2](x)) + 0.4),
        z.tanh(),
        f[6](x.tanh() + 0.1),
        f[4](F.relu(x.tanh() * 2 - 0.5)),
    )


def pixels_of_two(f, x):
    return torch.tanh(f[0](x)) * torch.exp(-f[1](x).abs()) + torch.sigmoid(f[0](x + 1))


def branches(f, x):
    """Parallel convolutions, of which some are one."""
    same = f[0](x) + f[1](x)  # 3x3 and 1x1
    grouped = f[0](x) + f[2](x)  # of other groups
    y = f[3](x) + f[4](x)  # 3x3 with padding, 2x2 without, both of stride 2: not centred on the same pixel
    return same, grouped, y, f[5](x) + f[0](x)  # an affine function


def cats(f, x):
    y = f[0](x)
    a, b = y.chunk(2, 1)
    z = f[1](x)
    twice, swapped = torch.cat([z, z], 1), torch.cat([f[2](b), b, a], 1)
    return f[3](twice), f[4](swapped), torch.cat([a, b], 1) + f[0](z), torch.cat([z, x, y], 1)


def whole(f, x):
    y = f[0](x)
    z = f[1](y)
    return f[2](z) * y.mean((2, 3), keepdim=True), y.flatten(2).amax(2), f[1](z)


def strides(f, x):
    """Windows that reach further along one axis, and unions of several."""
    y = f[0](x)
    return f[1](y) + f[2](y), f[3](F.max_pool2d(y, 3, 2, 1)), f[4](y)


NETWORKS = {
    "shortcuts": lambda: Net(shortcuts, *(layer() for _ in range(5))),
    "sums with their own input": lambda: Net(own_input, layer(), layer(k=5), layer()),
    "a shortcut that is read later": lambda: Net(later, *(layer() for _ in range(4))),
    "several sums": lambda: Net(several_sums, layer(), layer(k=1)),
    "sums after activations": lambda: Net(
        sums_after_activations, layer(), layer(k=1), *(layer() for _ in range(4)), layer(groups=C), nn.PReLU(C)
    ),
    "buffers in turn": lambda: Net(widths, layer(), layer(C, 24), layer(24, C), layer(), layer()),
    "outputs that are read": lambda: Net(taken_and_read, layer(), layer()),
    "several users": lambda: Net(many_users, layer(), nn.BatchNorm2d(C), layer(), layer(), nn.BatchNorm2d(C)),
    "two activations": lambda: Net(two_activations, layer(), layer()),
    "affine functions": lambda: Net(chain_of_affines, nn.BatchNorm2d(C), nn.BatchNorm2d(C), layer()),
    "hard swishes": lambda: Net(hard_swishes, *(layer() for _ in range(4))),
    "affine functions before convolutions": lambda: Net(
        forward_affines,
        layer(groups=C),
        layer(k=1),
        layer(),
        layer(o=12, k=1, groups=4, bias=False),
        layer(k=1),
        layer(k=3),
        layer(k=1, p=1),
    ),
    "ops of pixels": lambda: Net(pixels_of_two, layer(), layer()),
    "branches": lambda: Net(
        branches, layer(), layer(k=1), layer(groups=2), layer(s=2), layer(k=2, s=2, p=0), nn.BatchNorm2d(C)
    ),
    "concatenations": lambda: Net(cats, layer(o=16), layer(), layer(), layer(16), layer(24, 4), layer()),
    "whole planes": lambda: Net(whole, layer(), layer(), layer()),
    "windows": lambda: Net(strides, layer(), layer(k=(1, 5)), layer(k=(5, 1)), layer(k=3, p=0), layer(k=3, s=2)),
}


def build(name: str) -> tuple[nn.Module, nn.Module]:
    net = lively(NETWORKS[name]())
    return net, copy.deepcopy(net).double()


def frames():
    for density in (0.01, 1.0, 0.0, 0.005):
        x = torch.randn(2, 3, *SIZE).to(memory_format=torch.channels_last)
        yield x, torch.rand(2, *SIZE) < density


@pytest.mark.parametrize("name", NETWORKS)
def test_the_masked_contract(name):
    (net, exact), run = build(name), None
    for x, mask in frames():
        run = run or sbnet.sparsify(net, x, block=4)
        poison(run)
        masks = PlaneMasks(mask, 4)
        assert_holds(run(x, mask), masked_oracle(net, [x], masks), masked_oracle(exact, [x.double()], masks), name)


EXACT = [
    "hard swishes", "affine functions before convolutions", "shortcuts", "outputs that are read", "branches",
    "concatenations", "whole planes", "windows",
]  # fmt: skip
CACHED = [
    "affine functions before convolutions",
    "shortcuts",
    "buffers in turn",
    "outputs that are read",
    "concatenations",
    "whole planes",
]


@pytest.mark.parametrize("name", EXACT)
def test_the_exact_contract(name):
    (net, exact), run = build(name), None
    for x, mask in frames():
        mask[0] = False
        run = run or sbnet.sparsify(net, x, block=4, mode="exact")
        poison(run)
        with torch.no_grad():
            for got, dense, wide in zip(*map(tree_leaves, (run(x, mask), net(x), exact(x.double()))), strict=True):
                inside = mask.any((1, 2)).view(-1, *[1] * (got.dim() - 1))
                if got.dim() == 4:
                    inside = exact_pixels(got, mask)
                inside = inside.expand_as(got)
                assert_holds(got[inside], dense[inside], wide[inside], name)


@pytest.mark.parametrize("name", CACHED)
def test_the_cached_contract(name):
    net, exact = build(name)
    ours, theirs, run = CachedOracle(exact), CachedOracle(net), None
    for x, mask in frames():
        run = run or sbnet.sparsify(net, x, block=4, mode="cached")
        got, masks = run(x, mask), PlaneMasks(mask, 4)
        assert_holds(got, theirs([x], masks), ours([x.double()], masks), name)


@pytest.mark.parametrize("turned", [False, True])
def test_the_later_convolution_takes_the_sum(turned):
    """The other one's result is there by then, and its buffer is the sum's."""

    def work(f, x):
        early, late = f[0](x), f[1](f[2](x).relu())
        return late + early if turned else early + late

    run = sbnet.sparsify(lively(Net(work, layer(), layer(), layer())), torch.zeros(1, 3, *SIZE), block=4)
    assert [node.path for node in run.plan.graph.nodes] == ["stem", "layers.0", "layers.2", "layers.1"]


def test_a_sum_after_an_activation_is_the_convolutions():
    """The shortcut of YOLO's bottleneck is one node; where two may take it, the later one does."""
    net = Net(lambda f, x: F.silu(f[0](x)) + F.relu(f[1](x)), layer(), layer(k=1))
    graph = sbnet.sparsify(lively(net), torch.zeros(1, 3, *SIZE), block=4).plan.graph
    assert [node.path for node in graph.nodes] == ["stem", "layers.0", "layers.1"]
    assert graph.nodes[-1].options["residual_after"]
    assert graph.nodes[-1].params["residual"] is graph.nodes[1].output


@pytest.mark.parametrize("axis", [2, 3])
def test_slopes_of_a_transposed_map_are_not_the_channels(axis):
    """PReLU's slopes are those of dimension 1, whatever stands there."""
    size = (C, 12) if axis == 2 else (12, C)  # as many as there are channels
    net = Net(lambda f, x: f[1](f[0](x).transpose(1, axis)).transpose(1, axis), layer(), nn.PReLU(C))
    net = lively(net)
    net.layers[1].weight.data.copy_(torch.linspace(-1, 2, C))
    x = torch.randn(2, 3, *size)
    run = sbnet.sparsify(net, x, block=4)
    torch.testing.assert_close(run(x, torch.ones(2, *size, dtype=torch.bool)), net(x), rtol=1e-4, atol=1e-5)


def hand_made(kind: str, **params: Value) -> Graph:
    """An activated convolution of x, and a node that reads it."""
    x, y, z = (Value(name, (1, C, *SIZE), torch.float32) for name in "xyz")
    weight = Value("w", (C, C, 1, 1), torch.float32, tensor=torch.ones(C, C, 1, 1), constant=True)
    options = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, "activation": "relu"}
    conv = Node("conv", [x], [y], options=options, params={"weight": weight})
    args = [y, x] if kind == "add" else [y]
    user = Node(kind, args, [z], options={"activation": "silu"} if kind == "act" else {}, params=params)
    y.producer, z.producer = conv, user
    return Graph([x], [z], None, [conv, user]).link()


@pytest.mark.parametrize(
    ("kind", "one"),
    [("affine", fold_affine), ("add", fuse_residuals), ("act", fuse_activations), ("add", merge_branches)],
)
def test_what_is_activated_is_not_fused_into(kind, one):
    scale = Value("s", (C,), torch.float32, tensor=torch.ones(C), constant=True)
    graph = one(hand_made(kind, **({"scale": scale} if kind == "affine" else {})))
    assert [node.kind for node in graph.nodes] == ["conv", kind]
    assert graph.nodes[0].options["activation"] == "relu"


class Sums(nn.Module):
    """Sums of three channels with all that a pointwise node may hold, and one of whole words."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.body, self.norm = layer(3, 12), layer(3, 8), nn.BatchNorm2d(3)
        self.slopes, self.shuffle = nn.PReLU(3), nn.PixelShuffle(2)
        self.slopes.weight.data.copy_(torch.tensor([0.5, -0.25, 2.0]))

    def forward(self, x: Tensor):
        large = self.shuffle(self.up(x)) + F.interpolate(x, scale_factor=2, mode="nearest")
        words = self.body(x).tanh()
        return [
            large,
            F.leaky_relu(self.norm(large) + large, 0.2),
            (large + 0.5).relu(),
            self.slopes(large - 0.25),
            F.silu(F.max_pool2d(words, 3, 1, 1) + F.avg_pool2d(words, 3, 1, 1)),
        ]


class Gates(nn.Module):
    """Gates that one map reads, first or later, that two read, and that the network gives."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gates = layer(3, C), nn.ModuleList(layer(C, C, 1) for _ in range(5))

    def forward(self, x: Tensor):
        y = self.body(x)
        a, b, c, d, e = (gate(y.mean((2, 3), keepdim=True)) for gate in self.gates)
        given, twice = torch.sigmoid(d), torch.tanh(c)
        return [
            y * F.hardsigmoid(a),
            torch.exp(torch.tanh(b)) - y,
            (F.max_pool2d(y, 3, 1, 1) * twice).abs() + twice,
            given,
            F.avg_pool2d(y, 3, 1, 1) * given,
            torch.sqrt(F.max_pool2d(y, 5, 1, 2).abs() + torch.sigmoid(e)),
        ]


def test_gates_are_activated_by_programs_on_cuda():
    nodes = for_cuda(Gates()).nodes
    programs = [node.options["program"] for node in nodes if node.kind == "pointwise"]
    assert sorted(programs) == [
        "abs; add a; sqrt",
        "load a; hardsigmoid; mul x",
        "load a; tanh; exp; sub x",
        "mul a",
        "mul a; abs; add a",
    ]
    dense = [op_name(node.target) for node in nodes if node.kind == "aten"]
    assert [name for name in ("hardsigmoid", "exp", "tanh", "sigmoid") for _ in range(dense.count(name))] == [
        "tanh", "sigmoid", "sigmoid",
    ]  # fmt: skip


def test_sums_of_few_channels_are_programs_on_cuda():
    planned = for_cuda(Sums())
    few = [node for node in planned.nodes if node.output.shape[1] == 3]
    programs = [node.options["program"] for node in few if node.kind == "pointwise"]
    assert programs == ["add a", "mul a; add b", "add a; leaky_relu 0.2", "add a; relu", "add a; prelu b"]
    assert "channelwise" not in [node.kind for node in few]
    assert "channelwise" in [node.kind for node in planned.nodes if node.output.shape[1] == 8]
