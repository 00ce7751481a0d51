"""What the tests of single layers check in the same way: gradients, forms in place, windows, threads, networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import sbnet
from sbnet import ActiveBlocks, BlockGrid, Window, fringe
from support.helpers import assert_as_accurate_as_torch, assert_bitwise, random_active


def assert_gradients(
    op: Callable[..., Tensor], definition: Callable[..., Tensor], leaves: Sequence[Tensor]
) -> list[Tensor]:
    """op's gradients in float32 are as close to the definition's in float64 as the definition's in float32."""

    def grads(f: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        own = [t.detach().to(dtype).requires_grad_() for t in leaves]
        y = f(*own)
        upstream = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape).to(y)
        return list(torch.autograd.grad((y * upstream).sum(), own, allow_unused=True, materialize_grads=True))

    got, theirs, exact = grads(op, torch.float32), grads(definition, torch.float32), grads(definition, torch.float64)
    for one in zip(got, theirs, exact, strict=True):
        assert_as_accurate_as_torch(*one)
    return got


def assert_in_place(write: Callable[[Tensor], Any], got: Tensor, active: ActiveBlocks) -> None:
    """write(out) gives `got` on active blocks and leaves all else."""
    out, inside = torch.full_like(got, torch.nan), active.pixel_mask(got.shape[2:]).expand_as(got)
    assert write(out) is None
    assert_bitwise(out, torch.where(inside, got, torch.full_like(got, torch.nan)), "in place")


def assert_window(
    run: Callable[[Tensor], Tensor], x: Tensor, active: ActiveBlocks, window: Window, out: tuple[int, int]
) -> None:
    """What lies outside the fringe of the window may be anything."""
    n, _, *plane = x.shape
    none = random_active(BlockGrid.cover(tuple(plane), 4), n, 0.0, x.device.type)
    read = fringe(none, active, tuple(plane), window, consumer_size=tuple(out))
    keep = torch.zeros(n * plane[0] * plane[1], dtype=torch.bool, device=x.device)
    keep[read.pixels[: int(read.count)].long()] = True
    assert_bitwise(run(torch.where(keep.view(n, 1, *plane), x, torch.nan)), run(x))


def assert_same_bits_on_any_threads(run: Callable[[], Any], counts: Sequence[int] = (1, 2, 3, 5)) -> None:
    want, before = tree_leaves(run()), torch.get_num_threads()
    try:
        for count in counts:
            torch.set_num_threads(count)
            for got, one in zip(tree_leaves(run()), want, strict=True):
                assert_bitwise(got, one, f"{count} threads")
    finally:
        torch.set_num_threads(before)


def assert_network(net: nn.Module, mode: str, device: str, kinds: dict[str, int], judged: int | None = None) -> Any:
    """A network of 3 channels under a full mask and a small one, twice: the dense result, and the mode's contract.

    kinds: how many nodes of a kind are planned. judged: how many results the exact mode gives on the mask.
    """
    from sbnet.graph.oracle import PlaneMasks, masked_oracle

    x, mask = torch.randn(2, 3, 40, 56, device=device), torch.zeros(2, 40, 56, device=device)
    mask[0, 10:20, 30:40] = 1
    net = net.to(device).eval()
    run = sbnet.sparsify(net, x, block=8, mode=mode)
    planned = [node.kind for node in run.plan.graph.nodes]
    assert {kind: planned.count(kind) for kind in kinds} == kinds, run.plan.graph
    with torch.no_grad():
        dense = tree_leaves(net(x))
    want = tree_leaves(masked_oracle(net, [x], PlaneMasks(mask, 8))) if mode == "masked" else dense
    for _ in range(2):
        for got, one in zip(tree_leaves(run(x, torch.ones_like(mask))), dense, strict=True):
            torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-5)
        for got, one in list(zip(tree_leaves(run(x, mask, copy=True)), want, strict=True))[:judged]:
            if mode == "exact":
                pixels = F.adaptive_max_pool2d(mask[:, None], one.shape[2:] if one.dim() == 4 else (1, 1)) > 0
                pixels = pixels.view(*pixels.shape[: one.dim()])
                got, one = torch.where(pixels, got, 0), torch.where(pixels, one, 0)
            torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-5)
    return run
