"""Bad input of convolutions and bottleneck blocks: see test_bad_input.py."""

import pytest
import torch
import torch.utils._pytree as pytree

from sbnet import BlockGrid, sparse_bottleneck2d, sparse_bottleneck2d_, sparse_conv2d, sparse_conv2d_
from support.helpers import random_active
from support.refusals import GRID, OPS, refused, zeros


# ---- convolution
def conv_arguments(device, **changes):
    arguments = {
        "x": zeros(2, 4, 16, 24, device=device),
        "weight": zeros(6, 4, 3, 3, device=device),
        "bias": zeros(6, device=device),
        "active": random_active(GRID, 2, 0.5, device),
        "padding": 1,
        "residual": zeros(2, 6, 16, 24, device=device),
        "out": zeros(2, 6, 16, 24, device=device),
    }
    return {**arguments, **{k: v(arguments) if callable(v) else v for k, v in changes.items()}}


CONV = [
    ({"x": lambda a: a["x"].double()}, "x: dtype: expected .*, got float64|weight"),
    ({"x": lambda a: a["x"].int()}, "x: dtype: expected .*, got int32"),
    ({"x": lambda a: a["x"][..., :0]}, "x"),
    ({"weight": None}, "weight: expected a torch.Tensor, got NoneType"),
    ({"weight": lambda a: a["weight"][0]}, "weight: expected 4 dimensions, got 3"),
    ({"weight": lambda a: a["weight"].half()}, "weight: dtype: expected that of x, float32, got float16"),
    ({"weight": lambda a: a["weight"][:, :3]}, "weight: expected C/groups = 4 input channels, got 3"),
    ({"weight": lambda a: a["weight"][..., :0]}, "weight|active"),
    ({"weight": lambda a: a["weight"][:0], "bias": None}, "weight|out"),
    ({"weight": lambda a: zeros(6, 4, 99, 99, device=a["x"].device)}, "x"),
    ({"bias": 3.0}, "bias"),
    ({"bias": lambda a: a["bias"][:5]}, "bias"),
    ({"bias": lambda a: a["bias"][None]}, "bias"),
    ({"bias": lambda a: a["bias"].double()}, "bias: dtype: expected float32, got float64"),
    ({"bias": lambda a: a["bias"].half()}, "bias: dtype: expected float32, got float16"),
    ({"active": None}, "active: expected an sbnet.ActiveBlocks, got NoneType"),
    (
        {"active": lambda a: random_active(BlockGrid(8, 4, 0, (4, 6)), 2, 0.5, a["x"].device)},
        "active: expected the tiling grid",
    ),
    (
        {"active": lambda a: random_active(BlockGrid(8, 8, -1, (2, 3)), 2, 0.5, a["x"].device)},
        "active: expected the tiling grid",
    ),
    (
        {"active": lambda a: random_active(BlockGrid(8, 8, 0, (3, 3)), 2, 0.5, a["x"].device)},
        "active: expected the tiling grid",
    ),
    (
        {"active": lambda a: random_active(BlockGrid.cover((8, 12), 8), 2, 0.5, a["x"].device)},
        "active: expected the tiling grid",
    ),
    ({"stride": 2}, "out|residual|active"),
    ({"stride": 0}, "stride"),
    ({"stride": (1, -1)}, "stride"),
    ({"stride": (1, 1, 1)}, "stride"),
    ({"stride": 1.5}, "stride"),
    ({"stride": None}, "stride"),
    ({"stride": 2**40}, "stride"),
    ({"padding": -1}, "padding|out"),
    ({"padding": 2**40}, "padding"),
    ({"padding": 2**31 - 1}, "padding|out|active"),
    ({"padding": "same"}, "padding"),
    ({"dilation": 0}, "dilation"),
    ({"dilation": -(2**31)}, "dilation"),
    ({"dilation": 2**62}, "dilation"),
    ({"dilation": 30}, "x"),
    ({"groups": 0}, "groups"),
    ({"groups": -2}, "groups"),
    ({"groups": 3}, "groups"),
    ({"groups": 2}, "weight"),
    ({"groups": 2**40}, "groups"),
    ({"activation": "swish"}, "activation: expected .*, got 'swish'"),
    ({"activation": 3}, "activation: expected .*, got 3"),
    ({"residual": 1}, "residual"),
    ({"residual": lambda a: a["residual"].half()}, "residual: dtype: expected .*, got float16"),
    ({"residual": lambda a: a["residual"][..., :23]}, "residual: shape"),
    ({"residual": lambda a: a["residual"][:, :1]}, "residual: shape"),
]


@pytest.mark.parametrize("form", [sparse_conv2d, sparse_conv2d_])
@pytest.mark.parametrize(("changes", "pattern"), CONV, ids=[f"{next(iter(c))}-{n}" for n, (c, _) in enumerate(CONV)])
def test_conv(device, form, changes, pattern):
    arguments = conv_arguments(device, **changes)
    positional = [arguments.pop(k) for k in ("x", "weight", "bias", "active")]
    out = arguments.pop("out")
    positional += [out] if form is sparse_conv2d_ else []
    refused(f"sparse_conv2d.*({pattern})", form, *positional, **arguments)


# ---- bottleneck
def bottleneck_arguments(device, **changes):
    arguments = {
        "x": zeros(2, 4, 16, 24, device=device),
        "weights": [zeros(*s, device=device) for s in ((3, 4, 1, 1), (3, 3, 3, 3), (4, 3, 1, 1))],
        "biases": [zeros(n, device=device) for n in (3, 3, 4)],
        "active": random_active(GRID, 2, 0.5, device),
        "out": zeros(2, 4, 16, 24, device=device),
    }
    return {**arguments, **{k: v(arguments) if callable(v) else v for k, v in changes.items()}}


def but(name, k, change):
    """The sequence with one member changed."""
    return {name: lambda a: [change(t) if j == k else t for j, t in enumerate(a[name])]}


BOTTLENECK = [
    ({"x": lambda a: a["x"].half()}, r"weight1: dtype: expected that of x, float16, got float32"),
    ({"x": lambda a: a["x"][:, :3]}, r"weight1: shape: expected \[3,3,1,1\], got \[3,4,1,1\]"),
    ({"x": lambda a: a["x"][..., :0]}, "x: expected|active"),
    ({"weights": None}, "weights: expected three, .*, got NoneType"),
    ({"weights": lambda a: a["weights"][:2]}, "weights: expected three, .*, got 2 of them"),
    ({"weights": lambda a: a["weights"][1]}, "weights: expected three, .*, got Tensor"),
    (but("weights", 1, lambda t: None), r"weights\[1\]: expected a torch.Tensor, got NoneType"),
    (but("weights", 1, lambda t: t.half()), "weight2: dtype: expected that of x, float32, got float16"),
    (but("weights", 0, lambda t: t[0]), "weight1: expected 4 dimensions, got 3"),
    (but("weights", 1, lambda t: t[..., :1, :1]), r"weight2: shape: expected \[3,3,3,3\], got \[3,3,1,1\]"),
    (but("weights", 2, lambda t: t[:, :2]), r"weight3: shape: expected \[4,3,1,1\], got \[4,2,1,1\]"),
    (but("weights", 0, lambda t: t[:0]), "weight2: shape|bias1"),
    ({"biases": 3.0}, "biases: expected three, .*, got float"),
    ({"biases": lambda a: a["biases"][:2]}, "biases: expected three, .*, got 2 of them"),
    (but("biases", 2, lambda t: 1), r"biases\[2\]: expected a torch.Tensor, got int"),
    (but("biases", 1, lambda t: t[:2]), r"bias2: expected \[3\], got 2 elements in 1 dimensions"),
    (but("biases", 2, lambda t: t[None]), r"bias3: expected \[4\], got 4 elements in 2 dimensions"),
    (but("biases", 2, lambda t: t.double()), "bias3: dtype: expected that of bias1, float32, got float64"),
    ({"biases": lambda a: [b.double() for b in a["biases"]]}, "bias1: dtype: expected float32, got float64"),
    ({"biases": lambda a: [None, a["biases"][1].half(), None]}, "bias2: dtype: expected float32, got float16"),
    ({"active": None}, "active: expected an sbnet.ActiveBlocks, got NoneType"),
    (
        {"active": lambda a: random_active(BlockGrid(8, 4, 0, (4, 6)), 2, 0.5, a["x"].device)},
        "active: expected the tiling grid",
    ),
    (
        {"active": lambda a: random_active(BlockGrid.cover((8, 12), 8), 2, 0.5, a["x"].device)},
        "active: expected the tiling grid",
    ),
    ({"activation": "swish"}, "activation: expected .*, got 'swish'"),
    ({"activation": 3}, "activation: expected .*, got 3"),
]
BOTTLENECK_OUT = [
    ({"out": lambda a: a["x"]}, "out: expected memory of its own, got that of x"),
    ({"out": lambda a: a["x"].view(2, 4, 24, 16).transpose(2, 3)}, "out: expected memory of its own, got that of x"),
    (
        {"weights": lambda a: [*a["weights"][:2], a["out"].view(-1)[:12].view(4, 3, 1, 1)]},
        r"out: expected memory of its own, got that of weight3",
    ),
]


@pytest.mark.parametrize("form", [sparse_bottleneck2d, sparse_bottleneck2d_])
@pytest.mark.parametrize(
    ("changes", "pattern"),
    [*BOTTLENECK, *BOTTLENECK_OUT],
    ids=[f"{next(iter(c))}-{n}" for n, (c, _) in enumerate([*BOTTLENECK, *BOTTLENECK_OUT])],
)
def test_bottleneck(device, form, changes, pattern):
    arguments = bottleneck_arguments(device, **changes)
    positional = [arguments.pop(k) for k in ("x", "weights", "biases", "active")]
    out = arguments.pop("out")
    if form is sparse_bottleneck2d and (changes, pattern) in BOTTLENECK_OUT:
        pytest.skip("of the form in place")
    positional += [out] if form is sparse_bottleneck2d_ else []
    refused(f"sbnet::sparse_bottleneck2d_?: .*({pattern})", form, *positional, **arguments)


def test_raw_bottleneck(device):
    """Past Python: the batch, the activation, the map and the fringe."""
    a = bottleneck_arguments(device)
    active, tensors = a["active"], (a["x"], *a["weights"], *a["biases"])
    lists = active.indices, active.count, active.block_map
    rest = GRID.numbers(), "relu", 0.0, False
    op, op_ = OPS.sparse_bottleneck2d, OPS.sparse_bottleneck2d_
    refused("block_map: expected the images of x, 1, got 2", op, a["x"][:1], *tensors[1:], *lists, *rest)
    refused("sparse_bottleneck2d.*block_map", op, *tensors, *lists[:2], active.block_map[..., :1], *rest)
    wrong = "sparse_bottleneck2d.*activation: expected .*, got 'tanh'"
    refused(wrong, op, *tensors, *lists, GRID.numbers(), "tanh", 0.0, False)
    pixels = torch.zeros(5, dtype=torch.int32, device=device)
    for fringe_ in ((pixels, None), (None, pixels[:1]), (pixels.long(), pixels[:1]), (pixels, pixels)):
        refused("sparse_bottleneck2d_.*fringe", op_, *tensors, *lists, *rest, a["out"], *fringe_, *[None] * 3)
    for numbers in ([], GRID.numbers()[:7], [0] * 8, [2**31 - 1] * 8):
        refused("sparse_bottleneck2d.*(grid|active|block_map)", op, *tensors, *lists, numbers, *rest[1:])
    aside = [t.to("meta") for t in a["weights"]]
    refused("sparse_bottleneck2d: expected tensors on one device", sparse_bottleneck2d, a["x"], aside, None, active)
    one = "sparse_bottleneck2d_: expected tensors on one device"
    refused(one, sparse_bottleneck2d_, a["x"], aside, None, active, a["out"])
    x, aside = a["x"].to("meta"), [*aside[:2], aside[2][:3]]
    meta = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), active)
    refused(
        r"sparse_bottleneck2d: weight3: shape: expected .*, got \(3, 3, 1, 1\)",
        sparse_bottleneck2d,
        x,
        aside,
        None,
        meta,
    )
