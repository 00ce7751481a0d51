"""Block-sparse transposed 2-D convolution: act(conv_transpose2d(x, weight) + bias + residual) on active blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks, Fringe
from sbnet.geometry import conv_transpose_output_size
from sbnet.ops.common import mark_written, require_tensor
from sbnet.ops.masked.conv import activation_name, autocast, channel_slopes
from sbnet.ops.masked.conv_grad import NO_LIST, before_activation, conv, masked_gradient, weight_gradient, writing_lists
from sbnet.ops.masked.layer import input_list, layer_fakes, layer_inputs, layer_output, pairs, require_channels

_ops = torch.ops.sbnet


def sparse_conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    active: ActiveBlocks,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    activation: str | None = None,
    negative_slope: float = 0.01,
    residual: Tensor | None = None,
    allow_tf32: bool = False,
    slope: Tensor | None = None,
    x_active: ActiveBlocks | None = None,
) -> Tensor:
    """Transposed convolution ("deconvolution") computed on active blocks of the OUTPUT plane only; zeros elsewhere.

    Equals where(active, act(F.conv_transpose2d(x, weight, bias, ...) + residual), 0). x is read as it is. Where the
    strides divide the block sizes it is a convolution of stride 1 for each phase of the output, which multiplies no
    zeros; elsewhere a slow form serves. Under torch.autocast it casts what F.conv_transpose2d would cast.

    Args:
        x: [N,C,H,W] float32, float16 or bfloat16, any layout; channels_last is the fast one.
        weight: [C,K/groups,R,S] of x's dtype.
        bias: [K] of x's dtype or float32, or None.
        active: active blocks of the output plane (the tiling grid of `sbnet.conv_transpose_output_size`).
        stride, padding, output_padding, dilation, groups: as in F.conv_transpose2d.
        activation, negative_slope, slope, residual, allow_tf32, x_active: as in `sparse_conv2d`.

    Returns:
        [N,K,H_out,W_out] in x's memory format. Differentiable with respect to x, weight, bias, residual and
        slope.

    Raises:
        RuntimeError, ValueError, TypeError: wrong shapes, dtypes, devices or grid.

    >>> small = torch.rand(1, 16, 24, 40)
    >>> y = sbnet.sparse_conv_transpose2d(small, torch.randn(16, 8, 2, 2), None, active, stride=2)
    >>> y.shape
    torch.Size([1, 8, 48, 80])
    """
    op = "sparse_conv_transpose2d"
    x, weight, residual = autocast(x, weight, residual)
    lists = _arguments(op, x, weight, active)
    slope = channel_slopes(op, slope, weight.shape[1] * groups)
    return _ops.sparse_conv_transpose2d(
        x, weight, bias, residual, slope, *lists[:2], active.block_map, lists[2],
        *pairs(op, stride=stride, padding=padding, output_padding=output_padding, dilation=dilation),
        groups, activation_name(op, activation), negative_slope, allow_tf32, *input_list(op, x, x_active),
    )  # fmt: skip


def sparse_conv_transpose2d_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    active: ActiveBlocks,
    out: Tensor,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    activation: str | None = None,
    negative_slope: float = 0.01,
    residual: Tensor | None = None,
    fringe: Fringe | None = None,
    allow_tf32: bool = False,
    slope: Tensor | None = None,
) -> None:
    """As `sparse_conv_transpose2d`, writing the active blocks of `out`, zeroing the fringe's pixels, leaving the rest.

    Args:
        out: [N,K,H_out,W_out] of x's dtype, any layout; must not share memory with x. `residual` may be `out` itself.
        fringe: from `sbnet.fringe`, or None.

    >>> small, out = torch.rand(1, 16, 24, 40), torch.empty(1, 8, 48, 80)
    >>> sbnet.sparse_conv_transpose2d_(small, torch.randn(16, 8, 2, 2), None, active, out, stride=2)
    """
    op = "sparse_conv_transpose2d_"
    lists, edge = _arguments(op, x, weight, active), layer_output(op, out, fringe, x, weight, bias, residual, slope)
    slope = channel_slopes(op, slope, weight.shape[1] * groups)
    _ops.sparse_conv_transpose2d_(
        x, weight, bias, residual, slope, *lists,
        *pairs(op, stride=stride, padding=padding, output_padding=output_padding, dilation=dilation),
        groups, activation_name(op, activation), negative_slope, allow_tf32, *edge,
    )  # fmt: skip
    mark_written(out)


def _arguments(op: str, x: Tensor, weight: Tensor, active: ActiveBlocks) -> tuple[Tensor, Tensor, list[int]]:
    lists = layer_inputs(op, x, active)
    require_tensor(op, "weight", weight)
    return lists


# ---- fake implementations and gradients


def _shape(
    x: Sequence[Any], weight: Sequence[Any], stride: Any, padding: Any, output_padding: Any, dilation: Any,
    groups: Any, *_: Any,
) -> Sequence[Any]:  # fmt: skip
    require_channels("sparse_conv_transpose2d", x, weight, groups, 0)
    size = conv_transpose_output_size(x[2:], weight[2:], stride, padding, output_padding, dilation)
    return x[0], weight[1] * groups, *size


layer_fakes("sparse_conv_transpose2d", _shape)


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, bias, residual, slope, *lists = inputs[:8]
    grid, *ctx.window, ctx.groups, ctx.activation, ctx.param, ctx.tf32 = inputs[8:17]
    *x_lists, x_grid = inputs[17:]
    ctx.grids = grid, x_grid
    told = ctx.activation in ("relu", "relu6", "leaky_relu") and slope is None
    ctx.save_for_backward(x, weight, bias, residual, *lists, slope, *x_lists, output if told else None)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    """On lists: the activation's; a convolution of the gradient; the weight's gradient with the two sides exchanged."""
    x, weight, bias, residual, *lists, slope, x_indices, x_count, x_map, y = ctx.saved_tensors
    grid, x_grid = ctx.grids
    lists = [*lists, grid]
    need_x, need_weight, need_bias, need_residual, need_slope = ctx.needs_input_grad[:5]
    stride, padding, _, dilation = ctx.window
    window, groups, tf32, grad_slope = (stride, padding, dilation), ctx.groups, ctx.tf32, None
    if ctx.activation == "none":
        given = masked_gradient(grad, lists[2], grid)
    else:

        def again() -> Tensor:
            return _ops.sparse_conv_transpose2d(
                x, weight, bias, residual, None, *lists, *ctx.window, groups, "none", 0.0, tf32, *NO_LIST
            )

        given, grad_slope = before_activation(
            ctx.activation, ctx.param, slope, False, y, again, grad, lists, need_slope
        )
    grad_x = grad_weight = grad_bias = None
    if need_x or need_weight:
        if x_indices is None:
            x_lists = writing_lists(lists, weight.shape[2:], window, x.shape[2:], grad.shape[2:])
        else:
            x_lists = [x_indices, x_count, x_map, x_grid]
        if need_x:
            grad_x = conv(given, weight, None, None, x_lists, window, groups, tf32)
        if need_weight:
            grad_weight, _ = weight_gradient(given, x, x_lists, weight, window, groups, tf32, False)
    if need_bias and bias is not None:
        grad_bias = given.sum((0, 2, 3), dtype=torch.float32).to(bias.dtype)
    grad_residual = given if need_residual and residual is not None else None
    return grad_x, grad_weight, grad_bias, grad_residual, grad_slope, *[None] * 16


torch.library.register_autograd("sbnet::sparse_conv_transpose2d", _backward, setup_context=_setup)
