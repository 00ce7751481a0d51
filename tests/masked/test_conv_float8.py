"""sparse_conv2d_quantized of float8_e4m3fn, against float64 of the rounded operands."""

import pytest
import torch
import torch.nn.functional as F

from sbnet import (
    BlockGrid,
    conv_output_size,
    fringe,
    pack_conv_weight,
    reference,
    sparse_conv2d_,
    sparse_conv2d_quantized,
    sparse_conv2d_quantized_,
    sparse_fill,
)
from support.helpers import assert_bitwise, laid_out, random_active

F8 = torch.float8_e4m3fn
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
LAYERS = {  # batch, channels, outputs, height, width, kernel, stride, padding, dilation, block
    "3x3": (1, 64, 64, 20, 28, 3, 1, 1, 1, 16),
    "stride 2": (2, 3, 17, 21, 31, 3, 2, 1, 1, 8),
    "1x1": (1, 65, 33, 14, 30, 1, 1, 0, 1, (8, 16)),
    "1x1 stride 2": (1, 144, 80, 17, 22, 1, 2, 0, 1, 8),
    "5x5 dilated": (1, 5, 70, 19, 25, 5, 1, 2, 2, 12),
    "many channels": (1, 300, 20, 11, 9, 3, 1, 1, 1, 4),
}
# Of a sum of float32, over the sum of its products' magnitudes. Hopper's tensor cores keep 13 bits behind the point of
# the largest addend (docs/kernels/conv_float8.md), of runs of at most 18 products of 32.
OF_SUMS = {"cpu": 2.0**-19, "cuda": 18 * 2.0**-13}
HALF_STEP = {torch.float32: 2.0**-23, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, F8: 2.0**-4}


def float8(*shape, device="cpu", layout="channels_last", largest=3.0):
    values = (torch.randn(shape, device=device) * largest / 3).clamp(-448, 448).to(F8)
    return laid_out(values, layout) if len(shape) == 4 else values


def make(name, device, layout="channels_last", density=0.5):
    n, c, k, h, w, taps, stride, padding, dilation, block = LAYERS[name]
    window = {"stride": stride, "padding": padding, "dilation": dilation}
    out = conv_output_size((h, w), (taps, taps), stride, padding, dilation)
    x, weight = float8(n, c, h, w, device=device, layout=layout), float8(k, c, taps, taps, device=device)
    scale, bias = torch.rand(k, device=device) / (c * taps * taps) ** 0.5, torch.randn(k, device=device)
    active = random_active(BlockGrid.cover(out, block), n, density, device)
    return (x, weight, scale, bias, active), window, (n, k, *out)


def assert_right(got, call, window, **more):
    """Within the arithmetic's error of float64, on active blocks; zeros elsewhere. Activations at most double it."""
    x, weight, scale, bias, active = call
    out_scale = more.pop("out_scale", None) or 1.0
    want = reference.sparse_conv2d_quantized(*call, **window, **more, dtype=torch.float64)
    magnitude = F.conv2d(x.double().abs(), weight.double().abs(), None, **window) * scale.double()[:, None, None]
    for part in (bias, more.get("residual")):
        if part is not None:
            part = part.double().abs() * (1 if part is bias else more.get("residual_scale", 1.0))
            magnitude = magnitude + (part[:, None, None] if part.dim() == 1 else part)
    limit = 448 * out_scale if got.dtype == F8 else torch.finfo(got.dtype).max
    want = want.clamp(-limit, limit)
    allowed = 2 * OF_SUMS[got.device.type] * magnitude
    allowed = (
        allowed + HALF_STEP[got.dtype] * (want.abs() + allowed) + (out_scale * 2.0**-10 if got.dtype == F8 else 1e-7)
    )
    allowed = torch.where(active.pixel_mask(got.shape[2:]), allowed, 0)
    wrong = ((out_scale * got.double() - want).abs() > allowed) | (got.isnan() != want.isnan())
    assert not bool(wrong.any()), f"{int(wrong.sum())} of {wrong.numel()} values"


@pytest.mark.parametrize("layout", ["contiguous", "channel_slice", "channels_last"])
@pytest.mark.parametrize("name", LAYERS)
def test_sums_of_small_integers_are_exact(device, name, layout):
    (x, weight, scale, _, active), window, _ = make(name, device, layout)
    x, weight = (laid_out(t.float().round().clamp(-1, 2).to(F8), layout) for t in (x, weight))
    call = x, weight, torch.ones_like(scale), None, active
    want = reference.sparse_conv2d_quantized(*call, **window)
    assert 0 < want.abs().max() < 2**13
    assert_bitwise(sparse_conv2d_quantized(*call, **window), want)


@pytest.mark.parametrize("activation", [None, "relu", "relu6", "leaky_relu", "silu", "gelu", "hardswish"])
@pytest.mark.parametrize("dtype", [*FLOATS, F8], ids=str)
def test_outputs_against_float64(device, dtype, activation):
    for name in ("3x3", "stride 2"):
        call, window, shape = make(name, device)
        inside = call[-1].pixel_mask(shape[2:])
        residual = float8(*shape, device=device) if dtype == F8 else torch.randn(shape, device=device).to(dtype)
        more = {"activation": activation, "residual": residual, "residual_scale": 0.5}
        more |= {"out_scale": 0.03} if dtype == F8 else {}
        got = sparse_conv2d_quantized(*call, **window, **more, dtype=None if dtype == F8 else dtype)
        assert got.dtype == dtype
        assert_right(got, call, window, **more)
        into = torch.full_like(got, float("nan"))
        assert sparse_conv2d_quantized_(*call, into, **window, **more) is None
        assert_bitwise(torch.where(inside, into, torch.zeros_like(into)), got)
        assert bool(into.isnan()[~inside.expand_as(into)].all())
        in_place = residual.clone()
        sparse_conv2d_quantized_(*call, in_place, **window, **{**more, "residual": in_place})
        assert_bitwise(torch.where(inside, in_place, torch.zeros_like(in_place)), got)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_against_float64(device, name):
    call, window, shape = make(name, device, density=0.7)
    slope = torch.linspace(-0.5, 1.5, shape[1], device=device)
    for dtype in (torch.float32, torch.bfloat16):
        more = {"residual": torch.randn(shape, device=device).to(dtype), "activation": "leaky_relu", "slope": slope}
        for out_scale in (None, 0.02):
            got = sparse_conv2d_quantized(*call, **window, **more, out_scale=out_scale)
            assert got.dtype == (F8 if out_scale else torch.float32)
            assert_right(got, call, window, **more, out_scale=out_scale)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channel_slice", "channels_last"])
def test_floats_are_rounded_as_they_are_read(device, layout, dtype):
    """A scale of a power of 2: halves go to even, what float8 does not hold saturates, NaN stays."""
    for name in ("3x3", "stride 2", "1x1"):
        (x, weight, scale, _, active), window, _ = make(name, device)
        floats = (torch.randint(-40, 40, x.shape, device=device) / 32.0).to(dtype)
        floats[:, :, 3, 4], floats[:, :, 7, 5], floats[:, :, 9, 9] = 1000, -1000, float("inf")
        floats[:, 0, 0, 0] = float("nan")
        wanted = (floats.float() * 4).clamp(-448, 448).to(F8)
        assert wanted.float().nan_to_num().aminmax() == (-448, 448)
        call = weight, scale, None, active
        got = sparse_conv2d_quantized(laid_out(floats, layout), *call, **window, x_scale=0.25)
        assert got.isnan().any() or not active.pixel_mask(got.shape[2:])[0, 0, 0, 0]
        assert_right(got, (wanted, *call), window)
        if device == "cpu":  # a GPU may take another kernel for bytes that lie as these do
            assert_bitwise(got, sparse_conv2d_quantized(laid_out(wanted, layout), *call, **window))


def test_results_saturate_round_halves_to_even_and_keep_nan(device):
    active = random_active(BlockGrid.cover((1, 8), 8), 1, 1.0, device)
    x = torch.tensor([1, 17, 19, -17, 448, -448, 2.0**-9, 0], device=device).to(F8).view(1, 1, 1, 8)
    weight = torch.ones(3, 1, 1, 1, device=device).to(F8)
    scale = torch.tensor([0.5, 2.0, float("nan")], device=device)
    got = sparse_conv2d_quantized(x, weight, scale, None, active, out_scale=1.0).float()
    halves = [0.5, 8, 10, -8, 224, -224, 0, 0]  # of 16, 20, -16 and so on: float8 has no 17 and 19
    twice = [2, 32, 40, -32, 448, -448, 2.0**-8, 0]
    assert got[0, :2, 0].tolist() == [halves, twice]
    assert bool(got[0, 2].isnan().all())
    exact = torch.tensor([17.0, 19, 18, 33, 35, 470, 2.0**-10, 3 * 2.0**-10], device=device).view(1, 1, 1, 8)
    one = torch.ones(1, device=device)
    into = sparse_conv2d_quantized(
        torch.zeros_like(x), weight[:1], one, None, active, residual=exact, out_scale=1.0
    ).float()
    assert into.flatten().tolist() == [16, 20, 18, 32, 36, 448, 0, 2.0**-8]


def test_the_fringe_and_empty_lists(device):
    call, window, shape = make("3x3", device, density=0.3)
    edge = fringe(call[-1], random_active(BlockGrid.cover(shape[2:], 4), 1, 0.3, device), shape[2:], 3, 1, 1)
    into = torch.full(shape, float("nan"), dtype=F8, device=device)
    sparse_conv2d_quantized_(*call, into, out_scale=0.03, **window, fringe=edge, packed=pack_conv_weight(call[1]))
    want = torch.full_like(into, float("nan")).permute(0, 2, 3, 1).reshape(-1, shape[1])
    want[edge.pixels[: int(edge.count)].long()] = 0
    want = want.view(*shape[:1], *shape[2:], -1).permute(0, 3, 1, 2)
    got = sparse_conv2d_quantized(*call, out_scale=0.03, **window)
    assert_bitwise(into.float(), torch.where(call[-1].pixel_mask(shape[2:]), got, want).float())
    assert int(edge.count) > 0
    none = random_active(call[-1].grid, 1, 0.0, device)
    assert not bool((sparse_conv2d_quantized(*call[:-1], none, **window) != 0).any())
    filled = sparse_fill(torch.full_like(got, float("nan")), none, 0.0)
    assert filled.dtype == F8
    assert not bool((filled.float() != 0).any())


BAD = [
    ({"x": torch.zeros(1, 8, 9, 9)}, "x_scale: expected a positive number with x in float32, got 0"),
    ({"x": torch.zeros(1, 8, 9, 9).half()}, "x_scale: expected a positive number with x in float16, got 0"),
    ({"x": torch.zeros(1, 8, 9, 9, dtype=torch.int8)}, "x: dtype: expected float8_e4m3fn, float16, .* got int8"),
    ({"x": torch.zeros(1, 8, 9, 9).double(), "x_scale": 1.0}, "x: dtype: expected float8_e4m3fn.* got float64"),
    ({"x": torch.zeros(1, 8, 9, 9).to(torch.float8_e5m2)}, "x: dtype: expected a real floating or integer one"),
    ({"x_scale": 0.5}, "x_scale: expected none with x in float8_e4m3fn, got 0.5"),
    ({"weight": torch.zeros(16, 8, 3, 3, dtype=torch.int8)}, "x: dtype: expected int8, float16, .* got float8_e4m3fn"),
    (
        {"weight": torch.zeros(16, 8, 3, 3).to(torch.float8_e5m2)},
        "weight: dtype: expected a real floating or integer one",
    ),
    ({"weight": torch.zeros(16, 8, 3, 3).half()}, "weight: dtype: expected int8 or float8_e4m3fn, got float16"),
    ({"weight": torch.zeros(16, 4, 3, 3).to(F8)}, "weight"),
    ({"weight": torch.zeros(16, 4, 3, 3).to(F8), "groups": 2}, "groups: expected 1 with float8_e4m3fn weights, got 2"),
    ({"residual": torch.zeros(1, 16, 9, 9, dtype=torch.int8)}, "residual: dtype: expected float8_e4m3fn, .* got int8"),
    ({"bias": torch.ones(16).half()}, "bias: dtype: expected float32"),
    ({"scale": torch.ones(16).to(F8)}, "scale: dtype: expected float32, got float8_e4m3fn"),
    ({"packed": torch.zeros(64, dtype=torch.uint8)}, "packed: expected .*, got 64"),
    ({"x": torch.zeros(1, 8, 9, 9).to(F8).requires_grad_()}, "no gradient"),
    ({"weight": torch.zeros(16, 8, 3, 3).to(F8).requires_grad_()}, "no gradient"),
]


@pytest.mark.parametrize(("changes", "pattern"), BAD, ids=[str(k) for k in range(len(BAD))])
def test_bad_input_names_the_op_that_was_called(device, changes, pattern):
    active = random_active(BlockGrid.cover((9, 9), 4), 1, 0.5, device)
    moved = {
        k: v.detach().to(device).requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v
        for k, v in changes.items()
    }
    arguments = {
        "x": float8(1, 8, 9, 9, device=device), "weight": float8(16, 8, 3, 3, device=device),
        "scale": torch.ones(16, device=device), "bias": None, "active": active, "padding": 1, "out_scale": 0.1, **moved,
    }  # fmt: skip
    errors = (RuntimeError, ValueError, TypeError)
    out = torch.zeros(1, 16, 9, 9, device=device).to(F8)
    with pytest.raises(errors, match=f"sbnet::sparse_conv2d_quantized_: .*({pattern})"):
        sparse_conv2d_quantized_(**arguments, out=out)
    if "packed" not in changes:
        with pytest.raises(errors, match=f"sbnet::sparse_conv2d_quantized: .*({pattern})"):
            sparse_conv2d_quantized(**arguments)


def test_outputs_of_another_dtype_are_refused(device):
    call, window, shape = make("3x3", device)
    with pytest.raises(ValueError, match="dtype: expected None with an out_scale, got torch.float16"):
        sparse_conv2d_quantized(*call, **window, out_scale=1.0, dtype=torch.float16)
    with pytest.raises(
        RuntimeError, match="out: dtype: expected float8_e4m3fn, float16, bfloat16 or float32, got float64"
    ):
        sparse_conv2d_quantized(*call, **window, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="out_scale: expected a positive number with out in float8_e4m3fn, got 0"):
        sparse_conv2d_quantized_(*call, torch.zeros(shape, device=device).to(F8), **window)
    with pytest.raises(RuntimeError, match="out_scale: expected none with out in bfloat16, got 1"):
        sparse_conv2d_quantized_(*call, torch.zeros(shape, device=device).bfloat16(), **window, out_scale=1.0)


def test_layers_of_floats_refuse_float8(device):
    (x, weight, _, _, active), window, shape = make("3x3", device)
    with pytest.raises(RuntimeError, match="x: dtype: expected float32, float16 or bfloat16, got float8_e4m3fn"):
        sparse_conv2d_(x, weight, None, active, torch.zeros(shape, device=device).to(F8), **window)
    with pytest.raises(RuntimeError, match="pack_conv_weight: groups: expected 1 with float8_e4m3fn weights, got 2"):
        pack_conv_weight(weight, 2)
