"""Inside `sbnet.masked` a resize reads and writes open maps, and its gradient is one."""

import pytest
import torch
import torch.nn.functional as F
from graph.test_masked_open import BLOCK, SIZE, layers

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
    a = F.relu(n["conv"](x))
    b = F.relu(n["norm"](n["one"](a)))
    y = torch.cat([F.interpolate(b, **how)[:, :4], F.interpolate(n["next"](a), **how)[:, 4:]], 1)
    return torch.cat([F.relu(n["next"](y)), n["one"](F.interpolate(n["next"](a + b), **how))], 1)


def results(of, device, mode, dtype, draws=4):
    """Of some masks together, as few pixels are active in each: the output and all gradients of a loss that does not
    weigh one image against another."""
    found = []
    for draw in range(draws):
        torch.manual_seed(draw)
        x, mask = torch.randn(2, 3, *SIZE).to(device, dtype), (torch.rand(2, *SIZE) < 0.01).to(device)
        net = layers(device).to(dtype)
        with mode(mask):
            y = of(net, x)
        (y * torch.linspace(0.5, 1.5, y.numel(), dtype=dtype, device=device).view(y.shape)).sum().backward()
        found.append([y.detach(), *(p.grad for p in net.parameters() if p.grad is not None)])
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


def check(of, device, poisoned, capacity=None):
    """Poisoned: memory that was not written holds NaN."""

    def masked(mask):
        return sbnet.masked(mask, BLOCK, capacity=capacity)

    tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False  # of masked convolutions, too
    torch.use_deterministic_algorithms(poisoned, warn_only=True)
    try:
        got, again = (results(of, device, masked, torch.float32) for _ in range(2))
        torch.use_deterministic_algorithms(False)
        dense = (results(of, device, lambda m: DenseMasked(m, BLOCK), d) for d in (torch.float32, torch.float64))
        for k, (mine, same, theirs, exact) in enumerate(zip(got, again, *dense, strict=True)):
            assert_bitwise(mine, same)
            assert_as_accurate_as_torch(mine, theirs, exact, str(k))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.allow_tf32 = tf32


@pytest.mark.parametrize("capacity", [None, 1.0], ids=["", "stacks"])
@pytest.mark.parametrize("poisoned", [False, True], ids=["", "poisoned"])
@pytest.mark.parametrize("name", RESIZES)
def test_loss_and_gradients(device, name, poisoned, capacity):
    check(lambda n, x: resized(n, x, RESIZES[name]), device, poisoned, capacity)
