"""Kernels of transposed convolutions on the CPU (test_emulator.py says how), against PyTorch."""

import random

import pytest
import torch
from masked.test_emulator import KERNELS, WITH_SLOPES, judge, launch
from masked.test_emulator import emulated as convolutions  # noqa: F401  (a fixture)

from sbnet import BlockGrid, conv_transpose_output_size, fringe, reference
from support.emulator import CSRC, TOOLS, emulated_library
from support.helpers import poison, random_active, tensor, to_tf32


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    names = ("conv", "conv_select", "conv_query", "conv_transpose", "conv_transpose_select")
    names = (*(f"masked/{name}" for name in names), "grid", "layer", "memory", "settled", "through")
    units = [TOOLS / "entry_transpose.cpp", *(CSRC / f"core/{name}.cpp" for name in names)]
    kernels = [CSRC / "cuda/sm90/conv/conv_transpose.cu", CSRC / "cuda/masked/conv_rows.cu"]
    return emulated_library(tmp_path_factory, "conv_transpose", kernels, units)


def emulate(
    library, channels, filters, kernel, stride, size, block, density=1.0, padding=0, dilation=1, extra=0, batch=1,
    dtype=torch.float16, residual=False, activation=None, seed=1, multiprocessors=2, which=0,
):  # fmt: skip
    """Runs a layer and checks it; False where the kernel does not take it."""
    torch.manual_seed(seed)
    window = {"stride": stride, "padding": padding, "output_padding": extra, "dilation": dilation}
    out = conv_transpose_output_size(size, kernel, *window.values())
    x = tensor((batch, channels, *size), dtype).contiguous(memory_format=torch.channels_last)
    weight = tensor((channels, filters, kernel, kernel), dtype) / (channels * kernel) ** 0.5
    weight, bias = weight.contiguous(memory_format=torch.channels_last), tensor((filters,), dtype)
    active = random_active(BlockGrid.cover(out, block), batch, density)
    shape, more = (batch, filters, *out), {"activation": activation}
    if residual:
        more["residual"] = tensor(shape, dtype).contiguous(memory_format=torch.channels_last)
    if activation == "prelu":
        more |= {"activation": "leaky_relu", "slope": tensor((filters,), dtype)}
    edge, y = fringe(active, active, out, 3, 1, 1), poison(shape, dtype, "cpu", "channels_last")
    tensors = {"x": x, "weight": weight, "bias": bias, "y": y, "residual": None, "slope": None} | {
        k: v for k, v in more.items() if isinstance(v, torch.Tensor)
    }
    if not launch(
        library.emulate_conv_transpose, active, edge, tensors, kernel=which, multiprocessors=multiprocessors, seed=seed,
        k=filters, r=kernel, s=kernel, stride=stride, padding=padding, dilation=dilation, groups=1,
        activation=WITH_SLOPES[activation],
    ):  # fmt: skip
        return False
    rounded = (to_tf32(x), to_tf32(weight)) if dtype == torch.float32 else (x, weight)
    theirs = reference.sparse_conv_transpose2d(*rounded, bias, active, **window, **more)
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in more.items()}
    exact = reference.sparse_conv_transpose2d(x.double(), weight.double(), bias.double(), active, **window, **wide)
    judge(y, active, edge, theirs, exact)
    return True


# channels, filters, kernel, stride, padding, output padding, dilation, block
LAYERS = {
    "2x2": (64, 64, 2, 2, 0, 0, 1, 16), "4x4": (64, 64, 4, 2, 1, 0, 1, 16), "3x3": (64, 64, 3, 2, 1, 1, 1, 16),
    "3x3 without padding": (24, 40, 3, 2, 0, 0, 1, 32), "two slices": (128, 64, 4, 2, 1, 0, 1, 16),
    "slices that do not stay": (208, 136, 4, 2, 1, 0, 1, 16), "stride 3": (72, 48, 4, 3, 1, 1, 1, (24, 48)),
    "6x6": (32, 64, 6, 2, 2, 0, 1, (16, 48)), "dilation": (16, 64, 3, 2, 2, 1, 3, 16),
    "padding beyond": (64, 64, 2, 2, 5, 0, 1, 16),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_all_phases_in_one_launch(emulated, name):
    """Planes of odd sides, lists that fill no job, CTAs of many jobs and of none."""
    channels, filters, kernel, stride, padding, extra, dilation, block = LAYERS[name]
    rng = random.Random(name)
    window = {"kernel": kernel, "stride": stride, "padding": padding, "extra": extra, "dilation": dilation}
    for density in (1.0, 0.5, 0.0, 0.3):
        more = {"size": (rng.randint(7, 23), rng.randint(7, 23)), "batch": rng.choice([1, 2]), "density": density}
        more |= {"dtype": rng.choice([torch.float16, torch.bfloat16]), "multiprocessors": rng.choice([1, 2, 5])}
        more |= {"activation": rng.choice(list(WITH_SLOPES)), "residual": rng.random() < 0.5}
        more["seed"] = rng.randrange(2**31)
        try:
            assert emulate(emulated, channels, filters, block=block, **window, **more)
        except AssertionError as error:
            raise AssertionError(f"{more}: {error}") from error


# As above, without nine phases and without phases of 3x3, which go by patches; two more have no Hopper kernel.
BY_ROWS = {k: v for k, v in LAYERS.items() if k not in ("stride 3", "6x6")}
BY_ROWS |= {"few outputs": (64, 8, 4, 2, 1, 0, 1, 4), "short sums": (8, 72, 2, 2, 0, 0, 1, 6)}


@pytest.mark.parametrize("name", BY_ROWS)
def test_phases_by_rows(emulated, name):
    """The same of every GPU: up to four phases at once, of float32 as tf32, too."""
    channels, filters, kernel, stride, padding, extra, dilation, block = BY_ROWS[name]
    rng = random.Random(name)
    window = {"kernel": kernel, "stride": stride, "padding": padding, "extra": extra, "dilation": dilation}
    for density in (1.0, 0.5, 0.0, 0.3):
        more = {"size": (rng.randint(7, 23), rng.randint(7, 23)), "batch": rng.choice([1, 2]), "density": density}
        more |= {"dtype": rng.choice([torch.float16, torch.bfloat16, torch.float32])}
        more |= {"multiprocessors": rng.choice([1, 2, 5]), "seed": rng.randrange(2**31)}
        more |= {"activation": rng.choice(list(WITH_SLOPES)), "residual": rng.random() < 0.5}
        try:
            assert emulate(emulated, channels, filters, block=block, which=1, **window, **more)
        except AssertionError as error:
            raise AssertionError(f"{more}: {error}") from error


@pytest.mark.parametrize(("kernel", "channels"), [("1x1", 64), ("1x1", 256), ("1x1 wide", 256)])
def test_a_phase_may_write_a_larger_plane_than_it_reads(convolutions, kernel, channels):  # noqa: F811
    """A 1x1 convolution whose output padding reaches past x, where zeros are read: all pixels are not one row then."""
    x = tensor((2, channels, 12, 16), torch.float16).contiguous(memory_format=torch.channels_last)
    weight = tensor((channels, channels, 1, 1), torch.float16) / channels**0.5
    bias, y = tensor((channels,), torch.float16), poison((2, channels, 13, 17), torch.float16, "cpu", "channels_last")
    active = random_active(BlockGrid.cover((13, 17), 8), 2, 1.0)
    edge = fringe(active, active, (13, 17), 3, 1, 1)
    tensors = {"x": x, "weight": weight, "bias": bias, "y": y, "residual": None, "slope": None}
    if not launch(
        convolutions.emulate_conv, active, edge, tensors, kernel=KERNELS[kernel], multiprocessors=2, seed=1,
        k=channels, r=1, s=1, stride=1, padding=0, dilation=1, groups=1, activation=0,
    ):  # fmt: skip
        pytest.skip("this kernel does not take it")
    wide = torch.nn.functional.pad(x, (0, 1, 0, 1))
    exact = torch.nn.functional.conv2d(wide.double(), weight.double(), bias.double())
    judge(y, active, edge, torch.nn.functional.conv2d(wide.float(), weight.float(), bias.float()).half(), exact)
