"""ONNX Runtime: every op of torch.ops.sbnet as a custom op, the same bits as in torch, errors instead of crashes."""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")

import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper

import sbnet
from sbnet import ActiveBlocks, BlockGrid, Fringe, conv_output_size, export, reference
from sbnet.export import schemas
from support.helpers import (
    ACTIVATIONS,
    FLOATS,
    assert_bitwise,
    assert_conv,
    laid_out,
    poison,
    random_active,
    tensor,
)
from support.ort_models import (
    Node,
    grid_attributes,
    is_ort_error,
    model,
    nchw,
    nhwc,
    samples,
    session,
    torch_ops,
    value_info,
)

MASKS = [torch.bool, torch.uint8, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and "CUDAExecutionProvider" not in export.default_providers():
        pytest.skip("needs onnxruntime-gpu and a libsbnet.so with CUDA")
    return request.param


def lists(active: ActiveBlocks) -> list[torch.Tensor]:
    return [active.indices, active.count, active.block_map]


# ---- all ops
def test_every_torch_op_is_an_onnx_op(device):
    known = samples(device)
    assert set(known) == torch_ops()
    for node in known.values():
        for dynamic in (False, True):
            assert all(t.device.type == device for t in node.run(device, dynamic))


# ---- reduce_mask
GRIDS = {
    "tiling": ((40, 70), BlockGrid.cover((40, 70), 16)),
    "overlap": ((13, 12), BlockGrid((2, 3), (1, 2), (0, 0), (12, 5))),
    "gaps": ((30, 31), BlockGrid((3, 4), (7, 5), (1, 2), (4, 6))),
    "negative offset": ((20, 21), BlockGrid(6, 4, (-5, -3), (6, 6))),
    "no blocks": ((8, 8), BlockGrid(4, 4, 0, (0, 2))),
}


@pytest.mark.parametrize("avgpool", [False, True])
@pytest.mark.parametrize("dtype", MASKS, ids=str)
@pytest.mark.parametrize("name", GRIDS)
def test_reduce_mask(device, name, dtype, avgpool):
    size, grid = GRIDS[name]
    mask = (torch.rand(3, *size, device=device) > 0.97).to(dtype)
    tol = 0.003 if avgpool else 0.4
    for capacity in (None, 7):
        attributes = {**grid_attributes(grid), "tol": tol, "avgpool": int(avgpool)}
        if capacity is not None:
            attributes["capacity"] = capacity
        want = sbnet.reduce_mask(mask, grid, tol, avgpool, capacity)
        got = Node("reduce_mask", [mask], attributes).run(device)
        for g, w in zip(got, (want.indices, want.count, want.total, want.block_map), strict=True):
            assert_bitwise(g, w)


# ---- gather and scatter
def copy_case(device, dtype, halo):
    grid = BlockGrid.cover((21, 26), (8, 5))
    active = random_active(grid, 2, 0.4, device, capacity=17)
    grid = grid.conv_input(3, 1, 1) if halo else grid
    return active.with_grid(grid), laid_out(tensor((2, 12, 21, 26), dtype, device), "channels_last")


@pytest.mark.parametrize("halo", [False, True])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gather(device, dtype, transpose, halo):
    active, x = copy_case(device, dtype, halo)
    want = sbnet.sparse_gather(x, active, transpose)
    attributes = {**grid_attributes(active.grid), "transpose": int(transpose)}
    (got,) = Node("sparse_gather", [nhwc(x), *lists(active)], attributes).run(device)
    assert_bitwise(got if transpose else nchw(got), want)
    (got,) = Node("sparse_gather", [nhwc(x), *lists(active)], {**attributes, "zero_tail": 0}).run(device)
    rows = int(active.count)
    assert_bitwise((got if transpose else nchw(got))[:rows], want[:rows])


@pytest.mark.parametrize(("halo", "add"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scatter(device, dtype, transpose, halo, add):
    active, base = copy_case(device, dtype, halo)
    layout = "contiguous" if transpose else "channels_last"
    blocks = laid_out(tensor((active.capacity, 12, *active.grid.bsize), dtype, device), layout)
    want = sbnet.sparse_scatter(blocks, active, base, add=add, transpose=transpose)
    attributes = {**grid_attributes(active.grid, count=False), "transpose": int(transpose), "add": int(add)}
    inputs = [blocks if transpose else nhwc(blocks), *lists(active), nhwc(base)]
    (got,) = Node("sparse_scatter", inputs, attributes).run(device)
    assert_bitwise(nchw(got), want)
    if add and not halo:  # blocks apart: atomics add in one order only
        (got,) = Node("sparse_scatter", inputs, {**attributes, "atomic": 1}).run(device)
        assert_bitwise(nchw(got), want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fill(device, dtype):
    active, x = copy_case(device, dtype, False)
    for value in (0.0, -1.625, float("inf")):
        (got,) = Node("sparse_fill", [nhwc(x), active.block_map], {"bsize": [8, 5], "value": value}).run(device)
        assert_bitwise(nchw(got), sbnet.sparse_fill(x, active, value))


# ---- fringe
def test_fringe(device):
    for k, s, p, d in ((3, 1, 1, 1), (3, 2, 1, 1), ((1, 7), 1, (0, 3), 1), (5, (2, 1), 3, 2)):
        k, s, p, d = ((v, v) if isinstance(v, int) else v for v in (k, s, p, d))
        out = conv_output_size((23, 31), k, s, p, d)
        active = random_active(BlockGrid.cover((23, 31), (4, 6)), 2, 0.4, device)
        consumer = random_active(BlockGrid.cover(out, 5), 2, 0.3, device)
        want = sbnet.fringe(active, consumer, (23, 31), k, s, p, d)
        attributes = {"producer_bsize": [4, 6], "consumer_bsize": [5, 5]}
        attributes["window"] = sbnet.Window.conv(k, s, p, d).numbers()
        maps = [active.block_map, consumer.block_map]
        static = Node("fringe", maps, {**attributes, "size": [23, 31, *out]}).run(device)
        dynamic = Node("fringe", [*maps, torch.tensor([23, 31, *out])], attributes)
        for got in (static, dynamic.run(device, dynamic=True)) if device == "cpu" else (static,):
            assert_bitwise(got[0], want.pixels)
            assert_bitwise(got[1], want.count)
        cut = Node("fringe", maps, {**attributes, "size": [23, 31, *out], "capacity": 5}).run(device)
        assert_bitwise(cut[0], want.pixels[:5])


# ---- sparse_conv2d
CONVS = {  # x channels, filters, conv options
    "3x3": (16, 24, {"kernel": 3, "padding": 1}),
    "3x3 stride 2": (16, 24, {"kernel": 3, "stride": 2, "padding": 1}),
    "1x1": (16, 40, {"kernel": 1}),
    "7x7 of 3 channels": (3, 16, {"kernel": 7, "stride": 2, "padding": 3}),
    "groups": (16, 32, {"kernel": 3, "padding": 1, "groups": 4}),
    "depthwise": (16, 16, {"kernel": 3, "padding": 1, "groups": 16}),
    "dilated, uneven": (8, 8, {"kernel": (3, 2), "stride": (1, 2), "padding": (2, 0), "dilation": (2, 3)}),
}


def pair(v):
    return [v, v] if isinstance(v, int) else list(v)


def conv_case(device, dtype, name, density=0.4):
    channels, filters, options = CONVS[name]
    options = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, **options}
    kernel = pair(options.pop("kernel"))
    x = laid_out(tensor((2, channels, 21, 26), dtype, device), "channels_last")
    weight = tensor((filters, channels // options["groups"], *kernel), torch.float32, device)
    weight = (weight / weight[0].numel() ** 0.5).to(dtype).contiguous(memory_format=torch.channels_last)
    out = conv_output_size((21, 26), *(pair(v) for v in (kernel, *(options[n] for n in list(options)[:3]))))
    active = random_active(BlockGrid.cover(out, (8, 6)), 2, density, device)
    attributes = {n: v if n == "groups" else pair(v) for n, v in options.items()}
    return x, weight, active, options, {"bsize": [8, 6], **attributes}, out


def conv_inputs(x, weight, active, bias=None, residual=None, fringe: Fringe | None = None, base=None):
    edge = (None, None) if fringe is None else (fringe.pixels, fringe.count)
    residual, base = (None if t is None else nhwc(t) for t in (residual, base))
    inputs = [nhwc(x), nhwc(weight), *lists(active), bias, residual, *edge, base]
    while inputs[-1] is None:
        inputs.pop()
    return inputs


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CONVS)
def test_conv(device, name, dtype):
    """Bit for bit what torch.ops.sbnet computes, and as accurate as PyTorch."""
    x, weight, active, options, attributes, out = conv_case(device, dtype, name)
    filters = weight.shape[0]
    bias, residual = tensor((filters,), dtype, device), tensor((2, filters, *out), dtype, device)
    residual = laid_out(residual, "channels_last")
    zeros = torch.zeros(1, dtype=dtype, device=device)
    for b, r in ((None, None), (bias, None), (None, residual), (bias.float(), residual)):
        node = Node("sparse_conv2d", conv_inputs(x, weight, active, b, r), {**attributes, "zero_outside": 1})
        (got,) = node.run(device)
        assert_bitwise(nchw(got), sbnet.sparse_conv2d(x, weight, b, active, residual=r, **options))
        assert_conv(nchw(got), x, weight, b, active, zeros, residual=r, **options)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_conv_activation(device, activation):
    x, weight, active, options, attributes, _ = conv_case(device, torch.float32, "3x3")
    attributes |= {"activation": activation, "negative_slope": 0.25, "zero_outside": 1}
    (got,) = Node("sparse_conv2d", conv_inputs(x, weight, active), attributes).run(device)
    want = sbnet.sparse_conv2d(x, weight, None, active, activation=activation, negative_slope=0.25, **options)
    assert_bitwise(nchw(got), want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_conv_writes_blocks_and_fringe_of_base(device, dtype):
    x, weight, active, options, attributes, out = conv_case(device, dtype, "3x3")
    consumer = random_active(BlockGrid.cover(out, 8), 2, 0.5, device)
    edge = sbnet.fringe(active, consumer, out, 3, 1, 1)
    base = poison((2, weight.shape[0], *out), dtype, device, "channels_last")
    want = base.clone(memory_format=torch.preserve_format)
    sbnet.sparse_conv2d_(x, weight, None, active, want, fringe=edge, **options)
    (got,) = Node("sparse_conv2d", conv_inputs(x, weight, active, None, None, edge, base), attributes).run(device)
    assert_bitwise(nchw(got), want)
    assert bool((want == 0).any()), "no pixel in the fringe: the test tests nothing"


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_conv_empty_and_full(device, density):
    x, weight, active, options, attributes, _ = conv_case(device, torch.float32, "3x3", density)
    (got,) = Node("sparse_conv2d", conv_inputs(x, weight, active), {**attributes, "zero_outside": 1}).run(device)
    assert_bitwise(nchw(got), sbnet.sparse_conv2d(x, weight, None, active, **options))


# ---- sparse_bottleneck2d
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_bottleneck(device, activation, dtype):
    """Bit for bit what torch.ops.sbnet computes: with zeros outside, and into a base with a fringe."""
    x = laid_out(tensor((2, 64, 21, 26), dtype, device), "channels_last")
    shapes = (16, 64, 1, 1), (16, 16, 3, 3), (64, 16, 1, 1)
    weights = [laid_out(tensor(s, dtype, device) / 9, "channels_last") for s in shapes]
    biases = [tensor(s[:1], dtype, device) for s in shapes]
    active = random_active(BlockGrid.cover((21, 26), 8), 2, 0.4, device)
    options = {"activation": activation, "negative_slope": 0.25}
    for b in (biases, [None, biases[1], None], [t.float() for t in biases]):
        inputs = [nhwc(x), *map(nhwc, weights), *lists(active), *b]
        while inputs[-1] is None:
            inputs.pop()
        node = Node("sparse_bottleneck2d", inputs, {"bsize": [8, 8], **options, "zero_outside": 1})
        (got,) = node.run(device, dynamic=True)
        assert_bitwise(nchw(got), sbnet.sparse_bottleneck2d(x, weights, b, active, **options))
    edge = sbnet.fringe(active, active, (21, 26), 3, 1, 1)
    base = poison(x.shape, dtype, device, "channels_last")
    want = base.clone(memory_format=torch.preserve_format)
    sbnet.sparse_bottleneck2d_(x, weights, biases, active, want, **options, fringe=edge)
    inputs = [nhwc(x), *map(nhwc, weights), *lists(active), *biases, edge.pixels, edge.count, nhwc(base)]
    (got,) = Node("sparse_bottleneck2d", inputs, {"bsize": [8, 8], **options}).run(device)
    assert_bitwise(nchw(got), want)


# ---- pools
POOLS = {
    "3x3 stride 2": {"kernel_size": 3, "stride": 2, "padding": 1},
    "2x2": {"kernel_size": 2},
    "ceil": {"kernel_size": (3, 2), "stride": (2, 3), "padding": (1, 0), "ceil_mode": True},
    "dilated": {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2},
    "divisor": {"kernel_size": 3, "stride": 1, "padding": 1, "divisor_override": 5},
    "without padding": {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False},
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("kind", ["max", "avg"])
def test_pool(device, kind, name, dtype):
    """Bit for bit what torch.ops.sbnet computes: with zeros outside, and into a base with a fringe."""
    options = POOLS[name]
    if {"max": {"divisor_override", "count_include_pad"}, "avg": {"dilation"}}[kind] & set(options):
        pytest.skip("not an option of this pool")
    x = laid_out(tensor((2, 16, 21, 26), dtype, device), "channels_last")
    size = {k: v for k, v in options.items() if k not in ("divisor_override", "count_include_pad")}
    out = sbnet.pool_output_size((21, 26), **size)
    active = random_active(BlockGrid.cover(out, (8, 6)), 2, 0.4, device)
    single = {"ceil_mode", "divisor_override", "count_include_pad"}
    attributes = {"bsize": [8, 6], **{k: int(v) if k in single else pair(v) for k, v in options.items()}}
    op = f"sparse_{kind}_pool2d"
    (got,) = Node(op, [nhwc(x), *lists(active)], {**attributes, "zero_outside": 1}).run(device, dynamic=True)
    assert_bitwise(nchw(got), getattr(sbnet, op)(x, active, **options))
    edge = sbnet.fringe(active, active, out, 3, 1, 1)
    base = poison((2, 16, *out), dtype, device, "channels_last")
    want = base.clone(memory_format=torch.preserve_format)
    getattr(sbnet, op + "_")(x, active, want, **options, fringe=edge)
    (got,) = Node(op, [nhwc(x), *lists(active), edge.pixels, edge.count, nhwc(base)], attributes).run(device)
    assert_bitwise(nchw(got), want)


# ---- memory: what may be written in place, and what must not
def infos(named):
    return [value_info(n, export.runtime.ELEMENT_TYPES[t.dtype], list(t.shape)) for n, t in named.items()]


IN_PLACE = {
    "sparse_scatter": 4,
    "sparse_conv2d": 9,
    "sparse_conv_transpose2d": 9,
    "sparse_bottleneck2d": 12,
    "sparse_fill": 0,
    "sparse_max_pool2d": 6,
    "sparse_avg_pool2d": 6,
}


@pytest.mark.parametrize("op", IN_PLACE)
@pytest.mark.parametrize("base", ["graph input", "initializer", "intermediate", "intermediate used again"])
def test_in_place_never_shows(device, op, base):
    """The tensor that an op may take over keeps its value for everyone else, run after run."""
    node = samples(device)[op]
    at = IN_PLACE[op]
    plain = node.run(device)[0]
    names = [f"x{k}" for k in range(len(node.inputs))]
    given = dict(zip(names, node.inputs, strict=True))
    nodes, initializers, outputs = [], [], ["y", "again"]
    if base == "initializer":
        value = given.pop(names[at]).cpu()
        initializers = [helper.make_tensor(names[at], TensorProto.FLOAT, value.shape, value.flatten().tolist())]
    elif base != "graph input":  # -(-x): a tensor of the graph's own
        nodes += [helper.make_node("Neg", [names[at]], ["n"]), helper.make_node("Neg", ["n"], ["base"])]
    name = "base" if nodes else names[at]
    nodes.append(node.proto([name if k == at else n for k, n in enumerate(names)], ["z"]))
    nodes.append(helper.make_node("Neg", ["z"], ["y"]))  # a graph output would have memory of its own
    if base == "intermediate":
        outputs = ["y"]
    else:
        # max(base, base - |z|) is base, and cannot be computed before the op has run
        nodes.append(helper.make_node("Abs", ["z"], ["abs"]))
        nodes.append(helper.make_node("Sub", [name, "abs"], ["less"]))
        nodes.append(helper.make_node("Max", [name, "less"], ["again"]))
    made = [value_info(n, TensorProto.FLOAT, None) for n in outputs]
    s = session(model(nodes, infos(given), made, initializers), device)
    for _ in range(3):
        got = export.run(s, list(given.values()))
        assert_bitwise(-got[0], plain)
        if len(got) > 1:
            assert_bitwise(got[1], node.inputs[at])


# ---- sessions
def two_convs(element_type=TensorProto.FLOAT):
    """mask -> blocks -> conv, fringe -> conv -> fill, of any batch, height and width."""
    nodes = [
        helper.make_node("reduce_mask", ["mask"], ["i", "c", "t", "b"], domain="sbnet", bsize=[8, 8]),
        helper.make_node("Shape", ["x"], ["plane"], start=1, end=3),
        helper.make_node("Concat", ["plane", "plane"], ["size"], axis=0),
        helper.make_node(
            "fringe",
            ["b", "b", "size"],
            ["fp", "fc"],
            domain="sbnet",
            producer_bsize=[8, 8],
            consumer_bsize=[8, 8],
            window=sbnet.Window.conv(3, 1, 1).numbers(),
        ),
        helper.make_node(
            "sparse_conv2d",
            ["x", "w", "i", "c", "b", "", "", "fp", "fc"],
            ["h"],
            domain="sbnet",
            bsize=[8, 8],
            padding=[1, 1],
            activation="relu",
        ),
        helper.make_node(
            "sparse_conv2d", ["h", "w", "i", "c", "b"], ["u"], domain="sbnet", bsize=[8, 8], padding=[1, 1]
        ),
        helper.make_node("sparse_fill", ["u", "b"], ["y"], domain="sbnet", bsize=[8, 8]),
    ]
    inputs = [
        value_info("mask", TensorProto.BOOL, ["N", "H", "W"]),
        value_info("x", element_type, ["N", "H", "W", 16]),
        value_info("w", element_type, [16, 3, 3, 16]),
    ]
    return model(nodes, inputs, [value_info("y", element_type, ["N", "H", "W", 16])])


def two_convs_in_torch(mask, x, w):
    active = sbnet.reduce_mask(mask, BlockGrid.cover(mask.shape[1:], 8))
    h = sbnet.sparse_conv2d(nchw(x), nchw(w), None, active, padding=1, activation="relu")
    return nhwc(sbnet.sparse_conv2d(h, nchw(w), None, active, padding=1))


def two_convs_inputs(device, n, height, width, density=0.02, dtype=torch.float32):
    mask = torch.rand(n, height, width, device=device) < density
    weight = tensor((16, 3, 3, 16), dtype, device) / 12
    return [mask, tensor((n, height, width, 16), dtype, device), weight]


def test_dynamic_shapes(device):
    s = session(two_convs(), device)
    for n, height, width in ((1, 32, 48), (3, 17, 9), (2, 64, 64), (1, 32, 48), (0, 16, 16)):
        inputs = two_convs_inputs(device, n, height, width)
        assert_bitwise(export.run(s, inputs)[0], two_convs_in_torch(*inputs))


def test_one_session_from_four_threads(device):
    s = session(two_convs(), device)
    cases = [two_convs_inputs(device, 1 + k % 2, 40 + 8 * k, 33 + k) for k in range(4)]
    wanted = [two_convs_in_torch(*c) for c in cases]
    failures = []

    def work(k):
        try:
            for _ in range(25):
                assert_bitwise(export.run(s, cases[k])[0], wanted[k])
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]


def test_shapes_are_inferred():
    s = session(two_convs())
    assert s.get_outputs()[0].shape == ["N", "H", "W", 16]
    node = samples()["reduce_mask"]
    made = [(o.shape, o.type) for o in session(node.model()).get_outputs()]
    assert made == [
        ([9, 3], "tensor(int32)"),
        ([1], "tensor(int32)"),
        ([1], "tensor(int32)"),
        ([2, 3, 4], "tensor(int32)"),
    ]
    assert session(samples()["sparse_gather"].model()).get_outputs()[0].shape == [24, 8, 4, 4]


@pytest.mark.gpu
def test_cuda_graph_with_a_mask_per_run():
    if "CUDAExecutionProvider" not in export.default_providers():
        pytest.skip("needs onnxruntime-gpu and a libsbnet.so with CUDA")
    nodes = onnx.load_from_string(two_convs())
    # Under a CUDA graph no node may run on the CPU: the plane is fixed, so its size is an attribute.
    graph = nodes.graph
    del graph.node[1]
    graph.node[1].input.pop()
    graph.node[1].attribute.append(helper.make_attribute("size", [48, 64]))
    s = export.session(nodes.SerializeToString(), ["CUDAExecutionProvider"], cuda_graph=True)
    buffers = two_convs_inputs("cuda", 2, 48, 64)
    out = torch.empty(2, 48, 64, 16, device="cuda")
    for density in (0.01, 0.5, 0.0, 1.0, 0.03, 0.002):
        for b, new in zip(buffers, two_convs_inputs("cuda", 2, 48, 64, density), strict=True):
            b.copy_(new)
        export.run(s, buffers, [out])
        torch.cuda.synchronize()
        assert_bitwise(out, two_convs_in_torch(*buffers))


@pytest.mark.gpu
def test_no_copies_between_host_and_device(tmp_path):
    if "CUDAExecutionProvider" not in export.default_providers():
        pytest.skip("needs onnxruntime-gpu and a libsbnet.so with CUDA")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    export.session(two_convs(), ["CUDAExecutionProvider", "CPUExecutionProvider"], options=options)
    assert [n.op_type for n in onnx.load(tmp_path / "optimised.onnx").graph.node if "Memcpy" in n.op_type] == []


# ---- malformed models
def broken(op, drop=(), **changes):
    """The sample of an op with attributes changed or dropped."""
    node = samples()[op]
    node.attributes = {k: v for k, v in {**node.attributes, **changes}.items() if k not in drop}
    return node


def with_input(op, at, value):
    node = samples()[op]
    node.inputs[at] = value
    return node


def without_output(op, at):
    node = samples()[op]
    node.dropped = at
    return node


MALFORMED = {
    "attribute missing": (lambda: broken("sparse_conv2d", drop=["bsize"]), r"sparse_conv2d: bsize: .*missing"),
    "three numbers": (lambda: broken("sparse_conv2d", padding=[1, 1, 1]), r"padding: 3 numbers; 2 are wanted"),
    "float for ints": (lambda: broken("sparse_conv2d", padding=1.5), r"padding: 0 numbers; 2 are wanted"),
    "string for an int": (lambda: broken("sparse_conv2d", groups="2"), r"groups: an int is wanted"),
    "int for a float": (lambda: broken("reduce_mask", tol=1), r"tol: a float is wanted"),
    "block size 0": (lambda: broken("reduce_mask", bsize=[0, 4]), r"block size 0; at least 1"),
    "block size 2^40": (lambda: broken("reduce_mask", bsize=[1 << 40, 4]), r"does not fit 32 bits"),
    "capacity -5": (lambda: broken("reduce_mask", capacity=-5), r"capacity: -5"),
    "capacity 2^40": (lambda: broken("reduce_mask", capacity=1 << 40), r"capacity: 1099511627776"),
    "bcount missing": (lambda: broken("reduce_mask", bstride=[2, 2]), r"bcount: the attribute is missing"),
    "flag 2": (lambda: broken("sparse_gather", transpose=2), r"transpose: 2; 0 or 1"),
    "stride 0": (lambda: broken("sparse_conv2d", stride=[0, 1]), r"stride, dilation: 0"),
    "groups 3": (lambda: broken("sparse_conv2d", groups=3), r"groups: 3; a divisor"),
    "activation": (lambda: broken("sparse_conv2d", activation="tanh"), r"activation: 'tanh'"),
    "other bcount": (lambda: broken("sparse_gather", bcount=[5, 5]), r"block_map: .*is wanted"),
    "overlap without add": (lambda: broken("sparse_scatter", add=0, bstride=[2, 2]), r"overlap"),
    "size missing": (lambda: broken("fringe", drop=["size"]), r"size: missing"),
    "other size": (lambda: broken("fringe", size=[40, 40, 40, 40]), r"producer_map: .*is wanted"),
    "three sizes": (lambda: broken("fringe", size=[12, 15, 12]), r"size: expected height and width.*got 3"),
    "size 0": (lambda: broken("fringe", size=[12, 15, 0, 15]), r"size: expected 1 to 2\^29, got 0"),
    "window of five": (lambda: broken("fringe", window=[1] * 5), r"window: expected 10 numbers .*got 5"),
    "window too far": (lambda: broken("fringe", window=[1, 1, 1, 1, 0, 0, 1 << 30, 0, 1, 1]), r"window: lo, hi"),
    "rank of x": (lambda: with_input("sparse_conv2d", 0, torch.zeros(2, 12, 15)), r"x: .*dimensions; 4"),
    "channels": (lambda: with_input("sparse_conv2d", 1, torch.zeros(8, 3, 3, 5)), r"weight: 5 input channels"),
    "kernel beyond x": (lambda: with_input("sparse_conv2d", 1, torch.zeros(8, 33, 3, 8)), r"kernel's reach"),
    "bias length": (lambda: with_input("sparse_conv2d", 5, torch.zeros(7)), r"bias: 7 elements; 8"),
    "residual shape": (lambda: with_input("sparse_conv2d", 6, torch.zeros(2, 12, 14, 8)), r"residual: shape"),
    "fringe count": (lambda: with_input("sparse_conv2d", 8, torch.zeros(2, dtype=torch.int32)), r"fringe_count"),
    "width": (
        lambda: with_input("sparse_bottleneck2d", 2, torch.zeros(4, 3, 3, 5)),
        r"weights\[1\]: shape \[4,5,3,3\]",
    ),
    "a bias of three": (lambda: with_input("sparse_bottleneck2d", 8, torch.zeros(3)), r"bias2: 3 elements; 4"),
    "base of a bottleneck": (
        lambda: with_input("sparse_bottleneck2d", 12, torch.zeros(2, 12, 15, 7)),
        r"out: shape: expected .*, got \[2,7,12,15\]",
    ),
    "pixels alone": (lambda: with_input("sparse_conv2d", 8, None), r"pixels and count go together"),
    "base shape": (
        lambda: with_input("sparse_conv2d", 9, torch.zeros(2, 12, 15, 7)),
        r"out: shape: expected .*, got \[2,7,12,15\]",
    ),
    "base and zeros": (lambda: broken("sparse_conv2d", zero_outside=1), r"base: not with zero_outside"),
    "indices [n,2]": (
        lambda: with_input("sparse_gather", 1, torch.zeros(24, 2, dtype=torch.int32)),
        r"indices: int32\[24,2\]; int32\[24,3\]",
    ),
    "count of two": (lambda: with_input("sparse_gather", 2, torch.zeros(2, dtype=torch.int32)), r"count: int32\[2\]"),
    "batch": (lambda: with_input("sparse_gather", 0, torch.zeros(3, 12, 15, 8)), r"block_map: 2 images"),
    "output without a name": (lambda: without_output("reduce_mask", 2), r"output 2 is (missing|marked single)"),
    "int64 indices": (lambda: with_input("sparse_gather", 1, torch.zeros(24, 3, dtype=torch.int64)), r"int64"),
    "half weight": (
        lambda: with_input("sparse_conv2d", 1, torch.zeros(8, 3, 3, 8).half()),
        r"no kernel def matches|sparse_conv2d",
    ),
    "double mask": (lambda: with_input("reduce_mask", 0, torch.zeros(1, 4, 4).double()), r"double"),
    "more rows than capacity": (lambda: with_input("sparse_scatter", 0, torch.zeros(25, 4, 4, 8)), r"25 rows"),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_models_are_errors(name, dynamic):
    make, text = MALFORMED[name]
    node = make()
    with pytest.raises(Exception, match=r".") as caught:
        node.run(dynamic=dynamic)
    assert is_ort_error(caught.value), repr(caught.value)
    assert re.search(text, str(caught.value)), str(caught.value)


MAPS = [(op.name, at) for op in schemas.OPS.values() for at, (name, _) in enumerate(op.inputs) if "_map" in name]


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize(("op", "at"), MAPS)
def test_a_block_map_of_another_batch(op, at, images):
    """Where the kernel does not read the map it still says of how many images the list is."""
    node = samples()[op]
    node.inputs[at] = torch.full((images, *node.inputs[at].shape[1:]), -1, dtype=torch.int32)
    with pytest.raises(Exception, match=r"_map: ") as caught:
        node.run(dynamic=True)
    assert is_ort_error(caught.value), repr(caught.value)


def test_indices_out_of_range_are_skipped(device):
    """Device data cannot be checked without waiting for the device: bad rows and counts do nothing."""
    node = samples(device)["sparse_scatter"]
    good = random_active(BlockGrid.cover((12, 15), 4), 2, 1.0, device)
    bad = good.indices.clone()
    nowhere = [[-1, 0, 0], [2, 0, 0], [0, 3, 0], [0, 0, 4], [1 << 30, 1, 1], [0, -7, 0], [0, 0, -1], [9, 9, 9]]
    bad[::3] = torch.tensor(nowhere, dtype=torch.int32, device=device)
    count = torch.tensor([1 << 30], dtype=torch.int32, device=device)
    node.inputs[1:4] = [bad, count, good.block_map]
    node.attributes |= {"add": 0}
    base = nchw(node.inputs[4])
    active = ActiveBlocks(bad, count, count, good.block_map, good.grid)
    want = reference.sparse_scatter(nchw(node.inputs[0]), active, base)
    assert_bitwise(nchw(node.run(device)[0]), want)


def test_fuzz():
    """Over a thousand random models, in a process of their own, inputs and outputs beside guard pages."""
    script = Path(__file__).parents[1] / "tools/fuzz_ort.py"
    root = Path(sbnet.__file__).parent.parent
    code = (
        f"import sys; sys.path[:0] = [{str(root)!r}, {str(script.parents[1])!r}]; "
        f"import runpy; sys.argv = ['fuzz_ort.py', '1200']; runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["models"] >= 1000
    assert result["ran"] >= 100
    assert result["refused"] >= 300
    assert result["unclear"] == []
