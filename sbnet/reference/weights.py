"""Products and convolutions with block-sparse weights as dense ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.active import ActiveBlocks
from sbnet.ops.common import activate
from sbnet.ops.weights.conv_geometry import parts, to_geometry
from sbnet.ops.weights.conv_layout import ConvLayout
from sbnet.ops.weights.layout import BlockLayout
from sbnet.reference.masked import sparse_fill


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
    return sparse_fill(y, active)


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


def blocksparse_conv(
    x: Tensor,
    filters: Tensor,
    layout: ConvLayout,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    stride: int = 1,
    padding: int | Sequence[int] | str = "SAME",
    dilation: int = 1,
    negative_slope: float = 0.01,
) -> Tensor:
    """The sum of the dense convolutions of all blocks, each of its channels to its channels."""
    geometry = to_geometry("blocksparse_conv", layout, stride, padding, dilation)
    axes = len(layout.kernel_size)
    _, strides, pads, dilations = (list(part[3 - axes :]) for part in parts(geometry))
    convolve = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
    total: Tensor | None = None
    for (inputs, outputs), part in zip(layout.BCK, layout.split(filters), strict=True):
        y = convolve(x[:, list(inputs)], part, None, strides, pads, dilations)  # type: ignore[arg-type]
        if total is None:
            total = y.new_zeros(y.shape[0], layout.out_channels, *y.shape[2:])
        total = total.index_add(1, torch.tensor(outputs, device=y.device), y)
    assert total is not None
    if bias is not None:
        total = total + bias.to(total.dtype).view(1, -1, *[1] * axes)
    return activate(total, activation, negative_slope)


def blocksparse_deconv(
    x: Tensor,
    filters: Tensor,
    layout: ConvLayout,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    output_size: Sequence[int],
    stride: int = 1,
    padding: int | Sequence[int] | str = "SAME",
    dilation: int = 1,
    negative_slope: float = 0.01,
) -> Tensor:
    """The gradient, for an input of this size, of the convolution with the lists of each block exchanged."""
    back = layout.swapped()
    options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    with torch.enable_grad():
        y = x.new_zeros(x.shape[0], layout.out_channels, *output_size, requires_grad=True)
        pushed = blocksparse_conv(y, filters, back, **options)
        total = torch.autograd.grad(pushed, y, x, create_graph=x.requires_grad or filters.requires_grad)[0]
    if bias is not None:
        total = total + bias.to(total.dtype).view(1, -1, *[1] * len(output_size))
    return activate(total, activation, negative_slope)


def blocksparse_conv_active(
    x: Tensor, filters: Tensor, layout: ConvLayout, active: ActiveBlocks, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """The convolution of the whole plane, on the active blocks."""
    y = blocksparse_conv(x, filters, layout, bias, **{"padding": 0, **options})
    return sparse_fill(y, active)
