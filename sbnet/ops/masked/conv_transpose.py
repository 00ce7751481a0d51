"""Block-sparse transposed 2-D convolution: act(conv_transpose2d(x, weight) + bias + residual) on active blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks, Fringe
from sbnet.geometry import conv_transpose_output_size
from sbnet.ops.common import empty4, is_channels_last, mark_written, refuse_meta_mix, require_tensor
from sbnet.ops.masked.conv import activation_name, autocast, channel_slopes
from sbnet.ops.masked.conv_grad import before_activation, masked_gradient, weight_gradient, writing_lists
from sbnet.ops.masked.layer import in_place_fake, input_list, layer_inputs, layer_output, pairs

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

    >>> active = reduce_mask(mask, BlockGrid.cover(conv_transpose_output_size((50, 88), 2, 2), 16))
    >>> y = sparse_conv_transpose2d(x, weight, bias, active, stride=2)  # weight [C,K,2,2]
    """
    op = "sparse_conv_transpose2d"
    x, weight, residual = autocast(x, weight, residual)
    lists = _arguments(op, x, weight, active)
    slope = channel_slopes(op, slope, weight.shape[1] * groups)
    return _ops.sparse_conv_transpose2d(
        x, weight, bias, residual, *lists[:2], active.block_map, lists[2],
        *pairs(op, stride=stride, padding=padding, output_padding=output_padding, dilation=dilation),
        groups, activation_name(op, activation), negative_slope, allow_tf32, slope, *input_list(op, x, x_active),
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
    """
    op = "sparse_conv_transpose2d_"
    lists, edge = _arguments(op, x, weight, active), layer_output(op, out, fringe, x, weight, bias, residual, slope)
    slope = channel_slopes(op, slope, weight.shape[1] * groups)
    _ops.sparse_conv_transpose2d_(
        x, weight, bias, residual, *lists,
        *pairs(op, stride=stride, padding=padding, output_padding=output_padding, dilation=dilation),
        groups, activation_name(op, activation), negative_slope, allow_tf32, *edge, slope,
    )  # fmt: skip
    mark_written(out)


def _arguments(op: str, x: Tensor, weight: Tensor, active: ActiveBlocks) -> tuple[Tensor, Tensor, list[int]]:
    lists = layer_inputs(op, x, active)
    require_tensor(op, "weight", weight)
    return lists


# ---- fake implementations and gradients


@torch.library.register_fake("sbnet::sparse_conv_transpose2d")
def _sparse_conv_transpose2d_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    indices: Tensor,
    count: Tensor,
    block_map: Tensor,
    grid: list[int],
    stride: list[int],
    padding: list[int],
    output_padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str,
    activation_param: float,
    allow_tf32: bool,
    slope: Tensor | None = None,
    x_indices: Tensor | None = None,
    x_count: Tensor | None = None,
    x_map: Tensor | None = None,
    x_grid: Sequence[int] = (),
) -> Tensor:
    refuse_meta_mix("sparse_conv_transpose2d", x, weight, bias, residual, indices, count, block_map, slope)
    torch._check(
        groups >= 1 and weight.shape[0] == x.shape[1] and x.shape[1] % groups == 0,
        lambda: (
            f"sbnet::sparse_conv_transpose2d: weight: expected the {x.shape[1]} "
            f"channels of x, got {tuple(weight.shape)} in {groups} groups"
        ),
    )
    size = conv_transpose_output_size(x.shape[2:], weight.shape[2:], stride, padding, output_padding, dilation)
    return empty4(x, (x.shape[0], weight.shape[1] * groups, *size), is_channels_last(x))


in_place_fake("sparse_conv_transpose2d_")


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, bias, residual, *lists = inputs[:7]
    grid, *ctx.window, ctx.groups, ctx.activation, ctx.param, ctx.tf32, slope = inputs[7:17]
    ctx.grids = grid, inputs[20] if len(inputs) > 20 else []
    x_lists = inputs[17:20] if len(inputs) > 20 else (None, None, None)
    told = ctx.activation in ("relu", "relu6", "leaky_relu") and slope is None
    ctx.save_for_backward(x, weight, bias, residual, *lists, slope, *x_lists, output if told else None)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    """On lists: the activation's; a convolution of the gradient; the weight's gradient with the two sides exchanged."""
    x, weight, bias, residual, *lists, slope, x_indices, x_count, x_map, y = ctx.saved_tensors
    grid, x_grid = ctx.grids
    lists = [*lists, grid]
    stride, padding, output_padding, dilation = ctx.window
    window, groups, tf32, grad_slope = (stride, padding, dilation), ctx.groups, ctx.tf32, None
    if ctx.activation == "none":
        given = masked_gradient(grad, lists[2], grid)
    else:

        def again() -> Tensor:
            return _ops.sparse_conv_transpose2d(
                x, weight, bias, residual, *lists, stride, padding, output_padding, dilation, groups, "none", 0.0, tf32
            )

        want_slope = slope is not None and slope.requires_grad
        given, grad_slope = before_activation(
            ctx.activation, ctx.param, slope, False, y, again, grad, lists, want_slope
        )
    need_x, need_weight, need_bias, need_residual = ctx.needs_input_grad[:4]
    grad_x = grad_weight = grad_bias = None
    if need_x or need_weight:
        if x_indices is None:
            x_lists = writing_lists(lists, weight.shape[2:], window, x.shape[2:], grad.shape[2:])
        else:
            x_lists = [x_indices, x_count, x_map, x_grid]
        if need_x:
            grad_x = _ops.sparse_conv2d(given, weight, None, None, *x_lists, *window, groups, "none", 0.0, tf32)
        if need_weight:
            grad_weight, _ = weight_gradient(given, x, x_lists, weight, window, groups, tf32, False)
    if need_bias and bias is not None:
        grad_bias = given.sum((0, 2, 3), dtype=torch.float32).to(bias.dtype)
    grad_residual = given if need_residual and residual is not None else None
    return grad_x, grad_weight, grad_bias, grad_residual, *[None] * 12, grad_slope, *[None] * 4


torch.library.register_autograd("sbnet::sparse_conv_transpose2d", _backward, setup_context=_setup)
