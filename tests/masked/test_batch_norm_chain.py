"""Batch norms in place with the sum and the activation that follow, forward and backward, against float64; and the
other ops that write a list alone."""

import pytest
import torch
import torch.nn.functional as F

import sbnet
from sbnet import BlockGrid
from support.helpers import assert_as_accurate_as_torch, laid_out, random_active, tensor

OPS = torch.ops.sbnet
ACTIVATIONS = {
    "none": lambda t: t,
    "relu": F.relu,
    "leaky_relu": lambda t: F.leaky_relu(t, 0.1),
    "silu": F.silu,
    "gelu": F.gelu,
}
TOLD = ("relu", "leaky_relu")
UNWRITTEN = 7.0


def parts_of(device, density, size=(19, 22)):
    """An active list, its pixels, and the ring around them: (list, fringe, [N,1,H,W] bool twice)."""
    active = random_active(BlockGrid.cover(size, 4), 2, density, device)
    edge = sbnet.fringe(active, active, size, 3, 1, 1)
    ring = torch.zeros(2 * size[0] * size[1], dtype=torch.bool, device=device)
    ring[edge.pixels[: int(edge.count)].long()] = True
    return active, edge, active.pixel_mask(size), ring.view(2, 1, *size)


def whole(x, weight, bias, residual, dy, inside, activation):
    """y, the gradients of all four, mean and variance, by PyTorch."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias, residual)]
    x, weight, bias, residual = leaves
    some = inside.sum().clamp(min=1)
    mean = torch.where(inside, x, 0.0).sum((0, 2, 3), keepdim=True) / some
    apart = torch.where(inside, x - mean, 0.0)
    variance = apart.square().sum((0, 2, 3), keepdim=True) / some
    z = apart * torch.rsqrt(variance + 1e-5) * weight[:, None, None] + bias[:, None, None] + residual
    y = torch.where(inside, ACTIVATIONS[activation](z), 0.0)
    grads = torch.autograd.grad(y, leaves, torch.where(inside, dy, 0.0))
    return [t.detach() for t in (y, *grads, mean.flatten(), variance.flatten())]


@pytest.mark.parametrize("density", [0.5, 1.0, 0.05, 0.0])
@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_norm_with_what_follows(device, activation, dtype, layout, density):
    """What is not active is NaN where it is read, and left alone where it is written, but for the fringe."""
    active, edge, inside, ring = parts_of(device, density)
    lists, grid = (active.indices, active.count, active.block_map), active.grid.numbers()
    for channels in (5, 32, 72):
        x, dy, added = (laid_out(tensor((2, channels, 19, 22), dtype, device), layout) for _ in range(3))
        weight, bias = (tensor((channels,), torch.float32, device) for _ in range(2))
        for residual in (None, added):
            if residual is not None and activation not in ("none", *TOLD):
                continue
            nan = [
                None if t is None else laid_out(torch.where(inside, t, torch.nan), layout) for t in (x, dy, residual)
            ]
            y, dx, of_residual = (torch.full_like(x, UNWRITTEN) for _ in range(3))
            running = [torch.zeros(channels, device=device), torch.ones(channels, device=device)]
            statistics = OPS.sparse_batch_norm2d_(
                nan[0], weight, bias, nan[2], *lists, grid, 1e-5, activation, 0.1, y, edge.pixels, edge.count,
                *running, 0.1,
            )  # fmt: skip
            given = (
                laid_out(torch.where(inside, y, torch.nan), layout)
                if activation in TOLD and residual is not None
                else None
            )
            params = OPS.sparse_batch_norm2d_backward_(
                nan[1], nan[0], given, weight, bias, statistics, *lists, grid, 1e-5, activation, 0.1, dx,
                None if residual is None else of_residual, edge.pixels, edge.count,
            )  # fmt: skip
            other = torch.zeros_like(x) if residual is None else residual
            torchs = whole(x, weight.to(dtype), bias.to(dtype), other, dy, inside, activation)
            exact = whole(*(t.double() for t in (x, weight, bias, other, dy)), inside, activation)
            for t in (y, dx):
                assert not t[ring.expand_as(t)].any()
                assert (t[(~inside & ~ring).expand_as(t)] == UNWRITTEN).all()
            got = [torch.where(inside, y, 0.0), torch.where(inside, dx, 0.0), params[0], params[1]]
            got += [torch.where(inside, of_residual, 0.0)] if residual is not None else [None]
            got += [statistics[:channels], statistics[channels:-1]]
            pixels = float(inside.sum())
            assert statistics[-1] == pixels
            for k, (ours, theirs, right) in enumerate(zip(got, torchs, exact, strict=True)):
                if ours is not None and pixels:
                    assert_as_accurate_as_torch(ours.to(dtype), theirs, right, f"{channels} channels: {k}")
                elif ours is not None:
                    assert not ours.any()
            moved = [0.1 * exact[5], 0.9 + 0.1 * exact[6] * pixels / max(pixels - 1, 1)] if pixels else [0.0, 1.0]
            for ours, right in zip(running, moved, strict=True):
                torch.testing.assert_close(ours, torch.as_tensor(right, device=device).float().expand_as(ours))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
def test_a_norm_of_many_pixels(device, layout, dtype):
    """Several parts of the list, each of several tables; means far from 0; twice the same bits."""
    size = (150, 170)
    active, edge, inside, _ = parts_of(device, 0.9, size)
    lists, grid = (active.indices, active.count, active.block_map), active.grid.numbers()
    for channels in (24, 136):
        x, dy = (laid_out(tensor((2, channels, *size), dtype, device), layout) for _ in range(2))
        x += torch.linspace(-3, 30, channels, device=device, dtype=dtype)[:, None, None]
        weight, bias = (tensor((channels,), torch.float32, device) for _ in range(2))
        found = []
        for _ in range(2):
            y, dx = (torch.full_like(x, UNWRITTEN) for _ in range(2))
            statistics = OPS.sparse_batch_norm2d_(
                x, weight, bias, None, *lists, grid, 1e-5, "relu", 0.0, y, edge.pixels, edge.count, None, None, 0.0
            )  # fmt: skip
            params = OPS.sparse_batch_norm2d_backward_(
                dy, x, None, weight, bias, statistics, *lists, grid, 1e-5, "relu", 0.0, dx, None, edge.pixels,
                edge.count,
            )  # fmt: skip
            found.append((y, dx, params, statistics))
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)
        none = torch.zeros_like(x)
        torchs = whole(x, weight.to(dtype), bias.to(dtype), none, dy, inside, "relu")
        exact = whole(*(t.double() for t in (x, weight, bias, none, dy)), inside, "relu")
        got = [torch.where(inside, y, 0.0), torch.where(inside, dx, 0.0), *params, None]
        got += [statistics[:channels], statistics[channels:-1]]
        for k, (ours, theirs, right) in enumerate(zip(got, torchs, exact, strict=True)):
            if ours is not None:
                assert_as_accurate_as_torch(ours.to(dtype), theirs, right, f"{channels} channels: {k}")


def test_a_sum_into_the_residual_itself(device):
    active, _, inside, _ = parts_of(device, 0.5)
    lists, grid = (active.indices, active.count, active.block_map), active.grid.numbers()
    x, residual = (laid_out(tensor((2, 16, 19, 22), torch.float32, device), "channels_last") for _ in range(2))
    apart, within = torch.empty_like(x), residual.clone(memory_format=torch.preserve_format)
    for out, added in ((apart, residual), (within, within)):
        OPS.sparse_batch_norm2d_(
            x, None, None, added, *lists, grid, 1e-5, "relu", 0.0, out, None, None, None, None, 0.0
        )  # fmt: skip
    assert torch.equal(torch.where(inside, apart, 0.0), torch.where(inside, within, 0.0))
    assert torch.equal(torch.where(inside, 0.0, within), torch.where(inside, 0.0, residual))


def test_a_gradient_without_what_the_activation_gave_has_no_residual(device):
    active, *_ = parts_of(device, 0.5)
    lists, grid = (active.indices, active.count, active.block_map), active.grid.numbers()
    x, dy = (tensor((2, 8, 19, 22), torch.float32, device) for _ in range(2))
    statistics = torch.ones(17, device=device)

    def run(activation, given, added):
        OPS.sparse_batch_norm2d_backward_(
            dy, x, given, None, None, statistics, *lists, grid, 1e-5, activation, 0.1, torch.empty_like(x), added,
            None, None,
        )  # fmt: skip

    with pytest.raises(RuntimeError, match="given: expected what the activation gave"):
        run("relu", None, torch.empty_like(x))
    with pytest.raises(RuntimeError, match="given: expected the result of relu"):
        run("silu", x.clone(), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_turned_weights(device, dtype):
    """More of them than a launch takes, one of another dtype, one of nothing."""
    shapes = [(5, 3, 3, 3), (64, 40, 1, 1), (33, 70, 3, 5), (0, 4, 1, 1)] + [(3, 2, 1, 3)] * 45
    weights = [tensor(shape, torch.float16 if k == 2 else torch.float32, device) for k, shape in enumerate(shapes)]
    found = OPS.turn_conv_weights(weights, dtype)
    for weight, same, turned in zip(weights, found[: len(weights)], found[len(weights) :], strict=True):
        assert torch.equal(same, weight.to(dtype))
        assert torch.equal(turned, weight.flip(2, 3).transpose(0, 1).to(dtype))
        assert same.is_contiguous(memory_format=torch.channels_last)
        assert turned.is_contiguous(memory_format=torch.channels_last)


def test_gradients_of_activations_on_a_list(device):
    active, edge, inside, ring = parts_of(device, 0.5)
    dy, z = (laid_out(tensor((2, 16, 19, 22), torch.float32, device), "channels_last") for _ in range(2))
    for name in ("relu", "silu"):
        out = torch.full_like(z, UNWRITTEN)
        OPS.sparse_activation_grad_(
            dy, z, None, active.indices, active.count, active.grid.numbers(), name, 0.0, out, edge.pixels, edge.count
        )
        wanted = OPS.sparse_activation_grad(dy, z, None, active.block_map, active.grid.numbers(), name, 0.0)
        assert torch.equal(torch.where(inside, out, 0.0), wanted)
        assert not out[ring.expand_as(out)].any()
        assert (out[(~inside & ~ring).expand_as(out)] == UNWRITTEN).all()


@pytest.mark.parametrize("maximum", [True, False], ids=["maximum", "average"])
def test_gradients_of_pools_in_blocks_of_x(device, maximum):
    x = laid_out(tensor((2, 8, 20, 24), torch.float32, device), "channels_last")
    dy = laid_out(tensor((2, 8, 10, 12), torch.float32, device), "channels_last")
    of, own = (random_active(BlockGrid.cover(size, 4), 2, 0.5, device) for size in ((10, 12), (20, 24)))
    numbers = of.block_map, of.grid.numbers(), maximum, [3, 3], [2, 2], [1, 1], [1, 1], False, True, 0
    out, wanted = torch.full_like(x, UNWRITTEN), OPS.sparse_pool2d_grad(dy, x, *numbers)
    OPS.sparse_pool2d_grad_(dy, x, *numbers, own.block_map, own.grid.numbers(), out)
    inside = own.pixel_mask((20, 24))
    assert torch.equal(torch.where(inside, out, UNWRITTEN), out)
    assert torch.equal(torch.where(inside, out, 0.0), torch.where(inside, wanted, 0.0))


def test_weight_gradients_in_float32(device):
    active = random_active(BlockGrid.cover((20, 24), 8), 2, 0.5, device)
    x, dy = (laid_out(tensor((2, 16, 20, 24), torch.bfloat16, device), "channels_last") for _ in range(2))
    window = [1, 1], [1, 1], [1, 1]
    given = x, dy, active.indices, active.count, active.grid.numbers(), [3, 3], *window, 1, False, True, True
    wide, narrow = OPS.sparse_conv2d_weight_grad(*given, True), OPS.sparse_conv2d_weight_grad(*given)
    assert wide[0].dtype == torch.float32
    assert torch.equal(wide[0].bfloat16(), narrow[0])
    assert torch.equal(wide[1], narrow[1])
