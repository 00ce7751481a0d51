"""Sizes of what windowed layers read and write: output sizes, padding."""

from __future__ import annotations

import functools
import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

Pair = tuple[int, int]


@dataclass(frozen=True, order=True)
class Window:
    """Which coordinates of its input a layer reads, along each axis for output o: from floor((o*num + lo) / den) to
    floor((o*num + hi) / den), every step-th of them, as far as they lie in the plane.

    >>> Window.conv(3, stride=2, padding=1)
    Window(num=(2, 2), den=(1, 1), lo=(-1, -1), hi=(1, 1), step=(1, 1))
    """

    num: Pair
    den: Pair
    lo: Pair
    hi: Pair
    step: Pair

    @classmethod
    def conv(
        cls,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        op: str = "Window.conv",
    ) -> Window:
        """Of a convolution or pool. `op` is whom errors name."""
        k, s, p, d = to_window(op, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation)
        if min(p) < 0:
            raise ValueError(f"sbnet::{op}: padding: expected at least 0, got {p}")
        hi = ((k[0] - 1) * d[0] - p[0], (k[1] - 1) * d[1] - p[1])
        step = (d[0] if k[0] > 1 else 1, d[1] if k[1] > 1 else 1)
        return cls(s, (1, 1), (-p[0], -p[1]), hi, step)

    @classmethod
    def conv_transpose(
        cls,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        op: str = "Window.conv_transpose",
    ) -> Window:
        """Of a transposed convolution; coordinates between those that a dilated one reads are counted as read."""
        k, s, p, d = to_window(op, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation)
        lo = (p[0] - (k[0] - 1) * d[0] + s[0] - 1, p[1] - (k[1] - 1) * d[1] + s[1] - 1)
        return cls((1, 1), s, (min(lo[0], p[0]), min(lo[1], p[1])), p, (1, 1))

    @classmethod
    @functools.cache
    def resize(cls, size: Pair, out: Pair, mode: str, align_corners: bool = False, ratios: Any = (0.0, 0.0)) -> Window:
        """Of an interpolation from a plane of `size` to one of `out`: the narrowest that holds what each output reads.

        Args:
            ratios: input pixels from an output to the next; 0 where the sizes say it.
        """
        axes = [_resize_axis(size[d], out[d], mode, align_corners, ratios[d]) for d in range(2)]
        num, den, lo, hi = ((a, b) for a, b in zip(*axes, strict=True))
        return cls(num, den, lo, hi, (1, 1))

    @classmethod
    def adaptive(cls, size: Pair, out: Pair) -> Window:
        """Of an adaptive pool from a plane of `size` to one of `out`."""
        return cls(size, out, (0, 0), (size[0] - 1, size[1] - 1), (1, 1))

    @classmethod
    def rearrange(cls, up: int = 1, down: int = 1, pad: Sequence[int] = (0, 0, 0, 0)) -> Window:
        """Of `sparse_rearrange`: `down` pixels in a row, of which `up` lie in one of its input."""
        lo = (-pad[2] * down, -pad[0] * down)
        return cls((down, down), (up, up), lo, (lo[0] + down - 1, lo[1] + down - 1), (1, 1))

    def numbers(self) -> list[int]:
        """The ten numbers that torch.ops.sbnet.* and ONNX attributes take."""
        return [*self.num, *self.den, *self.lo, *self.hi, *self.step]


RESIZE_MODES = ("nearest", "nearest-exact", "bilinear", "bicubic")


def _resize_axis(side: int, out: int, mode: str, align_corners: bool, ratio: float) -> tuple[int, int, int, int]:
    """num, den, lo, hi of an interpolation along one axis, by the kernels' arithmetic (core/masked/resize.h)."""
    exact = Fraction(ratio).limit_denominator(1024) if ratio else Fraction(side, out)
    step = torch.tensor(ratio or side / out, dtype=torch.float32)
    if align_corners:
        exact = Fraction(side - 1, out - 1) if out > 1 else Fraction(0)
        step = torch.tensor(float(exact), dtype=torch.float32)
    outputs = torch.arange(out, dtype=torch.float32)
    if mode.startswith("nearest"):
        at = ((outputs + (0.5 if mode == "nearest-exact" else 0.0)) * step).floor().long()
        first = last = at.clamp(0, side - 1)
    else:
        centre, shift = (outputs, 0.0) if align_corners else (outputs + 0.5, 0.5)
        fused = (step.double() * centre.double() - shift).float()  # a GPU rounds once, a CPU twice
        twice = step * centre - shift
        low, high = torch.minimum(fused, twice), torch.maximum(fused, twice)
        if mode == "bilinear":
            first, last = low.clamp(min=0).floor().long(), high.clamp(min=0).ceil().long()
        else:
            first, last = low.floor().long() - 1, high.floor().long() + 2
        first, last = first.clamp(0, side - 1), last.clamp(0, side - 1)
    o = torch.arange(out)
    if ratio and not align_corners and out in (side, 2 * side):  # PyTorch may ignore the ratio, by device and mode
        before, behind = (1, 2) if mode == "bicubic" else (0, 0)  # taps that count nothing are read, too
        first = torch.minimum(first, (o * side // out - before).clamp(min=0))
        last = torch.maximum(last, (o * side // out + behind).clamp(max=side - 1))
    num, den = max(exact.numerator, 1), exact.denominator
    hi = int((last * den - o * num).max())
    return num, den, min(int(((first + 1) * den - 1 - o * num).min()), hi), hi


def as_window(op: str, window: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1) -> Window:
    """A Window as it is, or that of a convolution whose kernel size came in its place."""
    return window if isinstance(window, Window) else Window.conv(window, stride, padding, dilation, op)


def to_pair(value: int | Sequence[int], name: str) -> Pair:
    """(v, v) of an int, or the two ints of a sequence. `name` is what an error names: "op: argument"."""
    pair = tuple(value) if isinstance(value, (tuple, list, torch.Size)) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"sbnet::{name}: expected an int or two ints, got {reprlib.repr(pair)}")
    if not all(isinstance(v, (int, torch.SymInt)) for v in pair):
        raise TypeError(f"sbnet::{name}: expected an int or two ints, got {reprlib.repr(value)}")
    return pair[0], pair[1]


def to_window(op: str, **pairs: Any) -> list[Pair]:
    """Arguments of a convolution or pool as pairs; steps of 0 are refused."""
    found = [to_pair(value, f"{op}: {name}") for name, value in pairs.items()]
    for name, pair in zip(pairs, found, strict=True):
        if name in ("stride", "dilation", "kernel_size") and any(isinstance(v, int) and v < 1 for v in pair):
            raise ValueError(f"sbnet::{op}: {name}: expected at least 1, got {pair}")
    return found


def conv_output_size(
    size: int | Sequence[int],
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
) -> Pair:
    """(H_out, W_out) of a convolution over an H x W plane, torch's convention (symmetric padding)."""
    plane, *window = to_window(
        "conv_output_size", size=size, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation
    )
    out = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(plane, *window, strict=True)]
    return out[0], out[1]


def conv_transpose_output_size(
    size: int | Sequence[int],
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
) -> Pair:
    """(H_out, W_out) of PyTorch's conv_transpose2d over an H x W plane."""
    plane, k, s, p, op, d = to_window(
        "conv_transpose_output_size", size=size, kernel_size=kernel_size, stride=stride, padding=padding,
        output_padding=output_padding, dilation=dilation,
    )  # fmt: skip
    out = [(plane[a] - 1) * s[a] - 2 * p[a] + d[a] * (k[a] - 1) + op[a] + 1 for a in range(2)]
    return out[0], out[1]


def pool_output_size(
    size: int | Sequence[int],
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Pair:
    """(H_out, W_out) of PyTorch's max_pool2d and avg_pool2d (dilation 1) over an H x W plane."""
    stride = kernel_size if stride is None else stride
    plane, k, s, p, d = to_window(
        "pool_output_size", size=size, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation
    )
    if not ceil_mode:
        return conv_output_size(plane, k, s, p, d)
    # The last window may reach past the padding, but must begin inside the plane or the padding before it.
    out = [
        torch.sym_min(-(-(plane[a] + 2 * p[a] - d[a] * (k[a] - 1) - 1) // s[a]) + 1, -(-(plane[a] + p[a]) // s[a]))
        for a in range(2)
    ]
    return out[0], out[1]


def to_scales(value: float | Sequence[float], name: str) -> tuple[float, float]:
    """Scales of both axes. `name` is what an error names: "op: argument"."""
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2 or not all(isinstance(v, (int, float)) and math.isfinite(v) and v > 0 for v in pair):
        raise ValueError(f"sbnet::{name}: expected a number above 0 or two, got {reprlib.repr(value)}")
    return float(pair[0]), float(pair[1])


def resize_output_size(size: int | Sequence[int], scale_factor: float | Sequence[float]) -> Pair:
    """(H_out, W_out) of F.interpolate with a scale factor over an H x W plane."""
    plane = to_pair(size, "resize_output_size: size")
    scales = to_scales(scale_factor, "resize_output_size: scale_factor")
    out = [_scaled(n, s) for n, s in zip(plane, scales, strict=True)]
    return out[0], out[1]


def _scaled(side: int, scale: float) -> int:
    """Symbolic sides stay exact integers where the scale or its reciprocal is one."""
    if scale.is_integer():
        return side * int(scale)
    if (1 / scale).is_integer():
        return side // int(1 / scale)
    return int(torch.sym_int(side * scale)) if isinstance(side, int) else torch.sym_int(side * scale)


def same_padding(size: int, kernel_size: int, stride: int = 1, dilation: int = 1) -> Pair:
    """(before, after) padding of TensorFlow's SAME: output = ceil(size / stride), the odd pixel goes after."""
    if stride < 1:
        raise ValueError(f"sbnet::same_padding: stride: expected at least 1, got {stride}")
    total = max((-(-size // stride) - 1) * stride + dilation * (kernel_size - 1) + 1 - size, 0)
    return total // 2, total - total // 2
