"""Products with block-sparse weights: y = act(x W + bias), and the gradient of W on its layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.ops.common import refuse_meta_mix, require_tensor
from sbnet.ops.masked.conv import activation_name, autocast
from sbnet.ops.masked.conv_grad import activation_backward
from sbnet.ops.weights.layout import BlockLayout

_ops = torch.ops.sbnet

MAX_PAIRS = 8  # kMaxWeightGradPairs


def blocksparse_matmul(
    x: Tensor,
    weight: Tensor,
    layout: BlockLayout,
    gate: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    negative_slope: float = 0.01,
    transposed: bool = False,
    feature_axis: int = 1,
    allow_tf32: bool = False,
) -> Tensor:
    """act(x W + bias), W [C, K] given by the blocks of a layout; sums in float32.

    Under torch.autocast it casts what F.linear would cast.

    Args:
        x: [..., C] float32, float16 or bfloat16, any strides; [C, ...] with feature_axis=0. Any number of rows.
        weight: [blocks, bs, bs] of x's dtype, each block [c, k].
        layout: where the blocks stand.
        gate: [blocks] float32 scales each block, or None. Blocks with gate 0 are skipped.
        bias: [K] of x's dtype or float32, or None.
        activation: None, "relu", "relu6", "leaky_relu", "silu", "gelu" (exact) or "hardswish".
        negative_slope: of leaky_relu.
        transposed: multiply by W^T instead: x [..., K] -> [..., C], bias [C].
        feature_axis: 1 (features last) or 0 (features first).
        allow_tf32: float32 on CUDA may use tf32 tensor cores (10-bit mantissa).

    Returns:
        [..., K] of x's dtype ([K, ...] with feature_axis=0). Differentiable, also twice, with respect to x, weight,
        gate and bias.

    Raises:
        RuntimeError, ValueError, TypeError: wrong shapes, dtypes, devices.

    >>> layout = sbnet.BlockLayout([[1, 0], [1, 1]], block_size=32)
    >>> sbnet.blocksparse_matmul(torch.randn(8, 64), torch.randn(layout.weight_shape), layout).shape
    torch.Size([8, 64])
    """
    op = "blocksparse_matmul"
    require_tensor(op, "x", x)
    require_tensor(op, "weight", weight)
    require_layout(op, layout)
    x, weight = autocast(x, weight)
    rows = to_matrix(op, "x", x, feature_axis)
    tables, numbers = layout.on(x.device)
    if gate is not None:
        require_tensor(op, "gate", gate)
        gate = gate.float()
    activation = activation_name(op, activation)
    y = _ops.blocksparse_matmul(
        rows, weight, gate, bias, tables, numbers, transposed, activation, negative_slope, allow_tf32
    )
    features = layout.in_features if transposed else layout.out_features
    return y.view(*x.shape[:-1], features) if feature_axis else y.t().view(features, *x.shape[1:])


def blocksparse_weight_grad(
    pairs: Sequence[tuple[Tensor, Tensor]],
    layout: BlockLayout,
    *,
    feature_axis: int = 1,
    allow_tf32: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The sum over pairs (x, dy) of x^T dy, for the blocks of a layout only, in one launch.

    Args:
        pairs: x [..., C] and dy [..., K] with the same rows, all of one dtype ([C, ...], [K, ...] with feature_axis=0).
            More than eight are joined into eight first, which takes a copy of them.
        layout: where the blocks stand.
        dtype: of the result: that of the pairs (default), or float32 from pairs in halves.

    Returns:
        [blocks, bs, bs]; summed in float32 over all pairs and rounded once. Differentiable.

    >>> layout = sbnet.BlockLayout([[1, 0], [1, 1]], block_size=32)
    >>> sbnet.blocksparse_weight_grad([(torch.randn(8, 64), torch.randn(8, 64))], layout).shape
    torch.Size([3, 32, 32])
    """
    op = "blocksparse_weight_grad"
    require_layout(op, layout)
    if not pairs:
        raise ValueError(f"sbnet::{op}: pairs: expected at least one (x, dy), got none")
    for pair in pairs:
        if len(pair) != 2:
            raise ValueError(f"sbnet::{op}: pairs: expected (x, dy), got {len(pair)} tensors")
        x, dy = pair
        require_tensor(op, "x", x)
        require_tensor(op, "dy", dy)
    tables, numbers = layout.on(pairs[0][0].device)
    left, right = ([to_matrix(op, name, pair[i], feature_axis) for pair in pairs] for i, name in enumerate(("x", "dy")))
    own = left[0].dtype
    if dtype not in (None, own, torch.float32):
        raise TypeError(f"sbnet::{op}: dtype: expected {own} or torch.float32, got {dtype}")
    if len(pairs) > MAX_PAIRS:
        step = -(-len(pairs) // MAX_PAIRS)
        for x, dy in zip(left, right, strict=True):
            if x.shape[0] != dy.shape[0]:  # joined pairs would hide it
                raise ValueError(f"sbnet::{op}: dy: expected {x.shape[0]} rows as x has, got {dy.shape[0]}")
        left, right = ([torch.cat(side[i : i + step]) for i in range(0, len(side), step)] for side in (left, right))
    return _ops.blocksparse_weight_grad(left, right, tables, numbers, allow_tf32, dtype == torch.float32)


def require_layout(op: str, value: Any) -> None:
    if not isinstance(value, BlockLayout):
        raise TypeError(f"sbnet::{op}: layout: expected an sbnet.BlockLayout, got {type(value).__name__}")


def to_matrix(op: str, argument: str, x: Tensor, feature_axis: int) -> Tensor:
    """[rows, features], a view where x's strides allow it."""
    if feature_axis not in (0, 1):
        raise ValueError(f"sbnet::{op}: feature_axis: expected 0 or 1, got {feature_axis}")
    if x.dim() == 0:
        raise ValueError(f"sbnet::{op}: {argument}: expected at least one dimension, got none")
    if feature_axis == 0:  # sizes in full: of a tensor without elements -1 says nothing
        return x.reshape(x.shape[0], math.prod(x.shape[1:])).t()
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def is_feature_major(x: Tensor) -> bool:
    """Rows lie next to each other and features do not. Keep in step with torch_binding/weights/matmul.cpp."""
    return bool(x.stride(0) == 1) and bool(x.stride(1) != 1)


@torch.library.register_fake("sbnet::blocksparse_matmul")
def _matmul_fake(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    bias: Tensor | None,
    tables: Tensor,
    layout: list[int],
    transposed: bool,
    activation: str,
    activation_param: float,
    allow_tf32: bool,
) -> Tensor:
    op = "blocksparse_matmul"
    refuse_meta_mix(op, x, weight, gate, bias, tables)
    _, _, blocks, inputs, outputs, size, *_ = layout
    if transposed:
        inputs, outputs = outputs, inputs
    torch._check(x.dim() == 2 and x.shape[1] == inputs, lambda: f"sbnet::{op}: x: expected {inputs} features")
    torch._check(
        tuple(weight.shape) == (blocks, size, size),
        lambda: f"sbnet::{op}: weight: expected [{blocks}, {size}, {size}], got {tuple(weight.shape)}",
    )
    rows = x.shape[0]
    return x.new_empty(outputs, rows).t() if is_feature_major(x) else x.new_empty(rows, outputs)


@torch.library.register_fake("sbnet::blocksparse_weight_grad")
def _weight_grad_fake(
    x: list[Tensor], dy: list[Tensor], tables: Tensor, layout: list[int], allow_tf32: bool, float32: bool
) -> Tensor:
    refuse_meta_mix("blocksparse_weight_grad", *x, *dy, tables)
    _, _, blocks, _, _, size, *_ = layout
    return x[0].new_empty(blocks, size, size, dtype=torch.float32 if float32 else None)


def _matmul_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, gate, bias, tables, layout, transposed, activation, param, allow_tf32 = inputs
    ctx.save_for_backward(x, weight, gate, bias, tables)
    ctx.layout, ctx.transposed, ctx.activation, ctx.param, ctx.tf32 = layout, transposed, activation, param, allow_tf32


def _matmul_backward(ctx: Any, grad: Tensor) -> tuple:
    x, weight, gate, bias, tables = ctx.saved_tensors

    def multiply(a: Tensor, b: Tensor | None, transposed: bool) -> Tensor:
        return _ops.blocksparse_matmul(a, weight, gate, b, tables, ctx.layout, transposed, "none", 0.0, ctx.tf32)

    if ctx.activation != "none":
        grad = activation_backward(ctx.activation, grad, multiply(x, bias, ctx.transposed), ctx.param)
    need_x, need_weight, need_gate, need_bias = ctx.needs_input_grad[:4]
    grad_x = grad_weight = grad_gate = grad_bias = None
    if need_x:
        grad_x = multiply(grad, None, not ctx.transposed)
    if need_weight or need_gate:
        left, right = (grad, x) if ctx.transposed else (x, grad)
        full = _ops.blocksparse_weight_grad([left], [right], tables, ctx.layout, ctx.tf32, False)
        if need_gate:
            grad_gate = (full.float() * weight.float()).sum((1, 2))
        grad_weight = full if gate is None else (full * gate[:, None, None]).to(weight.dtype)
    if need_bias and bias is not None:
        grad_bias = grad.sum(0, dtype=torch.promote_types(grad.dtype, torch.float32)).to(bias.dtype)
    return grad_x, grad_weight, grad_gate, grad_bias, *[None] * 6


torch.library.register_autograd("sbnet::blocksparse_matmul", _matmul_backward, setup_context=_matmul_setup)


def _weight_grad_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, dy, tables, ctx.layout, ctx.tf32, _ = inputs
    ctx.pairs = len(x)
    ctx.save_for_backward(*x, *dy, tables)


def _weight_grad_backward(ctx: Any, grad: Tensor) -> tuple:
    *pairs, tables = ctx.saved_tensors
    x, dy = pairs[: ctx.pairs], pairs[ctx.pairs :]
    grad = grad.to(x[0].dtype)

    def multiply(a: Tensor, transposed: bool) -> Tensor:
        return _ops.blocksparse_matmul(a, grad, None, None, tables, ctx.layout, transposed, "none", 0.0, ctx.tf32)

    return [multiply(t, True) for t in dy], [multiply(t, False) for t in x], *[None] * 4


torch.library.register_autograd(
    "sbnet::blocksparse_weight_grad", _weight_grad_backward, setup_context=_weight_grad_setup
)
