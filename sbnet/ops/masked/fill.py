"""sparse_fill: give a tensor a defined value outside the active blocks of the layer that wrote it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks
from sbnet.ops.common import (
    check_active,
    mark_written,
    refuse_gradient,
    refuse_meta_mix,
    require_active,
    require_tensor,
)
from sbnet.ops.masked.layer import in_place_fake

_ops = torch.ops.sbnet


def sparse_fill(x: Tensor, active: ActiveBlocks, value: float = 0.0) -> Tensor:
    """where(active, x, value).

    Args:
        x: [N,C,H,W] float32, float16 or bfloat16, any layout. Outside the active blocks it is not read.
        active: blocks to keep (the tiling grid of H x W).
        value: what all other pixels become.

    Returns:
        [N,C,H,W] like x. Differentiable with respect to x.

    >>> out = torch.empty_like(x)
    >>> sbnet.sparse_conv2d_(x, weight, bias, active, out, padding=1)  # undefined outside the active blocks
    >>> y = sbnet.sparse_fill(out, active)
    """
    arguments = _arguments("sparse_fill", x, active)
    return _ops.sparse_fill(*arguments, value)


def sparse_fill_(x: Tensor, active: ActiveBlocks, value: float = 0.0) -> Tensor:
    """`sparse_fill` in place: writes the pixels outside the active blocks of x, and returns x. Records no gradient.

    >>> sbnet.sparse_fill_(x.clone(), active, -1.0)[0, 0, 0, 0]
    tensor(-1.)
    """
    arguments = _arguments("sparse_fill_", x, active)
    refuse_gradient("sparse_fill_", "sparse_fill", x)
    _ops.sparse_fill_(*arguments, value)
    mark_written(x)
    return x


def _arguments(op: str, x: Tensor, active: ActiveBlocks) -> tuple[Tensor, Tensor, list[int]]:
    require_tensor(op, "x", x)
    require_active(op, active)
    check_active(op, active)
    return x, active.block_map, active.grid.numbers()


@torch.library.register_fake("sbnet::sparse_fill")
def _sparse_fill_fake(x: Tensor, block_map: Tensor, grid: list[int], value: float) -> Tensor:
    refuse_meta_mix("sparse_fill", x, block_map)
    return torch.empty_like(x)


in_place_fake("sparse_fill_")


def _sparse_fill_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, block_map, ctx.grid, _ = inputs
    ctx.save_for_backward(block_map)


def _sparse_fill_backward(ctx: Any, grad: Tensor) -> tuple:
    return _ops.sparse_fill(grad, *ctx.saved_tensors, ctx.grid, 0.0), None, None, None


torch.library.register_autograd("sbnet::sparse_fill", _sparse_fill_backward, setup_context=_sparse_fill_setup)
