"""The ops inside PyTorch: opcheck, compile, export, pytrees, gradients, CUDA graphs, streams, no host sync."""

import io
import itertools
import time

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from helpers import (
    ACTIVATIONS,
    FLOATS,
    assert_as_accurate_as_torch,
    assert_bitwise,
    assert_same_active,
    laid_out,
    random_active,
    tensor,
)

import sbnet
from sbnet import (
    ActiveBlocks,
    BlockGrid,
    Fringe,
    conv_output_size,
    fringe,
    reduce_mask,
    reference,
    sparse_avg_pool2d,
    sparse_avg_pool2d_,
    sparse_conv2d,
    sparse_conv2d_,
    sparse_gather,
    sparse_max_pool2d,
    sparse_max_pool2d_,
    sparse_scatter,
    sparse_scatter_,
)

OPS = torch.ops.sbnet
CONV = ([1, 1], [1, 1], [1, 1], 1)
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
    residual = laid_out(tensor((2, 6, 20, 27), torch.float32, device), "channels_last")
    blocks = tensor((active.capacity, 8, 8, 8), torch.float32, device)
    wide = laid_out(tensor((active.capacity, 8, 10, 10), torch.float32, device), "channels_last")
    edge = fringe(active, active, (20, 27), 3, 1, 1)
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
            (active.block_map, active.block_map, [20, 27], g, [20, 27], g, [3, 3], [1, 1], [1, 1], [1, 1], 1080),
            (active.block_map, active.block_map, [20, 27], g, [20, 27], g, [1, 5], [1, 1], [0, 4], [1, 2], 7),
        ],
        "mask_pyramid": [
            (torch.rand(2, 20, 27, device=device), [20, 27, 8, 8, 10, 14, 4, 8], 0.97, []),
            (
                torch.rand(2, 20, 27, device=device) > 0.95,
                [20, 27, 8, 8, 10, 14, 8, 8],
                0.5,
                [0, 2, 0, 3, 3, 1, 1, 1, 1, 1, 1, 1, 3, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 5, 1, 1, 0, 2, 1, 1],
            ),
        ],
        "sparse_conv2d": [
            (x, weight, None, None, *lists, g, *CONV, "none", 0.0, False),
            (last, weight, bias, residual, *lists, g, *CONV, "relu", 0.0, False),
            (grad(last), grad(weight), grad(bias), grad(residual), *lists, g, *CONV, "silu", 0.0, False),
            (grad(x), weight, grad(bias), None, *lists, g, *CONV, "leaky_relu", 0.1, False),
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
            ),
        ],
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
        "sparse_fill": [(x, active.block_map, g, 0.0), (grad(last), active.block_map, g, -1.5)],
        "sparse_fill_": [
            (x.clone(), active.block_map, g, 0.0),
            (laid_out(x, "channels_last"), active.block_map, g, 2.0),
        ],
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
class Chain(torch.nn.Module):
    """reduce_mask -> gather -> conv -> scatter, then the fused form with its fringe and a residual."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = torch.nn.Parameter(torch.randn(8, 8, 3, 3, generator=generator) / 8)
        self.second = torch.nn.Parameter(torch.randn(8, 8, 3, 3, generator=generator) / 8)
        self.bias = torch.nn.Parameter(torch.randn(8, generator=generator))

    def forward(self, x, mask):
        grid = BlockGrid.cover(x.shape[2:], 8)
        active = reduce_mask(mask, grid, 0.9)
        blocks = F.conv2d(sparse_gather(x, active, grid=grid.conv_input(3, 1, 1)), self.first)
        y = sparse_scatter(blocks.relu(), active, x * 0)
        y = sparse_max_pool2d(sparse_avg_pool2d(y, active, 3, 1, 1), active, 3, 1, 1)
        return sparse_conv2d(y, self.second, self.bias, active, padding=1, activation="relu", residual=x), active


class InPlace(Chain):
    def forward(self, x, mask):
        with torch.no_grad():
            active = reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8), 0.9)
            edge = fringe(active, active, x.shape[2:], 3, 1, 1)
            first, second = torch.full_like(x, 7.0), torch.zeros_like(x)
            sparse_conv2d_(x, self.first, None, active, second, padding=1, activation="relu", fringe=edge)
            sparse_max_pool2d_(second, active, first, 3, 1, 1, fringe=edge)
            sparse_avg_pool2d_(first, active, second, 3, 1, 1, fringe=edge)
            sparse_conv2d_(second, self.first, None, active, first, padding=1, activation="relu", fringe=edge)
            sparse_conv2d_(first, self.second, self.bias, active, second, padding=1, residual=x)
            return sparse_scatter_(sparse_gather(second, active), active, torch.zeros_like(x), add=True), active


def chain_inputs(device, size=(20, 27), seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = laid_out(torch.randn(2, 8, *size, generator=generator), "channels_last").to(device)
    return x, torch.rand(2, *size, generator=generator).pow(0.1 + seed).to(device)


def assert_same_chain(got, want):
    assert_same_active(got[1], want[1])
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4)


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


# ---- gradients
def grads_of(function, tensors, dtype, upstream):
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in tensors]
    y = function(*leaves)
    y.backward(upstream.to(dtype))
    return [None if t is None else t.grad for t in leaves]


def assert_gradients(op, plain, tensors, upstream):
    """The op's gradients in the tensors' dtype against the reference's, by the error measure."""
    dtype = tensors[0].dtype
    got = grads_of(op, tensors, dtype, upstream)
    torchs = grads_of(plain, tensors, dtype, upstream)
    exact = grads_of(plain, tensors, torch.float64, upstream)
    for n, (a, b, c) in enumerate(zip(got, torchs, exact, strict=True)):
        if a is not None:
            assert_as_accurate_as_torch(a, b, c, f"gradient {n}")


GRIDS = {
    "tiling": BlockGrid.cover((20, 27), 8),
    "overlap": BlockGrid((10, 7), (8, 5), (-1, -2), (3, 6)),
    "gaps": BlockGrid((3, 4), (7, 6), (2, -1), (3, 5)),
}


def plain_gather(active):
    """A differentiable reference: windows of a padded plane, chosen by the list."""

    def gather(x):
        rows = [
            F.pad(x, (60, 60, 60, 60))[
                n, :, 60 + y : 60 + y + active.grid.bsize[0], 60 + z : 60 + z + active.grid.bsize[1]
            ]
            for n, i, j in active.indices[: int(active.count)].tolist()
            for y, z in [[active.grid.boffset[a] + v * active.grid.bstride[a] for a, v in enumerate((i, j))]]
        ]
        tail = x.new_zeros(active.capacity - len(rows), x.shape[1], *active.grid.bsize)
        return torch.cat([torch.stack(rows), tail])

    return gather


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "channel_slice"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", GRIDS)
def test_gather_gradient(device, name, dtype, layout, transpose):
    active = random_active(GRIDS[name], 2, 0.6, device)
    x = laid_out(tensor((2, 5, 20, 27), dtype, device), layout)
    upstream = tensor((active.capacity, 5, *active.grid.bsize), dtype, device)
    leaf = x.detach().requires_grad_()
    sparse_gather(leaf, active, transpose).backward(upstream)
    zeros = torch.zeros_like(x)
    torchs = reference.sparse_scatter(upstream, active, zeros, add=True)
    exact = reference.sparse_scatter(upstream.double(), active, zeros.double(), add=True)
    assert_as_accurate_as_torch(leaf.grad, torchs, exact)
    if dtype == torch.float32:  # and autograd's own opinion
        op = plain_gather(active)
        assert_bitwise(op(x), sparse_gather(x, active, transpose))
        assert_gradients(lambda t: sparse_gather(t, active, transpose), op, [x], upstream)


@pytest.mark.parametrize("layouts", list(itertools.product(("contiguous", "channels_last"), repeat=2)), ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("name", "add", "atomic"), [("tiling", False, False), ("gaps", False, False)]
                         + [(n, True, a) for n in GRIDS for a in (False, True)])  # fmt: skip
def test_scatter_gradient(device, name, add, atomic, dtype, layouts):
    active = random_active(GRIDS[name], 2, 0.6, device)
    blocks = laid_out(tensor((active.capacity, 5, *active.grid.bsize), dtype, device), layouts[0])
    base = laid_out(tensor((2, 5, 20, 27), dtype, device), layouts[1])
    upstream = laid_out(tensor((2, 5, 20, 27), dtype, device), layouts[0])

    def op(b, y):
        return sparse_scatter(b, active, y, add=add, atomic=atomic, transpose=layouts[0] != layouts[1])

    assert_gradients(op, lambda b, y: reference.sparse_scatter(b, active, y, add=add), [blocks, base], upstream)


def test_scatter_gradient_of_a_short_stack(device):
    """Rows that the stack does not have: their pixels keep base, and base its gradient."""
    active = random_active(GRIDS["tiling"], 2, 1.0, device)
    blocks, base = tensor((5, 3, 8, 8), torch.float32, device), tensor((2, 3, 20, 27), torch.float32, device)
    for add in (False, True):
        assert_gradients(
            lambda b, y, add=add: sparse_scatter(b, active, y, add=add),
            lambda b, y, add=add: reference.sparse_scatter(b, active, y, add=add),
            [blocks, base],
            tensor(base.shape, torch.float32, device),
        )


CONVS = [  # C, K, kernel, stride, padding, dilation, groups
    (6, 4, 3, 1, 1, 1, 1),
    (6, 9, 3, 2, 1, 1, 3),
    (5, 10, 3, 1, 2, 2, 5),
    (4, 6, (1, 5), (2, 1), (0, 2), 1, 2),
    (3, 4, 4, 3, 5, 1, 1),
    (8, 4, 1, 2, 0, 1, 1),
]


def conv_case(device, dtype, channels, filters, k, s, p, d, groups, layout):
    pairs = [(v, v) if isinstance(v, int) else v for v in (k, s, p, d)]
    size = conv_output_size((20, 27), *pairs)
    active = random_active(BlockGrid.cover(size, (5, 8)), 2, 0.6, device)
    x = laid_out(tensor((2, channels, 20, 27), dtype, device), layout)
    weight = tensor((filters, channels // groups, *pairs[0]), dtype, device) / 4
    bias, residual = tensor((filters,), dtype, device), laid_out(tensor((2, filters, *size), dtype, device), layout)
    return active, [x, weight, bias, residual], {"stride": s, "padding": p, "dilation": d, "groups": groups}


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("conv", CONVS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_conv_gradient(device, activation, conv, layout):
    active, tensors, options = conv_case(device, torch.float32, *conv, layout)
    upstream = tensor(tensors[3].shape, torch.float32, device)

    def form(op):
        return lambda x, w, b, r: op(x, w, b, active, residual=r, activation=activation, negative_slope=0.2, **options)

    assert_gradients(form(sparse_conv2d), form(reference.sparse_conv2d), tensors, upstream)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_conv_gradient_in_half(device, dtype, activation):
    active, tensors, options = conv_case(device, dtype, *CONVS[0], "channels_last")
    upstream = tensor(tensors[3].shape, dtype, device)

    def form(op):
        return lambda x, w, b, r: op(x, w, b, active, residual=r, activation=activation, **options)

    got = grads_of(form(sparse_conv2d), tensors, dtype, upstream)
    exact = grads_of(form(reference.sparse_conv2d), tensors, torch.float64, upstream)
    for a, b in zip(
        got, exact, strict=True
    ):  # a relu at 0 flips with the last bit: a bound on the whole, not PyTorch's
        assert a.dtype == dtype
        error = (a.double() - b).square().mean().sqrt() / b.square().mean().sqrt()
        assert float(error) < 20 * torch.finfo(dtype).eps


def test_conv_gradient_of_some_inputs(device):
    """None where nothing is wanted, and each alone equals it among the others."""
    active, tensors, options = conv_case(device, torch.float32, *CONVS[1], "channels_last")
    upstream = tensor(tensors[3].shape, torch.float32, device)

    def run(wanted):
        leaves = [t.detach().clone().requires_grad_(n in wanted) for n, t in enumerate(tensors)]
        sparse_conv2d(*leaves[:3], active, residual=leaves[3], activation="silu", **options).backward(upstream)
        return [t.grad for t in leaves]

    every = run({0, 1, 2, 3})
    for n in range(4):
        alone = run({n})
        assert [g is not None for g in alone] == [m == n for m in range(4)]
        torch.testing.assert_close(alone[n], every[n], rtol=1e-5, atol=1e-5)
    bare = [t.detach().requires_grad_() for t in tensors[:2]]
    sparse_conv2d(*bare, None, active, **options).backward(upstream)
    assert all(t.grad is not None for t in bare)


def test_a_float32_bias_gets_a_float32_gradient(device):
    active, (x, weight, bias, _), options = conv_case(device, torch.float16, *CONVS[0], "channels_last")
    bias = bias.float().requires_grad_()
    y = sparse_conv2d(x, weight, bias, active, activation="relu6", **options)
    y.sum().backward()
    assert bias.grad.dtype == torch.float32


def test_gradient_under_capacity_overflow(device):
    active = reduce_mask(torch.ones(2, 20, 27, device=device), BlockGrid.cover((20, 27), 8), capacity=7)
    x, weight = tensor((2, 4, 20, 27), torch.float32, device), tensor((3, 4, 3, 3), torch.float32, device)
    assert_gradients(
        lambda x, w: sparse_conv2d(x, w, None, active, padding=1),
        lambda x, w: reference.sparse_conv2d(x, w, None, active, padding=1),
        [x, weight],
        tensor((2, 3, 20, 27), torch.float32, device),
    )


def test_gradient_of_nothing_active(device):
    active = random_active(BlockGrid.cover((20, 27), 8), 2, 0.0, device)
    x = tensor((2, 4, 20, 27), torch.float32, device).requires_grad_()
    weight = tensor((3, 4, 3, 3), torch.float32, device).requires_grad_()
    for active_list in (active, active.trim()):
        x.grad = weight.grad = None
        sparse_conv2d(x, weight, None, active_list, padding=1, activation="gelu").sum().backward()
        assert not x.grad.any()
        assert not weight.grad.any()


def test_second_derivative(device):
    """A gradient penalty: d/dw of |dy/dx|^2."""
    active, (x, weight, _, _), options = conv_case(device, torch.float32, *CONVS[0], "channels_last")

    def penalty(op, dtype):
        a, w = (t.detach().to(dtype).requires_grad_() for t in (x, weight))
        (slope,) = torch.autograd.grad(op(a, w, None, active, **options).square().sum(), a, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), w)[0]

    got, torchs = penalty(sparse_conv2d, torch.float32), penalty(reference.sparse_conv2d, torch.float32)
    assert_as_accurate_as_torch(got, torchs, penalty(reference.sparse_conv2d, torch.float64))


def test_in_place_forms_refuse_gradients(device):
    active, (x, weight, _, residual), options = conv_case(device, torch.float32, *CONVS[0], "channels_last")
    with pytest.raises(RuntimeError, match="sparse_conv2d_: .*no_grad"):
        sparse_conv2d_(x, weight.requires_grad_(), None, active, residual, **options)
    blocks = torch.ones(active.capacity, 4, 5, 8, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="sparse_scatter_: .*no_grad"):
        sparse_scatter_(blocks, active, residual)
    with torch.no_grad():
        sparse_conv2d_(x, weight, None, active, residual, **options)
        sparse_scatter_(blocks, active, residual)


def test_in_place_forms_bump_the_version(device):
    """Autograd must notice that a saved tensor was written."""
    active, (x, weight, _, residual), options = conv_case(device, torch.float32, *CONVS[0], "channels_last")
    blocks = torch.ones(active.capacity, 4, 5, 8, device=device)
    for write in (
        lambda t: sparse_conv2d_(x, weight, None, active, t, **options),
        lambda t: sparse_scatter_(blocks, active, t),
    ):
        saved = residual.clone()
        leaf = torch.ones_like(saved, requires_grad=True)
        product = (leaf * saved).sum()
        before = saved._version
        write(saved)
        assert saved._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


# ---- CUDA: graphs, streams, no sync
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_cuda_graph_with_changing_masks(dtype):
    """One capture; masks of every density and new inputs between replays, empty ones too."""
    size = (50, 88)
    model_weights = [tensor((64, 64, 3, 3), dtype, "cuda") / 24 for _ in range(3)]
    depthwise = tensor((64, 1, 3, 3), dtype, "cuda") / 3
    x = laid_out(tensor((2, 64, *size), dtype, "cuda"), "channels_last")
    mask = torch.zeros(2, *size, device="cuda")
    grid = BlockGrid.cover(size, 16)
    first, second, third = (torch.empty_like(x) for _ in range(3))

    def step():
        active = reduce_mask(mask, grid, 0.5)
        edge = fringe(active, active, size, 3, 1, 1)
        sparse_conv2d_(x, model_weights[0], None, active, first, padding=1, activation="relu", fringe=edge)
        sparse_conv2d_(first, depthwise, None, active, second, padding=1, groups=64, fringe=edge)
        sparse_max_pool2d_(second, active, third, 3, 1, 1, fringe=edge)
        sparse_avg_pool2d_(third, active, second, 3, 1, 1, fringe=edge)
        sparse_conv2d_(second, model_weights[1], None, active, third, padding=1, residual=x)
        blocks = F.conv2d(sparse_gather(x, active, grid=grid.conv_input(3, 1, 1)), model_weights[2])
        y = sparse_scatter(blocks, active, torch.zeros_like(x))
        z = sparse_scatter(sparse_gather(y, active, True), active, y, add=True)
        return active, sparse_conv2d(z, model_weights[1], None, active, stride=1, padding=1)

    def eager():
        active, y = step()
        return [t.clone() for t in (active.indices, active.count, active.block_map, y)], [
            torch.where(active.pixel_mask(size), t, 0) for t in (first, second, third)
        ]

    eager()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, out = step()
    for density in (0.0, 0.3, 1.0, 0.001, 0.0, 0.05):
        mask.copy_((torch.rand(mask.shape, device="cuda") < density).float())
        x.copy_(tensor(x.shape, dtype, "cuda"))
        want, want_planes = eager()
        for t in (first, second, third):
            t.fill_(float("nan"))
        graph.replay()
        got = [captured.indices, captured.count, captured.block_map, out]
        for a, b in zip(got, want, strict=True):
            assert_bitwise(a, b, f"density {density}")
        for a, b in zip((first, second, third), want_planes, strict=True):
            assert_bitwise(torch.where(captured.pixel_mask(size), a, 0), b, f"density {density}")


def busy_calls(device="cuda"):
    grid = BlockGrid.cover((50, 88), 16)
    active = random_active(grid, 2, 0.5, device)
    halved = random_active(BlockGrid.cover((25, 44), 8), 2, 0.5, device)
    odd = random_active(BlockGrid.cover((50, 88), 10), 2, 0.5, device)
    halo = grid.conv_input(3, 1, 1)
    calls = {}
    for dtype in FLOATS:
        x = laid_out(tensor((2, 64, 50, 88), dtype, device), "channels_last")
        weight = laid_out(tensor((64, 64, 3, 3), dtype, device), "channels_last")
        depthwise, out = tensor((64, 1, 3, 3), dtype, device), torch.empty_like(x)
        mask, blocks = torch.rand(2, 50, 88, device=device), tensor((active.capacity, 64, 16, 16), dtype, device)
        wide = tensor((active.capacity, 64, 18, 18), dtype, device)
        edge = fringe(active, active, (50, 88), 3, 1, 1)
        calls |= {
            f"{name} {dtype}": call
            for name, call in {
                "reduce_mask": lambda mask=mask: reduce_mask(mask, grid, 0.9),
                "reduce_mask average": lambda mask=mask: reduce_mask(mask, halo, 0.5, True),
                "fringe": lambda: fringe(active, active, (50, 88), 3, 1, 1),
                "mask_pyramid": lambda mask=mask: sbnet.mask_pyramid(
                    mask, [(50, 88, 16), (25, 44, 8)], 0.9, [(0, [(0, 3, 1, 1), (1, 3, 2, 1)])]
                ),
                "gather": lambda x=x: sparse_gather(x, active, grid=halo),
                "gather transpose": lambda x=x: sparse_gather(x, active, True),
                "scatter": lambda x=x, b=blocks: sparse_scatter(b, active, x),
                "scatter_": lambda out=out, b=blocks: sparse_scatter_(b, active, out),
                "scatter add overlap": lambda out=out, b=wide: sparse_scatter_(b, active, out, halo, add=True),
                "scatter add atomic": lambda out=out, b=wide: sparse_scatter_(
                    b, active, out, halo, add=True, atomic=True
                ),
                "conv": lambda x=x, w=weight: sparse_conv2d(x, w, None, active, padding=1),
                "conv_": lambda x=x, w=weight, o=out, e=edge: sparse_conv2d_(
                    x, w, None, active, o, padding=1, fringe=e
                ),
                "conv depthwise": lambda x=x, w=depthwise: sparse_conv2d(x, w, None, active, padding=1, groups=64),
                "conv stride 2": lambda x=x, w=weight, a=halved: sparse_conv2d(x, w, None, a, padding=1, stride=2),
                "conv odd blocks": lambda x=x, w=weight, a=odd: sparse_conv2d(x, w, None, a, padding=1),
            }.items()
        }
    return calls


@pytest.mark.gpu
def test_no_op_syncs_the_host():
    """Every call returns while the stream is held busy, and none trips PyTorch's sync detector."""
    calls = busy_calls()
    for call in calls.values():  # first calls load modules and fill the allocator's cache
        call()
        call()
    torch.cuda.synchronize()
    slow = {}
    torch.cuda.set_sync_debug_mode("error")
    try:
        for name, call in calls.items():
            torch.cuda._sleep(int(1e9))  # about half a second
            marker = torch.cuda.Event()
            marker.record()
            start = time.perf_counter()
            result = call()
            if marker.query():
                slow[name] = time.perf_counter() - start
            del result
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not slow, f"waited for the stream: {slow}"


@pytest.mark.gpu
def test_ops_run_on_the_current_stream():
    """Behind a busy side stream the result is not there yet; the default stream is never used."""
    x = laid_out(tensor((1, 64, 64, 64), torch.float16, "cuda"), "channels_last")
    weight = tensor((64, 64, 3, 3), torch.float16, "cuda") / 24
    active = random_active(BlockGrid.cover((64, 64), 16), 1, 1.0, "cuda")
    want = sparse_conv2d(x, weight, None, active, padding=1)
    outs = [torch.full_like(x, 7.0) for _ in range(3)]

    def chain() -> ActiveBlocks:
        sparse_conv2d_(x, weight, None, active, outs[0], padding=1)
        sparse_scatter_(sparse_gather(outs[0], active), active, outs[1])
        return reduce_mask(outs[1][:, 0].isfinite(), active.grid)

    chain()  # a kernel's first launch loads it, which may wait for the device
    for out in outs:
        out.fill_(7.0)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(int(1e9))
        again = chain()
    assert not side.query()
    copy = outs[0].clone()  # the current stream does not wait for the side stream
    torch.cuda.current_stream().synchronize()
    assert not side.query()
    assert bool((copy == 7).all())
    side.synchronize()
    assert_bitwise(outs[0], want)
    assert_bitwise(outs[1], want)
    assert int(again.count) == 16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_two_streams_ten_thousand_launches_each(dtype):
    """CTAs that wait for one another must not starve when two launches share the device."""
    sides = [torch.cuda.Stream() for _ in range(2)]
    weight = laid_out(tensor((64, 64, 3, 3), dtype, "cuda") / 24, "channels_last")
    cases = []
    for seed in range(2):
        x = laid_out(tensor((1, 64, 208, 208), dtype, "cuda"), "channels_last")
        active = random_active(BlockGrid.cover((208, 208), 16), 1, (0.3, 1.0)[seed], "cuda")
        edge = fringe(active, active, (208, 208), 3, 1, 1)
        out, want = torch.zeros_like(x), torch.zeros_like(x)
        sparse_conv2d_(x, weight, None, active, want, padding=1, activation="relu", fringe=edge)
        cases.append((x, active, out, edge, want))
    torch.cuda.synchronize()
    for n in range(10_000):
        for side, (x, active, out, edge, _) in zip(sides, cases, strict=True):
            with torch.cuda.stream(side):
                sparse_conv2d_(x, weight, None, active, out, padding=1, activation="relu", fringe=edge)
        if n % 1000 == 999:  # a deadlock shows as a timeout, not as a test that never ends
            deadline = time.monotonic() + 60
            while not all(s.query() for s in sides):
                assert time.monotonic() < deadline, f"hangs after {n} launches"
                time.sleep(0.001)
    for _, _, out, _, want in cases:
        assert_bitwise(out, want)


@pytest.mark.gpu
def test_two_graphs_on_two_streams():
    weight = laid_out(tensor((64, 64, 3, 3), torch.float16, "cuda") / 24, "channels_last")
    sides, graphs, outs, wants = [torch.cuda.Stream() for _ in range(2)], [], [], []
    inputs = []  # a graph does not keep what it reads alive
    for seed in range(2):
        x = laid_out(tensor((1, 64, 208, 208), torch.float16, "cuda"), "channels_last")
        active = random_active(BlockGrid.cover((208, 208), 16), 1, (0.3, 1.0)[seed], "cuda")
        a, b = torch.zeros_like(x), torch.zeros_like(x)
        inputs.append((x, active, a))
        graph = torch.cuda.CUDAGraph()

        def step(x=x, a=a, b=b, active=active):
            for _ in range(20):
                sparse_conv2d_(x, weight, None, active, a, padding=1, activation="relu")
                sparse_conv2d_(a, weight, None, active, b, padding=1, activation="relu")

        step()
        torch.cuda.synchronize()
        wants.append(b.clone())
        with torch.cuda.graph(graph):
            step()
        graphs.append(graph)
        outs.append(b)
    for _ in range(50):
        for side, graph in zip(sides, graphs, strict=True):
            with torch.cuda.stream(side):
                graph.replay()
    torch.cuda.synchronize()
    for out, want in zip(outs, wants, strict=True):
        assert_bitwise(out, want)


@pytest.mark.gpu
def test_cpu_and_cuda_agree():
    """The same lists and copies bitwise, convolutions within rounding."""
    x, mask = chain_inputs("cpu")
    grid = BlockGrid.cover((20, 27), 8)
    halo = grid.conv_input(3, 1, 1)
    cpu, cuda = reduce_mask(mask, grid, 0.9), reduce_mask(mask.cuda(), grid, 0.9)
    for name in ("indices", "count", "total", "block_map"):
        assert_bitwise(getattr(cuda, name).cpu(), getattr(cpu, name))
    blocks = [sparse_gather(x, cpu, grid=halo), sparse_gather(x.cuda(), cuda, grid=halo)]
    assert_bitwise(blocks[1].cpu(), blocks[0])
    for add_dtype in FLOATS:
        sums = [
            sparse_scatter(b.to(add_dtype), a, t.to(add_dtype), halo, add=True)
            for b, a, t in zip(blocks, (cpu, cuda), (x, x.cuda()), strict=True)
        ]
        assert_bitwise(sums[1].cpu(), sums[0], f"overlapping add {add_dtype}")
    model = Chain()
    with torch.no_grad():
        torch.testing.assert_close(
            model.cuda()(x.cuda(), mask.cuda())[0].cpu(), Chain()(x, mask)[0], rtol=1e-4, atol=1e-4
        )


@pytest.mark.gpu
def test_the_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    x, mask = chain_inputs("cuda:1")
    model = Chain().to("cuda:1")
    got = model(x, mask)
    assert got[0].device == x.device
    assert_same_chain(got, Chain().to("cuda:1")(x, mask))


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
