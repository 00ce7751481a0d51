"""Layers on active blocks, as their definitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.active import ActiveBlocks, BlockGrid
from sbnet.geometry import to_pair
from sbnet.ops.common import activate
from sbnet.ops.masked.adaptive_pool import adaptive_pool_whole
from sbnet.ops.masked.norm import norm_whole
from sbnet.ops.masked.pointwise import run_program
from sbnet.ops.masked.rearrange import rearrange_whole
from sbnet.ops.masked.squeeze_excite import squeeze_excite_whole
from sbnet.reference.lists import block_slices


def _listed(active: ActiveBlocks) -> Iterator[tuple[int, int, int, int]]:
    """(row, n, i, j) for each row within the count that names a block."""
    count = min(max(int(active.count), 0), active.capacity)
    for row, (n, i, j) in enumerate(active.indices[:count].tolist()):
        if 0 <= n < active.batch and 0 <= i < active.grid.bcount[0] and 0 <= j < active.grid.bcount[1]:
            yield row, n, i, j


def sparse_gather(
    x: Tensor, active: ActiveBlocks, transpose: bool = False, *, grid: BlockGrid | None = None, tail: str = "zero"
) -> Tensor:
    active = active if grid is None else active.with_grid(grid)
    blocks = x.new_zeros(active.capacity, x.shape[1], *active.grid.bsize)
    for row, n, i, j in _listed(active):
        y, xs, by, bx = block_slices(active.grid, i, j, x.shape[2:])
        blocks[row, :, by, bx] = x[n, :, y, xs]
    return blocks


def sparse_scatter(
    blocks: Tensor,
    active: ActiveBlocks,
    base: Tensor,
    grid: BlockGrid | None = None,
    add: bool = False,
    atomic: bool = False,
    transpose: bool = False,
) -> Tensor:
    active = active if grid is None else active.with_grid(grid)
    out = base.clone()
    for row, n, i, j in _listed(active):
        if row >= blocks.shape[0]:
            continue
        y, x, by, bx = block_slices(active.grid, i, j, base.shape[2:])
        if add:
            out[n, :, y, x] += blocks[row, :, by, bx]
        else:
            out[n, :, y, x] = blocks[row, :, by, bx]
    return out


def sparse_scatter_(
    blocks: Tensor,
    active: ActiveBlocks,
    base: Tensor,
    grid: BlockGrid | None = None,
    add: bool = False,
    atomic: bool = False,
    transpose: bool = False,
) -> Tensor:
    return base.copy_(sparse_scatter(blocks, active, base, grid, add, atomic, transpose))


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
    slope: Tensor | None = None,
    residual_after: bool = False,
) -> Tensor:
    y = F.conv2d(x, weight, None if bias is None else bias.to(x.dtype), stride, padding, dilation, groups)  # type: ignore[arg-type]
    if residual is not None and not residual_after:
        y = y + residual
    y = activate(y, activation, negative_slope, slope)
    if residual is not None and residual_after:
        y = y + residual
    return sparse_fill(y, active)


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
    if x_scale:
        x = _rounded(x.double(), x_scale, weight.dtype)
    sums = F.conv2d(x.double(), weight.double(), None, stride, padding, dilation, groups)  # type: ignore[arg-type]
    y = sums * scale.double()[:, None, None]
    if bias is not None:
        y = y + bias.double()[:, None, None]
    added = 0 if residual is None else residual_scale * residual.double()
    y = y if residual_after else y + added
    y = activate(y, activation, negative_slope) if slope is None else F.prelu(y, slope.double())
    y = y + added if residual_after else y
    y = _rounded(y, out_scale, weight.dtype) if out_scale else y.to(dtype or torch.float32)
    return sparse_fill(y, active)


def _rounded(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """As bytes: what is too large saturates, and NaN is 0 of int8."""
    if dtype == torch.float8_e4m3fn:
        return (x / scale).clamp(-448, 448).float().to(dtype)
    return (x / scale).round().clamp(-128, 127).nan_to_num(0).to(torch.int8)


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
) -> Tensor:
    own = None if bias is None else bias.to(x.dtype)
    y = F.conv_transpose2d(x, weight, own, stride, padding, output_padding, groups, dilation)  # type: ignore[arg-type]
    y = activate(y if residual is None else y + residual, activation, negative_slope, slope)
    return sparse_fill(y, active)


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
    bias = biases or [None] * 3
    act = {"activation": activation, "negative_slope": negative_slope}
    y = sparse_conv2d(x, weights[0], bias[0], active, **act)  # type: ignore[arg-type]
    y = sparse_conv2d(y, weights[1], bias[1], active, padding=1, **act)  # type: ignore[arg-type]
    return sparse_conv2d(y, weights[2], bias[2], active, residual=x, **act)  # type: ignore[arg-type]


def sparse_max_pool2d(
    x: Tensor,
    active: ActiveBlocks,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    y = F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)  # type: ignore[arg-type]
    return sparse_fill(y, active)


def sparse_avg_pool2d(
    x: Tensor,
    active: ActiveBlocks,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    # Contiguous: PyTorch's gradient of padded channels_last on CUDA is wrong before 2.14 (its issue 188344)
    y = F.avg_pool2d(x.contiguous(), kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)  # type: ignore[arg-type]
    return sparse_fill(y, active)


def sparse_adaptive_avg_pool2d(
    x: Tensor, active: ActiveBlocks, output_size: int | Sequence[int] = 1, *, count_inactive: bool = True
) -> Tensor:
    return adaptive_pool_whole(
        x, active.pixel_mask(x.shape[2:]), to_pair(output_size, "adaptive_pool: output_size"), "avg", count_inactive
    )


def sparse_adaptive_max_pool2d(
    x: Tensor, active: ActiveBlocks, output_size: int | Sequence[int] = 1, *, count_inactive: bool = True
) -> Tensor:
    return adaptive_pool_whole(
        x, active.pixel_mask(x.shape[2:]), to_pair(output_size, "adaptive_pool: output_size"), "max", count_inactive
    )


def sparse_resize2d(
    x: Tensor,
    active: ActiveBlocks,
    *,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
) -> Tensor:
    y = F.interpolate(x, size, scale_factor, mode, align_corners)  # type: ignore[arg-type]
    return sparse_fill(y, active)


def sparse_group_norm(
    x: Tensor,
    active: ActiveBlocks,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return norm_whole(x, weight, bias, active.pixel_mask(x.shape[2:]), "group", num_groups, eps)


def sparse_instance_norm(
    x: Tensor, active: ActiveBlocks, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    return norm_whole(x, weight, bias, active.pixel_mask(x.shape[2:]), "group", x.shape[1], eps)


def sparse_response_norm(
    x: Tensor, active: ActiveBlocks, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    return norm_whole(x, weight, bias, active.pixel_mask(x.shape[2:]), "response", 1, eps)


def sparse_layer_norm2d(
    x: Tensor, active: ActiveBlocks, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    return norm_whole(x, weight, bias, active.pixel_mask(x.shape[2:]), "layer", 1, eps)


def sparse_softmax2d(x: Tensor, active: ActiveBlocks, *, log: bool = False) -> Tensor:
    return norm_whole(x, None, None, active.pixel_mask(x.shape[2:]), "log_softmax" if log else "softmax", 1, 0.0)


def sparse_pointwise(x: Tensor, active: ActiveBlocks, program: str, *others: Tensor) -> Tensor:
    y = run_program(program, x, *others)
    return sparse_fill(y, active)


def sparse_rearrange(x: Tensor, active: ActiveBlocks, **how: Any) -> Tensor:
    y = rearrange_whole(x, **how)
    return sparse_fill(y, active)


def sparse_fill(x: Tensor, active: ActiveBlocks, value: float = 0.0) -> Tensor:
    return torch.where(active.pixel_mask(x.shape[2:]), x, torch.full_like(x, value))


def sparse_fill_(x: Tensor, active: ActiveBlocks, value: float = 0.0) -> Tensor:
    return x.copy_(sparse_fill(x, active, value))


def sparse_squeeze_excite2d(
    x: Tensor,
    active: ActiveBlocks,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    activation: str = "relu",
    gate: str = "sigmoid",
) -> Tensor:
    inside = active.pixel_mask(x.shape[2:])
    return squeeze_excite_whole(x, weight1, weight2, bias1, bias2, inside, activation, gate)


def sparse_squeeze_excite2d_(
    x: Tensor,
    active: ActiveBlocks,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    out: Tensor,
    *,
    activation: str = "relu",
    gate: str = "sigmoid",
) -> None:
    gates = sparse_squeeze_excite2d(x, active, weight1, bias1, weight2, bias2, activation=activation, gate=gate)
    out.copy_(torch.where(active.pixel_mask(x.shape[2:]), x * gates, out))
