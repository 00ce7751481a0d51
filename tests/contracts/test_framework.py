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
    sparse_avg_pool2d,
    sparse_bottleneck2d,
    sparse_conv2d,
    sparse_gather,
    sparse_max_pool2d,
    sparse_scatter,
)
from support.chain import Chain, InPlace, assert_same_chain, chain_inputs
from support.helpers import assert_bitwise, assert_same_active, laid_out, random_active, tensor
from support.op_samples import op_samples

OPS = torch.ops.sbnet


# ---- opcheck
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
