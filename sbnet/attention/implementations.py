"""attention_impl and blocksparse_attention_impl, with the names and modes of OpenAI's sparse_attention."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sbnet.ops.attention.attention import block_attention
from sbnet.ops.attention.layout import AttentionLayout


def attention_impl(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    attn_mode: str,
    local_attn_ctx: int | None = None,
    *,
    recompute: bool = False,
) -> Tensor:
    """Causal attention of q, k, v [B, T, heads * D]: attn_mode "all", "local" or "strided" over local_attn_ctx.

    recompute: keep q, k and v alone for the backward pass, and run the forward again there.

    >>> y = attention_impl(q, k, v, heads=4, attn_mode="strided", local_attn_ctx=32)
    """
    layout = _layout("attention_impl", attn_mode, local_attn_ctx)
    return _run(q, k, v, layout, heads, recompute)


def blocksparse_attention_impl(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    attn_mode: str,
    local_attn_ctx: int | None = None,
    blocksize: int = 32,
    num_verts: int | None = None,
    vertsize: int | None = None,
    *,
    recompute: bool = False,
) -> Tensor:
    """As `attention_impl`, and attn_mode "fixed": `num_verts` groups of heads, each with `vertsize` blocks a chunk."""
    op = "blocksparse_attention_impl"
    if attn_mode == "fixed":
        layout = AttentionLayout.fixed(_context(op, local_attn_ctx), num_verts or 1, vertsize or 1, blocksize)
    else:
        if q.shape[1] % blocksize:
            raise ValueError(f"{op}: blocksize: expected a divisor of {q.shape[1]} positions, got {blocksize}")
        layout = _layout(op, attn_mode, local_attn_ctx)
    return _run(q, k, v, layout, heads, recompute)


def _context(op: str, local_attn_ctx: int | None) -> int:
    if local_attn_ctx is None:
        raise ValueError(f"{op}: local_attn_ctx: expected a number of positions, got None")
    return local_attn_ctx


def _layout(op: str, attn_mode: str, local_attn_ctx: int | None) -> AttentionLayout:
    if attn_mode == "all":
        return AttentionLayout.causal()
    if attn_mode == "local":
        return AttentionLayout.local(_context(op, local_attn_ctx))
    if attn_mode == "strided":
        return AttentionLayout.strided(_context(op, local_attn_ctx))
    raise ValueError(f"{op}: attn_mode: expected all, local, strided or (blocksparse) fixed, got {attn_mode!r}")


def _run(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, heads: int, recompute: bool) -> Tensor:
    run: Any = functools.partial(block_attention, layout=layout, heads=heads)
    return checkpoint(run, q, k, v, use_reentrant=False) if recompute else run(q, k, v)
