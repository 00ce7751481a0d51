"""Resizes inside `sbnet.masked`: they read and write active blocks, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.engine.eager_chains import note_clean
from sbnet.engine.eager_passes import Plane, first_derivatives, like
from sbnet.ops.common import is_channels_last

_ops = torch.ops.sbnet
How = tuple[str, bool, float, float]  # mode, align_corners, ratios: as the op takes them


def reach_within(how: How, plane: Plane, x_plane: Plane, size: Sequence[int], x_size: Sequence[int]) -> int | None:
    """By how many pixels an active block of the result may reach beside x's active blocks; None: not known.

    It is where every block of the result lies within one of x's, which then is active too.
    """
    mode, _, *ratios = how
    for d in range(2):
        scale, own, other = size[d] // x_size[d], plane.active.grid.bsize[d], x_plane.active.grid.bsize[d]
        if size[d] != scale * x_size[d] or other * scale % own or ratios[d] not in (0.0, 1 / scale):
            return None
    return {"bilinear": 1, "bicubic": 2}.get(mode, 0)


class Resize(torch.autograd.Function):
    """sparse_resize2d of an open map. ring: pixels around the gradient of x that are wanted to be 0."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plane: Plane, x_plane: Plane, size: Sequence[int], how: How, ring: int
    ) -> Tensor:  # fmt: skip
        indices, count, _, grid = plane.lists()
        out = like(x, (*x.shape[:2], *size))
        _ops.sparse_resize2d_(x, indices, count, grid, *how, out, *plane.edge(1))
        ctx.of, ctx.shape = (plane, x_plane, how, ring), x.shape
        ctx.joined, ctx.read = False, None  # Readers of x, and which of them this is
        ctx.form = torch.channels_last if is_channels_last(x) else torch.contiguous_format
        return out

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        plane, x_plane, how, ring = ctx.of
        (_, _, block_map, grid), (indices, count, _, x_grid) = plane.lists(), x_plane.lists()
        taken = None if ctx.read is None else ctx.read[0].take(ctx.read[1])
        found = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=ctx.form)
        _ops.sparse_resize2d_grad_(
            grad, block_map, grid, *how, indices, count, x_grid, found, *x_plane.edge(ring)
        )  # fmt: skip
        note_clean(found, ring)
        return found if ctx.read is None else ctx.read[0].give(found, taken), *[None] * 5
