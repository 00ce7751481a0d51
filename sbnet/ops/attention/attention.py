"""Block-sparse attention: softmax(scale q k^T) v over the keys that a layout shows each query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sbnet.ops.attention.layout import AttentionLayout
from sbnet.ops.common import refuse_gradient, refuse_meta_mix, require_tensor
from sbnet.ops.masked.conv import autocast
from sbnet.ops.masked.layer import in_place_fake

_ops = torch.ops.sbnet
_OP = "block_attention"


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
    scale: float | None = None,
    return_lse: bool = False,
    *,
    heads: int | None = None,
    q_lengths: Tensor | None = None,
    k_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v over the keys that `layout` shows; queries that see none get zeros, and zero gradients.

    Sums and softmax are float32. Under torch.autocast it casts what scaled_dot_product_attention would cast.

    Args:
        q: [B, H, T, D] float32, float16 or bfloat16, D 16 to 256 and a multiple of 8; or [B, T, H*D] with `heads`.
        k, v: [B, H', S, D], H a multiple of H' (query head h reads key head h // (H / H')); or [B, S, H'*D].
        layout: which keys a query sees.
        scale: 1/sqrt(D) by default.
        return_lse: return the log of the sum of exponentials too.
        heads: H, for tensors of three dimensions.
        q_lengths, k_lengths: [B] int32 on the device, for padded batches: queries and keys from there on are not there.
        dropout_p: each weight is dropped with this probability, the others are divided by 1 - dropout_p.
        seed: [2] int64 on the device for dropout; drawn from PyTorch's generator by default.
        deterministic: the same bits in the gradients at every run; by default as
            torch.use_deterministic_algorithms has it.

    Returns:
        The shape, dtype and memory layout of q; with return_lse also [B, H, T] float32, -inf without keys.
        Differentiable once with respect to q, k and v (through lse, too).

    Raises:
        RuntimeError, ValueError, TypeError: wrong shapes, dtypes, devices; lengths that the layout does not fit.

    >>> q = k = v = torch.rand(1, 2, 512, 16)
    >>> sbnet.block_attention(q, k, v, sbnet.AttentionLayout.local(128)).shape  # [B,H,T,D]
    torch.Size([1, 2, 512, 16])
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        require_tensor(_OP, name, t)
    if not isinstance(layout, AttentionLayout):
        raise TypeError(f"sbnet::{_OP}: layout: expected an sbnet.AttentionLayout, got {type(layout).__name__}")
    q, k, v = autocast(q, k, v)
    flat = q.dim() == 3
    if flat:
        q, k, v = split_heads(heads, q, k, v)
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"sbnet::{_OP}: q, k, v: expected 4 dimensions, got {q.dim()}, {k.dim()}, {v.dim()}")
    phases = layout.rule.phases
    _check_fits(layout, q.shape[1], q.shape[2] // phases, k.shape[2] // phases)
    tensors = layout.tensors(q.device, q.shape[1], q.shape[2] // phases, k.shape[2] // phases)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"sbnet::{_OP}: dropout_p: expected 0 to less than 1, got {dropout_p}")
    if dropout_p > 0 and seed is None:
        seed = torch.randint(2**63 - 1, (2,), device=q.device, dtype=torch.int64)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    out, lse, _ = _ops.block_attention(
        q,
        k,
        v,
        *tensors,
        q_lengths,
        k_lengths,
        seed if dropout_p > 0 else None,
        layout.numbers,
        q.shape[3] ** -0.5 if scale is None else float(scale),
        float(dropout_p),
        deterministic,
    )
    if flat:
        out = out.transpose(1, 2).flatten(2)
    return (out, lse) if return_lse else out


def block_attention_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
    scale: float,
    lengths: tuple[Tensor, Tensor | None],
    heads: int,
    out: Tensor,
) -> Tensor:
    """`block_attention` of [B, T, H*D] with lengths of queries and, unless all are there, of keys, written to `out` of
    the queries' shape. No gradient."""
    refuse_gradient("block_attention_", _OP, q, k, v, out)
    q, k, v, to = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v, out))
    tensors = layout.tensors(q.device, heads, q.shape[2], k.shape[2])
    _ops.block_attention_(q, k, v, *tensors, *lengths, layout.numbers, float(scale), to)
    return out


def _check_fits(layout: AttentionLayout, heads: int, q_length: int, k_length: int) -> None:
    """Does the layout, if it holds blocks, hold those of so many heads, queries and keys?"""
    if layout.held is None:
        return
    some, *held = layout.held
    size = layout.block_size
    for name, length, blocks in zip(("queries", "keys"), (q_length, k_length), held, strict=True):
        if isinstance(length, int) and -(-length // size) != blocks:
            its = f"{max(blocks - 1, 0) * size + 1} to {blocks * size} {name}"
            raise ValueError(f"sbnet::{_OP}: layout: expected one for {length} {name}, got {layout!r}, for {its}")
    if isinstance(heads, int) and some not in (1, heads):
        raise ValueError(f"sbnet::{_OP}: layout: expected one for 1 or {heads} heads, got {layout!r}")


def split_heads(heads: int | None, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T, H*D] -> [B, H, T, D], views."""
    if heads is None or heads < 1 or q.shape[-1] % heads:
        raise ValueError(f"sbnet::{_OP}: heads: expected a divisor of {q.shape[-1]} features, got {heads}")
    dim = q.shape[-1] // heads
    for name, t in (("k", k), ("v", v)):
        if t.dim() != 3 or not dim or t.shape[-1] % dim:
            raise ValueError(
                f"sbnet::{_OP}: {name}: expected 3 dimensions, the last of them in heads of {dim}, got {tuple(t.shape)}"
            )
    return (
        q.unflatten(-1, (heads, dim)).transpose(1, 2),
        k.unflatten(-1, (k.shape[-1] // dim, dim)).transpose(1, 2),
        v.unflatten(-1, (v.shape[-1] // dim, dim)).transpose(1, 2),
    )


def empty_like(t: Tensor) -> Tensor:
    """Packed as t is: [B, H, T, D], or with heads inside of positions. Keep in step with torch_binding/attention."""
    b, h, n, d = t.shape
    return t.new_empty(b, n, h, d).transpose(1, 2) if t.stride(1) < t.stride(2) else t.new_empty(b, h, n, d)


@torch.library.register_fake("sbnet::block_attention")
def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    refuse_meta_mix(_OP, q, k, v, *rest)
    torch._check(
        q.dim() == 4 and k.dim() == 4 and v.dim() == 4, lambda: f"sbnet::{_OP}: q, k, v: expected 4 dimensions"
    )
    torch._check(
        q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3],
        lambda: f"sbnet::{_OP}: k: expected batch and head dimension of q, got {tuple(k.shape)}",
    )
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    sums = (*q.shape[:3], 2) if q.dtype == torch.float32 else (0,)
    return empty_like(q), lse, q.new_empty(sums, dtype=torch.float32)


@torch.library.register_fake("sbnet::block_attention_backward")
def _backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    sums: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like(q), empty_like(k), empty_like(v)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.layout, ctx.scale, ctx.dropout, ctx.deterministic = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None) -> tuple:
    if grad_out is None and grad_lse is None:
        return (None,) * 14
    out, *rest = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    options = ctx.layout, ctx.scale, ctx.dropout, ctx.deterministic
    grads = _ops.block_attention_backward(grad_out, grad_lse, out, *rest, *options)
    return *grads, *[None] * 11


torch.library.register_autograd("sbnet::block_attention", _backward, setup_context=_setup)


def _no_second_derivative(ctx: Any, *grads: Tensor) -> tuple:
    raise RuntimeError("sbnet::block_attention: expected one backward pass, got one through its gradients")


torch.library.register_autograd("sbnet::block_attention_backward", _no_second_derivative)
in_place_fake("block_attention_")
