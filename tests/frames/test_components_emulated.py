"""connected_components' CUDA kernels, emulated, against the definition in plain PyTorch."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

from sbnet.reference.frames import connected_components
from support.components import fields, scored
from support.emulator import CSRC, TOOLS, emulated_library

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    kernels = ["capability", "frames/components"]
    core = ["frames/components", "grid", "memory", "settled", "window"]
    return emulated_library(
        tmp_path_factory, "components", [CSRC / f"cuda/{name}.cu" for name in kernels],
        [TOOLS / "entry_components.cpp", *(CSRC / f"core/{name}.cpp" for name in core)],
    )  # fmt: skip


@pytest.mark.parametrize("size", [(25, 70), (40, 31), (1, 64), (70, 65)], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_components(emulated, seed, size):
    """Maps of all shapes, their rows longer than a warp and shorter; too many components; two images of one layout."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for name, field in fields(*size).items():
        dtype, smallest, capacity = rng.choice(list(DTYPES)), rng.choice([1, 3]), rng.choice([2, 40, 2000])
        scores = torch.stack([scored(one, 0.25) for one in (field, field.flip(1))]).to(dtype)[:, None]
        shape = (ctypes.c_int64 * 8)(*scores.shape, *scores.stride())
        made = [torch.full((2, capacity, *rest), -7, dtype=torch.int32) for rest in ((4,), (), ())]
        made = [*made[:2], made[2].long(), torch.full((2,), -7, dtype=torch.int32)]
        message = ctypes.create_string_buffer(4096)
        failed = emulated.emulate_components(
            seed, ctypes.c_void_p(scores.data_ptr()), shape, DTYPES[dtype], ctypes.c_float(0.25),
            ctypes.c_int64(smallest), ctypes.c_int64(capacity), *(ctypes.c_void_p(v.data_ptr()) for v in made),
            message, ctypes.c_int64(4096),
        )  # fmt: skip
        assert not failed, message.value.decode()
        for got, wanted in zip(made, connected_components(scores[:, 0], 0.25, smallest, capacity), strict=True):
            assert torch.equal(got, wanted), name
