"""sparse_bottleneck2d in both forms: three convolutions and the shortcut on active blocks."""

import pytest
import torch

import sbnet
from sbnet import BlockGrid, reference, sparse_bottleneck2d, sparse_bottleneck2d_
from support.helpers import (
    ACTIVATIONS,
    FLOATS,
    LAYOUTS,
    assert_as_accurate_as_torch,
    assert_bitwise,
    assert_layout,
    dense_conv2d,
    laid_out,
    one_block,
    poison,
    random_active,
    rows_that_name_no_block,
    tensor,
)

NAN = float("nan")


def block(channels, width, dtype, device, bias=True):
    """Weights and biases that keep the scale of what goes through them."""
    shapes = ((width, channels, 1, 1), (width, width, 3, 3), (channels, width, 1, 1))
    weights = [tensor(s, dtype, device) * (2 / (s[1] * s[2] * s[3])) ** 0.5 for s in shapes]
    return weights, [tensor((s[0],), dtype, device) for s in shapes] if bias else None


def dense(x, weights, biases, active, dtype, activation="relu", negative_slope=0.01):
    """PyTorch's convolutions of the whole plane in `dtype`, h1 cut out."""
    options = {"activation": activation, "negative_slope": negative_slope}
    biases = biases or [None] * 3
    mask = active.pixel_mask(x.shape[2:])
    h1 = dense_conv2d(x, weights[0], biases[0], dtype, **options)
    h1 = torch.where(mask, h1, torch.zeros_like(h1))
    h2 = dense_conv2d(h1, weights[1], biases[1], dtype, padding=1, **options)
    return dense_conv2d(h2, weights[2], biases[2], dtype, residual=x, **options)


def chain(x, weights, biases, active, activation):
    y = sbnet.sparse_conv2d(x, weights[0], biases[0], active, activation=activation)
    y = sbnet.sparse_conv2d(y, weights[1], biases[1], active, activation=activation, padding=1)
    return sbnet.sparse_conv2d(y, weights[2], biases[2], active, activation=activation, residual=x)


def assert_bottleneck(got, x, weights, biases, active, outside, **options):
    exact = dense(x, weights, biases, active, torch.float64, **options)
    torchs = dense(x, weights, biases, active, x.dtype, **options)
    mask = active.pixel_mask(x.shape[2:]).expand_as(x)
    assert_bitwise(got[~mask], outside.expand_as(x)[~mask], "outside the active blocks")
    assert_as_accurate_as_torch(got[mask], torchs[mask], exact[mask], "on the active blocks")


def check(
    device, *, dtype=torch.float32, channels=32, width=16, size=(21, 26), blocks=8, batch=2, density=0.5,
    layout="channels_last", out_layout="channels_last", bias=True, x=None, **options,
):  # fmt: skip
    """Both forms: zeros outside, and NaN kept outside; x holds NaN outside the active blocks. Returns the functional
    result."""
    x = tensor((batch, channels, *size), dtype, device) if x is None else x
    grid = BlockGrid.cover(size, blocks)
    active = one_block(grid, batch, device) if density == "one" else random_active(grid, batch, density, device)
    weights, biases = block(channels, width, dtype, device, bias)
    mask = active.pixel_mask(size)
    given = laid_out(torch.where(mask, x, torch.full_like(x, NAN)), layout)
    x = torch.where(mask, x, torch.zeros_like(x))
    y = sparse_bottleneck2d(given, weights, biases, active, **options)
    assert_bottleneck(y, x, weights, biases, active, torch.zeros((), dtype=dtype, device=device), **options)
    into = poison(x.shape, dtype, device, out_layout)
    assert sparse_bottleneck2d_(given, weights, biases, active, into, **options) is None
    assert_bottleneck(into, x, weights, biases, active, torch.full((), NAN, dtype=dtype, device=device), **options)
    return y


# ---- geometry
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("blocks", [1, 3, 8, 16, 40, (8, 16), (16, 8), (5, 2)], ids=str)
@pytest.mark.parametrize("size", [(21, 26), (32, 48), (1, 1), (7, 40)], ids=str)
def test_blocks(device, size, blocks, dtype):
    check(device, dtype=dtype, blocks=blocks, size=size)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("channels", "width"),
    [(1, 1), (8, 3), (17, 5), (24, 40), (64, 16), (192, 48), (256, 64), (136, 72), (328, 96), (512, 128)],
)
def test_channels(device, channels, width, dtype):
    for blocks in (8, 16):
        check(device, dtype=dtype, channels=channels, width=width, blocks=blocks)
    check(device, dtype=dtype, channels=channels, width=width, layout="contiguous", out_layout="contiguous")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("density", [0, "one", 0.1, 1.0])
@pytest.mark.parametrize("batch", [1, 3])
def test_densities(device, batch, density, dtype):
    y = check(device, dtype=dtype, batch=batch, density=density, channels=64)
    assert density != 0 or not y.any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("channels", "width"), [(72, 24), (192, 48), (256, 64), (384, 96), (512, 128)])
def test_many_tiles(channels, width, dtype):
    """More than a GPU has SMs, and lists with more room than blocks."""
    for blocks, density in ((8, 1.0), (8, 0.1), (16, 0.5), ((8, 24), 0.5)):
        size = (197, 209)
        check("cuda", dtype=dtype, channels=channels, width=width, size=size, blocks=blocks, density=density)


def test_empty_batch(device):
    x = torch.empty(0, 8, 20, 20, device=device)
    active = random_active(BlockGrid.cover((20, 20), 4), 0, 1.0, device)
    weights, biases = block(8, 4, torch.float32, device)
    assert sparse_bottleneck2d(x, weights, biases, active).shape == x.shape
    sparse_bottleneck2d_(x, weights, biases, active, torch.empty_like(x))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("blocks", [1, 3, 8, (5, 16), (40, 4)], ids=str)
def test_what_the_workspace_held_is_not_read(device, blocks, dtype):
    """PyTorch fills new memory with NaN on request. (On a CPU it would be new pages, all zeros, most of the time.)"""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        for density in ("one", 0.1, 0.5, 0.9):
            x = tensor((2, 16, 23, 37), dtype, device).to(memory_format=torch.channels_last)
            grid = BlockGrid.cover((23, 37), blocks)
            active = one_block(grid, 2, device) if density == "one" else random_active(grid, 2, density, device)
            weights, biases = block(16, 8, dtype, device)
            assert bool(sparse_bottleneck2d(x, weights, biases, active).isfinite().all())
    finally:
        torch.use_deterministic_algorithms(False)


# ---- layouts and options
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("out_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, layout, out_layout, dtype):
    y = check(device, dtype=dtype, layout=layout, out_layout=out_layout)
    assert_layout(y, layout not in ("contiguous", "plane_slice", "permuted"))


def test_layouts_of_weights(device):
    for dtype in FLOATS:
        x, active = tensor((1, 16, 21, 26), dtype, device), random_active(BlockGrid.cover((21, 26), 8), 1, 0.5, device)
        weights, biases = block(16, 8, dtype, device)
        want = sparse_bottleneck2d(x, weights, biases, active)
        for layout in LAYOUTS:
            other = [laid_out(w, layout) for w in weights]
            strided = [torch.stack([b, b], 1)[:, 0] for b in biases]
            assert_bitwise(sparse_bottleneck2d(x, other, strided, active), want)


def test_x_and_out_of_one_buffer(device):
    buffer = tensor((2, 21, 26, 48), torch.float32, device).permute(0, 3, 1, 2)
    active = random_active(BlockGrid.cover((21, 26), 8), 2, 0.5, device)
    weights, biases = block(16, 8, torch.float32, device)
    before = buffer.clone()
    sparse_bottleneck2d_(buffer[:, :16], weights, biases, active, buffer[:, 16:32])
    assert_bitwise(buffer[:, :16], before[:, :16])
    assert_bitwise(buffer[:, 32:], before[:, 32:])
    assert_bottleneck(buffer[:, 16:32], before[:, :16], weights, biases, active, before[:, 16:32])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(device, activation, dtype):
    check(device, dtype=dtype, activation=activation, negative_slope=0.2)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_biases(device, dtype):
    """None at all, some, and float32 ones to halves."""
    check(device, dtype=dtype, bias=False)
    x, active = tensor((2, 16, 21, 26), dtype, device), random_active(BlockGrid.cover((21, 26), 8), 2, 0.5, device)
    weights, biases = block(16, 8, dtype, device)
    zero = torch.zeros((), dtype=dtype, device=device)
    for k in range(3):
        some = [b if j == k else None for j, b in enumerate(biases)]
        assert_bottleneck(sparse_bottleneck2d(x, weights, some, active), x, weights, some, active, zero)
    got = sparse_bottleneck2d(x, weights, [b.float() for b in biases], active)
    assert_bitwise(got, sparse_bottleneck2d(x, weights, biases, active))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_is_the_three_convolutions(device, dtype):
    """As close to sparse_conv2d's chain as to exact numbers; the reference is that chain."""
    x = laid_out(tensor((2, 64, 37, 45), dtype, device), "channels_last")
    active = random_active(BlockGrid.cover((37, 45), 8), 2, 0.5, device)
    weights, biases = block(64, 32, dtype, device)
    y = chain(x, weights, biases, active, "relu")
    got = sparse_bottleneck2d(x, weights, biases, active)
    exact = reference.sparse_bottleneck2d(x.double(), [w.double() for w in weights], biases, active)
    assert_as_accurate_as_torch(got, y, exact)
    assert_as_accurate_as_torch(y, got, exact)
    if device == "cpu":
        assert_bitwise(got, y)


def test_a_nan_spreads_no_further_than_the_windows_that_see_it(device):
    x = torch.ones(1, 16, 24, 24, device=device).to(memory_format=torch.channels_last)
    x[0, 3, 8, 8] = NAN
    weights, biases = block(16, 8, torch.float32, device)
    active = random_active(BlockGrid.cover((24, 24), 8), 1, 1.0, device)
    y = sparse_bottleneck2d(x, weights, biases, active)
    seen = torch.zeros(24, 24, dtype=torch.bool, device=device)
    seen[7:10, 7:10] = True
    assert_bitwise(y.isnan(), seen.expand_as(y).contiguous(), "NaN")


@pytest.mark.parametrize(("channels", "width"), [(96, 24), (64, 40), (64, 32), (192, 48), (512, 104)])
@pytest.mark.parametrize("where", ["h1", "x"])
def test_an_infinity_reaches_no_more_than_in_three_convolutions(device, where, channels, width):
    """Kernels whose width is padded multiply zeros with what lies in the other channels."""
    x = torch.ones(1, channels, 16, 16, dtype=torch.float16, device=device).to(memory_format=torch.channels_last)
    weights = [w.abs() for w in block(channels, width, torch.float16, device)[0]]
    if where == "h1":
        weights[0][0] = 2000.0  # channel 0 of h1 overflows
    else:
        x[0, 1, 5, 6] = float("inf")  # all channels of h1 there, 6 after the activation
    weights[1][:, 0] *= -1.0
    active = random_active(BlockGrid.cover((16, 16), 8), 1, 1.0, device)
    activation = "relu" if where == "h1" else "relu6"
    want = chain(x, weights, [None] * 3, active, activation)
    got = sparse_bottleneck2d(x, weights, None, active, activation=activation)
    assert bool(want.isfinite().all())
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


# ---- fringe, lists
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", ["channels_last", "contiguous", "odd_channel_slice"])
@pytest.mark.parametrize("channels", [8, 64])
def test_fringe(device, channels, layout, dtype):
    """Blocks written, fringe zeroed, all else as it was."""
    size = (20, 26)
    x = laid_out(tensor((2, channels, *size), dtype, device), layout)
    weights, biases = block(channels, 16, dtype, device)
    for density in (0.4, 0):
        active = random_active(BlockGrid.cover(size, 8), 2, density, device)
        other = random_active(BlockGrid.cover(size, 8), 2, 0.6, device)  # a list of no blocks has no ring of its own
        edge = sbnet.fringe(active, other, size, 3, 1, 1)
        into = poison(x.shape, dtype, device, layout)
        sparse_bottleneck2d_(x, weights, biases, active, into, fringe=edge)
        zero = torch.zeros(2 * 20 * 26, dtype=torch.bool, device=device)
        zero[edge.pixels[: int(edge.count)].long()] = True
        assert zero.any()
        zero = zero.view(2, 1, *size)
        outside = torch.full(zero.shape, NAN, dtype=dtype, device=device).masked_fill(zero, 0)
        assert_bottleneck(into, x, weights, biases, active, outside)


def test_a_fringe_alone(device):
    """A list without room for a block."""
    x = laid_out(tensor((1, 64, 16, 16), torch.float16, device), "channels_last")
    grid, (weights, biases) = BlockGrid.cover((16, 16), 8), block(64, 16, torch.float16, device)
    none, all_of_it = random_active(grid, 1, 0, device, capacity=0), random_active(grid, 1, 1.0, device)
    edge = sbnet.fringe(none, all_of_it, (16, 16), 3, 1, 1)
    into = poison(x.shape, x.dtype, device, "channels_last")
    sparse_bottleneck2d_(x, weights, biases, none, into, fringe=edge)
    assert not into.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_that_name_no_block_are_skipped(device, dtype):
    x = laid_out(tensor((2, 64, 20, 26), dtype, device), "channels_last")
    weights, biases = block(64, 16, dtype, device)
    good, lists = rows_that_name_no_block(device)
    for count, active in lists:
        want = sparse_bottleneck2d(x, weights, biases, good)
        got = sparse_bottleneck2d(x, weights, biases, active)
        torch.testing.assert_close(got, want if count > 0 else torch.zeros_like(want))


def test_the_same_bits_call_after_call(device):
    x = laid_out(tensor((2, 64, 50, 88), torch.float16, device), "channels_last")
    weights, biases = block(64, 16, torch.float16, device)
    active = random_active(BlockGrid.cover((50, 88), 8), 2, 0.5, device)
    first = sparse_bottleneck2d(x, weights, biases, active)
    for _ in range(5):
        assert_bitwise(sparse_bottleneck2d(x, weights, biases, active), first)


# ---- gradients
def gradients(function, dtype, upstream, x, weights, biases):
    leaves = [t.detach().to(dtype).requires_grad_() for t in (x, *weights, *biases)]
    function(leaves[0], leaves[1:4], leaves[4:7]).backward(upstream.to(dtype))
    return [t.grad for t in leaves]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradient(device, activation):
    x = laid_out(tensor((2, 12, 20, 27), torch.float32, device), "channels_last")
    given = x, *block(12, 6, torch.float32, device)
    active = random_active(BlockGrid.cover((20, 27), (5, 8)), 2, 0.6, device)
    upstream = tensor(x.shape, torch.float32, device)

    def run(op, dtype):
        return gradients(lambda x, w, b: op(x, w, b, active, activation=activation), dtype, upstream, *given)

    torchs, exact = (run(reference.sparse_bottleneck2d, dtype) for dtype in (torch.float32, torch.float64))
    for k, found in enumerate(zip(run(sparse_bottleneck2d, torch.float32), torchs, exact, strict=True)):
        assert_as_accurate_as_torch(*found, f"gradient {k}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradient_in_half(device, activation, dtype):
    """That of the three convolutions: float64 would differ wherever a half lies on the other side of a kink."""
    x = laid_out(tensor((2, 16, 20, 27), dtype, device), "channels_last")
    given = x, *block(16, 8, dtype, device)
    active = random_active(BlockGrid.cover((20, 27), 8), 2, 0.6, device)
    upstream = tensor(x.shape, dtype, device)
    got, want = (
        gradients(lambda x, w, b, op=op: op(x, w, b, active, activation=activation), dtype, upstream, *given)
        for op in (sparse_bottleneck2d, chain)
    )
    for k, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        error = float((mine.double() - theirs.double()).norm() / theirs.double().norm())
        assert error < 8 * torch.finfo(dtype).eps, f"gradient {k}: {error}"


def test_gradient_of_one_tensor_given_twice(device):
    x = tensor((1, 8, 10, 11), torch.float32, device)
    active = random_active(BlockGrid.cover((10, 11), 4), 1, 0.7, device)
    (w, middle, _), _ = block(8, 8, torch.float32, device, False)
    found = []
    for op in (sparse_bottleneck2d, reference.sparse_bottleneck2d):
        leaf = w.clone().requires_grad_()
        op(x, (leaf, middle, leaf), None, active).square().sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


def test_gradient_of_the_gradient(device):
    x = tensor((1, 4, 10, 11), torch.float32, device).requires_grad_()
    active = random_active(BlockGrid.cover((10, 11), 4), 1, 0.7, device)
    weights, biases = block(4, 3, torch.float32, device)
    found = []
    for op in (sparse_bottleneck2d, reference.sparse_bottleneck2d):
        (once,) = torch.autograd.grad(
            op(x, weights, biases, active, activation="silu").square().sum(), x, create_graph=True
        )
        found.append(torch.autograd.grad(once.square().sum(), x)[0])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


def test_in_place_refuses_gradients(device):
    x = tensor((1, 8, 16, 16), torch.float32, device)
    active = random_active(BlockGrid.cover((16, 16), 8), 1, 0.5, device)
    weights, biases = block(8, 4, torch.float32, device)
    weights[1].requires_grad_()
    with pytest.raises(RuntimeError, match="sparse_bottleneck2d_: .*use sparse_bottleneck2d"):
        sparse_bottleneck2d_(x, weights, biases, active, torch.empty_like(x))
    with torch.no_grad():
        sparse_bottleneck2d_(x, weights, biases, active, torch.empty_like(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(device, dtype):
    x = tensor((1, 8, 16, 16), torch.float32, device)
    active = random_active(BlockGrid.cover((16, 16), 8), 1, 0.5, device)
    weights, biases = block(8, 4, torch.float32, device)
    with torch.autocast(device, dtype):
        got = sparse_bottleneck2d(x, weights, biases, active)
    assert_bitwise(got, sparse_bottleneck2d(x.to(dtype), [w.to(dtype) for w in weights], biases, active))
