"""Block-sparse attention at 8192 tokens, 4 sequences of 16 heads, against dense attention and FlexAttention; at 4096
tokens against dense attention alone, and at 40960 bfloat16 ones.

Dense is scaled_dot_product_attention by cuDNN and by flash attention, causal where the layout is. torch.compile of
flex_attention gets a block mask: of 128, for blocks of 64 of 64, with tiles to match. The backward
is timed alone, from the output's gradient to those of q, k and v, and its deterministic form beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import sbnet
from sbnet.benchmarks.harness.attention import Pattern, pattern
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, WrongResult, close, short

FORWARD, BACKWARD = "block_attention, large", "block_attention, large, backward"
FORMS = {FORWARD: "block_attention", BACKWARD: "block_attention, backward"}
Parts = tuple[Tensor, Tensor, Tensor]

# What is left when the time is up matters least.
PATTERNS = "causal", "random 64, 25 %", "local 1024", "fixed", "strided", "local 128", "random 128, 25 %"
REST = "random 64, 50 %", "random 64, 10 %", "random 128, 50 %", "random 128, 10 %"


def cases(setting: Setting) -> Iterator[Case]:
    def both(batch: int, heads: int, length: int, dim: int, layout: str, dtype: torch.dtype) -> Iterator[Case]:
        facts = {"B": batch, "H": heads, "T": length, "D": dim, "layout": layout, "dtype": short(dtype)}
        for name in (FORWARD, BACKWARD):
            yield Case(name, "attention", facts, partial(work, setting, name == BACKWARD, facts, dtype))

    if setting.level == "tiny":
        for layout in ("causal", "fixed", "random 64, 50 %"):
            yield from both(1, 2, 256, 64, layout, setting.dtype)
        return
    if not setting.cuda:  # block_attention.py has what fits a CPU
        return
    quick = setting.level == "quick"
    dims = (64,) if quick else (64, 128)
    for layout in PATTERNS[:3] if quick else PATTERNS:
        for dim in dims:
            yield from both(4, 16, 8192, dim, layout, setting.dtype)
    if quick:
        return
    yield from both(1, 16, 40960, 128, "random 64, 10 %", torch.bfloat16)
    for layout in ("random 64, 50 %", "random 128, 50 %"):
        for dim in dims:
            yield from both(8, 16, 4096, dim, layout, setting.dtype)
    for layout in REST:
        for dim in dims:
            yield from both(4, 16, 8192, dim, layout, setting.dtype)


def work(setting: Setting, backward: bool, facts: dict[str, Any], dtype: torch.dtype) -> Work:
    batch, heads, length, dim = (facts[name] for name in ("B", "H", "T", "D"))
    chosen = pattern(facts["layout"], heads, length, setting.device)
    q, k, v, grad = (torch.randn(batch, heads, length, dim, device=setting.device, dtype=dtype) for _ in range(4))
    leaves = q.requires_grad_(backward), k.requires_grad_(backward), v.requires_grad_(backward)
    ours = FORMS[BACKWARD if backward else FORWARD]
    forms: dict[str, tuple[Callable[[], Any], str]] = {
        ours: (lambda: sbnet.block_attention(q, k, v, chosen.layout), "ours")
    }
    if backward:
        forms[f"{ours}, deterministic"] = (
            lambda: sbnet.block_attention(q, k, v, chosen.layout, deterministic=True),
            "peer",
        )
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION) if setting.cuda else (SDPBackend.MATH,):
        name = f"SDPA, {backend.name.split('_')[0].lower()}"
        forms[name] = partial(dense, backend, leaves, chosen.causal), "dense"
    if setting.cuda and setting.compiled and length == 8192:
        forms["flex_attention"] = flex(leaves, chosen), "peer"
    sides = {name: Side(run, kind) for name, (run, kind) in forms.items()}
    if backward:
        with compiling(chosen.block):
            for name, side in sides.items():
                sides[name] = Side(partial(gradients, side.run(), leaves, grad), side.kind, "eager")
                sides[name].run()
    grads = grad if backward else None
    references = {"ours": sample(leaves, grads, lambda: chosen.rows(0, length, setting.device))}
    references["peer"] = references["ours"]
    whole = Pattern(chosen.layout, (lambda b, h, q, k: k <= q) if chosen.causal else (lambda b, h, q, k: k >= q - q))
    references["dense"] = sample(leaves, grads, lambda: whole.rows(0, length, setting.device))

    def check(side: str, got: Any) -> float:
        torchs, exact = references[forms[side][1]]
        every = got if backward else (got,)
        if not all(bool(t.isfinite().all()) for t in every):
            raise WrongResult("a result that is not finite")
        return max(close(a[:1, :1], b, c) for a, b, c in zip(every, torchs, exact, strict=True))

    pairs = chosen.pairs(heads, length, setting.device)
    flops = (10 if backward else 4) * batch * heads * dim * pairs
    return Work(sides, check, flops, 0.0, dtype, {"pairs of a head": pairs})


def dense(backend: SDPBackend, leaves: Parts, causal: bool) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=causal)


def flex(leaves: Parts, chosen: Pattern) -> Callable[[], Any]:
    heads, length = leaves[0].shape[1:3]
    tiles = {"BLOCK_M": 64, "BLOCK_N": 64} if chosen.block == 64 else None
    if chosen.table is not None:  # create_block_mask would write out every pair
        count, order = (
            chosen.table.sum(-1).int()[None],
            chosen.table.int().argsort(stable=True, descending=True).int()[None],
        )
        some = torch.zeros_like(count)  # blocks of which some pairs are visible
        blocks = BlockMask.from_kv_blocks(some, order, count, order, chosen.block, chosen.shown)
    else:
        per_head = heads if chosen.per_head else None
        blocks = create_block_mask(chosen.shown, None, per_head, length, length, device="cuda")
    torch._dynamo.reset()  # of the case before: more than eight forms of one function run uncompiled
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(*leaves, block_mask=blocks, kernel_options=tiles)


@contextlib.contextmanager
def compiling(block: int) -> Iterator[None]:
    """A compiled backward that may run more than once; for blocks of 64 with tiles that divide them, as flex's own do
    not, the fastest of four."""
    from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic as Heuristic

    own = Heuristic.get_flex_attn_bwd_configs
    shapes = ((64, 64, 3, 4), (64, 64, 2, 4), (32, 64, 3, 4), (64, 64, 2, 8))

    def small(self: Any, *facts: Any) -> list[Any]:
        tiles: Any = own(self, *facts)[0]
        return [
            dataclasses.replace(
                tiles, block_m1=a, block_n1=b, block_m2=b, block_n2=a, num_stages=stages, num_warps=warps
            )
            for a, b, stages, warps in shapes
        ]

    with contextlib.ExitStack() as patches:
        patches.enter_context(torch._functorch.config.patch(donated_buffer=False))
        if block == 64:
            patches.enter_context(mock.patch.object(Heuristic, "get_flex_attn_bwd_configs", small))
        yield


def gradients(out: Tensor, leaves: Parts, grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, leaves, grad, retain_graph=True)


def sample(leaves: Parts, grad: Tensor | None, rows: Callable[[], Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The first head of the first sequence: PyTorch's result in this dtype, and the exact one."""

    def of(dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (t.detach()[:1, :1].to(dtype) for t in leaves)
        outs, dqs, dk, dv = [], [], torch.zeros_like(k), torch.zeros_like(v)
        for at, seen in rows():
            parts = q[:, :, at].clone(), k.detach(), v.detach()
            with torch.set_grad_enabled(grad is not None):
                some = [t.requires_grad_(grad is not None) for t in parts]
                scores = (some[0] @ some[1].transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
                outs.append(scores.softmax(-1) @ some[2])
            if grad is not None:
                dq, *grads = torch.autograd.grad(outs.pop(), some, grad[:1, :1, at].to(dtype))
                dqs.append(dq)
                dk, dv = dk + grads[0], dv + grads[1]
        return [torch.cat(outs, 2)] if grad is None else [torch.cat(dqs, 2), dk, dv]

    return of(leaves[0].dtype), of(torch.float64)
