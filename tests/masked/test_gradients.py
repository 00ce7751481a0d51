"""Gradients on lists of blocks, each held against float64: of convolutions, norms and activations, in poisoned memory,
of full, empty and tiny lists."""

import pytest
import torch
import torch.nn.functional as F

import sbnet
from sbnet import BlockGrid
from sbnet.geometry import conv_output_size
from sbnet.ops.masked.batch_norm import batch_norm2d, batch_norm_whole, follow_
from sbnet.ops.masked.conv_grad import activation_backward
from sbnet.ops.masked.norm import norm_whole
from support.helpers import assert_as_accurate_as_torch, assert_bitwise, laid_out, one_block, random_active, tensor
from support.layer_checks import assert_same_bits_on_any_threads

OPS = torch.ops.sbnet
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# x [N,C,H,W], K, kernel, stride, padding, dilation, groups, block
LAYERS = {
    "3x3": ((2, 16, 20, 27), 24, (3, 3), 1, 1, 1, 1, 8),
    "odd channels": ((2, 5, 19, 23), 7, (3, 3), 1, 1, 1, 1, 8),
    "7x7 stride 2": ((2, 3, 33, 47), 32, (7, 7), 2, 3, 1, 1, 8),
    "1x1": ((2, 16, 20, 21), 40, (1, 1), 1, 0, 1, 1, (4, 8)),
    "1x1 stride 2": ((2, 16, 20, 21), 40, (1, 1), 2, 0, 1, 1, 4),
    "patches": ((2, 8, 32, 32), 16, (4, 4), 4, 0, 1, 1, 4),
    "wide": ((1, 160, 16, 16), 200, (3, 3), 1, 1, 1, 1, 8),
    "dilated groups": ((2, 24, 20, 20), 48, (3, 3), 1, 2, 2, 4, 8),
    "depthwise 7x7": ((2, 24, 20, 20), 24, (7, 7), 1, 3, 1, 24, 8),
    "depthwise, two of each": ((2, 12, 20, 20), 24, (3, 3), 2, 1, 1, 12, 8),
    "a kernel of one row": ((2, 8, 20, 20), 8, (1, 5), (1, 2), (0, 2), 1, 1, 8),
    "few outputs": ((2, 32, 20, 20), 2, (1, 1), 1, 0, 1, 1, 8),
    "outputs of no whole words": ((2, 32, 16, 16), 100, (3, 3), 1, 1, 1, 1, 8),
    "many groups, blocks of 2": ((2, 64, 12, 11), 96, (3, 3), 1, 1, 1, 32, 2),
    "far padding": ((1, 8, 12, 12), 8, (3, 3), 1, 4, 1, 1, 8),
}


def case(name, device, dtype, layout, density=0.5):
    """x, dy, active blocks, geometry of a layer."""
    shape, k, kernel, stride, padding, dilation, groups, block = LAYERS[name]
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    size = conv_output_size(shape[2:], kernel, stride, padding, dilation)
    x = laid_out(tensor(shape, dtype, device), layout)
    dy = laid_out(tensor((shape[0], k, *size), dtype, device), layout)
    active = random_active(BlockGrid.cover(size, block), shape[0], density, device)
    weight = tensor((k, shape[1] // groups, *kernel), dtype, device)
    return x, dy, active, weight, geometry


def gradients(run, leaves, dy, dtype):
    """Of x, weight and bias; what is None is left out."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in leaves]
    return torch.autograd.grad(run(*leaves), leaves, dy.to(dtype))


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_convolutions(device, name, dtype, layout):
    """What is not active is NaN in dy, and of no account."""
    x, dy, active, weight, geometry = case(name, device, dtype, layout)
    bias = tensor((weight.shape[0],), dtype, device)
    inside = active.pixel_mask(dy.shape[2:])
    given = torch.where(inside, dy, torch.nan)

    def dense(x, w, b):
        return torch.where(inside, F.conv2d(x, w, b, **geometry), 0.0)

    got = gradients(lambda x, w, b: sbnet.sparse_conv2d(x, w, b, active, **geometry), (x, weight, bias), given, dtype)
    clean = torch.where(inside, dy, 0.0)
    torchs, exact = (gradients(dense, (x, weight, bias), clean, t) for t in (dtype, torch.float64))
    for what, parts in zip(("x", "weight", "bias"), zip(got, torchs, exact, strict=True), strict=True):
        assert_as_accurate_as_torch(*parts, what)


@pytest.mark.parametrize("name", ["3x3", "depthwise 7x7", "7x7 stride 2"])
def test_lists_that_are_full_empty_or_tiny(device, name):
    for density in (1.0, 0.0):
        x, dy, active, weight, geometry = case(name, device, torch.float32, "channels_last", density)
        lists = [active]
        if density:
            lists += [one_block(active.grid, x.shape[0], device), sbnet.ActiveBlocks.from_indices(
                active.indices[:0], active.grid, x.shape[0])]  # fmt: skip
        for of in lists:
            inside = of.pixel_mask(dy.shape[2:])

            def dense(x, w, inside=inside, geometry=geometry):
                return torch.where(inside, F.conv2d(x, w, **geometry), 0.0)

            got = gradients(
                lambda x, w, of=of, g=geometry: sbnet.sparse_conv2d(x, w, None, of, **g), (x, weight), dy, torch.float32
            )
            torchs, exact = (gradients(dense, (x, weight), dy, t) for t in (torch.float32, torch.float64))
            for parts in zip(got, torchs, exact, strict=True):
                assert_as_accurate_as_torch(*parts)


def test_the_list_of_x_is_where_its_gradient_is(device):
    x, dy, active, weight, geometry = case("3x3", device, torch.float32, "channels_last")
    own = random_active(BlockGrid.cover(x.shape[2:], 8), 2, 0.5, device)
    leaf = x.clone().requires_grad_()

    def run(**more):
        y = sbnet.sparse_conv2d(leaf, weight, None, active, **geometry, **more)
        return torch.autograd.grad(y, leaf, dy)[0]

    whole, part = run(), run(x_active=own)
    inside = own.pixel_mask(x.shape[2:])
    torch.testing.assert_close(part, torch.where(inside, whole, 0.0))
    assert not torch.where(inside, 0.0, part).any()
    with pytest.raises(ValueError, match="x_active: expected the blocks of x's plane"):
        run(x_active=random_active(BlockGrid.cover((8, 8), 8), 2, 0.5, device))


def test_bits_do_not_depend_on_the_call_or_on_threads(device):
    x, dy, active, *_ = case("3x3", device, torch.float32, "channels_last")
    window = [1, 1], [1, 1], [1, 1]

    def run():
        return OPS.sparse_conv2d_weight_grad(
            x, dy, active.indices, active.count, active.grid.numbers(), [3, 3], *window, 1, False, True, True
        )

    assert_same_bits_on_any_threads(run)


# ---- second derivatives
def test_second_derivatives(device):
    """A penalty on a gradient: for gradcheck and gradient penalties alone."""
    grid = BlockGrid.cover((10, 12), 4)
    active = random_active(grid, 2, 0.6, device)
    inside = active.pixel_mask((10, 12))
    leaves = [tensor(s, torch.float32, device) for s in ((2, 3, 10, 12), (4, 3, 3, 3), (4,))]

    def penalty(run, leaves):
        y = run(*leaves)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(t.square().sum() for t in first), leaves)

    for name in ("none", "relu", "silu", "gelu"):
        act = (lambda t: t) if name == "none" else getattr(F, name)
        ours = [t.clone().requires_grad_() for t in leaves]
        got = penalty(lambda x, w, b: sbnet.sparse_conv2d(x, w, b, active, padding=1, activation=name), ours)  # noqa: B023
        exact = [t.double().requires_grad_() for t in leaves]
        want = penalty(lambda x, w, b: torch.where(inside, act(F.conv2d(x, w, b, padding=1)), 0.0), exact)  # noqa: B023
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


# ---- batch and layer norms
@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [5, 32])
def test_batch_norm(device, channels, dtype, layout):
    active = random_active(BlockGrid.cover((19, 22), 4), 2, 0.5, device)
    inside = active.pixel_mask((19, 22))
    x = laid_out(tensor((2, channels, 19, 22), dtype, device) * 2 + 3, layout)
    dy = laid_out(tensor((2, channels, 19, 22), dtype, device), layout)
    weight, bias = (tensor((channels,), torch.float32, device) for _ in range(2))

    def run(f, dtype, x, dy):
        leaves = [x.to(dtype), *(t.to(torch.promote_types(dtype, torch.float32)) for t in (weight, bias))]
        leaves = [t.detach().clone().requires_grad_() for t in leaves]
        y = f(*leaves)
        return [y, *torch.autograd.grad(y, leaves, dy.to(dtype))]

    poisoned = torch.where(inside, x, torch.nan), torch.where(inside, dy, torch.nan)
    got = run(lambda x, w, b: batch_norm2d(x, active, w, b)[0], dtype, *poisoned)
    clean = torch.where(inside, dy, 0.0)

    def dense(x, w, b):
        return batch_norm_whole(x, w, b, inside, 1e-5)

    torchs, exact = (run(dense, t, x, clean) for t in (dtype, torch.float64))
    for parts in zip(got, torchs, exact, strict=True):
        assert_as_accurate_as_torch(*parts)


def test_running_statistics_are_those_of_nn_batch_norm(device):
    norm, active = torch.nn.BatchNorm2d(6).to(device), random_active(BlockGrid.cover((8, 8), 8), 3, 1.0, device)
    mean, var = norm.running_mean.clone(), norm.running_var.clone()
    for _ in range(3):
        x = tensor((3, 6, 8, 8), torch.float32, device) * 2 + 1
        want = norm(x)
        got, statistics = batch_norm2d(x, active, norm.weight, norm.bias, norm.eps)
        follow_(mean, var, statistics, 0.1)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mean, norm.running_mean)
    torch.testing.assert_close(var, norm.running_var)
    none = random_active(BlockGrid.cover((8, 8), 8), 3, 0.0, device)
    before = mean.clone()
    y, statistics = batch_norm2d(x, none, norm.weight, norm.bias, norm.eps)
    follow_(mean, var, statistics, 0.1)
    assert not y.any()
    assert torch.equal(mean, before)


def response_whole(x, weight, bias, inside):
    """Of a map times its mask, by PyTorch's norm: zeros add nothing to it."""
    x = torch.where(inside, x, 0.0)
    size = torch.linalg.vector_norm(x, dim=(2, 3), keepdim=True)
    shares = size / (size.mean(1, keepdim=True) + 1e-6)
    return torch.where(inside, x + weight[:, None, None] * (x * shares) + bias[:, None, None], 0.0)


NORMS = {
    "layer": lambda x, w, b, inside: norm_whole(x, w, b, inside, "layer", 1, 1e-6),
    "group": lambda x, w, b, inside: norm_whole(x, w, b, inside, "group", x.shape[1] // 4 or 1, 1e-6),
    "response": response_whole,
}


@pytest.mark.parametrize("method", NORMS)
@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 1.0])
def test_norms_in_place_write_the_blocks_and_the_ring(device, method, density):
    """What is not active is NaN, and not read; what is neither active nor of the ring is left alone."""
    for dtype, channels, layout in ((torch.bfloat16, 72, "channels_last"), (torch.float32, 12, "contiguous")):
        active = random_active(BlockGrid.cover((29, 34), 4), 3, density, device)
        ring = sbnet.fringe(active, active, (29, 34), 7, 1, 3)
        inside = active.pixel_mask((29, 34))
        x, dy = (laid_out(tensor((3, channels, 29, 34), dtype, device) + 2, layout) for _ in range(2))
        weight = tensor((channels,), torch.float32, device)
        lists = active.indices, active.count, active.block_map, active.grid.numbers()
        numbers = method, channels // 4 if method == "group" else 1, 1e-6
        dirty = [torch.where(inside, t, torch.nan) for t in (dy, x)]
        out = torch.full_like(x, 7.0)
        params = OPS.sparse_norm2d_backward_(*dirty, weight, *lists, *numbers, out, ring.pixels, ring.count)
        leaves = [t.double().requires_grad_() for t in (x, weight, 0 * weight)]
        whole = NORMS[method](*leaves, inside)
        exact = torch.autograd.grad(whole, leaves, torch.where(inside, dy, 0.0).double())
        edge = torch.zeros_like(inside).contiguous()
        edge.view(-1)[ring.pixels[: int(ring.count)].long()] = True
        assert_bitwise(torch.where(inside, 7.0, out), torch.where(edge, 0.0, torch.full_like(out, 7.0)))
        got = torch.where(inside, out, 0.0).double()
        assert (got - exact[0]).abs().max() <= (2e-2 if dtype == torch.bfloat16 else 2e-5) * (1 + exact[0].abs().max())
        for row, want in zip(params, exact[1:], strict=True):
            torch.testing.assert_close(row.double(), want, rtol=1e-3, atol=1e-3 * float(1 + want.abs().max()))


@pytest.mark.parametrize("method", NORMS)
def test_norms_of_no_images(device, method):
    active = random_active(BlockGrid.cover((8, 8), 4), 0, 0.5, device)
    x, weight = torch.empty(0, 8, 8, 8, device=device), torch.ones(8, device=device)
    lists = active.indices, active.count, active.block_map, active.grid.numbers()
    found, params = OPS.sparse_norm2d_backward(x, x, weight, *lists, method, 1, 1e-6)
    assert found.shape == x.shape
    assert not params.any()


def test_norms_have_a_gradient_of_known_methods(device):
    active = random_active(BlockGrid.cover((8, 8), 4), 1, 0.5, device)
    x = torch.ones(1, 8, 8, 8, device=device)
    lists = active.indices, active.count, active.block_map, active.grid.numbers()
    for method, groups, eps, what in (
        ("softmax", 1, 0.0, "method: expected group, layer or response, got softmax"),
        ("what", 1, 0.0, "method: expected"),
        ("group", 3, 1e-5, "groups: expected a divisor of 8 channels, got 3"),
        ("response", 1, 0.0, "eps: expected"),
        ("layer", 1, -1.0, "eps: expected"),
    ):
        with pytest.raises(RuntimeError, match=f"sbnet::sparse_norm2d_backward: {what}"):
            OPS.sparse_norm2d_backward(x, x, None, *lists, method, groups, eps)


@pytest.mark.parametrize("method", NORMS)
@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("channels", [5, 96, 768])
def test_norm(device, channels, layout, method):
    for dtype in DTYPES:
        active = random_active(BlockGrid.cover((9, 12), 4), 2, 0.5, device)
        inside = active.pixel_mask((9, 12))
        x, dy = (laid_out(tensor((2, channels, 9, 12), dtype, device), layout) for _ in range(2))
        weight, bias = (tensor((channels,), torch.float32, device) for _ in range(2))

        def run(f, dtype, dy, x=x, weight=weight, bias=bias):
            leaves = [x.to(dtype), *(t.to(torch.promote_types(dtype, torch.float32)) for t in (weight, bias))]
            leaves = [t.detach().clone().requires_grad_() for t in leaves]
            return torch.autograd.grad(f(*leaves), leaves, dy.to(dtype))

        ours = {
            "layer": lambda x, w, b: sbnet.sparse_layer_norm2d(x, active, w, b, 1e-6),  # noqa: B023
            "group": lambda x, w, b: sbnet.sparse_group_norm(x, active, channels // 4 or 1, w, b, 1e-6),  # noqa: B023
            "response": lambda x, w, b: sbnet.sparse_response_norm(x, active, w, b, 1e-6),  # noqa: B023
        }
        got = run(ours[method], dtype, dy)
        clean = torch.where(inside, dy, 0.0)
        whole = lambda x, w, b: NORMS[method](x, w, b, inside)  # noqa: B023, E731
        torchs, exact = (run(whole, t, clean) for t in (dtype, torch.float64))
        for parts in zip(got, torchs, exact, strict=True):
            assert_as_accurate_as_torch(*parts)


# ---- activations
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["none", "relu", "relu6", "leaky_relu", "silu", "gelu", "hardswish"])
def test_activations(device, name, dtype):
    """At the kinks too, and of NaN."""
    active = random_active(BlockGrid.cover((19, 22), 4), 2, 0.5, device)
    inside = active.pixel_mask((19, 22))
    z, dy = (laid_out(tensor((2, 8, 19, 22), dtype, device), "channels_last") for _ in range(2))
    z = 4 * z
    varies = ("relu6", "hardswish")  # of NaN PyTorch's own differs between its scalar, vector and CUDA code
    for column, value in enumerate((3.0, -3.0, 0.0, 6.0, torch.nan)):
        if name not in varies or value == value:
            z[..., column] = value
    slope = tensor((8,), torch.float32, device) if name == "leaky_relu" else None
    got = OPS.sparse_activation_grad(dy, z, slope, active.block_map, active.grid.numbers(), name, 0.1)
    with torch.no_grad():
        own = torch.where(inside, activation_backward(name, dy, z, 0.1, slope), 0.0)
        wide = None if slope is None else slope.double()
        exact = torch.where(inside, activation_backward(name, dy.double(), z.double(), 0.1, wide), 0.0)
    assert_as_accurate_as_torch(got, own, exact)


@pytest.mark.parametrize("name", ["relu", "silu"])
def test_activations_in_place_leave_the_rest(device, name):
    active = random_active(BlockGrid.cover((19, 22), 4), 2, 0.5, device)
    inside = active.pixel_mask((19, 22))
    for layout in ("channels_last", "contiguous"):
        x, other = (laid_out(tensor((2, 6, 19, 22), torch.float32, device), layout) for _ in range(2))
        for added in (None, other):
            got = x.clone()
            OPS.activate_blocks_(got, added, active.block_map, active.grid.numbers(), name, 0.0)
            want = getattr(F, name)(x if added is None else x + added)
            torch.testing.assert_close(got, torch.where(inside, want, x))
