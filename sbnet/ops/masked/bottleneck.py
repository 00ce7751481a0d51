"""A bottleneck block in one op: 1x1, 3x3 and 1x1 convolution and the shortcut, on the active blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks, Fringe
from sbnet.ops.common import mark_written, require_tensor
from sbnet.ops.masked.conv import activation_name, autocast
from sbnet.ops.masked.conv_grad import conv as conv2d
from sbnet.ops.masked.layer import layer_fakes, layer_inputs, layer_output

_ops = torch.ops.sbnet


def sparse_bottleneck2d(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
    active: ActiveBlocks,
    *,
    activation: str | None = "relu",
    negative_slope: float = 0.01,
    allow_tf32: bool = False,
) -> Tensor:
    """A residual block of three convolutions computed on active blocks only; zeros elsewhere.

    Equals, with conv for `sparse_conv2d` on the same active blocks and one activation for all,
    conv(conv(conv(x, weights[0], biases[0]), weights[1], biases[1], padding=1), weights[2], biases[2], residual=x): the
    3x3 convolution reads zeros outside the active blocks. Of x the active blocks alone are read. Hopper does it in one
    kernel where it can. Under torch.autocast it casts what F.conv2d would cast.

    Args:
        x: [N,C,H,W] float32, float16 or bfloat16, any layout; channels_last is the fast one.
        weights: [width,C,1,1], [width,width,3,3] and [C,width,1,1] of x's dtype; kept in channels_last memory they are
            used without a copy.
        biases: [width], [width] and [C], all of x's dtype or all float32, each or all may be None.
        active: active blocks of the plane (the tiling grid of H x W).
        activation: None, "relu", "relu6", "leaky_relu", "silu", "gelu" (exact) or "hardswish"; NaN passes through.
        negative_slope: of leaky_relu.
        allow_tf32: float32 on CUDA may use tf32 tensor cores (10-bit mantissa).

    Returns:
        [N,C,H,W] in x's memory format. Differentiable with respect to x, weights and biases; the backward pass computes
        the layers between anew.

    Raises:
        RuntimeError, ValueError, TypeError: wrong shapes, dtypes, devices or grid.

    >>> weights = torch.randn(8, 16, 1, 1), torch.randn(8, 8, 3, 3), torch.randn(16, 8, 1, 1)
    >>> sbnet.sparse_bottleneck2d(x, weights, None, active).shape
    torch.Size([1, 16, 48, 80])
    """
    op = "sparse_bottleneck2d"
    three = _three(op, "weights", weights)
    x, *three = autocast(x, *three)
    return _ops.sparse_bottleneck2d(
        *_arguments(op, x, three, biases, active), activation_name(op, activation), negative_slope, allow_tf32
    )


def sparse_bottleneck2d_(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
    active: ActiveBlocks,
    out: Tensor,
    *,
    activation: str | None = "relu",
    negative_slope: float = 0.01,
    fringe: Fringe | None = None,
    allow_tf32: bool = False,
) -> None:
    """As `sparse_bottleneck2d`, writing the active blocks of `out`, zeroing the fringe's pixels and leaving the rest.

    Args:
        out: [N,C,H,W] of x's dtype, any layout; must not share memory with x or a weight.
        fringe: from `sbnet.fringe`, or None.

    >>> weights = torch.randn(8, 16, 1, 1), torch.randn(8, 8, 3, 3), torch.randn(16, 8, 1, 1)
    >>> sbnet.sparse_bottleneck2d_(x, weights, None, active, torch.empty_like(x))
    """
    op = "sparse_bottleneck2d_"
    arguments = _arguments(op, x, _three(op, "weights", weights), biases, active)
    edge = layer_output(op, out, fringe, *arguments[:7])
    _ops.sparse_bottleneck2d_(
        *arguments,
        activation_name(op, activation),
        negative_slope,
        allow_tf32,
        *edge,
        *[None] * 3,
    )
    mark_written(out)


def _three(op: str, argument: str, values: Any) -> list[Any]:
    if not isinstance(values, Sequence) or len(values) != 3:
        what = f"{len(values)} of them" if isinstance(values, Sequence) else type(values).__name__
        raise ValueError(f"sbnet::{op}: {argument}: expected three, for 1x1, 3x3 and 1x1, got {what}")
    return list(values)


def _arguments(op: str, x: Tensor, weights: list[Tensor], biases: Any, active: ActiveBlocks) -> tuple[Any, ...]:
    indices, count, grid = layer_inputs(op, x, active)
    for k, weight in enumerate(weights):
        require_tensor(op, f"weights[{k}]", weight)
    bias = [None] * 3 if biases is None else _three(op, "biases", biases)
    for k, values in enumerate(bias):
        if values is not None:
            require_tensor(op, f"biases[{k}]", values)
    return x, *weights, *bias, indices, count, active.block_map, grid


# ---- fake implementations and gradients
def _shape(x: Sequence[Any], *given: Any) -> Sequence[Any]:
    channels, width = x[1], given[0][0]
    for k, wanted in enumerate(((width, channels, 1, 1), (width, width, 3, 3), (channels, width, 1, 1))):
        torch._check(
            all(have == want for have, want in zip(given[k], wanted, strict=True)),
            lambda k=k, wanted=wanted: (
                f"sbnet::sparse_bottleneck2d: weight{k + 1}: shape: expected {wanted}, got {tuple(given[k])}"
            ),
        )
    return x


layer_fakes("sparse_bottleneck2d", _shape)


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.grid, ctx.activation, ctx.param, ctx.allow_tf32 = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    """Through the three convolutions, computed anew."""
    *tensors, indices, count, block_map = ctx.saved_tensors
    again = torch.is_grad_enabled()  # for the gradient of the gradient
    with torch.enable_grad():
        # aliases: one tensor may be given twice, and each gets a gradient of its own
        given: list[Any] = [
            None if t is None else t.view_as(t) if again else t.detach().requires_grad_(needed)
            for t, needed in zip(tensors, ctx.needs_input_grad, strict=False)
        ]
        x, *layers = given

        def conv(t: Tensor | None, k: int, residual: Tensor | None = None) -> Tensor:
            padding = [1, 1] if k == 1 else [0, 0]
            lists, window = (indices, count, block_map, ctx.grid), ([1, 1], padding, [1, 1])
            how = ctx.allow_tf32, ctx.activation, ctx.param
            return conv2d(t, layers[k], layers[3 + k], residual, lists, window, 1, *how)

        y = conv(conv(conv(x, 0), 1), 2, x)
        wanted = [k for k, needed in enumerate(ctx.needs_input_grad[:7]) if needed]
        found = torch.autograd.grad(y, [given[k] for k in wanted], grad, create_graph=again)
    grads: list[Tensor | None] = [None] * 14
    for k, gradient in zip(wanted, found, strict=True):
        grads[k] = gradient
    return tuple(grads)


torch.library.register_autograd("sbnet::sparse_bottleneck2d", _backward, setup_context=_setup)
