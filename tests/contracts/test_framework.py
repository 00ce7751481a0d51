"""The ops inside PyTorch: opcheck, compile, export, pytrees, copies."""

import io
import itertools

import pytest
import torch
import torch.utils._pytree as pytree

import sbnet
from sbnet import (
    ActiveBlocks,
    BlockGrid,
    Fringe,
    Window,
    fringe,
    sparse_avg_pool2d,
    sparse_bottleneck2d,
    sparse_conv2d,
    sparse_gather,
    sparse_max_pool2d,
    sparse_scatter,
)
from support.attention_cases import attention_samples
from support.blockconv_cases import blockconv_samples
from support.chain import Chain, InPlace, assert_same_chain, chain_inputs
from support.helpers import (
    assert_bitwise,
    assert_same_active,
    laid_out,
    random_active,
    tensor,
)
from support.weight_cases import weight_samples

OPS = torch.ops.sbnet
CONV = ([1, 1], [1, 1], [1, 1], 1)
TRANSPOSED = ([1, 1], [1, 1], [0, 0], [1, 1], 1)
WINDOW = ([3, 3], [1, 1], [1, 1])


# ---- opcheck
def op_samples(device):
    """op name -> list of arguments."""
    grid = BlockGrid.cover((20, 27), 8)
    halo = grid.conv_input(3, 1, 1)
    active = random_active(grid, 2, 0.5, device)
    lists = (active.indices, active.count, active.block_map)
    x = tensor((2, 8, 20, 27), torch.float32, device)
    last = laid_out(x, "channels_last")
    weight, bias = tensor((6, 8, 3, 3), torch.float32, device), tensor((6,), torch.float32, device)
    far = Window.conv((1, 5), 1, (0, 4), 2).numbers()
    wide_out = tensor((8, 6, 3, 3), torch.float32, device)
    residual = laid_out(tensor((2, 6, 20, 27), torch.float32, device), "channels_last")
    bottleneck = [tensor(s, torch.float32, device) / 6 for s in ((4, 8, 1, 1), (4, 4, 3, 3), (8, 4, 1, 1))]
    bias8 = tensor((8,), torch.float32, device)
    blocks = tensor((active.capacity, 8, 8, 8), torch.float32, device)
    wide = laid_out(tensor((active.capacity, 8, 10, 10), torch.float32, device), "channels_last")
    edge = fringe(active, active, (20, 27), 3, 1, 1)
    bytes_, filters, rest = (
        torch.randint(-128, 128, shape, dtype=torch.int8, device=device)
        for shape in ((2, 8, 20, 27), (6, 8, 3, 3), (2, 6, 20, 27))
    )
    scales, edges = torch.rand(6, device=device) / 1000, (edge.pixels, edge.count)
    g, h = grid.numbers(), halo.numbers()
    small = random_active(BlockGrid.cover((10, 14), 8), 2, 0.5, device)  # of half the plane, ceil_mode
    small_lists, s = (small.indices, small.count, small.block_map), small.grid.numbers()

    def grad(t):
        return t.detach().clone().requires_grad_()

    return {
        "reduce_mask": [
            (torch.rand(2, 20, 27, device=device), g, 0.97, False, 24),
            (torch.rand(2, 20, 27, device=device) > 0.9, h, 0.01, True, 5),
        ],
        "sparse_gather": [
            (x, *lists, g, False, True),
            (last, *lists, h, True, True),
            (grad(last), *lists, h, False, True),
            (grad(x), *lists, h, True, True),
            (laid_out(x, "channel_slice"), *lists, g, False, True),
        ],
        "sparse_scatter": [
            (blocks, *lists, x, g, False, False, False),
            (grad(blocks), *lists, grad(last), g, False, False, True),
            (grad(wide), *lists, grad(last), h, True, False, False),
            (grad(wide), *lists, x, h, True, False, True),
            (blocks[:5], *lists, grad(x), g, False, False, False),
        ],
        "sparse_scatter_": [
            (blocks, *lists, x.clone(), g, False, False, False),
            (wide, *lists, laid_out(x, "channels_last"), h, True, False, False),
        ],
        "fringe": [
            (active.block_map, active.block_map, [20, 27], g, [20, 27], g, Window.conv(3, 1, 1).numbers(), 1080),
            (active.block_map, active.block_map, [20, 27], g, [20, 27], g, far, 7),
        ],
        "mask_pyramid": [
            (torch.rand(2, 20, 27, device=device), [20, 27, 8, 8, 10, 14, 4, 8], 0.97, []),
            (
                torch.rand(2, 20, 27, device=device) > 0.95,
                [20, 27, 8, 8, 10, 14, 8, 8],
                0.5,
                [
                    *(0, 2, 0, *Window.conv(3, 1, 1).numbers(), 1, *Window.conv(3, 2, 1).numbers()),
                    *(1, 1, 1, *Window.conv((1, 5), 1, (0, 2)).numbers()),
                ],
            ),
        ],
        "motion_mask": [
            (torch.rand(2, 3, 20, 27, device=device), torch.rand(2, 20, 27, device=device), 0.08, 0.5, 0.3, 5),
            ((255 * torch.rand(1, 3, 20, 27, device=device)).byte(), x[:1, 0].contiguous(), 0.1, 1.0, 0.15, 1),
        ],
        "motion_mask_": [(x[:, :3], torch.rand(2, 20, 27, device=device), 0.08, 0.5, 0.3, 3)],
        "sparse_conv2d": [
            (x, weight, None, None, *lists, g, *CONV, "none", 0.0, False),
            (last, weight, bias, residual, *lists, g, *CONV, "relu", 0.0, False),
            (grad(last), grad(weight), grad(bias), grad(residual), *lists, g, *CONV, "silu", 0.0, False),
            (grad(x), weight, grad(bias), None, *lists, g, *CONV, "leaky_relu", 0.1, False),
        ],
        "sparse_conv2d_quantized": [
            (bytes_, filters, scales, None, None, 1.0, *lists, g, *CONV[:3], "none", 0.0, 0.5),
            (bytes_, filters, scales, bias, rest, 0.1, *lists, g, *CONV[:3], "silu", 0.0, 0.5),
        ],
        "sparse_conv2d_dequantized": [
            (bytes_, filters, scales, bias, rest.float(), 0.1, *lists, g, *CONV[:3], "relu", 0.0),
        ],
        "sparse_conv2d_quantized_": [
            (bytes_, filters, scales, bias, None, 1.0, *lists[:2], g, *CONV[:3], "relu", 0.0, 0.5, 0 * rest, *edges),
            (
                bytes_,
                filters,
                scales,
                None,
                None,
                1.0,
                *lists[:2],
                g,
                *CONV[:3],
                "none",
                0.0,
                0.0,
                rest.float(),
                *edges,
            ),
        ],
        "sparse_conv_transpose2d": [
            (x, wide_out, None, None, *lists, g, *TRANSPOSED, "none", 0.0, False),
            (last, wide_out, bias, residual, *lists, g, *TRANSPOSED, "relu", 0.0, False),
            (grad(last), grad(wide_out), grad(bias), grad(residual), *lists, g, *TRANSPOSED, "silu", 0.0, False),
            (grad(x), wide_out, grad(bias), None, *lists, g, *TRANSPOSED, "leaky_relu", 0.1, False),
        ],
        "sparse_conv_transpose2d_": [
            (
                last,
                wide_out,
                bias,
                residual,
                *lists[:2],
                g,
                *TRANSPOSED,
                "relu",
                0.0,
                False,
                torch.zeros_like(residual),
                edge.pixels,
                edge.count,
            ),
        ],
        "sparse_conv2d_": [
            (x, weight, None, None, *lists[:2], g, *CONV, "none", 0.0, False, torch.zeros_like(residual), None, None),
            (
                last,
                weight,
                bias,
                residual,
                *lists[:2],
                g,
                *CONV,
                "relu",
                0.0,
                False,
                0 * residual,
                edge.pixels,
                edge.count,
                OPS.pack_conv_weight(weight, 1),
            ),
        ],
        "sparse_bottleneck2d": [
            (x, *bottleneck, None, None, None, *lists, g, "relu", 0.0, False),
            (last, *bottleneck, bias8[4:], None, bias8, *lists, g, "leaky_relu", 0.2, False),
            (grad(last), *map(grad, bottleneck), None, grad(bias8[:4]), grad(bias8), *lists, g, "silu", 0.0, False),
            (x, grad(bottleneck[0]), *bottleneck[1:], None, None, None, *lists, g, "relu", 0.0, False),
        ],
        "sparse_bottleneck2d_": [
            (x, *bottleneck, None, None, None, *lists, g, "relu", 0.0, False, 0 * x, None, None),
            (last, *bottleneck, None, None, bias8, *lists, g, "gelu", 0.0, False, 0 * last, edge.pixels, edge.count),
        ],
        "pack_conv_weight": [(weight, 1), (tensor((6, 1, 3, 5), torch.float16, device), 6)],
        "sparse_max_pool2d": [
            (x, *lists, g, *WINDOW, [1, 1], False),
            (grad(last), *lists, g, *WINDOW, [1, 1], True),
            (grad(x), *small_lists, s, [2, 2], [2, 2], [0, 0], [1, 1], True),
        ],
        "sparse_max_pool2d_": [
            (x, *lists[:2], g, *WINDOW, [1, 1], False, x.clone(), None, None),
            (last, *lists[:2], g, *WINDOW, [1, 1], False, 0 * last, edge.pixels, edge.count),
        ],
        "sparse_avg_pool2d": [
            (x, *lists, g, *WINDOW, False, True, None),
            (grad(last), *lists, g, *WINDOW, False, False, None),
            (grad(x), *small_lists, s, [2, 2], [2, 2], [0, 0], True, True, 3),
        ],
        "sparse_avg_pool2d_": [
            (x, *lists[:2], g, *WINDOW, False, True, None, x.clone(), None, None),
            (last, *lists[:2], g, *WINDOW, False, False, 7, 0 * last, edge.pixels, edge.count),
        ],
        "sparse_resize2d": [
            (x, *lists, g, [20, 27], "nearest", False, 0.0, 0.0),
            (grad(last), *lists, g, [20, 27], "bilinear", True, 0.0, 0.0),
            (grad(x), *small_lists, s, [10, 14], "bicubic", False, 2.0, 0.0),
        ],
        "sparse_resize2d_": [
            (x, *lists[:2], g, "nearest-exact", False, 0.5, 0.0, 0 * x, None, None),
            (last, *lists[:2], g, "bilinear", False, 0.0, 0.0, 0 * last, edge.pixels, edge.count),
        ],
        "sparse_rearrange": [
            (x, *lists, g, 1, 1, 2, [1, -1, 0, 0], 0.5),
            (grad(last), *lists, g, 1, 1, 1, [-1, 1, 2, -2], 0.0),
            (grad(x[..., :10, :14]), *lists, g, 2, 1, 2, [0, -1, 0, 0], 0.0),
            (grad(x[..., :26]), *small_lists, s, 1, 2, 4, [0, 1, 0, 0], -1.0),
        ],
        "sparse_rearrange_": [
            (x, *lists[:2], g, 1, 1, 4, [0, 0, 0, 0], 0.0, 0 * x, None, None),
            (last, *lists[:2], g, 1, 1, 1, [3, -3, 0, 0], 1.5, 0 * last, edge.pixels, edge.count),
        ],
        "sparse_pointwise": [
            (x, None, None, None, None, *lists, g, "mul 2; silu"),
            (grad(last), grad(0 * last + 1), grad(bias8[None, :, None, None]), None, None, *lists, g, "mul a; prelu b"),
        ],
        "sparse_pointwise_": [
            (last, x, None, None, None, *lists[:2], g, "add a; tanh", 0 * last, edge.pixels, edge.count),
        ],
        "sparse_fill": [(x, active.block_map, g, 0.0), (grad(last), active.block_map, g, -1.5)],
        "sparse_fill_": [
            (x.clone(), active.block_map, g, 0.0),
            (laid_out(x, "channels_last"), active.block_map, g, 2.0),
        ],
        **weight_samples(device),
        **blockconv_samples(device),
        **attention_samples(device),
    }


def test_every_registered_op_has_samples():
    registered = {
        n.split("::")[1].split(".")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith("sbnet::")
    }
    assert registered == set(op_samples("cpu"))


@pytest.mark.parametrize("name", op_samples("cpu"))
def test_opcheck(device, name):
    op = getattr(OPS, name).default
    for n, arguments in enumerate(op_samples(device)[name]):
        results = torch.library.opcheck(op, arguments)
        assert set(results.values()) == {"SUCCESS"}, f"sample {n}"


def test_fake_strides_match(device):
    """Shapes are opcheck's; here also the memory order, for every layout of the input."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    active = random_active(BlockGrid.cover((20, 27), 8), 2, 0.5, device)
    for layout, channels in itertools.product(("contiguous", "channels_last", "channel_slice", "plane_slice"), (1, 8)):
        x = laid_out(tensor((2, channels, 20, 27), torch.float32, device), layout)
        weight = tensor((3, channels, 3, 3), torch.float32, device)
        calls = {
            "gather": lambda x, w, a: sparse_gather(x, a),
            "gather, transposed": lambda x, w, a: sparse_gather(x, a, True),
            "conv": lambda x, w, a: sparse_conv2d(x, w, None, a, padding=1),
            "conv to one channel": lambda x, w, a: sparse_conv2d(x, w[:1], None, a, padding=1),
            "scatter": lambda x, w, a: sparse_scatter(sparse_gather(x, a), a, x),
            "bottleneck": lambda x, w, a: sparse_bottleneck2d(
                x,
                (w[:2, :, :1, :1], w[:2, :1].expand(2, 2, 3, 3), w[:1, :1, :1, :1].expand(x.shape[1], 2, 1, 1)),
                None,
                a,
            ),
            "max pool": lambda x, w, a: sparse_max_pool2d(x, a, 3, 1, 1),
            "average pool": lambda x, w, a: sparse_avg_pool2d(x, a, 3, 1, 1),
        }
        for name, call in calls.items():
            real = call(x, weight, active)
            with FakeTensorMode() as mode:
                fake = call(*pytree.tree_map(mode.from_tensor, (x, weight, active)))
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype), (name, layout)


# ---- pytrees
def test_active_blocks_is_a_pytree():
    active = random_active(BlockGrid((3, 4), (5, 6), (-1, -2), (7, 8)), 2)
    leaves, spec = pytree.tree_flatten(active)
    assert len(leaves) == 4
    back = pytree.tree_unflatten(leaves, spec)
    assert_same_active(back, active)
    assert spec == pytree.treespec_loads(pytree.treespec_dumps(spec))
    moved = pytree.tree_map(lambda t: t.long(), {"a": [active]})["a"][0]
    assert moved.indices.dtype == torch.int64
    assert moved.grid == active.grid
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(active)[0]]
    assert paths == [".indices", ".count", ".total", ".block_map"]


def test_fringe_is_a_pytree():
    edge = Fringe(torch.arange(3), torch.tensor([3]))
    leaves, spec = pytree.tree_flatten(edge)
    assert isinstance(pytree.tree_unflatten(leaves, spec), Fringe)
    assert spec == pytree.treespec_loads(pytree.treespec_dumps(spec))


# ---- compile and export
@pytest.mark.parametrize("module", [Chain, InPlace])
def test_compile_fullgraph(device, module):
    model = module().to(device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        x, mask = chain_inputs(device, seed=seed)
        assert_same_chain(compiled(x, mask), model(x, mask))


@pytest.mark.parametrize("module", [Chain, InPlace])
def test_compile_dynamic_shapes(device, module):
    model = module().to(device)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in ((20, 27), (24, 31), (41, 16)):
        x, mask = chain_inputs(device, size)
        assert_same_chain(compiled(x, mask), model(x, mask))


@pytest.mark.slow
@pytest.mark.parametrize("module", [Chain, InPlace])
def test_compile_inductor(device, module):
    model = module().to(device)
    x, mask = chain_inputs(device)
    torch._dynamo.reset()
    with torch.no_grad():
        assert_same_chain(torch.compile(model, fullgraph=True)(x, mask), model(x, mask))


def test_compiled_gradients(device):
    model = Chain().to(device)
    x, mask = chain_inputs(device)
    grads = []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        call(leaf, mask)[0].square().sum().backward()
        grads.append([leaf.grad, model.first.grad.clone(), model.second.grad.clone(), model.bias.grad.clone()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_compile_takes_and_returns_active_blocks(device):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def f(x, active):
        return sparse_gather(x, active, grid=BlockGrid(10, 8, -1, active.grid.bcount)), active

    x, _ = chain_inputs(device)
    active = random_active(BlockGrid.cover((20, 27), 8), 2, 0.5, device)
    blocks, same = f(x, active)
    assert_same_active(same, active)
    assert_bitwise(blocks, sparse_gather(x, active, grid=BlockGrid(10, 8, -1, active.grid.bcount)))


@pytest.mark.parametrize("module", [Chain, InPlace])
def test_export_round_trip(device, module):
    model = module().to(device).eval()
    x, mask = chain_inputs(device)
    program = torch.export.export(model, (x, mask))
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    targets = {str(n.target) for g in graphs for n in g.nodes if n.op == "call_function"}
    assert any("sbnet.reduce_mask" in t for t in targets)
    saved = io.BytesIO()
    torch.export.save(program, saved)
    saved.seek(0)
    loaded = torch.export.load(saved).module()
    for seed in range(2):
        inputs = chain_inputs(device, seed=seed)
        assert_same_chain(loaded(*inputs), model(*inputs))


# ---- the package
def test_version_and_build_info():
    assert sbnet.__version__
    assert {"version", "compiler", "cuda", "archs"} <= set(sbnet.build_info())


def test_deep_copies_and_pickles():
    import copy
    import pickle

    active = random_active(BlockGrid.cover((20, 27), 8), 2)
    assert_same_active(copy.deepcopy(active), active)
    assert_same_active(pickle.loads(pickle.dumps(active)), active)
    assert isinstance(active, ActiveBlocks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_casts_what_pytorchs_convolution_does(device, dtype):
    """Layers of PyTorch before and after give and want halves."""
    grid = BlockGrid.cover((24, 32), 8)
    active = random_active(grid, 2, 0.5, device)
    x, weight = torch.randn(2, 8, 24, 32, device=device), torch.randn(8, 8, 3, 3, device=device)
    bias, residual = torch.randn(8, device=device), torch.randn(2, 8, 24, 32, device=device)
    with torch.autocast(device, dtype):
        before = torch.nn.functional.conv2d(x, weight, padding=1)
        got = sparse_conv2d(before, weight, bias, active, padding=1, residual=residual)
        compiled = torch.compile(
            lambda: sparse_conv2d(before, weight, bias, active, padding=1, residual=residual),
            fullgraph=True, backend="aot_eager",
        )()  # fmt: skip
    assert before.dtype == got.dtype == dtype
    want = sparse_conv2d(before, weight.to(dtype), bias, active, padding=1, residual=residual.to(dtype))
    assert_bitwise(got, want)
    assert_bitwise(compiled, want)
    assert sparse_conv2d(x, weight, bias, active, padding=1).dtype == torch.float32


def test_active_blocks_load_with_weights_only():
    """torch.export.load reads the example inputs of a program that way."""
    active = sbnet.reduce_mask(torch.rand(1, 24, 32), BlockGrid.cover((24, 32), 8))
    pyramid = sbnet.mask_pyramid(torch.rand(1, 24, 32), [(24, 32, 8)], fringes=[(0, [(0, 3, 1, 1)])])
    file = io.BytesIO()
    torch.save((active, pyramid), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded[0].grid == active.grid
    for got, want in zip(pytree.tree_leaves(loaded), pytree.tree_leaves((active, pyramid)), strict=True):
        assert_bitwise(got, want)
