"""Batch normalisation whose statistics are those of a batch's active pixels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks
from sbnet.ops.common import empty4, is_channels_last, pixels_of, refuse_meta_mix
from sbnet.ops.masked.layer import in_place_fake, layer_inputs

_ops = torch.ops.sbnet


def batch_norm2d(
    x: Tensor, active: ActiveBlocks, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """F.batch_norm in training mode, with the mean and variance of all active pixels; zeros elsewhere.

    Args:
        x: [N,C,H,W] float32, float16 or bfloat16, any layout. Outside the active blocks it is not read.
        active: active blocks of x's plane.
        weight, bias: [C] of x's dtype or float32, or None: 1, 0.
        eps: added to the variance, which is divided by the number of pixels.

    Returns:
        y like x, differentiable with respect to x, weight and bias; and [2 C + 1] float32 without a gradient: mean and
        variance of each channel, and how many pixels are active.
    """
    *lists, grid = layer_inputs("sparse_batch_norm2d", x, active)
    return _ops.sparse_batch_norm2d(x, weight, bias, *lists, active.block_map, grid, eps)


def follow_(running_mean: Tensor, running_var: Tensor, statistics: Tensor, momentum: float) -> None:
    """Moves running statistics [C] float32 towards those of a batch, as nn.BatchNorm2d does in training."""
    _ops.batch_norm_follow_(running_mean, running_var, statistics.detach(), momentum)


def synchronized_batch_norm2d(
    x: Tensor, active: ActiveBlocks, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """The same with the statistics of the active pixels of all processes of torch.distributed's default group.

    By ops of PyTorch on whole planes and two sums over the processes. Every process must call it.
    """
    from torch.distributed.nn.functional import all_reduce

    dtype = torch.promote_types(x.dtype, torch.float32)
    inside = active.pixel_mask(x.shape[2:])
    values = torch.where(inside, x.to(dtype), 0.0)  # what lies outside may be anything, NaN too
    first = all_reduce(torch.cat([values.sum((0, 2, 3)), inside.sum().to(dtype)[None]]))
    pixels = first[-1].detach()
    some = pixels.clamp(min=1)
    mean = first[:-1] / some
    apart = torch.where(inside, values - mean[:, None, None], 0.0)
    variance = all_reduce(apart.square().sum((0, 2, 3))) / some
    scale = torch.rsqrt(variance + eps)
    y = apart * (scale if weight is None else scale * weight.to(dtype))[:, None, None]
    if bias is not None:
        y = torch.where(inside, y + bias.to(dtype)[:, None, None], 0.0)
    return y.to(x.dtype), torch.cat([mean, variance, pixels[None]]).detach().float()


@torch.library.register_fake("sbnet::sparse_batch_norm2d")
def _fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, indices: Tensor, count: Tensor, block_map: Tensor,
    grid: list[int], eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    refuse_meta_mix("sparse_batch_norm2d", x, weight, bias, indices, count, block_map)
    return empty4(x, x.shape, is_channels_last(x)), x.new_empty(2 * x.shape[1] + 1, dtype=torch.float32)


@torch.library.register_fake("sbnet::sparse_batch_norm2d_backward")
def _backward_fake(
    grad: Tensor, x: Tensor, weight: Tensor | None, statistics: Tensor, indices: Tensor, count: Tensor,
    block_map: Tensor, grid: list[int], eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    refuse_meta_mix("sparse_batch_norm2d_backward", grad, x, weight, statistics, indices, count, block_map)
    return empty4(x, x.shape, is_channels_last(x)), x.new_empty((2, x.shape[1]), dtype=torch.float32)


@torch.library.register_fake("sbnet::sparse_batch_norm2d_")
def _in_place_fake(x: Tensor, *more: Any) -> Tensor:
    refuse_meta_mix("sparse_batch_norm2d_", x, *more)
    return x.new_empty(2 * x.shape[1] + 1, dtype=torch.float32)


@torch.library.register_fake("sbnet::sparse_batch_norm2d_backward_")
def _backward_in_place_fake(grad: Tensor, x: Tensor, *more: Any) -> Tensor:
    refuse_meta_mix("sparse_batch_norm2d_backward_", grad, x, *more)
    return x.new_empty((2, x.shape[1]), dtype=torch.float32)


in_place_fake("batch_norm_follow_")


def _setup(ctx: Any, inputs: tuple, output: Any) -> None:
    x, weight, bias, indices, count, block_map, ctx.grid, ctx.eps = inputs
    ctx.save_for_backward(x, weight, bias, indices, count, block_map, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple:
    x, weight, bias, indices, count, block_map, statistics = ctx.saved_tensors
    grad_x, params = _ops.sparse_batch_norm2d_backward(
        grad, x, weight, statistics, indices, count, block_map, ctx.grid, ctx.eps
    )
    grad_weight = None if weight is None else params[0].to(weight.dtype)
    grad_bias = None if bias is None else params[1].to(bias.dtype)
    return grad_x, grad_weight, grad_bias, *[None] * 5


torch.library.register_autograd("sbnet::sparse_batch_norm2d", _backward, setup_context=_setup)


def batch_norm_whole(x: Tensor, weight: Tensor | None, bias: Tensor | None, inside: Tensor, eps: float) -> Tensor:
    """What `batch_norm2d` gives, by PyTorch; inside [N,1,H,W] bool: active pixels."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    some = inside.sum().to(dtype).clamp(min=1)
    values = torch.where(inside, x.to(dtype), 0.0)  # what lies outside may be anything, NaN too
    mean = values.sum((0, 2, 3), keepdim=True) / some
    apart = torch.where(inside, values - mean, 0.0)
    y = apart * torch.rsqrt(apart.square().sum((0, 2, 3), keepdim=True) / some + eps)
    y = y if weight is None else y * weight.to(dtype)[:, None, None]
    y = y if bias is None else y + bias.to(dtype)[:, None, None]
    return torch.where(inside, y, 0.0).to(x.dtype)


def _second_setup(ctx: Any, inputs: tuple, output: Any) -> None:
    grad, x, weight, _statistics, _indices, _count, block_map, ctx.grid, ctx.eps = inputs
    ctx.save_for_backward(grad, x, weight, block_map)


def _second_backward(ctx: Any, *grads: Tensor) -> tuple:
    """Second derivatives: PyTorch's own, of whole planes."""
    grad, x, weight, block_map = ctx.saved_tensors
    inside = pixels_of(block_map, ctx.grid, x.shape[2:])
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (grad, x, x.new_ones(x.shape[1]) if weight is None else weight)]
        bias = torch.zeros_like(leaves[2]).requires_grad_()
        y = batch_norm_whole(leaves[1], leaves[2], bias, inside, ctx.eps)
        found = torch.autograd.grad(y, (leaves[1], leaves[2], bias), leaves[0], create_graph=True)
        total = (found[0] * grads[0]).sum()
        total = total + (found[1] * grads[1][0]).sum() + (found[2] * grads[1][1]).sum()
        of_grad, of_x, of_weight = torch.autograd.grad(total, leaves, allow_unused=True)
    return of_grad, of_x, None if weight is None else of_weight, *[None] * 6


torch.library.register_autograd("sbnet::sparse_batch_norm2d_backward", _second_backward, setup_context=_second_setup)
