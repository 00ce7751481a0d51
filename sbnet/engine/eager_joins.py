"""Channels of maps joined inside `sbnet.masked`: active blocks are copied, and those who read a map that others read,
too, add up its gradient among themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sbnet.engine.eager_passes import Plane, first_derivatives, like

_ops = torch.ops.sbnet
WORD = 16  # bytes that are copied at once


def joins(tensors: Any) -> bool:
    """Are they maps of one kind, in whole words of channels?"""
    first = tensors[0]
    return all(
        t.dtype == first.dtype and t.shape[::2] == first.shape[::2] and t.shape[3] == first.shape[3]
        and t.shape[1] * t.element_size() % WORD == 0
        for t in tensors
    )  # fmt: skip


class Cat(torch.autograd.Function):
    """torch.cat of channels, of open maps into one."""

    @staticmethod
    def forward(ctx: Any, plane: Plane, *tensors: Tensor) -> Tensor:
        ctx.joined, ctx.reads = False, [None] * len(tensors)  # Readers of the tensors, and which of them this is
        ctx.channels = [t.shape[1] for t in tensors]
        first = tensors[0]
        out = like(first, (first.shape[0], sum(ctx.channels), *first.shape[2:]))
        indices, count, _, grid = plane.lists()
        for t, part in zip(tensors, out.split(ctx.channels, 1), strict=True):
            _ops.sparse_pointwise_(
                t, None, None, None, None, indices, count, grid, "", part, *plane.edge(1)
            )  # fmt: skip
        return out

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        parts: list[Tensor | None] = list(grad.split(ctx.channels, 1))
        for k, read in enumerate(ctx.reads):
            if read is not None:
                readers, own = read
                parts[k] = readers.give(parts[k], readers.take(own))
        return None, *parts
