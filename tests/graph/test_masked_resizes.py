"""Inside `sbnet.masked` a resize reads and writes open maps, and its gradient is one."""

import pytest
import torch
import torch.nn.functional as F
from graph.test_masked_open import BLOCK, SIZE, data, gradients, layers

import sbnet
from sbnet.benchmarks.harness.dense_masked import DenseMasked
from support.helpers import assert_as_accurate_as_torch, assert_bitwise

RESIZES = {
    "nearest": {"scale_factor": 2}, "nearest-exact": {"scale_factor": (3, 2), "mode": "nearest-exact"},
    "bilinear": {"scale_factor": 2, "mode": "bilinear"}, "bicubic": {"scale_factor": 2, "mode": "bicubic"},
    "corners": {"scale_factor": 2, "mode": "bilinear", "align_corners": True},
    "bicubic corners": {"size": (41, 47), "mode": "bicubic", "align_corners": True},
    "down": {"scale_factor": 0.5, "mode": "bilinear"}, "down nearest": {"scale_factor": 0.37},
    "by x1.7": {"scale_factor": 1.7, "mode": "bilinear"}, "same": {"size": SIZE, "mode": "bilinear"},
    "double by x2.03": {"scale_factor": 2.03, "mode": "bilinear"},
}  # fmt: skip


def resized(n, x, how):
    """Of layers that are pending, made and joined, with other readers; with layers that want zeros around gradients."""
    a = n["norm"](n["one"](F.relu(n["conv"](x))))
    b = F.relu(n["next"](a))
    y = torch.cat([F.interpolate(F.relu(a), **how)[:, :4], F.interpolate(b, **how)[:, 4:]], 1)
    return torch.cat([F.relu(n["next"](y)), n["other"](n["one"](F.interpolate(n["next"](b), **how)))], 1)


@pytest.mark.parametrize("capacity", [None, 1.0], ids=["", "stacks"])
@pytest.mark.parametrize("poisoned", [False, True], ids=["", "poisoned"])
@pytest.mark.parametrize("name", RESIZES)
def test_loss_and_gradients(device, name, poisoned, capacity, monkeypatch):
    """Poisoned: memory that was not written holds NaN."""
    x, mask = data(device)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of masked convolutions, too

    def run(mode, dtype):
        return gradients(lambda n, x: resized(n, x, RESIZES[name]), layers(device), x, mode, dtype)

    torch.use_deterministic_algorithms(poisoned, warn_only=True)
    try:
        got, again = (run(sbnet.masked(mask, BLOCK, capacity=capacity), torch.float32) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(got, again, strict=True):
        assert_bitwise(a, b)
    theirs, exact = (run(DenseMasked(mask, BLOCK), dtype) for dtype in (torch.float32, torch.float64))
    for k, parts in enumerate(zip(got, theirs, exact, strict=True)):
        assert_as_accurate_as_torch(*parts, f"{name}: {k}")
