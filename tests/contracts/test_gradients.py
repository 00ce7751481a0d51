"""Gradients of the ops against those of the reference, and what in-place forms do about them."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from sbnet import (
    BlockGrid,
    conv_output_size,
    reduce_mask,
    reference,
    sparse_conv2d,
    sparse_conv2d_,
    sparse_gather,
    sparse_scatter,
    sparse_scatter_,
)
from support.helpers import (
    ACTIVATIONS,
    FLOATS,
    assert_as_accurate_as_torch,
    assert_bitwise,
    laid_out,
    random_active,
    tensor,
)


def grads_of(function, tensors, dtype, upstream):
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in tensors]
    y = function(*leaves)
    y.backward(upstream.to(dtype))
    return [None if t is None else t.grad for t in leaves]


def assert_gradients(op, plain, tensors, upstream):
    """The op's gradients in the tensors' dtype against the reference's, by the error measure: of four gradients of the
    result as one, as the errors of a few biases are single draws."""
    dtype = tensors[0].dtype
    many = [upstream.roll(k, -1) for k in range(4)]
    got, torchs, exact = (
        [grads_of(function, tensors, kind, one) for one in many]
        for function, kind in ((op, dtype), (plain, dtype), (plain, torch.float64))
    )
    for n in range(len(tensors)):
        if got[0][n] is not None:
            a, b, c = (torch.stack([grads[n] for grads in side]) for side in (got, torchs, exact))
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


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("conv", CONVS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_conv_gradient(device, activation, conv, layout, after):
    active, tensors, options = conv_case(device, torch.float32, *conv, layout)
    upstream = tensor(tensors[3].shape, torch.float32, device)
    options |= {"residual_after": after, "activation": activation, "negative_slope": 0.2}

    def form(op):
        return lambda x, w, b, r: op(x, w, b, active, residual=r, **options)

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
    # the sum over all pixels is not rounded to half on its way: 51 * 43 = 2193 is odd and past 2048
    weight, bias = torch.ones(1, 1, 1, 1, dtype=x.dtype, device=device), torch.zeros(1, device=device).requires_grad_()
    active = random_active(BlockGrid.cover((51, 43), 8), 1, 1.0, device)
    sparse_conv2d(torch.ones(1, 1, 51, 43, dtype=x.dtype, device=device), weight, bias, active).sum().backward()
    assert float(bias.grad) == 51 * 43


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


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_second_derivative(device, activation):
    """A gradient penalty: d/dw of |dy/dx|^2."""
    active, (x, weight, _, _), options = conv_case(device, torch.float32, *CONVS[0], "channels_last")

    def penalty(op, dtype):
        a, w = (t.detach().to(dtype).requires_grad_() for t in (x, weight))
        y = op(a, w, None, active, activation=activation, **options)
        (slope,) = torch.autograd.grad(y.square().sum(), a, create_graph=True)
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
