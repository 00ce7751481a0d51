"""The error measure of docs/contracts.md for results of any structure."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def assert_holds(got, torchs, exact, what: str = "") -> None:
    """rms error against float64 <= 2 x PyTorch's own + 1 ulp, for each tensor of a result."""
    for k, (g, t, e) in enumerate(zip(tree_leaves(got), tree_leaves(torchs), tree_leaves(exact), strict=True)):
        assert g.shape == e.shape
        assert g.isfinite().all(), f"{what}: output {k} is not finite"
        limit = 2 * rms(t.double() - e) + torch.finfo(g.dtype).eps * rms(e)
        assert rms(g.double() - e) <= limit, f"{what}: output {k}: {rms(g.double() - e):.3g}, limit {limit:.3g}"


def poison(run) -> None:
    """Memory without a promise of zeros holds NaN: a read of it shows. Of a run, or an executor."""
    executor = run.executor if hasattr(run, "executor") else run
    clean = {root.buffer for root in executor.storage.roots if root.kept}
    for k, buffer in enumerate(executor.buffers):
        if k not in clean:
            buffer.fill_(float("nan") if buffer.is_floating_point() else 77)
