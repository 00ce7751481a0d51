"""Kernels of norms' gradients on the CPU (test_simt_emulated.py says how), against PyTorch in float64."""

import ctypes
import random

import pytest
import torch
from lists.test_simt_emulated import DTYPES, FLOATS, run, shape_of

from sbnet import BlockGrid, reference
from sbnet.ops.masked.norm import norm_whole
from support.emulator import CSRC, TOOLS, emulated_library
from support.helpers import assert_as_accurate_as_torch, assert_bitwise, laid_out, poison, random_active, tensor

KINDS = {"group": 0, "layer": 1, "response": 4}


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    core = ("masked/norm", "masked/norm_grad", "grid", "layer", "memory", "settled", "through")
    kernels = [CSRC / f"cuda/{name}.cu" for name in ("capability", "masked/norm", "masked/norm_grad")]
    units = [TOOLS / "entry_norm_grad.cpp", *(CSRC / f"core/{name}.cpp" for name in core)]
    return emulated_library(tmp_path_factory, "norm_grad", kernels, units)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(emulated, kind, seed):
    rng = random.Random(seed)
    for dtype in FLOATS:
        torch.manual_seed(seed)
        size, channels = (rng.randint(6, 40), rng.randint(6, 30)), rng.choice([8, 16, 6, 80])
        active = random_active(BlockGrid.cover(size, rng.choice([4, (3, 8)])), 2, rng.choice([0.0, 0.4, 1.0]))
        inside = active.pixel_mask(size)
        edge = reference.fringe(active, active, size, 3, 1, 1)
        x, dy = (
            torch.where(inside, laid_out(tensor((2, channels, *size), dtype) + 1, layout), torch.nan)
            for layout in rng.choices(["contiguous", "channels_last"], k=2)
        )
        dx = poison(x.shape, dtype, "cpu", rng.choice(["contiguous", "channels_last"]))
        before = dx.clone()
        weight, params = tensor((channels,), torch.float32), torch.full((2, channels), torch.nan)
        groups = 2 if kind == "group" else 1
        run(
            emulated, "norm_grad", seed, dy, shape_of(dy), x, shape_of(x), dx, shape_of(dx), DTYPES[dtype], weight,
            params, active.indices, active.count, active.block_map, ctypes.c_int64(active.capacity),
            active.grid.numbers(), edge.pixels, edge.count, ctypes.c_int64(len(edge.pixels)), KINDS[kind], groups,
            ctypes.c_float(1e-5),
        )  # fmt: skip

        def gradients(to, given=(x, weight, 0 * weight), dy=dy, inside=inside, groups=groups):
            leaves = [torch.nan_to_num(t).to(to).requires_grad_() for t in given]
            y = norm_whole(*leaves, inside, kind, groups, 1e-5)
            return torch.autograd.grad(y, leaves, torch.where(inside, dy, 0.0).to(to))

        exact, theirs = gradients(torch.float64), gradients(torch.float32)
        taken = inside.expand_as(x)
        assert_as_accurate_as_torch(dx[taken], theirs[0].to(dtype)[taken], exact[0][taken], "x")
        for row, a, b in zip(params, theirs[1:], exact[1:], strict=True):
            assert (row - b).norm() <= 4 * (a - b).norm() + 1e-5 * (1 + b.norm())
        ring = torch.zeros_like(inside).contiguous()
        ring.view(-1)[edge.pixels[: int(edge.count)].long()] = True
        assert_bitwise(torch.where(inside, 0.0, dx), torch.where(inside | ring, 0.0, before))
