"""Pools: gradients, bad input, the same bits whatever runs them."""

import pytest
import torch

import sbnet
from sbnet import BlockGrid, reference
from support.helpers import laid_out, one_block, random_active, tensor
from support.layer_checks import assert_gradients, assert_same_bits_on_any_threads
from support.pool_cases import KINDS, NAN, dense, ops, output_size, window


# ---- gradients
def grads(function, x, dtype, upstream):
    leaf = x.detach().to(dtype).requires_grad_()
    function(leaf).backward(upstream.to(dtype))
    return leaf.grad


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize(
    "pool", [window(3, 2, 1), window(2), window(3, 1, 1, ceil_mode=True), window((3, 2), 3, (1, 1))], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_gradient(device, kind, pool, layout):
    """Ties go to the first, as in PyTorch: a third of the values are equal."""
    x = tensor((2, 6, 20, 27), torch.float32, device)
    x = laid_out(torch.where(torch.rand_like(x) < 0.5, x, x.round()), layout)
    active = random_active(BlockGrid.cover(output_size((20, 27), pool), (5, 8)), 2, 0.6, device)
    op, plain = ops(kind)[0], getattr(reference, f"sparse_{kind}_pool2d")
    assert_gradients(lambda t: op(t, active, **pool), lambda t: plain(t, active, **pool), [x])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_in_half(device, kind, dtype):
    x = laid_out(tensor((2, 8, 20, 26), dtype, device), "channels_last")
    active = random_active(BlockGrid.cover((10, 13), 4), 2, 0.6, device)
    upstream = tensor((2, 8, 10, 13), dtype, device)
    op, plain = ops(kind)[0], getattr(reference, f"sparse_{kind}_pool2d")
    got = grads(lambda t: op(t, active, 3, 2, 1), x, dtype, upstream)
    exact = grads(lambda t: plain(t, active, 3, 2, 1), x, torch.float64, upstream)
    assert got.dtype == dtype
    error = (got.double() - exact).norm() / exact.norm()
    assert float(error) < 4 * torch.finfo(dtype).eps


def test_second_derivative_and_refusals(device):
    x = tensor((2, 4, 20, 26), torch.float32, device).requires_grad_()
    active = random_active(BlockGrid.cover((10, 13), 4), 2, 0.6, device)
    for kind in KINDS:
        functional, mutating = ops(kind)
        (slope,) = torch.autograd.grad(functional(x, active, 2).pow(3).sum(), x, create_graph=True)
        (curve,) = torch.autograd.grad(slope.sum(), x)
        assert bool(curve.isfinite().all())
        assert bool((curve != 0).any())
        with pytest.raises(RuntimeError, match=f"sparse_{kind}_pool2d_: .*no_grad"):
            mutating(x, active, torch.zeros(2, 4, 10, 13, device=device), 2)
        out = torch.zeros(2, 4, 10, 13, device=device)
        before = out._version
        mutating(x.detach(), active, out, 2)
        assert out._version > before


# ---- bad input
BAD = [
    ({"x": lambda a: a["x"][..., :0]}, "x"),
    (
        {"active": lambda a: random_active(BlockGrid.cover((7, 13), 4), 2, 0.5, a["x"].device.type)},
        "active: expected the tiling grid",
    ),
    ({"kernel_size": 0}, "kernel_size.*0"),
    ({"kernel_size": -3}, "kernel_size.*-3"),
    ({"kernel_size": (1, 2, 3)}, "kernel_size"),
    ({"kernel_size": 2.5}, "kernel_size"),
    ({"kernel_size": 40}, "x|active"),
    ({"kernel_size": 2**31}, "kernel_size: .*32 bits"),
    ({"kernel_size": 2**30}, "kernel_size.*2\\^28"),
    ({"stride": 0}, "stride"),
    ({"stride": -1}, "stride"),
    ({"padding": 2}, "padding: expected 0 to half of kernel_size, 1, got 2"),
    ({"padding": -1}, "padding: expected .*, got -1"),
    ({"padding": "same"}, "padding"),
]


@pytest.mark.parametrize(("changes", "pattern"), BAD, ids=lambda v: v if isinstance(v, str) else next(iter(v)))
@pytest.mark.parametrize("kind", KINDS)
def test_bad_input(device, kind, changes, pattern):
    arguments = {
        "x": torch.zeros(2, 4, 20, 26, device=device),
        "active": random_active(BlockGrid.cover((10, 13), 4), 2, 0.5, device),
        "out": torch.zeros(2, 4, 10, 13, device=device),
        "kernel_size": 3,
        "stride": 2,
        "padding": 1,
    }
    arguments |= {k: v(arguments) if callable(v) else v for k, v in changes.items()}
    functional, mutating = ops(kind)
    errors = (RuntimeError, ValueError, TypeError)
    with pytest.raises(errors, match=f"sparse_{kind}_pool2d.*({pattern})"):
        mutating(**arguments)
    del arguments["out"]
    with pytest.raises(errors, match=f"sparse_{kind}_pool2d.*({pattern})"):
        functional(**arguments)


def test_bad_options(device):
    x = torch.zeros(2, 4, 20, 26, device=device)
    active = random_active(BlockGrid.cover((10, 13), 4), 2, 0.5, device)
    with pytest.raises(RuntimeError, match="sparse_avg_pool2d: divisor_override: expected anything but 0, got 0"):
        sbnet.sparse_avg_pool2d(x, active, 2, divisor_override=0)
    with pytest.raises(RuntimeError, match="sparse_avg_pool2d: divisor_override: .*32 bits"):
        sbnet.sparse_avg_pool2d(x, active, 2, divisor_override=2**40)
    with pytest.raises(
        RuntimeError, match="sparse_max_pool2d: kernel_size, stride, dilation: expected at least 1, got 2, 2, 0"
    ):
        sbnet.sparse_max_pool2d(x, active, 2, dilation=0)
    with pytest.raises(TypeError, match="sparse_max_pool2d: dilation"):
        sbnet.sparse_max_pool2d(x, active, 2, dilation=None)


# ---- one device, one build: the same bits
def test_thread_counts_agree():
    x = laid_out(tensor((2, 24, 61, 47), torch.float32), "channels_last")
    active = random_active(BlockGrid.cover((31, 24), 4), 2, 0.5)
    assert_same_bits_on_any_threads(lambda: [ops(kind)[0](x, active, 3, 2, 1) for kind in KINDS])


@pytest.mark.gpu
def test_a_tensor_of_more_than_2_31_elements():
    x = torch.randn(1, 64, 5900, 5900, device="cuda", dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    assert x.numel() > 2**31
    grid = BlockGrid.cover((5900, 5900), 16)
    active = one_block(grid, 1, "cuda")
    y = torch.empty_like(x)
    for kind in KINDS:
        y[..., -20:, -20:] = NAN
        ops(kind)[1](x, active, y, 3, 1, 1)
        want = dense(kind, x[..., -20:, -20:], window(3, 1, 1))
        rest = 5900 % 16
        torch.testing.assert_close(y[..., -rest:, -rest:], want[..., -rest:, -rest:], rtol=2e-3, atol=2e-3)
        assert bool(y[0, 0, -rest - 1, -rest - 1].isnan())
