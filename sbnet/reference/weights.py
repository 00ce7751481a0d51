"""Products with block-sparse weights as dense ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks
from sbnet.ops.weights.layout import BlockLayout
from sbnet.reference.masked import activate


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
) -> Tensor:
    """act(x W + bias) with W [C, K] written out: every block at its place, times its gate."""
    dense = dense_weight(weight, layout, gate)
    rows = x.movedim(0, -1) if feature_axis == 0 else x
    y = rows @ (dense.T if transposed else dense)
    y = activate(y if bias is None else y + bias.to(y.dtype), activation, negative_slope)
    return y.movedim(-1, 0) if feature_axis == 0 else y


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
) -> Tensor:
    """The dense 1x1 convolution, on the active blocks."""
    pixels = x.permute(0, 2, 3, 1)
    y = blocksparse_matmul(pixels, weight, layout, gate, bias, activation, negative_slope=negative_slope)
    y = y.permute(0, 3, 1, 2)
    return torch.where(active.pixel_mask(x.shape[2:]), y, torch.zeros_like(y))


def blocksparse_weight_grad(
    pairs: Sequence[tuple[Tensor, Tensor]], layout: BlockLayout, *, feature_axis: int = 1
) -> Tensor:
    """The blocks of the sum of x^T dy."""
    total: Tensor | float = 0.0
    for x, dy in pairs:
        left, right = (t if feature_axis == 0 else t.movedim(-1, 0) for t in (x, dy))
        total = total + left.flatten(1) @ right.flatten(1).T
    assert isinstance(total, Tensor)
    size = layout.block_size
    padded = total.new_zeros(layout.block_rows * size, layout.block_columns * size)
    padded[: total.shape[0], : total.shape[1]] = total
    grads = total.new_empty(layout.weight_shape)
    for b, (c, k) in enumerate(layout.coords.tolist()):
        grads[b] = padded[c * size : (c + 1) * size, k * size : (k + 1) * size]
    return grads


def dense_weight(weight: Tensor, layout: BlockLayout, gate: Tensor | None = None) -> Tensor:
    """W [C, K]. Blocks with gate 0 are left out, whatever they hold."""
    size = layout.block_size
    dense = weight.new_zeros(layout.block_rows * size, layout.block_columns * size)
    for b, (c, k) in enumerate(layout.coords.tolist()):
        if gate is None or gate[b] != 0:
            block = weight[b] if gate is None else (weight[b] * gate[b]).to(weight.dtype)
            dense[c * size : (c + 1) * size, k * size : (k + 1) * size] = block
    return dense[: layout.in_features, : layout.out_features]
