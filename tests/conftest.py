"""Fixtures of the op tests: the device they run on, fixed seeds, float32 that means float32."""

import os

# Before torch is imported; `pytest -n` and subprocesses hand it on. A thread that spins at the end of a parallel loop
# takes the core on which another process computes what its own loop waits for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from hypothesis import settings

settings.register_profile("sbnet", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("sbnet")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _fixed_seed_and_full_float32():
    torch.manual_seed(0)
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(autouse=True)
def _device_memory_for_other_processes():
    """What PyTorch keeps for later is missing in the workers beside this one (pytest -n)."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**31:
        torch.cuda.empty_cache()
