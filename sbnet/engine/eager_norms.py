"""Norms inside `sbnet.masked` whose statistics are a pixel's or an image's: they read and write active blocks, forward
and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sbnet.engine.eager_chains import note_clean
from sbnet.engine.eager_passes import Plane, first_derivatives, like
from sbnet.ops.common import is_channels_last
from sbnet.ops.masked.norm import MOST_CHANNELS

_ops = torch.ops.sbnet


def listed(method: str, channels: int) -> bool:
    """Has a norm of so many channels a gradient on lists?"""
    return method != "layer" or channels <= MOST_CHANNELS


class Norm2d(torch.autograd.Function):
    """sparse_norm2d of an open map. ring: pixels around the gradient of x that are wanted to be 0."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, plane: Plane, method: str, groups: int,
        eps: float, ring: int,
    ) -> Tensor:  # fmt: skip
        out = like(x, x.shape)
        ctx.of = plane, (method, groups, eps), ring
        ctx.dtypes = None if weight is None else weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(x.detach(), weight)
        _ops.sparse_norm2d_(x, weight, bias, *plane.lists(), method, groups, eps, out, None, None)
        return out

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        plane, numbers, ring = ctx.of
        if is_channels_last(x) and not is_channels_last(grad):
            grad = grad.contiguous(memory_format=torch.channels_last)
        found = like(x, x.shape)
        params = _ops.sparse_norm2d_backward_(grad, x, weight, *plane.lists(), *numbers, found, *plane.edge(ring))
        note_clean(found, ring)
        of_params = (None if dtype is None else row.to(dtype) for row, dtype in zip(params, ctx.dtypes, strict=True))
        return found, *of_params, *[None] * 5
