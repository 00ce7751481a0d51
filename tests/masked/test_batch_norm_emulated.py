"""Kernels of batch norms on the CPU (test_emulator.py says how), against float64."""

import ctypes

import pytest
import torch
from masked.test_batch_norm_chain import UNWRITTEN, whole
from masked.test_emulator import run

import sbnet
from sbnet import BlockGrid
from support.emulator import CSRC, emulated_library, units_of
from support.helpers import assert_as_accurate_as_torch, assert_bitwise, laid_out, random_active, tensor

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ACTIVATIONS = {"none": 0, "relu": 1, "silu": 4}


class Case(ctypes.Structure):
    _fields_ = (
        [
            (name, ctypes.c_int32)
            for name in ["multiprocessors", "seed", "type", "n", "c", "h", "w", "block", "activation"]
        ]
        + [("stride", ctypes.c_int64 * 4)]
        + [
            (name, ctypes.c_void_p)
            for name in [
                "x",
                "y",
                "residual",
                "grad",
                "given",
                "dx",
                "grad_residual",
                "weight",
                "bias",
                "statistics",
                "mean",
                "variance",
                "grad_params",
                "indices",
                "count",
                "block_map",
                "fringe",
                "fringe_count",
            ]
        ]
        + [("capacity", ctypes.c_int64), ("fringe_capacity", ctypes.c_int64)]
    )


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    kernels = [CSRC / "cuda/masked/batch_norm.cu", CSRC / "cuda/capability.cu"]
    units = units_of("entry_norm", "masked/batch_norm", "masked/activation_grad")
    return emulated_library(tmp_path_factory, "batch_norm", kernels, units)


def emulate(library, channels, size, density, dtype, layout, activation, added, multiprocessors, seed=1):
    """What a norm and its gradient give: y, dx, the residual's, those of weight and bias, mean and variance."""
    torch.manual_seed(0)
    active = random_active(BlockGrid.cover(size, 4), 2, density, "cpu")
    edge = sbnet.fringe(active, active, size, 3, 1, 1)
    inside = active.pixel_mask(size)
    x, dy, residual = (laid_out(tensor((2, channels, *size), dtype, "cpu"), layout) for _ in range(3))
    nan = [laid_out(torch.where(inside, t, torch.nan), layout) for t in (x, dy, residual)]
    y, dx, of_residual = (torch.full_like(x, UNWRITTEN) for _ in range(3))
    weight, bias = (tensor((channels,), torch.float32, "cpu") for _ in range(2))
    statistics, params = torch.full((2 * channels + 1,), torch.nan), torch.full((2, channels), torch.nan)
    running = torch.zeros(channels), torch.ones(channels)
    case = Case(multiprocessors, seed, DTYPES[dtype], 2, channels, *size, 4, ACTIVATIONS[activation])
    case.stride[:] = x.stride()
    pointers = {
        "x": nan[0], "y": y, "grad": nan[1], "dx": dx, "weight": weight, "bias": bias, "statistics": statistics,
        "mean": running[0], "variance": running[1], "grad_params": params, "indices": active.indices,
        "count": active.count, "block_map": active.block_map, "fringe": edge.pixels, "fringe_count": edge.count,
    }  # fmt: skip
    if added:
        pointers |= {"residual": nan[2], "grad_residual": of_residual}
    for name, t in pointers.items():
        setattr(case, name, t.data_ptr())
    case.capacity, case.fringe_capacity = len(active.indices), len(edge.pixels)
    run(library.emulate_norm, case)
    given = laid_out(torch.where(inside, y, torch.nan), layout)
    if added and activation == "relu":
        case.given = given.data_ptr()
    run(library.emulate_norm_grad, case)
    other = residual if added else torch.zeros_like(x)
    ring = torch.zeros(2 * size[0] * size[1], dtype=torch.bool)
    ring[edge.pixels[: int(edge.count)].long()] = True
    ring = ring.view(2, 1, *size)
    for t in (y, dx):
        assert not t[ring.expand_as(t)].any()
        assert (t[(~inside & ~ring).expand_as(t)] == UNWRITTEN).all()
    assert statistics[-1] == inside.sum()
    got = [torch.where(inside, t, 0.0) for t in (y, dx)] + [*params]
    got += [torch.where(inside, of_residual, 0.0) if added else None, *statistics[:-1].chunk(2)]
    return got, (x, weight, bias, other, dy), inside, running


CASES = {  # channels, size, density, dtype, layout, activation, with a residual
    "words": (72, (30, 34), 0.6, torch.bfloat16, "channels_last", "relu", True),
    "a ring that is full": (64, (100, 90), 0.9, torch.bfloat16, "channels_last", "relu", True),
    "no residual": (128, (60, 70), 0.9, torch.float16, "channels_last", "relu", False),
    "float32": (24, (40, 50), 0.5, torch.float32, "channels_last", "silu", False),
    "channels by themselves": (5, (23, 30), 0.5, torch.bfloat16, "contiguous", "none", True),
    "few blocks": (16, (40, 40), 0.02, torch.bfloat16, "channels_last", "relu", True),
    "nothing": (16, (20, 20), 0.0, torch.bfloat16, "channels_last", "silu", False),
}


@pytest.mark.parametrize("multiprocessors", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_norms(emulated, name, multiprocessors):
    dtype, activation = CASES[name][3], CASES[name][5]
    got, leaves, inside, running = emulate(emulated, *CASES[name], multiprocessors)
    torchs = whole(*(t.to(dtype) for t in leaves), inside, activation)
    exact = whole(*(t.double() for t in leaves), inside, activation)
    if not inside.any():
        assert not any(t.any() for t in got if t is not None)
        return
    for k, (ours, theirs, right) in enumerate(zip(got, torchs, exact, strict=True)):
        if ours is not None and k < 5:
            assert_as_accurate_as_torch(ours.to(dtype), theirs, right, f"{name}: {k}")
        elif ours is not None:  # statistics, which are float32: PyTorch's are of x's dtype
            torch.testing.assert_close(ours, right.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(running[0], 0.1 * exact[5].float(), rtol=1e-5, atol=1e-6)


def test_bits_repeat(emulated):
    first, second = (emulate(emulated, *CASES["words"], 4, seed)[0] for seed in (1, 2))
    for a, b in zip(first, second, strict=True):
        assert_bitwise(a, b)
