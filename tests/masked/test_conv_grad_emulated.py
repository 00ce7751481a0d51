"""Kernels of weight gradients on the CPU (test_emulator.py says how), against PyTorch."""

import ctypes
import random

import pytest
import torch
import torch.nn.functional as F
from masked.test_emulator import described, run

from sbnet import BlockGrid, fringe
from sbnet.geometry import conv_output_size
from support.emulator import CSRC, TOOLS, emulated_library
from support.helpers import assert_as_accurate_as_torch, poison, random_active, tensor


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    names = ("masked/conv", "masked/conv_query", "masked/conv_grad", "grid", "layer", "memory", "settled", "through")
    units = [TOOLS / "entry_grad.cpp", *(CSRC / f"core/{name}.cpp" for name in names)]
    kernels = [
        CSRC / f"cuda/masked/conv_grad{name}.cu"
        for name in ("", "_add", "_cells", "_depthwise", "_few", "_layers", "_rows")
    ]
    return emulated_library(tmp_path_factory, "conv_grad", [*kernels, CSRC / "cuda/capability.cu"], units)


CELLS, ROWS, FEW, REST, DEPTHWISE = range(5)
# kernel, channels, filters, taps, stride, padding, dilation, groups, block
LAYERS = {
    "3x3": (CELLS, 40, 72, 3, 1, 1, 1, 1, 8), "3x3, cells that are not full": (CELLS, 16, 24, 3, 1, 1, 1, 1, (7, 12)),
    "3x3, large blocks": (CELLS, 32, 32, 3, 1, 0, 1, 1, (8, 24)), "3x3 stride 2": (CELLS, 24, 40, 3, 2, 1, 1, 1, 8),
    "3x3 stride 2, few outputs": (CELLS, 8, 8, 3, 2, 2, 1, 1, (6, 8)), "3x3 groups": (CELLS, 32, 48, 3, 1, 1, 1, 2, 8),
    "1x1": (ROWS, 136, 72, 1, 1, 0, 1, 1, 8), "1x1, few inputs": (ROWS, 48, 200, 1, 1, 0, 1, 1, (4, 8)),
    "1x1, few outputs": (ROWS, 264, 24, 1, 1, 0, 1, 1, (3, 5)), "1x1 stride 2": (ROWS, 16, 16, 1, 2, 1, 1, 1, 4),
    "3x3, small blocks": (ROWS, 16, 24, 3, 1, 1, 1, 1, (2, 3)), "3x3 dilated": (ROWS, 16, 16, 3, 1, 2, 2, 1, 8),
    "5x5 groups": (ROWS, 16, 32, 5, 2, 2, 1, 2, 8), "few channels": (FEW, 3, 72, 3, 1, 1, 1, 1, 8),
    "few channels, 7x7 stride 2": (FEW, 3, 24, 7, 2, 3, 1, 1, (6, 8)),
    "few channels, groups": (FEW, 10, 32, 3, 1, 2, 1, 2, 8), "few channels, dilated": (REST, 3, 8, 3, 1, 2, 2, 1, 8),
    "few channels, two tiles": (FEW, 4, 8, 7, 1, 3, 1, 1, 8),
    "few channels, small blocks": (REST, 3, 20, 3, 1, 1, 1, 1, 2),
    "depthwise 7x7": (DEPTHWISE, 24, 24, 7, 1, 3, 1, 24, 8),
    "depthwise 3x3, blocks of no whole strips": (DEPTHWISE, 72, 72, 3, 1, 1, 1, 72, (3, 12)),
    "depthwise, stride 2": (DEPTHWISE, 16, 16, 5, 2, 2, 1, 16, 4),
    "depthwise, dilated, two of each": (DEPTHWISE, 6, 12, 3, 1, 2, 2, 6, 8),
    "depthwise, more taps than a group": (DEPTHWISE, 8, 8, 9, 1, 4, 1, 8, 8),
    "outputs of no whole words": (REST, 8, 20, 3, 1, 1, 1, 1, 8),
}  # fmt: skip


def read_by(active, size, x_size, window):
    """The pixels of x that windows of active pixels reach."""
    inside = active.pixel_mask(size).double()
    weight = torch.ones(1, 1, window["taps"], window["taps"], dtype=torch.float64)
    made = torch.zeros(inside.shape[0], 1, *x_size, dtype=torch.float64, requires_grad=True)
    y = F.conv2d(made, weight, None, window["stride"], window["padding"], window["dilation"])
    return torch.autograd.grad(y, made, inside.expand_as(y))[0] > 0


class Layer:
    """A weight gradient's inputs, memory for what it writes, and its check. What it must not read is NaN."""

    def __init__(self, layer, size, dtype, density, batch=1, bias=True, wide=True, multiprocessors=2, seed=1):
        which, channels, filters, taps, stride, padding, dilation, groups, block = layer
        torch.manual_seed(seed)
        window = {"taps": taps, "stride": stride, "padding": padding, "dilation": dilation}
        out = conv_output_size(size, (taps, taps), *[[window[k]] * 2 for k in ("stride", "padding", "dilation")])
        active = random_active(BlockGrid.cover(out, block), batch, density)
        nan = torch.tensor(float("nan"), dtype=dtype)
        x = torch.where(read_by(active, out, size, window), tensor((batch, channels, *size), dtype), nan)
        dy = torch.where(active.pixel_mask(out), tensor((batch, filters, *out), dtype), nan)
        self.x, self.dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
        self.window, self.groups, self.bias = (stride, padding, dilation), groups, bias
        self.found = poison(
            (filters, channels // groups, taps, taps), torch.float32 if wide else dtype, "cpu", "channels_last"
        )
        self.sums = torch.full((filters,), float("nan"))
        self.tensors = {
            "x": self.x, "y": self.dy, "weight": self.found, "bias": self.sums if bias else None, "residual": None,
            "slope": None,
        }  # fmt: skip
        self.edge = fringe(active, active, out, 3, 1, 1)
        self.active = active
        self.case = described(
            active, self.edge, self.tensors, kernel=which, multiprocessors=multiprocessors, seed=seed, k=filters,
            r=taps, s=taps, stride=stride, padding=padding, dilation=dilation, groups=groups, activation=int(wide),
        )  # fmt: skip

    def gradient(self, to):
        given = [torch.nan_to_num(t).to(to) for t in (self.x, self.dy)]
        weight = torch.zeros(self.found.shape, dtype=to, requires_grad=True)
        made = F.conv2d(given[0], weight, None, *self.window, self.groups)
        return torch.autograd.grad(made, weight, given[1])[0], given[1].sum((0, 2, 3))

    def check(self):
        exact, exact_bias = self.gradient(torch.float64)
        theirs, theirs_bias = self.gradient(torch.float32)
        assert_as_accurate_as_torch(self.found, theirs.to(self.found.dtype), exact, "weight")
        if self.bias:
            assert_as_accurate_as_torch(self.sums, theirs_bias, exact_bias, "bias")


def emulate(library, layer, size, dtype, density, **more):
    """Runs a weight gradient and checks it."""
    of = Layer(layer, size, dtype, density, **more)
    assert run(library.emulate_conv_grad, of.case), "another kernel took it"
    of.check()
    return of.found


def together(library, layers):
    """Runs those of several layers in one call, and checks them."""
    message = ctypes.create_string_buffer(4096)
    cases = (ctypes.c_void_p * len(layers))(*(ctypes.addressof(of.case) for of in layers))
    result = library.emulate_conv_grads(cases, len(layers), message, ctypes.c_int64(len(message)))
    assert result == 0, message.value.decode() or "another kernel took one"
    for of in layers:
        of.check()
    return [of.found for of in layers]


@pytest.mark.parametrize("name", LAYERS)
def test_weight_gradients(emulated, name):
    """Lists that are full, random, of few blocks and empty; parts that are added and that are alone."""
    rng = random.Random(name)
    for density in (1.0, 0.5, 0.2, 0.0):
        more = {"size": (rng.randint(9, 20), rng.randint(9, 20)), "batch": rng.choice([1, 2]), "density": density}
        more |= {"dtype": rng.choice([torch.float16, torch.bfloat16]), "multiprocessors": rng.choice([2, 5, 20])}
        more |= {"bias": rng.random() < 0.7, "wide": rng.random() < 0.7, "seed": rng.randrange(2**31)}
        try:
            emulate(emulated, LAYERS[name], **more)
        except AssertionError as error:
            raise AssertionError(f"{more}: {error}") from error


def test_bits_repeat(emulated):
    for name in ("3x3", "1x1"):
        more = {"size": (16, 16), "dtype": torch.float16, "density": 0.7, "multiprocessors": 8}
        first, second = (emulate(emulated, LAYERS[name], **more) for _ in range(2))
        assert torch.equal(first, second)


@pytest.mark.parametrize("multiprocessors", [1, 3, 40])
def test_layers_of_one_call(emulated, multiprocessors):
    """All kinds, some of which share launches; lists that are full, of few blocks and empty; the same bits again."""
    rng = random.Random(multiprocessors)

    def made(seed):
        found = []
        names = ["1x1", "3x3", "few channels", "1x1", "3x3 groups", "3x3", "1x1, few inputs", "1x1", "depthwise 7x7"]
        for k, name in enumerate(names):
            more = {"size": (11 + k, 18 - k), "batch": 1 + k % 2, "density": (1.0, 0.4, 0.0)[(k + seed) % 3]}
            more |= {"dtype": torch.float16 if k == 7 else torch.bfloat16, "bias": k in (1, 5, 8), "wide": k != 4}
            found.append(Layer(LAYERS[name], seed=seed + k, multiprocessors=multiprocessors, **more))
        return found

    for seed in rng.sample(range(1000), 3):
        first, second = (together(emulated, made(seed)) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), seed


def test_more_layers_than_a_launch_has(emulated):
    layers = [
        Layer(LAYERS["1x1, few outputs" if k % 2 else "1x1 stride 2"], (8, 9), torch.bfloat16, 0.6, seed=k, bias=False)
        for k in range(70)
    ]
    together(emulated, layers)
