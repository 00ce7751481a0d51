"""1x1 convolution with block-sparse weights on the active blocks of a plane: both kinds of zeros at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks
from sbnet.ops.common import (
    check_active,
    empty4,
    is_channels_last,
    refuse_meta_mix,
    require_active,
    require_batch,
    require_tensor,
    zeros4,
)
from sbnet.ops.masked.conv import activation_name, autocast
from sbnet.ops.masked.conv_grad import activation_backward
from sbnet.ops.weights.layout import BlockLayout
from sbnet.ops.weights.matmul import require_layout

_ops = torch.ops.sbnet


def blocksparse_conv1x1(
    x: Tensor,
    weight: Tensor,
    layout: BlockLayout,
    active: ActiveBlocks,
    gate: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    negative_slope: float = 0.01,
    allow_tf32: bool = False,
) -> Tensor:
    """act(x W + bias) of the pixels of active blocks, W [C, K] given by the blocks of a layout; zeros elsewhere.

    `sparse_conv2d(..., layout=layout)` is this function. x is read as it is: the op knows nothing of masks on x.

    Args:
        x: [N,C,H,W] float32, float16 or bfloat16, any layout; channels_last is the fast one.
        weight, layout, gate: as in `blocksparse_matmul`.
        active: active blocks of the plane (its tiling grid).
        bias: [K] of x's dtype or float32, or None.
        activation, negative_slope, allow_tf32: as in `sparse_conv2d`.

    Returns:
        [N,K,H,W] in x's memory format. Differentiable, also twice, with respect to x, weight, gate and bias.

    Raises:
        RuntimeError, ValueError, TypeError: wrong shapes, dtypes, devices or grid.

    >>> layout = sbnet.BlockLayout([[1, 0], [1, 1]], block_size=8)
    >>> y = sbnet.blocksparse_conv1x1(x, torch.randn(layout.weight_shape), layout, active)
    >>> y.shape
    torch.Size([1, 16, 48, 80])
    """
    op = "blocksparse_conv1x1"
    require_tensor(op, "x", x)
    require_tensor(op, "weight", weight)
    require_layout(op, layout)
    require_active(op, active)
    require_batch(op, x, active)
    check_active(op, active)
    x, weight = autocast(x, weight)
    tables, numbers = layout.on(x.device)
    if gate is not None:
        require_tensor(op, "gate", gate)
        gate = gate.float()
    return _ops.blocksparse_conv1x1(
        x,
        weight,
        gate,
        bias,
        tables,
        numbers,
        active.indices,
        active.count,
        active.block_map,
        active.grid.numbers(),
        activation_name(op, activation),
        negative_slope,
        allow_tf32,
    )


@torch.library.register_fake("sbnet::blocksparse_conv1x1")
def _conv1x1_fake(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    bias: Tensor | None,
    tables: Tensor,
    layout: list[int],
    indices: Tensor,
    count: Tensor,
    block_map: Tensor,
    grid: list[int],
    activation: str,
    activation_param: float,
    allow_tf32: bool,
) -> Tensor:
    op = "blocksparse_conv1x1"
    refuse_meta_mix(op, x, weight, gate, bias, tables, indices, count, block_map)
    _, _, blocks, inputs, outputs, size, *_ = layout
    torch._check(x.dim() == 4 and x.shape[1] == inputs, lambda: f"sbnet::{op}: x: expected {inputs} features")
    torch._check(
        tuple(weight.shape) == (blocks, size, size),
        lambda: f"sbnet::{op}: weight: expected [{blocks}, {size}, {size}], got {tuple(weight.shape)}",
    )
    return empty4(x, (x.shape[0], outputs, *x.shape[2:]), is_channels_last(x))


def _conv1x1_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, gate, bias, tables, layout, indices, count, block_map, grid, activation, param, allow_tf32 = inputs
    ctx.save_for_backward(x, weight, gate, bias, tables, indices, count, block_map)
    ctx.layout, ctx.grid, ctx.activation, ctx.param, ctx.tf32 = layout, grid, activation, param, allow_tf32


def _conv1x1_backward(ctx: Any, grad: Tensor) -> tuple:
    """On the stacks of blocks, as matrices [pixels, features]: the products of blocksparse_matmul."""
    x, weight, gate, bias, tables, *active = ctx.saved_tensors

    def rows(t: Tensor) -> Tensor:
        stack = _ops.sparse_gather(t, *active, ctx.grid, False, True)
        return stack.permute(0, 2, 3, 1).reshape(-1, t.shape[1])

    def multiply(a: Tensor, b: Tensor | None, transposed: bool) -> Tensor:
        return _ops.blocksparse_matmul(a, weight, gate, b, tables, ctx.layout, transposed, "none", 0.0, ctx.tf32)

    need_x, need_weight, need_gate, need_bias = ctx.needs_input_grad[:4]
    grads = rows(grad)
    if ctx.activation != "none":
        grads = activation_backward(ctx.activation, grads, multiply(rows(x), bias, False), ctx.param)
    grad_x = grad_weight = grad_gate = grad_bias = None
    if need_x:
        bh, bw = ctx.grid[:2]
        stack = multiply(grads, None, True).view(-1, bh, bw, x.shape[1]).permute(0, 3, 1, 2)
        base = zeros4(x, x.shape, is_channels_last(x))
        grad_x = _ops.sparse_scatter(stack, *active, base, ctx.grid, False, False, False)
    if need_weight or need_gate:
        full = _ops.blocksparse_weight_grad([rows(x)], [grads], tables, ctx.layout, ctx.tf32, False)
        if need_gate:
            grad_gate = (full.float() * weight.float()).sum((1, 2))
        grad_weight = full if gate is None else (full * gate[:, None, None]).to(weight.dtype)
    if need_bias and bias is not None:
        grad_bias = grads.sum(0, dtype=torch.promote_types(grads.dtype, torch.float32)).to(bias.dtype)
    return grad_x, grad_weight, grad_gate, grad_bias, *[None] * 9


torch.library.register_autograd("sbnet::blocksparse_conv1x1", _conv1x1_backward, setup_context=_conv1x1_setup)
