"""Normalisations on active blocks: GroupNorm, InstanceNorm and response norms of the active pixels, and of each pixel's
channels LayerNorm and softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.active import ActiveBlocks, Fringe
from sbnet.ops.common import empty4, is_channels_last, mark_written, refuse_meta_mix, require_tensor
from sbnet.ops.masked.layer import layer_fakes, layer_inputs, layer_output, whole_gradient

_ops = torch.ops.sbnet


def sparse_group_norm(
    x: Tensor,
    active: ActiveBlocks,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.group_norm with the mean and variance of the active pixels, on active blocks; zeros elsewhere.

    Of an image that is active everywhere it equals F.group_norm. Inactive pixels are neither read nor counted. With as
    many groups as channels it is instance normalisation (`sparse_instance_norm`).

    Args:
        x: [N,C,H,W] float32, float16 or bfloat16, any layout; channels_last is the fast one.
        active: active blocks of x's plane.
        num_groups: a divisor of C.
        weight, bias: [C], of x's dtype or both float32; None: 1 and 0.
        eps: added to the variance.

    Returns:
        [N,C,H,W] in x's memory format. Differentiable with respect to x, weight and bias.

    Raises:
        RuntimeError, ValueError, TypeError: wrong shapes, dtypes, devices, grid or groups.

    Source: Wu and He, Group Normalization (2018).

    >>> norm = torch.nn.GroupNorm(4, 16)
    >>> y = sbnet.sparse_group_norm(x, active, 4, norm.weight, norm.bias)
    """
    return _functional("sparse_group_norm", x, active, weight, bias, "group", num_groups, eps)


def sparse_group_norm_(
    x: Tensor,
    active: ActiveBlocks,
    out: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    fringe: Fringe | None = None,
) -> None:
    """As `sparse_group_norm`, writing the active blocks of `out`, zeroing the pixels of `fringe` and leaving the rest.

    Args:
        out: [N,C,H,W] of x's dtype, any layout; must not share memory with x.
        fringe: from `sbnet.fringe`, or None.

    >>> sbnet.sparse_group_norm_(x, active, torch.empty_like(x), 4)
    """
    _in_place("sparse_group_norm_", x, active, out, weight, bias, "group", num_groups, eps, fringe)


def sparse_instance_norm(
    x: Tensor, active: ActiveBlocks, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """F.instance_norm with the mean and variance of each image's active pixels: `sparse_group_norm` of C groups.

    >>> y = sbnet.sparse_instance_norm(x, active)
    """
    require_tensor("sparse_instance_norm", "x", x)
    return _functional("sparse_instance_norm", x, active, weight, bias, "group", x.shape[1], eps)


def sparse_response_norm(
    x: Tensor, active: ActiveBlocks, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """The global response norm of ConvNeXtV2, over the active pixels of an image, on active blocks; zeros elsewhere.

    With G [N,C,1,1], the root of the sum of squares of each channel, y = x + weight * x * G / (G.mean(1) + eps) + bias.
    Arguments, result and errors are those of `sparse_group_norm`, but that eps is above 0.

    Source: Woo et al., ConvNeXt V2 (2023).

    >>> y = sbnet.sparse_response_norm(x, active, torch.ones(16), torch.zeros(16))
    """
    return _functional("sparse_response_norm", x, active, weight, bias, "response", 1, eps)


def sparse_response_norm_(
    x: Tensor,
    active: ActiveBlocks,
    out: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    fringe: Fringe | None = None,
) -> None:
    """As `sparse_response_norm`, into `out` and `fringe` as `sparse_group_norm_`.

    >>> sbnet.sparse_response_norm_(x, active, torch.empty_like(x))
    """
    _in_place("sparse_response_norm_", x, active, out, weight, bias, "response", 1, eps, fringe)


def sparse_layer_norm2d(
    x: Tensor, active: ActiveBlocks, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """F.layer_norm over the channels of each pixel, on active blocks; zeros elsewhere.

    Arguments, result and errors are those of `sparse_group_norm`.

    >>> norm = torch.nn.LayerNorm(16, eps=1e-6)
    >>> y = sbnet.sparse_layer_norm2d(x, active, norm.weight, norm.bias, norm.eps)  # as ConvNeXt has it
    """
    return _functional("sparse_layer_norm2d", x, active, weight, bias, "layer", 1, eps)


def sparse_layer_norm2d_(
    x: Tensor,
    active: ActiveBlocks,
    out: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    fringe: Fringe | None = None,
) -> None:
    """As `sparse_layer_norm2d`, into `out` and `fringe` as `sparse_group_norm_`.

    >>> sbnet.sparse_layer_norm2d_(x, active, torch.empty_like(x))
    """
    _in_place("sparse_layer_norm2d_", x, active, out, weight, bias, "layer", 1, eps, fringe)


def sparse_softmax2d(x: Tensor, active: ActiveBlocks, *, log: bool = False) -> Tensor:
    """F.softmax(x, 1), or F.log_softmax, on active blocks; zeros elsewhere.

    Arguments, result and errors are those of `sparse_group_norm`.

    >>> classes = sbnet.sparse_softmax2d(x, active)
    >>> bool((classes.sum(1, keepdim=True)[active.pixel_mask((48, 80))] - 1).abs().max() < 1e-5)
    True
    """
    return _functional("sparse_softmax2d", x, active, None, None, "log_softmax" if log else "softmax", 1, 0.0)


def sparse_softmax2d_(
    x: Tensor, active: ActiveBlocks, out: Tensor, *, log: bool = False, fringe: Fringe | None = None
) -> None:
    """As `sparse_softmax2d`, into `out` and `fringe` as `sparse_group_norm_`.

    >>> sbnet.sparse_softmax2d_(x, active, torch.empty_like(x))
    """
    method = "log_softmax" if log else "softmax"
    _in_place("sparse_softmax2d_", x, active, out, None, None, method, 1, 0.0, fringe)


def _functional(
    op: str, x: Tensor, active: ActiveBlocks, weight: Tensor | None, bias: Tensor | None, *how: Any
) -> Tensor:
    *lists, grid = layer_inputs(op, x, active)
    _check(op, *how)
    return _ops.sparse_norm2d(x, weight, bias, *lists, active.block_map, grid, *how)


def _in_place(
    op: str, x: Tensor, active: ActiveBlocks, out: Tensor, weight: Tensor | None, bias: Tensor | None,
    method: str, groups: int, eps: float, fringe: Fringe | None,
) -> None:  # fmt: skip
    *lists, grid = layer_inputs(op, x, active)
    edge = layer_output(op, out, fringe, x, weight, bias)
    _check(op, method, groups, eps)
    _ops.sparse_norm2d_(x, weight, bias, *lists, active.block_map, grid, method, groups, eps, *edge)
    mark_written(out)


def _check(op: str, method: str, groups: int, eps: float) -> None:
    if isinstance(groups, bool) or not isinstance(groups, (int, torch.SymInt)):
        raise TypeError(f"sbnet::{op}: num_groups: expected an int, got {groups!r}")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"sbnet::{op}: eps: expected a number, got {eps!r}")


def norm_whole(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, inside: Tensor, method: str, groups: int, eps: float
) -> Tensor:
    """What `sparse_norm2d` gives, by PyTorch; `inside` [N,1,H,W] bool: active pixels."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    zero = torch.zeros((), dtype=dtype, device=x.device)
    values = torch.where(inside, x.to(dtype), zero)  # what lies outside may be anything, NaN too
    weight, bias = (None if t is None else t.to(dtype) for t in (weight, bias))
    if method == "layer":
        y = F.layer_norm(values.permute(0, 2, 3, 1), x.shape[1:2], weight, bias, eps).permute(0, 3, 1, 2)
    elif method == "group":
        parts, mask = values.unflatten(1, (groups, -1)), inside[:, None]
        count = (inside.sum((1, 2, 3)) * (x.shape[1] // groups)).clamp(min=1).to(dtype).view(-1, 1, 1, 1, 1)
        mean = parts.sum((2, 3, 4), keepdim=True) / count
        apart = torch.where(mask, parts - mean, zero)
        variance = apart.square().sum((2, 3, 4), keepdim=True) / count
        y = (apart * torch.rsqrt(variance + eps)).flatten(1, 2)
        y = y if weight is None else y * weight[:, None, None]
        y = y if bias is None else y + bias[:, None, None]
    elif method == "response":
        # A root's gradient at 0 is none: that of no pixels, and of such as are all 0, is 0.
        square = values.square().sum((2, 3), keepdim=True)
        size = torch.where(square > 0, torch.where(square > 0, square, 1).sqrt(), zero)
        shares = values * (size / (size.mean(1, keepdim=True) + eps))
        shares = shares if weight is None else shares * weight[:, None, None]
        y = values + shares if bias is None else values + shares + bias[:, None, None]
    else:
        y = F.softmax(values, 1) if method == "softmax" else F.log_softmax(values, 1)
    return torch.where(inside, y, zero).to(x.dtype)


layer_fakes("sparse_norm2d")


def _on_blocks(ctx: Any, grad: Tensor, saved: Sequence[Any], block_map: Tensor, lists: Sequence[Tensor]) -> Any:
    """The gradient of a norm, by an op of its own."""
    x, weight, bias = saved
    method, groups, eps = ctx.numbers
    if "softmax" in method or (method == "layer" and x.shape[1] > MOST_CHANNELS) or torch.is_grad_enabled():
        return None
    given, params = _ops.sparse_norm2d_backward(grad, x, weight, *lists, block_map, ctx.grid, method, groups, eps)
    of_params = (None if t is None else row.to(t.dtype) for t, row in zip((weight, bias), params, strict=True))
    return given, *of_params


MOST_CHANNELS = 2048  # of the op, of layer norms
whole_gradient("sparse_norm2d", norm_whole, _on_blocks)


@torch.library.register_fake("sbnet::sparse_norm2d_backward")
def _backward_fake(
    grad: Tensor, x: Tensor, weight: Tensor | None, indices: Tensor, count: Tensor, block_map: Tensor,
    grid: list[int], method: str, groups: int, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    refuse_meta_mix("sparse_norm2d_backward", grad, x, weight, indices, count, block_map)
    return empty4(x, x.shape, is_channels_last(x)), _params_fake(x)


@torch.library.register_fake("sbnet::sparse_norm2d_backward_")
def _backward_in_place_fake(grad: Tensor, x: Tensor, *others: Any) -> Tensor:
    refuse_meta_mix("sparse_norm2d_backward_", grad, x, *others)
    return _params_fake(x)


def _params_fake(x: Tensor) -> Tensor:
    return x.new_empty((2, x.shape[1]), dtype=torch.float32)
