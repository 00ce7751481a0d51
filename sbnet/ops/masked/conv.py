"""Block-sparse 2-D convolution: act(conv2d(x, weight) + bias + residual) on the active blocks of the output plane."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks, Fringe
from sbnet.geometry import conv_output_size
from sbnet.ops.common import mark_written, require_tensor
from sbnet.ops.masked.conv_grad import (
    before_activation,
    conv,
    input_gradient,
    masked_gradient,
    read_lists,
    weight_gradient,
)
from sbnet.ops.masked.layer import input_list, layer_fakes, layer_inputs, layer_output, pairs, require_channels
from sbnet.ops.weights.conv_layout import ConvLayout

if TYPE_CHECKING:
    from sbnet.ops.weights.layout import BlockLayout

_ops = torch.ops.sbnet

ACTIVATIONS = ("none", "relu", "relu6", "leaky_relu", "silu", "gelu", "hardswish")


def sparse_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    active: ActiveBlocks,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    activation: str | None = None,
    negative_slope: float = 0.01,
    residual: Tensor | None = None,
    allow_tf32: bool = False,
    layout: BlockLayout | ConvLayout | None = None,
    slope: Tensor | None = None,
    residual_after: bool = False,
    x_active: ActiveBlocks | None = None,
) -> Tensor:
    """Convolution computed on active blocks of the OUTPUT plane only; zeros elsewhere.

    Equals where(active, act(F.conv2d(x, weight, bias, ...) + residual), 0), or act(F.conv2d(x, weight, bias, ...)) +
    residual there with residual_after. x is read as it is: the op knows nothing of masks on x. Under torch.autocast it
    casts what F.conv2d would cast.

    Args:
        x: [N,C,H,W] float32, float16 or bfloat16, any layout; channels_last is the fast one.
        weight: [K,C/groups,R,S] of x's dtype; kept in channels_last memory it is used without a copy.
        bias: [K] of x's dtype or float32, or None.
        active: active blocks of the output plane (the tiling grid of H_out x W_out).
        stride, padding, dilation, groups: as in F.conv2d.
        activation: None, "relu", "relu6", "leaky_relu", "silu", "gelu" (exact) or "hardswish"; NaN passes through.
        negative_slope: of leaky_relu.
        residual: [N,K,H_out,W_out] added before the activation, or after it with residual_after; or None.
        allow_tf32: float32 on CUDA may use tf32 tensor cores (10-bit mantissa).
        layout: of block-sparse weights, or None: a `ConvLayout`, weight being the filters of its blocks
            (`blocksparse_conv_active`), or, for a 1x1 convolution of stride 1, a `BlockLayout`, weight [blocks,bs,bs]
            (`blocksparse_conv1x1`). Without residual, groups and slope.
        slope: [K] or [1] of x's dtype or float32, of activation="leaky_relu", a number a channel (PReLU) instead of
            negative_slope; or None.
        residual_after: the residual is added to what the activation gives.
        x_active: active blocks of x's plane, where x is 0 elsewhere: its gradient is wanted in these blocks alone, and
            is 0 elsewhere. None: wherever an active block reads.

    Returns:
        [N,K,H_out,W_out] in x's memory format. Differentiable with respect to x, weight, bias, residual and
        slope.

    Raises:
        RuntimeError, ValueError, TypeError: wrong shapes, dtypes, devices or grid.

    >>> y = sbnet.sparse_conv2d(x, weight, bias, active, padding=1, activation="relu")
    >>> y.shape, bool(y[0, 0, 0, 0] == 0)  # zeros outside the active blocks
    (torch.Size([1, 16, 48, 80]), True)
    """
    op = "sparse_conv2d"
    if isinstance(layout, ConvLayout):
        from sbnet.ops.weights.conv import blocksparse_conv_active

        if residual is not None or slope is not None or groups != 1:
            raise ValueError(
                f"sbnet::{op}: layout: expected a convolution in one group without residual and slope, got "
                f"groups={groups}{'' if residual is None else ', a residual'}{'' if slope is None else ', a slope'}"
            )
        return blocksparse_conv_active(
            x, weight, layout, active, bias, activation,
            stride=stride, padding=padding, dilation=dilation, negative_slope=negative_slope,
        )  # fmt: skip
    if layout is not None:
        from sbnet.ops.weights.conv1x1 import blocksparse_conv1x1

        window = pairs(op, stride=stride, padding=padding, dilation=dilation)
        given = residual is not None or slope is not None
        if given or groups != 1 or window != [[1, 1], [0, 0], [1, 1]]:
            raise ValueError(
                f"sbnet::{op}: layout: expected a 1x1 convolution of stride 1 in one group without residual and slope, "
                f"got stride={stride}, padding={padding}, dilation={dilation}, groups={groups}"
                f"{'' if residual is None else ', a residual'}{'' if slope is None else ', a slope'}"
            )
        options: dict[str, Any] = {"negative_slope": negative_slope, "allow_tf32": allow_tf32}
        return blocksparse_conv1x1(x, weight, layout, active, None, bias, activation, **options)
    x, weight, residual = autocast(x, weight, residual)
    common = _arguments(op, x, weight, bias, active, residual, slope)
    window = pairs(op, stride=stride, padding=padding, dilation=dilation)
    numbers = groups, activation_name(op, activation), negative_slope, residual_after, allow_tf32
    *tensors, grid = common
    return _ops.sparse_conv2d(*tensors, active.block_map, grid, *window, *numbers, *input_list(op, x, x_active))


def sparse_conv2d_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    active: ActiveBlocks,
    out: Tensor,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    activation: str | None = None,
    negative_slope: float = 0.01,
    residual: Tensor | None = None,
    fringe: Fringe | None = None,
    allow_tf32: bool = False,
    packed: Tensor | None = None,
    slope: Tensor | None = None,
    residual_after: bool = False,
) -> None:
    """As `sparse_conv2d`, writing the active blocks of `out`, zeroing the pixels of `fringe` and leaving the rest.

    Args:
        out: [N,K,H_out,W_out] of x's dtype, any layout; must not share memory with x. `residual` may be `out` itself.
        fringe: from `sbnet.fringe`, or None.
        packed: `pack_conv_weight(weight, groups)`, made since the weight was last written; or None: a CPU then packs
            the weight for this call.

    >>> out = torch.empty_like(x)
    >>> sbnet.sparse_conv2d_(x, weight, bias, active, out, padding=1)  # other pixels of out stay as they were
    """
    op = "sparse_conv2d_"
    common = _arguments(op, x, weight, bias, active, residual, slope)
    edge = layer_output(op, out, fringe, x, weight, bias, residual, slope)
    window = pairs(op, stride=stride, padding=padding, dilation=dilation)
    numbers = groups, activation_name(op, activation), negative_slope, residual_after, allow_tf32
    _ops.sparse_conv2d_(*common, *window, *numbers, *edge, packed)
    mark_written(out)


def pack_conv_weight(weight: Tensor, groups: int = 1) -> Tensor:
    """A weight in the order in which this device's kernels read it, for many calls of `sparse_conv2d_`.

    A copy of what the weight holds now, for this processor: make it anew after the weight has been written, and do not
    store it. `sparse_conv2d_` refuses one of another shape, dtype, number of groups or instruction set; other values it
    cannot tell.

    Args:
        weight: [K,C/groups,R,S] float32, float16 or bfloat16, or int8 for `sparse_conv2d_quantized_`; any layout.
        groups: of the convolution; 1 with int8.

    Returns:
        [bytes] uint8; empty on CUDA, whose kernels read weights as they are.

    >>> out, packed = torch.empty_like(x), sbnet.pack_conv_weight(weight)
    >>> sbnet.sparse_conv2d_(x, weight, bias, active, out, padding=1, packed=packed)
    """
    require_tensor("pack_conv_weight", "weight", weight)
    return _ops.pack_conv_weight(weight, groups)


@torch.library.register_fake("sbnet::pack_conv_weight")
def _pack_conv_weight_fake(weight: Tensor, groups: int) -> Tensor:
    k, c, r, s = weight.shape
    torch._check(
        groups >= 1 and k % groups == 0,
        lambda: f"sbnet::pack_conv_weight: groups: expected a divisor of K = {k}, got {groups}",
    )
    few = 2 * k <= 16 and groups == 1 and weight.dtype == torch.float32  # kept with input channels as lanes, too
    groups = 1 if c == 1 else groups
    square = r == s and groups == 1
    # Sizes may be symbols, which are no keys of a dict.
    terms = next((n for taps, n in ((2, 3), (3, 4), (5, 7), (7, 10)) if square and r == taps), 0)  # of Winograd's form
    lanes = (k // groups + 15) // 16 * 16
    sums = lanes * 4 if weight.dtype == torch.int8 else 0
    floats = groups * lanes * c * (r * s + terms * terms) + (k * ((c + 15) // 16 * 16) * r * s if few else 0)
    size = 128 + floats * 4 + sums  # packed_bytes in csrc/core/masked/conv.cpp
    return weight.new_empty(0 if weight.is_cuda else size, dtype=torch.uint8)


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """x, weight and residual in autocast's dtype, where it is on."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else ""
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    eligible = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(t.to(dtype) if isinstance(t, Tensor) and t.dtype in eligible else t for t in tensors)


def _arguments(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, active: ActiveBlocks, residual: Tensor | None,
    slope: Tensor | None,
) -> tuple:  # fmt: skip
    lists = layer_inputs(op, x, active)
    require_tensor(op, "weight", weight)
    return x, weight, bias, residual, channel_slopes(op, slope, weight.shape[0]), *lists


def activation_name(op: str, name: str | None) -> str:
    if name is None:
        return "none"
    if name not in ACTIVATIONS:
        raise ValueError(
            f"sbnet::{op}: activation: expected None or one of {', '.join(ACTIVATIONS[1:])}, got {reprlib.repr(name)}"
        )
    return name


def channel_slopes(op: str, slope: Tensor | None, channels: int) -> Tensor | None:
    """Slopes as a convolution takes them: one for all channels is written out."""
    if slope is None:
        return None
    require_tensor(op, "slope", slope)
    return slope.expand(channels) if slope.shape == (1,) else slope


def conv_shape(
    op: str, x: Sequence[Any], weight: Sequence[Any], stride: Any, padding: Any, dilation: Any, groups: Any, *_: Any
) -> Sequence[Any]:
    """A convolution's [N,K,H_out,W_out], for fake implementations."""
    require_channels(op, x, weight, groups, 1)
    return x[0], weight[0], *conv_output_size(x[2:], weight[2:], stride, padding, dilation)


layer_fakes("sparse_conv2d", partial(conv_shape, "sparse_conv2d"))


def _sparse_conv2d_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, bias, residual, slope, *lists = inputs[:8]
    grid, *ctx.window, ctx.groups, ctx.activation, ctx.param, after, ctx.tf32 = inputs[8:17]
    *x_lists, x_grid = inputs[17:]
    ctx.after = after and ctx.activation != "none"  # without an activation there is no telling
    ctx.grids = grid, x_grid
    told = ctx.activation in ("relu", "relu6", "leaky_relu") and slope is None and not ctx.after
    ctx.save_for_backward(x, weight, bias, residual, *lists, slope, *x_lists, output if told else None)


def _sparse_conv2d_backward(ctx: Any, grad: Tensor) -> tuple:
    """On the list: the activation's, then two convolutions, of the gradient and of x."""
    x, weight, bias, residual, *lists, slope, x_indices, x_count, x_map, y = ctx.saved_tensors
    grid, x_grid = ctx.grids
    lists = [*lists, grid]
    need_x, need_weight, need_bias, need_residual, need_slope = ctx.needs_input_grad[:5]
    window, groups, tf32 = ctx.window, ctx.groups, ctx.tf32
    kernel = weight.shape[2:]
    given, masked, grad_slope = grad, False, None
    if ctx.activation != "none":

        def again() -> Tensor:
            before = None if ctx.after else residual
            return conv(x, weight, bias, before, lists, window, groups, tf32)

        given, grad_slope = before_activation(
            ctx.activation, ctx.param, slope, ctx.after, y, again, grad, lists, need_slope
        )
        masked = True
    grad_x = grad_weight = grad_bias = grad_residual = None
    if need_weight or (need_bias and bias is not None):
        wanted = need_bias and bias is not None
        grad_weight, summed = weight_gradient(x, given, lists, weight, window, groups, tf32, wanted)
        if wanted:
            grad_bias = summed.to(bias.dtype)
        if not need_weight:
            grad_weight = None
    if need_x:
        x_lists: Any = [x_indices, x_count, x_map, x_grid]
        if x_indices is None:
            x_lists = read_lists(lists, kernel, window, x.shape[2:])
        # One pixel for one, of the same list: nothing else is read.
        same = [list(kernel), *map(list, window[:2])] == [[1, 1], [1, 1], [0, 0]] and x_lists[2] is lists[2]
        if not masked and not same:
            given, masked = masked_gradient(given, lists[2], grid), True
        grad_x = input_gradient(given, weight, x, lists, x_lists, window, groups, tf32)
    if need_residual and residual is not None:
        if ctx.after:
            grad_residual = masked_gradient(grad, lists[2], grid)
        else:
            grad_residual = given if masked else masked_gradient(given, lists[2], grid)
    return grad_x, grad_weight, grad_bias, grad_residual, grad_slope, *[None] * 16


torch.library.register_autograd("sbnet::sparse_conv2d", _sparse_conv2d_backward, setup_context=_sparse_conv2d_setup)
