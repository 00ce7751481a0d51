"""Block-sparse attention at 8192 tokens, 4 sequences of 16 heads, against dense attention and FlexAttention.

Dense is scaled_dot_product_attention by cuDNN and by flash attention, causal where the layout is. torch.compile of
flex_attention gets a block mask: of 128, and in the forward of blocks of 64 of 64, with tiles to match. The backward
is timed alone, from the output's gradient to those of q, k and v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import sbnet
from sbnet import AttentionLayout
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, WrongResult, close, short

FORWARD, BACKWARD = "block_attention", "block_attention, backward"
CHUNK = 128  # of strided and fixed
Parts = tuple[Tensor, Tensor, Tensor]
Mask = Callable[..., Tensor]


def cases(setting: Setting) -> Iterator[Case]:
    batch, heads, length = setting.pick((1, 2, 256), (1, 4, 512), (4, 16, 8192) if setting.cuda else (1, 8, 1024))
    patterns = ("causal", "local 1024", "local 128", "strided", "fixed", *(
        f"random {block}, {density} %" for block in (64, 128) for density in (10, 25, 50)
    ))  # fmt: skip
    chosen = setting.pick(("causal", "fixed", "random 64, 50 %"), ("causal", "local 128", "random 64, 25 %"), patterns)
    for name in (FORWARD, BACKWARD):
        for dim in setting.pick((64,), (64,), (64, 128)):
            for pattern in chosen:
                facts = {
                    "B": batch,
                    "H": heads,
                    "T": length,
                    "D": dim,
                    "layout": pattern,
                    "dtype": short(setting.dtype),
                }
                yield Case(name, "attention", facts, partial(work, setting, name == BACKWARD, facts))


def layout_of(pattern: str, heads: int, length: int) -> tuple[AttentionLayout, Mask | None, int]:
    """The layout, the mask function of flex_attention (but for random blocks, which have a table) and its blocks."""
    kind, *numbers = pattern.replace(",", "").split()
    if kind == "causal":
        return AttentionLayout.causal(), lambda b, h, q, k: k <= q, 128
    if kind == "local":
        reach = int(numbers[0])
        return AttentionLayout.local(reach), lambda b, h, q, k: (k <= q) & (q - k < reach), 128
    if kind == "strided":
        return AttentionLayout.strided(CHUNK), lambda b, h, q, k: (k <= q) & ((q - k) % CHUNK == 0), 128
    if kind == "fixed":
        verticals = 2 if heads % 4 else 4

        def fixed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            vertical = k % CHUNK // 32 == 3 - h % verticals
            return (k <= q) & ((q // CHUNK == k // CHUNK) | vertical)

        return AttentionLayout.fixed(CHUNK, verticals), fixed, 128
    block, density = int(numbers[0]), int(numbers[1]) / 100
    blocks = torch.rand(heads, length // block, length // block) < density
    blocks |= torch.eye(length // block, dtype=torch.bool)
    return AttentionLayout.from_blocks(blocks, block), None, block


def table_mask(layout: AttentionLayout, heads: int, length: int, block: int, device: str) -> Mask:
    seen = layout.visible(heads, length, length)[:, ::block, ::block].to(device)
    return lambda b, h, q, k: seen[h, q // block, k // block]


def work(setting: Setting, backward: bool, facts: dict[str, Any]) -> Work:
    batch, heads, length, dim, pattern = (facts[name] for name in ("B", "H", "T", "D", "layout"))
    torch.manual_seed(0)
    layout, mask, block = layout_of(pattern, heads, length)
    options: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype}
    q, k, v, grad = (torch.randn(batch, heads, length, dim, **options) for _ in range(4))
    leaves = q.requires_grad_(backward), k.requires_grad_(backward), v.requires_grad_(backward)
    causal = not pattern.startswith("random")
    forms: dict[str, tuple[Callable[[], Any], str]] = {
        BACKWARD if backward else FORWARD: (lambda: sbnet.block_attention(q, k, v, layout), "ours")
    }
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION) if setting.cuda else (SDPBackend.MATH,):
        forms[f"SDPA, {backend.name.split('_')[0].lower()}"] = partial(dense, backend, leaves, causal), "dense"
    if setting.cuda and setting.compiled:
        shown = mask or table_mask(layout, heads, length, block, setting.device)
        size = 64 if block == 64 and not backward else 128
        tiles = {"BLOCK_M": 64, "BLOCK_N": 64} if size == 64 else None
        per_head = heads if pattern.split()[0] in ("fixed", "random") else None
        blocks = create_block_mask(shown, None, per_head, length, length, device="cuda", BLOCK_SIZE=size)
        compiled: Any = torch.compile(flex_attention, dynamic=False)
        forms["flex_attention"] = lambda: compiled(q, k, v, block_mask=blocks, kernel_options=tiles), "peer"
    sides = {
        name: Side(partial(gradients, run(), leaves, grad), kind, "eager") if backward else Side(run, kind)
        for name, (run, kind) in forms.items()
    }
    whole = layout.visible(heads, length, length)
    pairs = whole.sum().item() / len(whole)
    seen = whole[:1, None].to(setting.device)  # of the head that is checked
    every = torch.ones_like(seen)
    grads = grad if backward else None
    references = {"dense": sample(leaves, grads, every.tril() if causal else every)}
    references["ours"] = references["peer"] = sample(leaves, grads, seen)

    def check(side: str, got: Any) -> float:
        torchs, exact = references[forms[side][1]]
        found = [t[:1, :1] for t in (got if backward else (got,))]
        if not all(bool(t.isfinite().all()) for t in (got if backward else (got,))):
            raise WrongResult("a result that is not finite")
        return max(close(a, b, c) for a, b, c in zip(found, torchs, exact, strict=True))

    flops = (10 if backward else 4) * batch * heads * dim * pairs
    return Work(sides, check, flops, 0.0, setting.dtype, {"pairs of a head": pairs})


def dense(backend: SDPBackend, leaves: Parts, causal: bool) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=causal)


def gradients(out: Tensor, leaves: Parts, grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, leaves, grad, retain_graph=True)


def sample(leaves: Parts, grad: Tensor | None, seen: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The first head of the first sequence: PyTorch's result in this dtype, and the exact one."""

    def of(dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (t.detach()[:1, :1].to(dtype).requires_grad_(grad is not None) for t in leaves)
        scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
        out = scores.softmax(-1) @ v
        if grad is None:
            return [out]
        return list(torch.autograd.grad(out, (q, k, v), grad[:1, :1].to(dtype)))

    return of(leaves[0].dtype), of(torch.float64)
