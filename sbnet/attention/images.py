"""Attention over the pixels that a convolution reads."""

from __future__ import annotations

import torch
from torch import Tensor

from sbnet.ops.attention.layout import AttentionLayout


def conv_layout(
    input_h: int = 1,
    input_w: int = 1,
    filter_h: int = 1,
    filter_w: int = 1,
    stride: int = 1,
    block_size: int = 32,
    autoregressive: bool = True,
) -> AttentionLayout:
    """Queries are the pixels of a convolution's output, row by row, keys those of its input: it sees what it reads.

    The output has 1 / stride of the input's rows and columns. autoregressive: and no pixel behind its own.

    Raises:
        ValueError: no padding gives such an output (even filters need stride 2), pixels that fill no block.

    >>> layout = conv_layout(16, 16, 5, 5, block_size=8)  # 256 queries and keys
    """
    sizes = input_h, input_w, filter_h, filter_w, stride, block_size
    return AttentionLayout.from_mask(conv_pixels("conv_layout", *sizes, autoregressive), block_size)


def deconv_layout(
    output_h: int = 1,
    output_w: int = 1,
    filter_h: int = 1,
    filter_w: int = 1,
    stride: int = 1,
    block_size: int = 32,
    autoregressive: bool = True,
) -> AttentionLayout:
    """The same of the transposed convolution: queries are the large plane's pixels, keys the small one's."""
    sizes = output_h, output_w, filter_h, filter_w, stride, block_size
    return AttentionLayout.from_mask(deconv_pixels("deconv_layout", *sizes, autoregressive), block_size)


def conv_pixels(
    op: str, h: int, w: int, filter_h: int, filter_w: int, stride: int, block: int, autoregressive: bool
) -> Tensor:
    """[outputs, inputs] bool: which pixels a query of `conv_layout` sees."""
    visible, own = _pixels(op, h, w, filter_h, filter_w, stride, block)
    return visible & (torch.arange(h * w) <= own[:, None]) if autoregressive else visible


def deconv_pixels(
    op: str, h: int, w: int, filter_h: int, filter_w: int, stride: int, block: int, autoregressive: bool
) -> Tensor:
    """[outputs, inputs] bool: which pixels a query of `deconv_layout` sees."""
    visible, own = _pixels(op, h, w, filter_h, filter_w, stride, block)
    return visible.t() & (torch.arange(h * w)[:, None] >= own) if autoregressive else visible.t()


def _pixels(op: str, h: int, w: int, filter_h: int, filter_w: int, stride: int, block: int) -> tuple[Tensor, Tensor]:
    """[small plane, large plane]: which pixels a filter joins; and where the small plane's lie in the large one."""
    rows = torch.ones(1, 1, dtype=torch.bool) if h == 1 else _line(op, "filter_h", h, filter_h, stride)
    columns = _line(op, "filter_w", w, filter_w, stride)
    p, q = len(rows), len(columns)
    if p * q % block or h * w % block:
        raise ValueError(f"{op}: block_size: expected a divisor of {p * q} and {h * w} pixels, got {block}")
    visible = (rows[:, None, :, None] & columns[None, :, None, :]).view(p * q, h * w)
    own = torch.arange(p)[:, None] * stride * w + torch.arange(q) * stride
    return visible, own.flatten()


def _line(op: str, name: str, side: int, taps: int, stride: int) -> Tensor:
    """[side / stride, side]: what each output reads along an axis, with the least padding that gives so many."""
    count, odd = divmod(side, stride)
    paddings = [p for p in range(taps) if -(-(side - taps + 1 + 2 * p) // stride) == count]
    if odd or not paddings:
        raise ValueError(
            f"{op}: {name}: expected a size for which {side} pixels give {side} / {stride} (even ones need stride 2), "
            f"got {taps}"
        )
    at = torch.arange(side) - torch.arange(count)[:, None] * stride + paddings[0]
    return (at >= 0) & (at < taps)
