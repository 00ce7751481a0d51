"""ONNX Runtime: every op of torch.ops.sbnet as a custom op, the same bits as in torch, errors instead of crashes."""

import pytest

pytest.importorskip("onnxruntime")

import torch

import sbnet
from sbnet import BlockGrid, Fringe, conv_output_size
from support.helpers import ACTIVATIONS, FLOATS, assert_bitwise, assert_conv, laid_out, poison, random_active, tensor
from support.ort_models import MASKS, Node, grid_attributes, lists, nchw, nhwc, samples, torch_ops


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


# ---- motion_mask
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16], ids=str)
def test_motion_mask(device, dtype):
    """Bit for bit what torch.ops.sbnet computes, frame after frame, the background going round."""
    frames = (torch.rand(3, 2, 40, 50, 3, device=device) * (255 if dtype == torch.uint8 else 1)).to(dtype)
    background = own = torch.full((2, 40, 50), torch.inf, device=device)
    for frame in (*frames, frames[-1]):
        node = Node("motion_mask", [frame, background], {"threshold": 0.05, "rate": 0.25, "cut": 0.4, "smooth": 3})
        mask, background = node.run(device)
        wanted, own = sbnet.motion_mask(frame.permute(0, 3, 1, 2), own, 0.05, 0.25, 0.4, 3)
        assert_bitwise(mask, wanted)
        assert_bitwise(background, own)
    assert 0 < float(wanted.float().mean()) < 1


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


def conv_inputs(x, weight, active, bias=None, residual=None, fringe: Fringe | None = None, base=None, slope=None):
    edge = (None, None) if fringe is None else (fringe.pixels, fringe.count)
    residual, base = (None if t is None else nhwc(t) for t in (residual, base))
    inputs = [nhwc(x), nhwc(weight), *lists(active), bias, residual, slope, *edge, base]
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


# ---- numbers a channel, of x's type or float
def of_types(dtype):
    return [dtype] if dtype == torch.float32 else [dtype, torch.float32]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_conv_with_slopes(device, dtype):
    """Bit for bit, with a bias of the slopes' type and without."""
    x, weight, active, options, attributes, _ = conv_case(device, dtype, "3x3")
    attributes |= {"activation": "leaky_relu", "zero_outside": 1}
    for kind in of_types(dtype):
        slope = tensor((weight.shape[0],), kind, device)
        for bias in (None, tensor(slope.shape, kind, device)):
            node = Node("sparse_conv2d", conv_inputs(x, weight, active, bias, slope=slope), attributes)
            want = sbnet.sparse_conv2d(x, weight, bias, active, slope=slope, activation="leaky_relu", **options)
            assert_bitwise(nchw(node.run(device, dynamic=True)[0]), want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mode", ["group", "layer"])
def test_norm_with_weights_of_either_type(device, mode, dtype):
    x = laid_out(tensor((2, 8, 21, 26), dtype, device), "channels_last")
    active = random_active(BlockGrid.cover((21, 26), 8), 2, 0.4, device)
    for kind in of_types(dtype):
        weight, bias = tensor((8,), kind, device), tensor((8,), kind, device)
        for w, b in ((weight, bias), (weight, None), (None, bias)):
            want = (
                sbnet.sparse_group_norm(x, active, 4, w, b)
                if mode == "group"
                else sbnet.sparse_layer_norm2d(x, active, w, b, 1e-5)
            )
            given = [nhwc(x), *lists(active), w, b]
            groups = {"groups": 4} if mode == "group" else {}
            attributes = {"bsize": [8, 8], "mode": mode, "zero_outside": 1, "eps": 1e-5, **groups}
            while given[-1] is None:
                given.pop()
            assert_bitwise(nchw(Node("sparse_norm2d", given, attributes).run(device)[0]), want)
