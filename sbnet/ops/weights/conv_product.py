"""Block-sparse convolutions as block-sparse products: patches of x side by side, times the weights of every tap.

For halves on CUDA where convolutions have no kernel for tensor cores, which products have: copying the patches costs
less. That is on GPUs other than Hopper; there for volumes, blocks of 8, and x whose channels are not adjacent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet._library import kernel_capability
from sbnet.ops.weights.conv_layout import ConvLayout
from sbnet.ops.weights.layout import BlockLayout
from sbnet.ops.weights.matmul import blocksparse_matmul

SIZES = (8, 16, 32, 64, 128)  # of blocks, that products take
MAX_BYTES = 1 << 30  # of patches


def hopper_convolves(x: Tensor, layout: ConvLayout, size: Sequence[int], channels_last: bool) -> bool:
    """Has this convolution a Hopper kernel? As hopper_blocksparse_conv_declines has it, of what calls differ in."""
    if torch.compiler.is_compiling() or not x.is_cuda or kernel_capability(x.device) != 90:
        return False
    pixels, taps = math.prod(size), math.prod(layout.kernel_size)
    suits = bool(layout.block_size) and len(size) < 3 and pixels >= 36 and taps <= 128
    return suits and channels_last and x.data_ptr() % 16 == 0


def as_product(layout: ConvLayout) -> BlockLayout | None:
    """The layout of W [taps C, K], a row of blocks a tap and input block; None where blocks are not those of a grid."""
    size = len(layout.BCK[0][0])
    if size not in SIZES or set(layout.sizes) != {(size, size)}:
        return None
    coords = []
    for inputs, outputs in layout.BCK:
        c, k = inputs[0], outputs[0]
        if c % size or k % size or inputs != tuple(range(c, c + size)) or outputs != tuple(range(k, k + size)):
            return None
        coords.append((c // size, k // size))
    if len(set(coords)) != len(coords):
        return None
    rows, columns = layout.in_channels // size, layout.out_channels // size
    taps = layout.weights // (layout.blocks * size * size)
    at = torch.tensor([(tap * rows + c, k) for c, k in coords for tap in range(taps)])
    return BlockLayout.from_coords(at, (taps * rows, columns), size)


def product_of(
    x: Tensor,
    filters: Tensor,
    layout: ConvLayout,
    bias: Tensor | None,
    geometry: Sequence[Sequence[int]],
    size: Sequence[int],
) -> BlockLayout | None:
    """The layout to convolve by, or None: no halves on CUDA, blocks that do not suit, patches that are too large, a
    gradient that is wanted (a patch's would be rounded before it is summed)."""
    halves = x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) and filters.dtype == x.dtype
    if not halves or torch.compiler.is_compiling() or x.shape[1] != layout.in_channels:
        return None
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, filters, bias)):
        return None
    _, strides, paddings, dilations = geometry
    patches = x.shape[0] * math.prod(size) * math.prod(layout.kernel_size) * layout.in_channels * x.itemsize
    if not 0 < patches <= MAX_BYTES or min(*strides, *dilations) < 1 or min(paddings) < 0:
        return None
    if layout.by_product is None:
        layout.by_product = as_product(layout) or False
    return layout.by_product or None


def convolve_by_product(
    x: Tensor,
    filters: Tensor,
    layout: BlockLayout,
    bias: Tensor | None,
    activation: str | None,
    geometry: Sequence[Sequence[int]],
    **options: Any,
) -> Tensor:
    """x [N,C,...] -> [N,K,...], channels last in memory; geometry: kernel sizes, strides, paddings, dilations."""
    axes = x.dim() - 2
    kernels, strides, paddings, dilations = geometry
    patches = x.movedim(1, -1)
    if any(paddings):
        patches = F.pad(patches, (0, 0, *(p for padding in reversed(paddings) for p in (padding, padding))))
    for axis, (kernel, stride, dilation) in enumerate(zip(kernels, strides, dilations, strict=True)):
        patches = patches.unfold(1 + axis, (kernel - 1) * dilation + 1, stride)[..., ::dilation]
    patches = patches.movedim(1 + axes, -1).flatten(1 + axes)  # [N, sides of y, taps and C]
    size, taps = layout.block_size, math.prod(kernels)
    weight = filters.reshape(-1, size, size, taps).permute(0, 3, 2, 1).reshape(layout.weight_shape)
    return blocksparse_matmul(patches, weight, layout, None, bias, activation, **options).movedim(-1, 1)
