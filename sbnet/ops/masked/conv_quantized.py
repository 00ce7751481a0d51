"""Block-sparse 2-D convolution of int8 (exact sums in 32 bits) or float8, scales and activation in the epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks, Fringe
from sbnet.ops.common import mark_written, require_tensor
from sbnet.ops.masked.conv import activation_name, channel_slopes, conv_shape
from sbnet.ops.masked.layer import layer_fakes, layer_inputs, layer_output, pairs

_ops = torch.ops.sbnet


def sparse_conv2d_quantized(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    active: ActiveBlocks,
    *,
    out_scale: float | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    activation: str | None = None,
    negative_slope: float = 0.01,
    residual: Tensor | None = None,
    residual_scale: float = 1.0,
    x_scale: float | None = None,
    slope: Tensor | None = None,
    dtype: torch.dtype | None = None,
    residual_after: bool = False,
) -> Tensor:
    """Convolution of int8 or float8_e4m3fn on active blocks of the OUTPUT plane only; zeros elsewhere.

    v = act(scale * conv2d(x, weight) + bias + residual_scale * residual), the sums of products exact of int8, in
    float32 of float8. Symmetric quantisation: a tensor of bytes stands for itself times its scale, so `scale` is that
    of x times those of weight. A float f is rounded as ONNX's QuantizeLinear does it: f * (1 / scale), halves to even,
    within -128 ... 127 or -448 ... 448; NaN as 0, as NaN in float8.

    On CPUs float8 is for judging accuracy: all of x and weight is widened to float32 at each call.

    Args:
        x: [N,C,H,W] of the weight's dtype; or of floats with an x_scale, which are rounded as they are read: float32,
            with float8 weights and on GPUs float16 or bfloat16, too. Any layout, channels_last is the fast one.
        weight: [K,C/groups,R,S] int8, of at most 131071 products a sum, or 1024 where groups are of one channel; or
            [K,C,R,S] float8_e4m3fn.
        scale: [K] float32, units of the output that 1 of a sum counts.
        bias: [K] float32, in units of the output, or None.
        active: active blocks of the output plane (the tiling grid of H_out x W_out).
        out_scale: units of the output that 1 of a result in the weight's dtype counts; or None: v itself.
        stride, padding, dilation, groups: as in F.conv2d.
        activation, negative_slope: as in `sparse_conv2d`.
        residual: [N,K,H_out,W_out] of any dtype that x may have, or None.
        residual_scale: units of the output that 1 of residual counts.
        x_scale: units of x that 1 of its form in bytes counts, where x is of floats.
        slope: [K] or [1] float32, of activation="leaky_relu", a number a channel (PReLU) instead of negative_slope; or
            None.
        dtype: without an out_scale, of the result: None or float32, with float8 weights and on GPUs float16 or
            bfloat16, too.
        residual_after: the residual is added to what the activation gives.

    Returns:
        [N,K,H_out,W_out] of weight's dtype, or of floats without an out_scale, in x's memory format. Not
        differentiable.

    Raises:
        RuntimeError, ValueError, TypeError: wrong shapes, dtypes, devices or grid; a scale or bias that requires a
            gradient.

    >>> x8 = (127 * x).to(torch.int8)
    >>> w8, scale = (20 * weight).clamp(-127, 127).to(torch.int8), torch.full((16,), 1 / (127 * 20))
    >>> y = sbnet.sparse_conv2d_quantized(x8, w8, scale, bias, active, out_scale=0.05, padding=1)
    >>> y.dtype
    torch.int8
    """
    op = "sparse_conv2d_quantized"
    common = _arguments(op, x, weight, scale, bias, active, residual, slope)
    floats = x, weight, scale, bias, residual, slope
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in floats):
        raise RuntimeError(f"sbnet::{op}: no gradient is defined, but an input requires one; detach it")
    scale_of_output = _scale(op, "out_scale", out_scale)
    if scale_of_output and dtype is not None:
        raise ValueError(f"sbnet::{op}: dtype: expected None with an out_scale, got {dtype}")
    window = pairs(op, stride=stride, padding=padding, dilation=dilation)
    numbers = *window, groups, activation_name(op, activation), negative_slope, residual_after
    *tensors, grid = common
    scales = _scale(op, "x_scale", x_scale), float(residual_scale)
    if scale_of_output:
        return _ops.sparse_conv2d_quantized(*tensors, active.block_map, grid, *numbers, *scales, scale_of_output)
    return _ops.sparse_conv2d_dequantized(*tensors, active.block_map, grid, *numbers, *scales, dtype)


def sparse_conv2d_quantized_(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    active: ActiveBlocks,
    out: Tensor,
    *,
    out_scale: float | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    activation: str | None = None,
    negative_slope: float = 0.01,
    residual: Tensor | None = None,
    residual_scale: float = 1.0,
    x_scale: float | None = None,
    slope: Tensor | None = None,
    fringe: Fringe | None = None,
    packed: Tensor | None = None,
    residual_after: bool = False,
) -> None:
    """As `sparse_conv2d_quantized`, writing the active blocks of `out`, zeroing the pixels of `fringe`.

    Args:
        out: [N,K,H_out,W_out], of weight's dtype with an out_scale and of floats without, any layout; must not share
            memory with x. `residual` may be `out` itself.
        fringe: from `sbnet.fringe`, or None.
        packed: `pack_conv_weight(weight, groups)`, made since the weight was last written; or None.

    >>> x8 = (127 * x).to(torch.int8)
    >>> w8, scale = (20 * weight).clamp(-127, 127).to(torch.int8), torch.full((16,), 1 / (127 * 20))
    >>> sbnet.sparse_conv2d_quantized_(x8, w8, scale, bias, active, torch.empty_like(x), padding=1)
    """
    op = "sparse_conv2d_quantized_"
    common = _arguments(op, x, weight, scale, bias, active, residual, slope)
    edge = layer_output(op, out, fringe, x, weight, scale, bias, residual, slope)
    window = pairs(op, stride=stride, padding=padding, dilation=dilation)
    scales = _scale(op, "x_scale", x_scale), float(residual_scale), _scale(op, "out_scale", out_scale)
    numbers = *window, groups, activation_name(op, activation), negative_slope, residual_after, *scales
    _ops.sparse_conv2d_quantized_(*common, *numbers, *edge, packed)
    mark_written(out)


def _arguments(
    op: str,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    active: ActiveBlocks,
    residual: Tensor | None,
    slope: Tensor | None,
) -> tuple:
    lists = layer_inputs(op, x, active)
    require_tensor(op, "weight", weight)
    require_tensor(op, "scale", scale)
    return x, weight, scale, bias, residual, channel_slopes(op, slope, weight.shape[0]), *lists


def _scale(op: str, name: str, scale: float | None) -> float:
    """0 stands for a tensor of floats to write, or of bytes to read."""
    if scale is not None and not 0 < scale < float("inf"):
        raise ValueError(f"sbnet::{op}: {name}: expected a positive number or None, got {scale}")
    return scale or 0.0


def _told(*arguments: Any) -> torch.dtype:
    return arguments[-1] or torch.float32


layer_fakes("sparse_conv2d_quantized", partial(conv_shape, "sparse_conv2d_quantized"), lambda *given: given[1].dtype)
layer_fakes("sparse_conv2d_dequantized", partial(conv_shape, "sparse_conv2d_dequantized"), _told, in_place=False)
