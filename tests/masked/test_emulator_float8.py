"""The Hopper kernel of float8 convolutions on the CPU (test_emulator.py says how), against float64."""

import ctypes
import random

import pytest
import torch
from masked.test_conv_float8 import F8, assert_right, float8
from masked.test_emulator import ACTIVATIONS, Case, described, emulated, fields, run  # noqa: F401

from sbnet import BlockGrid, conv_output_size, fringe
from support.helpers import poison, random_active

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, F8: 10}  # core/types.h


class QuantizedCase(ctypes.Structure):  # as in conv_case.h
    _fields_ = [
        ("conv", Case), *fields(ctypes.c_void_p, "scale slope"),
        *fields(ctypes.c_float, "residual_scale out_scale x_scale"),
        *fields(ctypes.c_int32, "dtype x_dtype y_dtype residual_dtype"),
    ]  # fmt: skip


def emulate(
    library, channels, filters, kernel, size, block, density=1.0, stride=1, padding=0, dilation=1, batch=1,
    dtype=torch.float16, residual=None, after=False, activation=None, slopes=False, seed=1, multiprocessors=2,
):  # fmt: skip
    """Runs a layer and checks it; False where the kernel does not take it."""
    torch.manual_seed(seed)
    r, s = (kernel, kernel) if isinstance(kernel, int) else kernel
    window = {"stride": stride, "padding": padding, "dilation": dilation}
    out = conv_output_size(size, (r, s), stride, padding, dilation)
    x, weight = float8(batch, channels, *size), float8(filters, channels, r, s)
    scale, bias = torch.rand(filters) / (channels * r * s) ** 0.5, torch.randn(filters)
    active = random_active(BlockGrid.cover(out, block), batch, density)
    slope = torch.linspace(-0.5, 1.5, filters) if slopes else None
    more = {
        "activation": "leaky_relu" if slopes else activation,
        "slope": slope,
        "residual_scale": 0.5,
        "residual_after": after,
    }
    shape = (batch, filters, *out)
    if residual is not None:
        more["residual"] = torch.randn(shape).to(residual).contiguous(memory_format=torch.channels_last)
    edge, y = fringe(active, active, out, 3, 1, 1), poison(shape, dtype, "cpu", "channels_last")
    tensors = {"x": x, "weight": weight, "bias": bias, "residual": more.get("residual"), "y": y}
    out_scale = 0.02 if dtype == F8 else 0.0
    case = described(
        active, edge, tensors, kernel=0, multiprocessors=multiprocessors, seed=seed, k=filters, r=r, s=s, stride=stride,
        padding=padding, dilation=dilation, groups=1, activation=ACTIVATIONS[more["activation"]], residual_after=after,
    )  # fmt: skip
    given = QuantizedCase(
        case, scale.data_ptr(), slope.data_ptr() if slopes else None, 0.5, out_scale, 0.0, DTYPES[F8], DTYPES[F8],
        DTYPES[dtype], DTYPES[residual or torch.float32],
    )  # fmt: skip
    if not run(library.emulate_conv_bytes, given):
        return False
    mask = active.pixel_mask(out).expand(shape)
    zeros = torch.zeros(y[:, 0].numel(), dtype=torch.bool)
    zeros[edge.pixels[: int(edge.count)].long()] = True
    zeros = zeros.view(-1, 1, *out).expand(shape)
    assert not bool((y.float()[zeros] != 0).any()), "the fringe"
    assert bool((y.isnan() | mask | zeros).all()), "other pixels were written"
    y = torch.where(mask, y, torch.zeros_like(y))
    assert_right(y, (x, weight, scale, bias, active), window, **more, out_scale=out_scale)
    return True


# 1x1 by a kernel of its own or not, its weights resident or not; short and long reductions; by TMA, and in copies of
# 8, 4 and 2 bytes; steps of 1 to 4 in the last slice
LAYERS = {
    "3x3 of 64": {"channels": 64, "filters": 64, "kernel": 3, "padding": 1, "block": 16},
    "3x3 of 128": {"channels": 128, "filters": 80, "kernel": 3, "padding": 1, "block": 8},
    "3x3 of 288": {"channels": 288, "filters": 64, "kernel": 3, "padding": 1, "block": 16},
    "stride 2": {"channels": 96, "filters": 48, "kernel": 3, "padding": 1, "stride": 2, "block": 8},
    "1x1": {"channels": 256, "filters": 136, "kernel": 1, "block": 8},
    "1x1 of 800": {"channels": 800, "filters": 16, "kernel": 1, "block": 12},
    "1x1 stride 2": {"channels": 224, "filters": 33, "kernel": 1, "stride": 2, "block": 8},
    "1x1 of 528": {"channels": 528, "filters": 320, "kernel": 1, "block": 8},
    "1x1 of 16": {"channels": 16, "filters": 64, "kernel": 1, "block": 4},
    "words of 8": {"channels": 72, "filters": 24, "kernel": 3, "padding": 1, "block": 10},
    "words of 4": {"channels": 36, "filters": 70, "kernel": (1, 3), "block": 8},
    "words of 2": {"channels": 130, "filters": 10, "kernel": 3, "padding": 2, "dilation": 2, "block": 16},
    "7x7": {"channels": 32, "filters": 32, "kernel": 7, "padding": 3, "block": 20},
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(emulated, name):  # noqa: F811
    rng = random.Random(name)
    for dtype in (F8, rng.choice([torch.float16, torch.bfloat16, torch.float32])):
        more = {
            "residual": rng.choice([None, *DTYPES]),
            "activation": rng.choice(list(ACTIVATIONS)),
            "after": rng.random() < 0.5,
        }
        more |= {"size": (rng.randint(9, 30), rng.randint(9, 30)), "density": rng.choice([0.4, 1.0])}
        more |= {"slopes": rng.random() < 0.3, "seed": rng.randrange(2**31), "multiprocessors": rng.choice([1, 2, 5])}
        assert emulate(emulated, **LAYERS[name], dtype=dtype, **more), (name, dtype, more)


def test_every_output_and_residual(emulated):  # noqa: F811
    """Whole words of 16 channels, and not."""
    for filters in (32, 20):
        for dtype in DTYPES:
            for residual in DTYPES:
                assert emulate(
                    emulated, 32, filters, 1, (8, 9), 8, dtype=dtype, residual=residual, activation="silu"
                ), (filters, dtype, residual)  # fmt: skip


def test_empty_lists_and_what_it_does_not_take(emulated):  # noqa: F811
    assert emulate(emulated, 64, 64, 3, (20, 20), 8, density=0.0, padding=1)
    assert not emulate(emulated, 63, 64, 3, (20, 20), 8, padding=1)  # an odd number of channels
    assert not emulate(emulated, 64, 64, 3, (20, 20), 4, padding=1)  # blocks of few pixels
