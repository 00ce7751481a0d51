"""Kernel size, stride, padding and dilation of convolutions of one to three axes, as the ops take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.ops.weights.conv_layout import ConvLayout

Sides = int | Sequence[int]


def sides(op: str, name: str, value: Any, axes: int) -> list[int]:
    """One number an axis."""
    if isinstance(value, (int, torch.SymInt)):
        return [value] * axes  # type: ignore[list-item]
    if len(value) != axes:
        raise ValueError(f"sbnet::{op}: {name}: expected 1 or {axes} numbers, got {len(value)}")
    return list(value)


def to_geometry(op: str, layout: ConvLayout, stride: Sides, padding: Sides | str, dilation: Sides) -> list[int]:
    """The op's twelve numbers: kernel size, stride, padding, dilation of three axes."""
    axes = len(layout.kernel_size)
    steps = sides(op, "dilation", dilation, axes)
    if isinstance(padding, str):
        if padding.upper() not in ("SAME", "VALID"):
            raise ValueError(f"sbnet::{op}: padding: expected 'SAME', 'VALID' or numbers, got {padding!r}")
        wide = [(k - 1) * d + 1 for k, d in zip(layout.kernel_size, steps, strict=True)]
        padding = [w // 2 if padding.upper() == "SAME" else 0 for w in wide]
    groups = ((layout.kernel_size, 1), (sides(op, "stride", stride, axes), 1),
              (sides(op, "padding", padding, axes), 0), (steps, 1))  # fmt: skip
    return [v for numbers, other in groups for v in (*[other] * (3 - axes), *numbers)]


def parts(geometry: Sequence[int]) -> list[Sequence[int]]:
    """kernel_size, stride, padding, dilation."""
    return [geometry[3 * i : 3 * i + 3] for i in range(4)]


def output_sides(x: Tensor, geometry: Sequence[int], axes: int) -> list[int]:
    """Sides of a convolution's output."""
    out = []
    for w, k, s, p, d in zip(x.shape[2:], *(part[3 - axes :] for part in parts(geometry)), strict=True):
        room = w + 2 * p - (k - 1) * d - 1
        if room < 0 or s < 1:
            raise ValueError(
                f"sbnet::blocksparse_conv: x: expected {(k - 1) * d + 1 - 2 * p} or more along an axis of kernel {k}, "
                f"stride {s} from 1 on, got {w} and stride {s}"
            )
        out.append(room // s + 1)
    return out
