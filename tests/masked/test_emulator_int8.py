"""int8 convolutions of GPUs on the CPU (test_emulator.py says how): exact sums, and the epilogue's bits."""

import random

import pytest
import torch
from masked.test_emulator import ACTIVATIONS, described, run
from masked.test_emulator import emulated as hopper  # noqa: F401
from masked.test_emulator_float8 import LAYERS as HOPPER_LAYERS
from masked.test_emulator_float8 import QuantizedCase

from sbnet import BlockGrid, conv_output_size, fringe, reference
from support.emulator import CSRC, emulated_library, units_of
from support.helpers import laid_out, random_active

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 6}  # core/types.h


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    names = "conv_quantized", "conv_patch_int8", "conv_rows_int8", "conv_quantized_round"
    kernels = [CSRC / f"cuda/masked/{name}.cu" for name in names]
    core = (f"masked/{name}" for name in ("bottleneck", "conv", "conv_select", "conv_query"))
    units = units_of("entry_quantized", *core)
    return emulated_library(tmp_path_factory, "quantized", kernels, units).emulate_conv_quantized


def some_bytes(*shape):
    return laid_out(torch.randint(-128, 128, shape, dtype=torch.int8), "channels_last")


def emulate(
    function, channels, filters, kernel, size, block, density=1.0, stride=1, padding=0, dilation=1, batch=1,
    dtype=torch.int8, residual=None, after=False, activation=None, slopes=False, seed=1, multiprocessors=2,
    x_scale=None, floats=torch.float32,
):  # fmt: skip
    """Runs a layer and checks it, bit for bit; False where the kernel does not take it, or the portable one did."""
    torch.manual_seed(seed)
    r, s = (kernel, kernel) if isinstance(kernel, int) else kernel
    window = {"stride": stride, "padding": padding, "dilation": dilation}
    out = conv_output_size(size, (r, s), stride, padding, dilation)
    shape = (batch, filters, *out)
    x, weight = some_bytes(batch, channels, *size), some_bytes(filters, channels, r, s)
    if x_scale:
        x = laid_out(torch.randint(-2000, 2000, x.shape) * (x_scale / 12), "channels_last").to(floats)
    steps = 2 ** round(torch.tensor(channels * r * s * 5000.0).sqrt().log2().item())  # a typical sum
    scale, bias = torch.full((filters,), 1 / steps) * 2.0 ** torch.randint(-2, 2, (filters,)), torch.randn(filters)
    bias = (bias * 8).round() / 8
    active = random_active(BlockGrid.cover(out, block), batch, density)
    slope = torch.randint(-4, 8, (filters,)) / 8 if slopes else None
    more = {
        "activation": "leaky_relu" if slopes else activation,
        "slope": slope,
        "residual_scale": 0.5,
        "residual_after": after,
    }
    more["out_scale"] = 2.0**-5 if dtype == torch.int8 else None
    more["x_scale"] = x_scale
    if residual is not None:
        more["residual"] = some_bytes(*shape).to(residual)
    edge = fringe(active, active, out, 3, 1, 1)
    poison = 77 if dtype == torch.int8 else float("nan")
    y = torch.full(shape, poison, dtype=dtype).contiguous(memory_format=torch.channels_last)
    tensors = {"x": x, "weight": weight, "bias": bias, "residual": more.get("residual"), "y": y}
    case = described(
        active, edge, tensors, kernel=0, multiprocessors=multiprocessors, seed=seed, k=filters, r=r, s=s, stride=stride,
        padding=padding, dilation=dilation, groups=1, activation=ACTIVATIONS[more["activation"]], residual_after=after,
    )  # fmt: skip
    given = QuantizedCase(
        case, scale.data_ptr(), slope.data_ptr() if slopes else None, 0.5, more["out_scale"] or 0.0,
        x_scale or 0.0, DTYPES[torch.int8], DTYPES[x.dtype], DTYPES[dtype], DTYPES[residual or torch.float32],
    )  # fmt: skip
    taken = run(function, given)
    if not taken and bool((y.isnan() | (y == 77)).all()):
        return False
    want = reference.sparse_conv2d_quantized(x, weight, scale, bias, active, **window, **more, dtype=dtype)
    mask = active.pixel_mask(out).expand(shape)
    zeros = torch.zeros(y[:, 0].numel(), dtype=torch.bool)
    zeros[edge.pixels[: int(edge.count)].long()] = True
    zeros = zeros.view(-1, 1, *out).expand(shape)
    want = torch.where(mask, want, torch.where(zeros, 0, poison).to(dtype))
    same = (y == want) | (y.isnan() & want.isnan())
    if activation in ("silu", "gelu") or (activation == "leaky_relu" and not slopes):  # a product by 0.01 is rounded
        step = 1 if dtype == torch.int8 else max(3e-6, torch.finfo(dtype).eps) * (want.double().abs() + 1)
        same = same | ((y.double() - want.double()).abs() <= step)
    assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} values"
    return taken


LAYERS = {  # words of 16 channels in whole and cut-off chunks and stages; all widths of a tile; kept weights
    "3x3 of 64": {"channels": 64, "filters": 64, "kernel": 3, "padding": 1, "block": 16},
    "3x3 of 128": {"channels": 128, "filters": 80, "kernel": 3, "padding": 1, "block": 8},
    "3x3 of 16": {"channels": 16, "filters": 24, "kernel": 3, "padding": 1, "block": (8, 16)},
    "3x3 of 32": {"channels": 32, "filters": 32, "kernel": 3, "padding": 1, "block": 16},
    "3x3 of 208": {"channels": 208, "filters": 104, "kernel": 3, "padding": 1, "block": 16},
    "stride 2": {"channels": 96, "filters": 48, "kernel": 3, "padding": 1, "stride": 2, "block": 8},
    "1x1": {"channels": 256, "filters": 136, "kernel": 1, "block": 8},
    "1x1 of 48": {"channels": 48, "filters": 17, "kernel": 1, "block": 12},
    "1x1 stride 2": {"channels": 224, "filters": 33, "kernel": 1, "stride": 2, "block": 4},
    "wide": {"channels": 32, "filters": 128, "kernel": 3, "padding": 1, "block": 16},
    "wide 1x1": {"channels": 64, "filters": 240, "kernel": 1, "block": 16},
    "dilated": {"channels": 32, "filters": 10, "kernel": (1, 3), "padding": 2, "dilation": 2, "block": 10},
}


def check_layers(function, name, layer):
    rng = random.Random(name)
    for dtype in DTYPES:
        more = {
            "residual": rng.choice([None, *DTYPES]),
            "activation": rng.choice(list(ACTIVATIONS)),
            "after": rng.random() < 0.5,
        }
        more |= {"slopes": rng.random() < 0.3, "seed": rng.randrange(2**31), "multiprocessors": rng.choice([1, 2, 5])}
        more |= {"density": rng.choice([0.4, 1.0]), "batch": rng.choice([1, 2])}
        more |= {"size": (rng.randint(9, 30), rng.randint(9, 30))}
        if name.startswith("wide"):  # more tiles than the device holds at once
            more |= {"size": (33, 35), "multiprocessors": 1, "density": 1.0}
        assert emulate(function, **layer, dtype=dtype, **more), (name, dtype, more)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(emulated, name):
    check_layers(emulated, name, LAYERS[name])


@pytest.mark.parametrize("name", HOPPER_LAYERS)
def test_layers_on_hopper(hopper, name):  # noqa: F811
    layer = HOPPER_LAYERS[name]
    others = {"stride 2": 98, "7x7": 34}  # channels: words of 16 go by mma.sync there
    check_layers(hopper.emulate_conv_bytes, name, {**layer, "channels": others.get(name, layer["channels"])})


def test_every_output_and_residual_on_hopper(hopper):  # noqa: F811
    """Whole words of 16 channels, and not."""
    for filters in (32, 20):
        for dtype in DTYPES:
            for residual in (None, *DTYPES):
                assert emulate(
                    hopper.emulate_conv_bytes, 32, filters, 1, (8, 9), 8, dtype=dtype, residual=residual,
                    activation="relu",
                ), (filters, dtype, residual)  # fmt: skip
    assert not emulate(hopper.emulate_conv_bytes, 64, 64, 3, (20, 20), 4, padding=1)  # blocks of few pixels


@pytest.mark.parametrize("name", ["3x3 of 64", "stride 2", "1x1 stride 2", "dilated"])
def test_floats_are_rounded_where_they_are_read(emulated, name):
    """Into a workspace of which the rest is 0x7f; density 0.4 leaves much of it so."""
    for floats, density in ((torch.float32, 0.4), (torch.float32, 1.0), (torch.float16, 0.4), (torch.bfloat16, 0.4)):
        more = {"size": (27, 22), "batch": 2, "density": density, "x_scale": 0.25, "seed": len(name)}
        assert emulate(emulated, **LAYERS[name], **more, floats=floats)


def test_every_output_and_residual(emulated):
    """Whole words of four channels, and not."""
    for filters in (32, 18, 1):
        for dtype in DTYPES:
            for residual in (None, *DTYPES):
                assert emulate(
                    emulated, 32, filters, 1, (8, 9), 8, dtype=dtype, residual=residual, activation="relu"
                ), (filters, dtype, residual)  # fmt: skip


def test_empty_lists_and_what_the_portable_kernel_takes(emulated):
    assert emulate(emulated, 64, 64, 3, (20, 20), 8, density=0.0, padding=1)
    for channels in (3, 20):  # one by one, and in words of four
        for dtype in DTYPES:
            assert not emulate(emulated, channels, 12, 3, (11, 14), 8, padding=1, activation="relu", dtype=dtype)
