"""blocksparse.embed: rows of a table, with a gradient that is the same in every run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


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


def embedding_lookup(emb: Tensor, idx: Tensor, sort_grad: bool = True, bench: int = 0, use_tf: bool = False) -> Tensor:
    """Rows of emb [C, K] at idx [...], integers -> [..., K]. The gradient is the same in every run."""
    return _Embedding.apply(emb, idx)
