"""Convolutions with block-sparse weights, 1-D to 3-D, and their transposes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks
from sbnet.ops.common import (
    check_active,
    is_channels_last,
    refuse_meta_mix,
    require_active,
    require_batch,
    require_tensor,
)
from sbnet.ops.masked.conv import activation_name, autocast
from sbnet.ops.masked.conv_grad import activation_backward
from sbnet.ops.weights.conv_geometry import Sides, output_sides, parts, sides, to_geometry
from sbnet.ops.weights.conv_layout import ConvLayout, layout_of_lists
from sbnet.ops.weights.conv_pack import require_pack
from sbnet.ops.weights.conv_product import convolve_by_product, hopper_convolves, product_of

_ops = torch.ops.sbnet


def blocksparse_conv(
    x: Tensor,
    filters: Tensor,
    BCK: ConvLayout | Sequence[Any],
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    kernel_size: Sides | None = None,
    stride: Sides = 1,
    padding: Sides | str = "SAME",
    dilation: Sides = 1,
    output_size: Sides | None = None,
    negative_slope: float = 0.01,
    packed: Tensor | None = None,
) -> Tensor:
    """act(bias + the sum over blocks of their convolutions); sums in float32. Cross-correlation, as F.conv2d.

    Args:
        x: [N,C,W], [N,C,H,W] or [N,C,D,H,W] float32, float16 or bfloat16, any layout; channels_last is the fast one.
        filters: of each block [outputs, inputs, *kernel_size]: [blocks, ...] if all are of one size, else, or also
            then, all of them one after the other in a vector. Of x's dtype.
        BCK: a `ConvLayout`, or of each block a list of input channels and a list of output channels; lists may overlap.
        bias: [K] of x's dtype or float32, or None.
        activation, negative_slope: as in `sparse_conv2d`.
        kernel_size: wanted where BCK is no ConvLayout and the filters are a vector.
        stride, dilation: one number, or one an axis.
        padding: likewise, on both sides; "SAME": half the (dilated) kernel, rounded down; "VALID": none.
        output_size: other than ceil((W - S' + 1 + 2 padding) / stride), S' the dilated kernel size: zeros are read
            beyond the padding.
        packed: `pack_blocksparse_filters(filters, BCK)`, made since the filters were last written, or None.

    Returns:
        [N,K,...] in x's memory format. Differentiable, also twice, with respect to x, filters and bias.

    Raises:
        RuntimeError, ValueError, TypeError: wrong shapes, dtypes, devices.

    >>> BCK = [[range(0, 32), range(0, 48)], [range(32, 64), range(48, 96)]]
    >>> y = sbnet.blocksparse_conv(torch.randn(8, 64, 28, 28), torch.randn(2, 48, 32, 3, 3), BCK)
    >>> y.shape
    torch.Size([8, 96, 28, 28])
    """
    op = "blocksparse_conv"
    layout = to_layout(op, x, filters, BCK, kernel_size)
    geometry = to_geometry(op, layout, stride, padding, dilation)
    axes = len(layout.kernel_size)
    size = sides(op, "output_size", output_size, axes) if output_size is not None else output_sides(x, geometry, axes)
    if output_size is None:
        x, filters = autocast(x, filters)
        own = [part[3 - axes :] for part in parts(geometry)]
        product = None
        if not hopper_convolves(x, layout, size, is_channels_last(lifted(x))):
            product = product_of(x, filters, layout, bias, own, size)
        if product is not None:
            require_pack(op, packed, x, layout)
            y = convolve_by_product(x, filters, product, bias, activation, own, negative_slope=negative_slope)
            return y if is_channels_last(lifted(x)) else y.contiguous()
    act = activation_name(op, activation), negative_slope
    return _convolve(x, filters, layout, bias, geometry, size, False, *act, packed)


def blocksparse_deconv(
    x: Tensor,
    filters: Tensor,
    BCK: ConvLayout | Sequence[Any],
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    kernel_size: Sides | None = None,
    stride: Sides = 1,
    padding: Sides | str = "SAME",
    dilation: Sides = 1,
    output_size: Sides | None = None,
    negative_slope: float = 0.01,
    packed: Tensor | None = None,
) -> Tensor:
    """The transposed convolution, exactly the transpose of `blocksparse_conv` with the lists of each block exchanged.

    Args:
        filters: of each block [inputs, outputs, *kernel_size], as for `F.conv_transpose2d`.
        BCK, kernel_size: a `ConvLayout` from this function's inputs to its outputs; else as in `blocksparse_conv`.
        output_size: other than W stride + S - 2 padding - (S mod 2), S the kernel size.
        packed: as there, made with transposed=True.
        x, bias, activation, negative_slope, stride, padding, dilation: as in `blocksparse_conv`.

    Returns:
        [N,K,...] in x's memory format. Differentiable, also twice, with respect to x, filters and bias.

    >>> BCK = [[range(0, 32), range(0, 64)]]
    >>> y = sbnet.blocksparse_deconv(torch.randn(8, 32, 14, 14), torch.randn(1, 32, 64, 3, 3), BCK, stride=2)
    >>> y.shape
    torch.Size([8, 64, 28, 28])
    """
    op = "blocksparse_deconv"
    layout = to_layout(op, x, filters, BCK, kernel_size)
    geometry = to_geometry(op, layout, stride, padding, dilation)
    axes = len(layout.kernel_size)
    if output_size is not None:
        size = sides(op, "output_size", output_size, axes)
    else:
        size = [
            w * s + k - 2 * p - k % 2
            for w, k, s, p in zip(x.shape[2:], *(part[3 - axes :] for part in parts(geometry)[:3]), strict=True)
        ]
    act = activation_name(op, activation), negative_slope
    return _convolve(x, filters, layout, bias, geometry, size, True, *act, packed)


def blocksparse_conv_active(
    x: Tensor,
    filters: Tensor,
    layout: ConvLayout,
    active: ActiveBlocks,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    stride: Sides = 1,
    padding: Sides = 0,
    dilation: Sides = 1,
    negative_slope: float = 0.01,
    packed: Tensor | None = None,
) -> Tensor:
    """A 2-D `blocksparse_conv` of the pixels of active blocks, zeros elsewhere: both kinds of zeros at once.

    `sparse_conv2d(..., layout=layout)` is this function. x [N,C,H,W] is read as it is; `active`: blocks of the output
    plane (its tiling grid); packed as in `blocksparse_conv`. Differentiable with respect to x, filters and bias;
    gradients are dense convolutions.

    >>> layout = sbnet.ConvLayout([[range(0, 8), range(0, 16)], [range(8, 16), range(16, 32)]], (3, 3))
    >>> filters = torch.randn(layout.filter_shape)
    >>> sbnet.blocksparse_conv_active(x, filters, layout, active, padding=1).shape
    torch.Size([1, 32, 48, 80])
    """
    op = "blocksparse_conv_active"
    layout = to_layout(op, x, filters, layout, None)
    require_active(op, active)
    require_batch(op, x, active)
    check_active(op, active)
    if len(layout.kernel_size) != 2:
        raise ValueError(f"sbnet::{op}: layout: expected a kernel of two axes, got {layout.kernel_size}")
    geometry = to_geometry(op, layout, stride, padding, dilation)
    size = output_sides(x, geometry, 2)
    x, filters = autocast(x, filters)
    tables, numbers = layout.on(x.device)
    y = _ops.blocksparse_conv_active(
        lifted(x), filters.reshape(-1), bias, tables, numbers, geometry, [1, *size], active.indices, active.count,
        active.block_map, active.grid.numbers(), activation_name(op, activation), negative_slope, packed,
    )  # fmt: skip
    return y.squeeze(2)


def _convolve(
    x: Tensor,
    filters: Tensor,
    layout: ConvLayout,
    bias: Tensor | None,
    geometry: list[int],
    size: Sequence[int],
    transposed: bool,
    activation: str,
    slope: float,
    packed: Tensor | None,
) -> Tensor:
    x, filters = autocast(x, filters)
    tables, numbers = layout.on(x.device, swapped=transposed)
    size = [1] * (3 - len(size)) + list(size)
    weight = filters.reshape(-1)
    y = _ops.blocksparse_conv(
        lifted(x), weight, bias, tables, numbers, geometry, size, transposed, activation, slope, packed
    )
    for _ in range(5 - x.dim()):
        y = y.squeeze(2)
    return y


def lifted(x: Tensor) -> Tensor:
    """[N,C,...] as [N,C,D,H,W]."""
    for _ in range(5 - x.dim()):
        x = x.unsqueeze(2)
    return x


def to_layout(op: str, x: Any, filters: Any, BCK: Any, kernel_size: Sides | None) -> ConvLayout:
    """The layout of a call; x and filters checked against it as far as Python must."""
    require_tensor(op, "x", x)
    require_tensor(op, "filters", filters)
    if not isinstance(BCK, ConvLayout):
        if kernel_size is None:
            if filters.dim() < 4:
                raise ValueError(f"sbnet::{op}: kernel_size: expected one with filters of {filters.dim()} dimensions")
            kernel_size = tuple(filters.shape[3:])
        kernel = (kernel_size,) * (x.dim() - 2) if isinstance(kernel_size, int) else tuple(kernel_size)
        lists = tuple(tuple(tuple(map(int, channels)) for channels in block) for block in BCK)
        BCK = layout_of_lists(lists, kernel)
    axes = len(BCK.kernel_size)
    if x.dim() != axes + 2:
        raise ValueError(
            f"sbnet::{op}: x: expected {axes + 2} dimensions for a kernel {BCK.kernel_size}, got {x.dim()}"
        )
    inverse = (BCK.blocks, *BCK.sizes[0][::-1], *BCK.kernel_size) if len(BCK.filter_shape) > 1 else BCK.filter_shape
    wanted = inverse if op == "blocksparse_deconv" else BCK.filter_shape
    if tuple(filters.shape) not in (wanted, (BCK.weights,)):
        raise ValueError(f"sbnet::{op}: filters: expected {list(wanted)} or [{BCK.weights}], got {list(filters.shape)}")
    return BCK


def _result(x: Tensor, channels: int, size: Sequence[int]) -> Tensor:
    if is_channels_last(x):
        return x.new_empty(x.shape[0], *size, channels).permute(0, 4, 1, 2, 3)
    return x.new_empty(x.shape[0], channels, *size)


def _check_fake(op: str, x: Tensor, weight: Tensor, layout: list[int], inputs: int) -> None:
    torch._check(x.dim() == 5 and x.shape[1] == inputs, lambda: f"sbnet::{op}: x: expected {inputs} channels")
    torch._check(
        tuple(weight.shape) == (layout[5],),
        lambda: f"sbnet::{op}: weight: expected [{layout[5]}], got {tuple(weight.shape)}",
    )


@torch.library.register_fake("sbnet::blocksparse_conv")
def _conv_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tables: Tensor,
    layout: list[int],
    geometry: list[int],
    output_size: list[int],
    transposed: bool,
    activation: str,
    activation_param: float,
    packed: Tensor | None = None,
) -> Tensor:
    refuse_meta_mix("blocksparse_conv", x, weight, bias, tables, packed)
    outputs, inputs = layout[:2]
    if transposed:
        outputs, inputs = inputs, outputs
    _check_fake("blocksparse_conv", x, weight, layout, inputs)
    return _result(x, outputs, output_size)


@torch.library.register_fake("sbnet::blocksparse_conv_active")
def _conv_active_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tables: Tensor,
    layout: list[int],
    geometry: list[int],
    output_size: list[int],
    indices: Tensor,
    count: Tensor,
    block_map: Tensor,
    grid: list[int],
    activation: str,
    activation_param: float,
    packed: Tensor | None = None,
) -> Tensor:
    refuse_meta_mix("blocksparse_conv_active", x, weight, bias, tables, indices, count, block_map, packed)
    _check_fake("blocksparse_conv_active", x, weight, layout, layout[1])
    return _result(x, layout[0], output_size)


@torch.library.register_fake("sbnet::blocksparse_conv_weight_grad")
def _weight_grad_fake(x: Tensor, dy: Tensor, tables: Tensor, layout: list[int], geometry: list[int]) -> Tensor:
    refuse_meta_mix("blocksparse_conv_weight_grad", x, dy, tables)
    return x.new_empty(layout[5])


def _gradients(ctx: Any, grad: Tensor, transposed: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of x, weight and bias; `grad` is zero where nothing was computed."""
    x, weight, bias, tables = ctx.saved_tensors[:4]

    def convolve(a: Tensor, b: Tensor | None, size: Sequence[int], other_way: bool) -> Tensor:
        return _ops.blocksparse_conv(a, weight, b, tables, ctx.layout, ctx.geometry, size, other_way, "none", 0.0)

    if ctx.activation != "none":
        grad = activation_backward(ctx.activation, grad, convolve(x, bias, grad.shape[2:], transposed), ctx.param)
    grad_x = grad_weight = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = convolve(grad, None, x.shape[2:], not transposed)
    if ctx.needs_input_grad[1]:
        left, right = (grad, x) if transposed else (x, grad)
        grad_weight = _ops.blocksparse_conv_weight_grad(left, right, tables, ctx.layout, ctx.geometry)
    if ctx.needs_input_grad[2] and bias is not None:
        wide = torch.promote_types(grad.dtype, torch.float32)
        grad_bias = grad.sum((0, 2, 3, 4), dtype=wide).to(bias.dtype)
    return grad_x, grad_weight, grad_bias


def _conv_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, bias, tables, ctx.layout, ctx.geometry, _, ctx.transposed, ctx.activation, ctx.param, _ = inputs
    ctx.save_for_backward(x, weight, bias, tables)


def _conv_backward(ctx: Any, grad: Tensor) -> tuple:
    return *_gradients(ctx, grad, ctx.transposed), *[None] * 8


torch.library.register_autograd("sbnet::blocksparse_conv", _conv_backward, setup_context=_conv_setup)


def _conv_active_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, bias, tables, ctx.layout, ctx.geometry, _, indices, count, block_map, ctx.grid, *rest = inputs
    ctx.activation, ctx.param, _ = rest
    ctx.save_for_backward(x, weight, bias, tables, indices, count, block_map)


def _conv_active_backward(ctx: Any, grad: Tensor) -> tuple:
    """The dense gradients of what the active blocks alone received."""
    active = ctx.saved_tensors[4:]
    plane = grad.squeeze(2)
    stack = _ops.sparse_gather(plane, *active, ctx.grid, False, True)
    kept = _ops.sparse_scatter(stack, *active, torch.zeros_like(plane), ctx.grid, False, False, False)
    return *_gradients(ctx, kept.unsqueeze(2), False), *[None] * 11


torch.library.register_autograd(
    "sbnet::blocksparse_conv_active", _conv_active_backward, setup_context=_conv_active_setup
)


def _weight_grad_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, dy, tables, ctx.layout, ctx.geometry = inputs
    ctx.save_for_backward(x, dy, tables)


def _weight_grad_backward(ctx: Any, grad: Tensor) -> tuple:
    x, dy, tables = ctx.saved_tensors

    def convolve(a: Tensor, size: Sequence[int], transposed: bool) -> Tensor:
        return _ops.blocksparse_conv(a, grad, None, tables, ctx.layout, ctx.geometry, size, transposed, "none", 0.0)

    grad_x = convolve(dy, x.shape[2:], True) if ctx.needs_input_grad[0] else None
    grad_dy = convolve(x, dy.shape[2:], False) if ctx.needs_input_grad[1] else None
    return grad_x, grad_dy, None, None, None


torch.library.register_autograd(
    "sbnet::blocksparse_conv_weight_grad", _weight_grad_backward, setup_context=_weight_grad_setup
)
