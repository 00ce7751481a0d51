"""sparse_conv2d_quantized: sums of products exact, scales and rounding against float64."""

import itertools

import pytest
import torch

from sbnet import (
    BlockGrid,
    conv_output_size,
    fringe,
    pack_conv_weight,
    reference,
    sparse_conv2d_,
    sparse_conv2d_quantized,
    sparse_conv2d_quantized_,
)
from support.helpers import assert_bitwise, laid_out, random_active

LAYERS = {  # batch, channels, outputs, height, width, kernel, stride, padding, dilation, block, groups
    "3x3": (1, 64, 64, 20, 28, 3, 1, 1, 1, 16, 1),
    "stride 2": (2, 3, 17, 21, 31, 3, 2, 1, 1, 8, 1),
    "1x1": (1, 65, 33, 14, 30, 1, 1, 0, 1, (8, 16), 1),
    "5x5 dilated": (1, 5, 70, 19, 25, 5, 1, 2, 2, 12, 1),
    "many channels": (1, 300, 20, 11, 9, 3, 1, 1, 1, 4, 1),
    "words": (2, 96, 144, 23, 30, 3, 2, 1, 1, 8, 1),
    "1x1 of words": (1, 272, 70, 14, 30, 1, 1, 0, 1, (4, 8), 1),
    "one of all": (2, 1, 1, 9, 9, 1, 2, 0, 1, 4, 1),
    "three panels": (1, 40, 150, 10, 12, 3, 1, 1, 1, 5, 1),
    "depthwise": (1, 70, 70, 20, 28, 3, 1, 1, 1, 16, 70),
    "two of each": (2, 20, 40, 21, 31, 5, 2, 4, 2, 8, 20),
    "groups": (1, 36, 60, 14, 18, 3, 1, 1, 1, 8, 3),
    "narrow groups": (1, 40, 8, 10, 12, 1, 1, 0, 1, 5, 8),
    "wide groups": (1, 64, 96, 14, 18, 3, 1, 1, 1, 8, 2),
    "depthwise, stride 2": (2, 48, 48, 21, 31, 3, 2, 1, 1, 8, 48),
    "depthwise, 9x9": (1, 33, 33, 14, 18, 9, 1, 4, 1, 8, 33),
}


def bytes_of(*shape, device="cpu", layout="channels_last"):
    values = torch.randint(-128, 128, shape, device=device, dtype=torch.int8)
    return laid_out(values, layout) if len(shape) == 4 else values


def make(name, device, layout="channels_last", density=0.5):
    n, c, k, h, w, taps, stride, padding, dilation, block, groups = LAYERS[name]
    window = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    out = conv_output_size((h, w), (taps, taps), stride, padding, dilation)
    x, weight = bytes_of(n, c, h, w, device=device, layout=layout), bytes_of(k, c // groups, taps, taps, device=device)
    scale = torch.rand(k, device=device) * 2e-3 / (c // groups * taps * taps) ** 0.5
    bias = torch.randn(k, device=device)
    return (
        (x, weight, scale, bias, random_active(BlockGrid.cover(out, block), n, density, device)),
        window,
        (n, k, *out),
    )


@pytest.mark.parametrize("layout", ["contiguous", "channel_slice", "channels_last"])
@pytest.mark.parametrize("name", LAYERS)
def test_sums_are_exact(device, name, layout):
    """With a scale of 1 and no bias a float32 result is the sum itself, below 2^24."""
    (x, weight, scale, _, active), window, _ = make(name, device, layout)
    call = x, weight, torch.ones_like(scale), None, active
    want = reference.sparse_conv2d_quantized(*call, **window)
    assert want.abs().max() < 2**24
    assert_bitwise(sparse_conv2d_quantized(*call, **window), want)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [16, 4])
@pytest.mark.parametrize(("channels", "outputs", "taps", "stride"), [(64, 250, 3, 1), (336, 128, 1, 1), (32, 64, 3, 2)])
def test_sums_of_many_tiles_are_exact(channels, outputs, taps, stride, block):
    """Several tiles for each multiprocessor, by mma.sync with blocks that Hopper's kernel declines; what no active
    block writes keeps its poison."""
    size, window = (611, 700), {"stride": stride, "padding": taps // 2}
    out = conv_output_size(size, (taps, taps), stride, taps // 2)
    x = bytes_of(1, channels + 32, *size, device="cuda")[:, 16 : 16 + channels]  # a slice of whole words
    weight = bytes_of(outputs, channels, taps, taps, device="cuda")
    got = torch.full((1, outputs, *out), float("nan"), device="cuda").contiguous(memory_format=torch.channels_last)
    active = random_active(BlockGrid.cover(out, block), 1, 0.7, "cuda")
    sparse_conv2d_quantized_(x, weight, torch.ones(outputs, device="cuda"), None, active, got, **window)
    want = torch.nn.functional.conv2d(x.double(), weight.double(), **window).float()
    inside = active.pixel_mask(out).expand_as(got)
    assert_bitwise(got, torch.where(inside, want, float("nan")))


def test_sums_are_exact_at_the_ends_of_the_range(device):
    """All products equal and as large as they can be: what patches are offset by, and 32 bits, must hold them."""
    active = random_active(BlockGrid.cover((6, 6), 3), 1, 1.0, device)
    for a, b, channels in ((-128, -128, 14563), (127, -128, 14563), (-128, 127, 1001), (127, 127, 3)):
        x = torch.full((1, channels, 6, 6), a, dtype=torch.int8, device=device)
        weight = torch.full((2, channels, 3, 3), b, dtype=torch.int8, device=device)
        got = sparse_conv2d_quantized(x, weight, torch.ones(2, device=device), None, active, padding=1)
        assert got[0, 0, 2, 2].item() == torch.tensor(float(a * b * 9 * channels)).item()
        assert got[0, 1, 0, 0].item() == torch.tensor(float(a * b * 4 * channels)).item()


def test_depthwise_sums_are_exact_at_the_ends_of_the_range(device):
    """Of 1024 taps, the most: 2^24 is the last integer that follows all others in float32."""
    for a, b, side in ((-128, -128, 32), (127, -128, 32), (-127, -127, 31)):
        x = torch.full((1, 3, side + 2, side + 4), a, dtype=torch.int8, device=device)
        weight = torch.full((3, 1, side, side), b, dtype=torch.int8, device=device)
        weight[1] //= 2
        active = random_active(BlockGrid.cover((3, 5), 2), 1, 1.0, device)
        call = x, weight, torch.ones(3, device=device), None, active
        want = reference.sparse_conv2d_quantized(*call, groups=3)
        assert want.abs().max().item() == abs(a * b) * side * side
        assert_bitwise(sparse_conv2d_quantized(*call, groups=3), want)


@pytest.mark.parametrize("activation", [None, "relu", "relu6", "leaky_relu", "silu", "gelu", "hardswish"])
@pytest.mark.parametrize("name", ["3x3", "stride 2", "depthwise", "groups"])
def test_both_outputs_against_float64(device, name, activation):
    call, window, shape = make(name, device)
    inside = call[-1].pixel_mask(shape[2:])
    for out_scale, after in itertools.product((None, 0.03), (False, True)):
        residual = torch.randn(shape, device=device) if out_scale is None else bytes_of(*shape, device=device)
        more = {"activation": activation, "residual": residual, "residual_scale": 0.02, "out_scale": out_scale}
        more["residual_after"] = after
        got = sparse_conv2d_quantized(*call, **window, **more)
        want = reference.sparse_conv2d_quantized(*call, **window, **more)
        assert got.dtype == want.dtype == (torch.int8 if out_scale else torch.float32)
        if out_scale is None:
            torch.testing.assert_close(got, want, rtol=3e-6, atol=3e-6)
        else:  # a value within float32's error of a half may go either way
            apart = (got.int() - want.int()).abs()
            assert apart.max() <= 1
            assert (apart > 0).float().mean() < 1e-3
            assert -128 <= want.min() < want.max() <= 127
        into = torch.full_like(got, 77)
        assert sparse_conv2d_quantized_(*call, into, **window, **more) is None
        assert_bitwise(torch.where(inside, into, torch.zeros_like(into)), got)
        assert bool((into[~inside.expand_as(into)] == 77).all())
        in_place = residual.clone()
        sparse_conv2d_quantized_(*call, in_place, **window, **{**more, "residual": in_place})
        assert_bitwise(torch.where(inside, in_place, torch.zeros_like(in_place)), got)


@pytest.mark.parametrize("layout", ["contiguous", "channel_slice", "channels_last"])
@pytest.mark.parametrize("name", LAYERS)
def test_floats_are_rounded_as_they_are_read(device, name, layout):
    """Powers of 2, so that scales round nothing: halves go to even, what int8 does not hold saturates, NaN is 0."""
    (x, weight, scale, _, active), window, _ = make(name, device)
    floats = torch.randint(-300, 300, x.shape, device=device) / 8.0
    floats[:, :, 3, 4], floats[:, :, 5, 6], floats[:, :, 7, 5] = float("nan"), float("inf"), -float("inf")
    wanted = (floats * 4).nan_to_num(0, 1000, -1000).round().clamp(-128, 127).to(torch.int8)
    assert {-128, 127} <= set(wanted.unique().tolist())
    call = weight, torch.ones_like(scale), None, active
    want = sparse_conv2d_quantized(laid_out(wanted, layout), *call, **window)
    assert_bitwise(sparse_conv2d_quantized(laid_out(floats, layout), *call, **window, x_scale=0.25), want)
    assert_bitwise(reference.sparse_conv2d_quantized(floats, *call, **window, x_scale=0.25), want)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
@pytest.mark.parametrize("name", ["3x3", "stride 2", "three panels", "two of each", "groups"])
def test_slopes_and_residuals_of_either_dtype(device, name, dtype):
    """Into both outputs: PReLU with a slope a channel, some of them negative."""
    call, window, shape = make(name, device)
    residual = bytes_of(*shape, device=device)
    residual = residual if dtype == torch.int8 else residual * 0.037
    slope = torch.linspace(-0.5, 1.5, shape[1], device=device)
    more = {"residual": residual, "residual_scale": 0.02, "activation": "leaky_relu", "slope": slope}
    for out_scale in (None, 0.03):
        got = sparse_conv2d_quantized(*call, **window, **more, out_scale=out_scale)
        want = reference.sparse_conv2d_quantized(*call, **window, **more, out_scale=out_scale)
        if out_scale is None:
            torch.testing.assert_close(got, want, rtol=3e-6, atol=3e-6)
        else:
            assert (got.int() - want.int()).abs().max() <= 1
            assert (got != want).float().mean() < 1e-3
        assert got.dtype == want.dtype


def test_a_residual_of_another_dtype_is_not_the_output(device):
    call, window, shape = make("3x3", device)
    n, k, h, w = shape
    flat = torch.zeros(n * k * h * w, device=device)
    floats = flat.view(n, h, w, k).permute(0, 3, 1, 2)
    as_bytes = flat.view(torch.int8)[: flat.numel()].view(n, h, w, k).permute(0, 3, 1, 2)
    with pytest.raises(RuntimeError, match="residual: expected out itself or memory apart from it"):
        sparse_conv2d_quantized_(*call, as_bytes, **window, residual=floats, out_scale=1.0)


def test_results_saturate_round_halves_to_even_and_make_0_of_nan(device):
    active = random_active(BlockGrid.cover((1, 8), 8), 1, 1.0, device)
    x = torch.tensor([1, 3, 5, -1, -3, 127, -128, 0], dtype=torch.int8, device=device).view(1, 1, 1, 8)
    weight = torch.ones(3, 1, 1, 1, dtype=torch.int8, device=device)
    scale = torch.tensor([0.5, 2.0, float("nan")], device=device)
    got = sparse_conv2d_quantized(x, weight, scale, None, active, out_scale=1.0)
    assert got[0, :, 0].tolist() == [[0, 2, 2, 0, -2, 64, -64, 0], [2, 6, 10, -2, -6, 127, -128, 0], [0] * 8]


@pytest.mark.parametrize("name", ["3x3", "depthwise", "groups"])
def test_packed_weights_and_the_fringe(device, name):
    call, window, shape = make(name, device, density=0.3)
    edge = fringe(call[-1], random_active(BlockGrid.cover(shape[2:], 4), 1, 0.3, device), shape[2:], 3, 1, 1)
    into = torch.full(shape, 7, dtype=torch.int8, device=device)
    packed = pack_conv_weight(call[1], window["groups"])
    sparse_conv2d_quantized_(*call, into, out_scale=0.03, **window, fringe=edge, packed=packed)
    want = torch.full_like(into, 7).permute(0, 2, 3, 1).reshape(-1, shape[1])
    want[edge.pixels[: int(edge.count)].long()] = 0
    want = want.view(*shape[:1], *shape[2:], -1).permute(0, 3, 1, 2)
    got = sparse_conv2d_quantized(*call, out_scale=0.03, **window)
    assert_bitwise(into, torch.where(call[-1].pixel_mask(shape[2:]), got, want))
    assert int(edge.count) > 0


BAD = [
    ({"x": torch.zeros(1, 8, 9, 9)}, "x_scale: expected a positive number with x in float32, got 0"),
    ({"x": torch.zeros(1, 8, 9, 9).double()}, "x: dtype: expected int8, float16, bfloat16 or float32, got float64"),
    ({"x_scale": 0.5}, "x_scale: expected none with x in int8, got 0.5"),
    ({"x": torch.zeros(1, 8, 9, 9), "x_scale": -1.0}, "x_scale: expected a positive number or None, got -1"),
    ({"x": torch.zeros(1, 8, 9, 9, requires_grad=True), "x_scale": 1.0}, "no gradient"),
    ({"slope": torch.ones(16)}, "slope: expected the activation leaky_relu"),
    ({"slope": torch.ones(15), "activation": "leaky_relu"}, r"slope: expected \[16\]"),
    ({"slope": torch.ones(16).half(), "activation": "leaky_relu"}, "slope: dtype: expected float32, got float16"),
    ({"weight": torch.zeros(16, 8, 3, 3)}, "weight: dtype: expected int8"),
    ({"weight": torch.zeros(16, 9, 3, 3, dtype=torch.int8)}, "weight"),
    (
        {"weight": torch.zeros(1, 1, 3, 3, dtype=torch.int8).expand(16, 8, 3, 3)[:, :, 0]},
        "weight: expected 4 dimensions, got 3",
    ),
    ({"scale": torch.ones(15)}, r"scale: expected \[16\]"),
    ({"scale": torch.ones(16).half()}, "scale: dtype: expected float32, got float16"),
    ({"scale": None}, "scale: expected .*, got NoneType"),
    ({"bias": torch.ones(16).half()}, "bias: dtype: expected float32"),
    ({"residual": torch.zeros(1, 16, 9, 9).double()}, "residual: dtype: expected int8, float16, .*, got float64"),
    ({"out_scale": 0.0}, "out_scale: expected a positive number"),
    ({"out_scale": float("nan")}, "out_scale: expected a positive number"),
    ({"out_scale": 1e300}, "out_scale: expected a positive number"),
    ({"activation": "swish"}, "activation: expected .*, got 'swish'"),
    ({"scale": torch.ones(16, requires_grad=True)}, "no gradient"),
    ({"groups": 3}, "groups: expected a divisor of C = 8 and K = 16, got 3"),
    ({"groups": 2}, "weight: expected C/groups = 4 input channels, got 8"),
    ({"groups": 0}, "groups: expected .*, got 0"),
]


@pytest.mark.parametrize(("changes", "pattern"), BAD, ids=[str(k) for k in range(len(BAD))])
def test_bad_input_names_the_op_that_was_called(device, changes, pattern):
    active = random_active(BlockGrid.cover((9, 9), 4), 1, 0.5, device)
    moved = {
        k: v.to(device).requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v
        for k, v in changes.items()
    }
    arguments = {
        "x": bytes_of(1, 8, 9, 9, device=device),
        "weight": bytes_of(16, 8, 3, 3, device=device),
        "scale": torch.ones(16, device=device),
        "bias": None,
        "active": active,
        "padding": 1,
        "out_scale": 0.1,
        **moved,
    }
    errors = (RuntimeError, ValueError, TypeError)
    with pytest.raises(errors, match=f"sbnet::sparse_conv2d_quantized: .*({pattern})"):
        sparse_conv2d_quantized(**arguments)
    out = torch.zeros(1, 16, 9, 9, dtype=torch.int8, device=device)
    with pytest.raises(errors, match=f"sbnet::sparse_conv2d_quantized_: .*({pattern})"):
        sparse_conv2d_quantized_(**arguments, out=out)


def test_floats_of_16_bits_are_refused_on_a_cpu():
    x, weight, scale = torch.zeros(1, 8, 9, 9), torch.zeros(16, 8, 3, 3, dtype=torch.int8), torch.ones(16)
    call = weight, scale, None, random_active(BlockGrid.cover((9, 9), 4), 1, 0.5, "cpu")
    message = "dtype: expected int8 or float32 on a CPU, got"
    with pytest.raises(RuntimeError, match=f"sbnet::sparse_conv2d_dequantized: x: {message} float16"):
        sparse_conv2d_quantized(x.half(), *call, padding=1, x_scale=1.0)
    with pytest.raises(RuntimeError, match=f"out: {message} bfloat16"):
        sparse_conv2d_quantized(x, *call, padding=1, x_scale=1.0, dtype=torch.bfloat16)
    residual = torch.zeros(1, 16, 9, 9).half()
    with pytest.raises(RuntimeError, match=f"residual: {message} float16"):
        sparse_conv2d_quantized(x, *call, padding=1, x_scale=1.0, residual=residual)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["3x3", "stride 2", "1x1 of words", "groups"])
def test_floats_of_16_bits_on_a_gpu(name, dtype):
    """In, out and residual: what the same numbers in float32 give, rounded once."""
    (x, weight, scale, bias, active), window, shape = make(name, "cuda")
    halves = (torch.randn_like(x, dtype=torch.float32) * 20).to(dtype)
    call = weight, scale, bias, active
    more = {"x_scale": 0.25, "residual_scale": 0.5, "activation": "relu"}
    residual = torch.randn(shape, device="cuda").contiguous(memory_format=torch.channels_last).to(dtype)
    want = sparse_conv2d_quantized(halves.float(), *call, **window, **more, residual=residual.float())
    got = sparse_conv2d_quantized(halves, *call, **window, **more, residual=residual, dtype=dtype)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_too_many_products_for_32_bits_are_refused():
    active = random_active(BlockGrid.cover((2, 2), 2), 1, 1.0, "cpu")
    x = torch.zeros(1, 131072, 2, 2, dtype=torch.int8)
    with pytest.raises(RuntimeError, match="weight: expected at most 131071 products"):
        sparse_conv2d_quantized(x, torch.zeros(1, 131072, 1, 1, dtype=torch.int8), torch.ones(1), None, active)
    deep = x[:, :2], torch.zeros(2, 1, 25, 41, dtype=torch.int8), torch.ones(2), None, active
    with pytest.raises(RuntimeError, match="weight: expected at most 1024 taps of a depthwise layer, got 25x41"):
        sparse_conv2d_quantized(*deep, padding=(12, 20), groups=2)


def test_float_layers_refuse_what_was_packed_for_int8():
    active = random_active(BlockGrid.cover((9, 9), 4), 1, 0.5, "cpu")
    x, weight = torch.zeros(1, 8, 9, 9), torch.zeros(16, 8, 3, 3)
    packed = pack_conv_weight(weight.to(torch.int8))
    with pytest.raises(RuntimeError, match="sbnet::sparse_conv2d_: packed"):
        sparse_conv2d_(x, weight, None, active, torch.zeros(1, 16, 9, 9), padding=1, packed=packed)
