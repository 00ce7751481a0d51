"""Kernels of resizes' gradients on the CPU (test_simt_emulated.py says how), against the CPU's kernels."""

import ctypes
import random

import pytest
import torch
from lists.test_simt_emulated import DTYPES, FLOATS, run, shape_of

import sbnet
from sbnet import BlockGrid
from sbnet.geometry import RESIZE_MODES
from support.emulator import CSRC, TOOLS, emulated_library
from support.helpers import assert_bitwise, laid_out, poison, random_active, tensor

LAYOUTS = ["contiguous", "channels_last"]


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    core = ("masked/resize", "masked/resize_grad", "grid", "layer", "memory", "settled", "through")
    kernels = [CSRC / f"cuda/{name}.cu" for name in ("capability", "masked/resize_grad")]
    units = [TOOLS / "entry_resize_grad.cpp", *(CSRC / f"core/{name}.cpp" for name in core)]
    return emulated_library(tmp_path_factory, "resize_grad", kernels, units)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("mode", RESIZE_MODES)
def test_gradients(emulated, mode, seed):
    rng = random.Random(f"{mode} {seed}")
    for dtype in FLOATS:
        torch.manual_seed(seed)
        size, out = ((rng.randint(1, 30), rng.randint(1, 30)) for _ in range(2))
        channels, corners = rng.choice([8, 16, 6, 80]), mode in ("bilinear", "bicubic") and rng.random() < 0.4
        ratios = 0.0, (0.0 if corners or rng.random() < 0.5 else size[1] / (out[1] + rng.random()))
        active, own = (
            random_active(BlockGrid.cover(side, rng.choice([4, (3, 8)])), 2, rng.choice([0.0, 0.4, 1.0]))
            for side in (out, size)
        )
        ring, inside = sbnet.fringe(own, own, size, 3, 1, 1), own.pixel_mask(size)
        dy = laid_out(tensor((2, channels, *out), dtype), rng.choice(LAYOUTS))
        dirty = torch.where(active.pixel_mask(out), dy, torch.nan)
        lists = active.block_map, active.grid.numbers()
        want = torch.ops.sbnet.sparse_resize2d_grad(dirty, *lists, list(size), mode, corners, *ratios, False)
        for listed in (False, True):
            dx = poison((2, channels, *size), dtype, "cpu", rng.choice(LAYOUTS))
            before = dx.clone()
            run(
                emulated, "resize_grad", seed, dirty, shape_of(dirty), dx, shape_of(dx), DTYPES[dtype], *lists,
                RESIZE_MODES.index(mode), int(corners), *map(ctypes.c_float, ratios), own.indices if listed else None,
                own.count, ctypes.c_int64(own.capacity), own.grid.numbers(), ring.pixels, ring.count,
                ctypes.c_int64(len(ring.pixels)),
            )  # fmt: skip
            taken = inside.expand_as(dx) if listed else torch.ones_like(dx, dtype=torch.bool)
            tolerance = 4 * torch.finfo(dtype).eps * float(1 + want.abs().max())
            torch.testing.assert_close(dx[taken], want[taken], rtol=0, atol=tolerance)
            if listed:
                edge = torch.zeros_like(inside).contiguous()
                edge.view(-1)[ring.pixels[: int(ring.count)].long()] = True
                assert_bitwise(torch.where(inside, 0.0, dx), torch.where(inside | edge, 0.0, before))
