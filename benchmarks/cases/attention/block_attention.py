"""Block-sparse attention at lengths that fit a CPU, against the dense computation: SDPA with the layout as a mask gives
the same result, and SDPA without one (causal where the layout is) is what one would run instead.

All heads, forward and backward, are checked against float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sbnet
from sbnet import reference
from sbnet.benchmarks.harness.attention import pattern
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, close, short

FORWARD, BACKWARD = "block_attention", "block_attention, backward"


def cases(setting: Setting) -> Iterator[Case]:
    batch, heads, length = setting.pick((1, 2, 256), (1, 4, 512), (1, 8, 2048))
    layouts = ("local 128", "fixed", "strided", "random 64, 25 %", "causal", "random 64, 50 %", "random 16, 25 %")
    for name in (FORWARD, BACKWARD):
        for layout in setting.pick(layouts[:2], layouts[:4], layouts):
            facts = {"B": batch, "H": heads, "T": length, "D": 64, "layout": layout, "dtype": short(setting.dtype)}
            yield Case(name, "attention", facts, partial(work, setting, name, facts))


def work(setting: Setting, name: str, facts: dict[str, Any]) -> Work:
    batch, heads, length, dim = (facts[key] for key in ("B", "H", "T", "D"))
    chosen = pattern(facts["layout"], heads, length, setting.device)
    backward = name == BACKWARD
    options: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype}
    q, k, v = (torch.randn(batch, heads, length, dim, **options).requires_grad_(backward) for _ in range(3))
    grad = torch.randn(batch, heads, length, dim, **options)
    mask = chosen.layout.visible(heads, length, length).to(setting.device)
    every = torch.ones_like(mask[:1]).tril() if chosen.causal else torch.ones_like(mask[:1])

    def ready(attend: Callable[..., Any], dtype: torch.dtype | None = None) -> Callable[[], tuple[Tensor, ...]]:
        leaves: tuple[Tensor, ...] = (q, k, v)
        if dtype is not None:
            leaves = tuple(t.detach().to(dtype).requires_grad_(backward) for t in leaves)
        if not backward:
            return lambda: (attend(*leaves),)
        out = attend(*leaves)
        return lambda: torch.autograd.grad(out, leaves, grad.to(out.dtype), retain_graph=True)

    def results(shown: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        by_hand: Any = partial(reference.block_attention, layout=shown[None])
        return ready(by_hand)(), ready(by_hand, torch.float64)()

    clock = "eager" if backward else "graph"
    sdpa: Any = F.scaled_dot_product_attention
    sides = {
        name: Side(ready(partial(sbnet.block_attention, layout=chosen.layout)), "ours", clock),
        "SDPA, its mask": Side(ready(lambda *a: sdpa(*a, attn_mask=mask[None])), "dense", clock),
        "SDPA": Side(ready(lambda *a: sdpa(*a, is_causal=chosen.causal)), "dense", clock),
    }
    masked, whole = results(mask), results(every)

    def check(side: str, got: tuple[Tensor, ...]) -> float:
        torchs, exact = whole if side == "SDPA" else masked
        return max(close(a, b, c) for a, b, c in zip(got, torchs, exact, strict=True))

    pairs = float(mask.sum()) / len(mask)
    flops = (10 if backward else 4) * batch * heads * dim * pairs
    return Work(sides, check, flops, 0.0, setting.dtype, {"pairs of a head": pairs})
