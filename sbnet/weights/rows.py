"""blocksparse's ops on rows by its names: top-k, softmax with masks, cross entropy, embeddings, gathers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of x [..., K], largest first: (values, indices) [..., k]."""
    _check_k("top_k", x, k)
    values, indices = torch.topk(x, k)
    return values, indices


def rectified_top_k(x: Tensor, k: int, rebase: bool = True) -> Tensor:
    """The k largest of each row of x [..., K] where they are positive, zeros elsewhere.

    rebase: less the k-th largest, where that is positive. The gradient passes where the result is not zero, and knows
    nothing of what was subtracted, as in blocksparse.
    """
    values, indices = top_k(x, k)
    if rebase:
        values = values - values.detach()[..., -1:].clamp(min=0)
    return torch.zeros_like(x).scatter(-1, indices, torch.relu(values))


def softmax(x: Tensor, scale: float = 1.0) -> Tensor:
    """softmax(scale x) over the last axis, in float32, returned in x's dtype."""
    return masked_softmax(x, None, scale)


def masked_softmax(x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """softmax(scale mask x) over the last axis where mask is not 0, zeros elsewhere; a row without any is all zeros.

    mask: numbers that broadcast against x, as many axes; or None. In float32, returned in x's dtype.
    """
    if mask is None:
        return torch.softmax(x if scale == 1 else x.float() * scale, -1).to(x.dtype)
    _check_mask("masked_softmax", x, mask)
    # Halves times float32 are float32: no pass over memory that widens x.
    return _softmax_where(x * (mask.float() * scale), mask != 0, x.dtype)


def masked_top_k_softmax(x: Tensor, k: int, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """As `masked_softmax`, over the k largest of scale mask x in each row; zeros elsewhere."""
    _check_k("masked_top_k_softmax", x, k)
    scores, there = x.float() * scale, torch.ones((), dtype=torch.bool, device=x.device)
    if mask is not None:
        _check_mask("masked_top_k_softmax", x, mask)
        scores, there = scores * mask, mask != 0
    best = scores.detach().masked_fill(~there, -torch.inf).topk(k).indices
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    return _softmax_where(scores, kept & there, x.dtype)


def _softmax_where(scores: Tensor, there: Tensor, dtype: torch.dtype) -> Tensor:
    """`scores` are overwritten."""
    # The fill is finite, so that neither a row without any nor its gradient is NaN.
    absent = ~there
    filled = scores.masked_fill_(absent, torch.finfo(scores.dtype).min)
    return torch.softmax(filled, -1).to(dtype).masked_fill(absent, 0.0)


def _check_k(op: str, x: Tensor, k: int) -> None:
    if not 1 <= k <= x.shape[-1]:
        raise ValueError(f"{op}: k: expected 1 to {x.shape[-1]}, got {k}")


def _check_mask(op: str, x: Tensor, mask: Tensor) -> None:
    if mask.dim() != x.dim() or any(m not in (1, n) for m, n in zip(mask.shape, x.shape, strict=True)):
        raise ValueError(f"{op}: mask: expected 1 or the size of x in {list(x.shape)}, got {list(mask.shape)}")


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits as they are, not the softmax in float32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, labels)
        return -torch.log_softmax(logits, -1, dtype=torch.float32).gather(-1, labels[..., None])[..., 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        logits, labels = ctx.saved_tensors
        p = torch.softmax(logits, -1, dtype=torch.float32)
        p.scatter_add_(-1, labels[..., None], p.new_full((), -1.0).expand(*labels.shape, 1))
        return p.mul_(dy[..., None]).to(logits.dtype), None


def softmax_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(logits)[labels] of each row: logits [..., K] of any float, labels [...] -> float32 [...].

    Computed in float32 from halves. The gradient is of the logits' dtype.
    """
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"softmax_cross_entropy: labels: expected {list(logits.shape[:-1])}, got {list(labels.shape)}")
    return _CrossEntropy.apply(logits, labels.long())


class _Embedding(torch.autograd.Function):
    """The gradient is summed in float32, the rows of one index always in the same order."""

    @staticmethod
    def forward(ctx: Any, emb: Tensor, idx: Tensor) -> Tensor:
        ctx.rows = emb.shape[0]
        ctx.save_for_backward(idx)
        return torch.nn.functional.embedding(idx, emb)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (idx,) = ctx.saved_tensors
        wide = dy.float().contiguous()
        if (
            dy.is_cuda
        ):  # sorts the indices; embedding_dense_backward gave other sums in other runs (an H200, torch 2.11)
            grad = wide.new_zeros(ctx.rows, dy.shape[-1]).index_put_((idx,), wide, accumulate=True)
        else:  # a thread owns rows; index_put_ adds atomically here
            grad = torch.ops.aten.embedding_dense_backward(wide, idx, ctx.rows, -1, False)
        return grad.to(dy.dtype), None


def embedding_lookup(emb: Tensor, idx: Tensor) -> Tensor:
    """Rows of emb [C, K] at idx [...], integers -> [..., K]. The gradient is the same in every run."""
    return _Embedding.apply(emb, idx)


def fancy_gather(x: Tensor, idx: Tensor) -> Tensor:
    """x [*I, J, ...] at idx [*I], indices along J -> [*I, ...]; negative ones read the first."""
    if x.dim() <= idx.dim() or x.shape[: idx.dim()] != idx.shape:
        raise ValueError(f"fancy_gather: idx: expected the first sizes of x {list(x.shape)}, got {list(idx.shape)}")
    at = idx.long().clamp(min=0).reshape(*idx.shape, *[1] * (x.dim() - idx.dim()))
    return x.gather(idx.dim(), at.expand(*idx.shape, 1, *x.shape[idx.dim() + 1 :])).squeeze(idx.dim())


def reduce_max(x: Tensor, axis: int, keepdims: bool = False) -> Tensor:
    """The largest along one axis; the gradient goes to one of them."""
    return x.max(axis, keepdims).values


def transpose_2d(x: Tensor) -> Tensor:
    """[A, B] -> [B, A], in memory, too."""
    return x.t().contiguous()


def transpose_0213(x: Tensor) -> Tensor:
    """[A, B, C, D] -> [A, C, B, D], in memory, too."""
    return x.permute(0, 2, 1, 3).contiguous()
