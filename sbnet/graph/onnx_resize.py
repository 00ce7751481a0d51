"""Resize and Upsample of ONNX: by F.interpolate where it means the same, else by a matrix or an index for each axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.graph.onnx_run import Arguments, Unsupported, op

F32 = np.float32


@dataclass(frozen=True)
class How:
    """What all axes of a Resize share; names are ONNX's."""

    mode: str
    where: str
    rounding: str
    antialias: bool = False
    exclude_outside: bool = False
    cubic_coeff_a: float = -0.75
    extrapolation_value: float = 0.0


@dataclass(frozen=True)
class Axis:
    """One axis that changes: its length, the new one, its scale, and the part that is cropped."""

    size: int
    wanted: int
    scale: float
    roi: tuple[float, float] = (0.0, 1.0)


@op("Resize")
def resize(a: Arguments) -> Tensor:
    if a.version < 11:
        return _old(a, a.number(1))
    how = How(
        a.option("mode"), a.option("coordinate_transformation_mode"), a.option("nearest_mode"),
        bool(a.option("antialias", 0)), bool(a.option("exclude_outside")), a.option("cubic_coeff_a"),
        a.option("extrapolation_value"),
    )  # fmt: skip
    from_sizes = bool(a.number(3)) and a.option("keep_aspect_ratio_policy", "stretch") == "stretch"
    return _resized(a[0], _axes_of(a, how), how, from_sizes)


@op("Upsample")
def upsample(a: Arguments) -> Tensor:
    return _old(a, a.either("scales", 1))


def _old(a: Arguments, scales: list[float]) -> Tensor:
    """Before version 11: pixel k lies at k / scale, and the nearest is the one before, or, getting smaller, after."""
    x, mode = a[0], a.option("mode")
    a.expect(mode in ("nearest", "linear", "bilinear"), "attribute mode", "nearest or linear", mode)
    axes = {k: Axis(n, math.floor(F32(n) * F32(s)), s) for k, (n, s) in enumerate(zip(x.shape, scales, strict=True))}
    return _resized(x, axes, How(mode.removeprefix("bi"), "asymmetric", "simple"), from_sizes=False)


def _axes_of(a: Arguments, how: How) -> dict[int, Axis]:
    x, scales, sizes = a[0], a.number(2), a.number(3)
    if not scales and not sizes:
        raise Unsupported("inputs scales, sizes: expected one of them, got none")
    axes = a.option("axes", None) or list(range(x.dim()))
    policy = a.option("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch" and min(axes) < 0:
        raise Unsupported(f"attribute axes: expected none below 0 beside keep_aspect_ratio_policy {policy}, got {axes}")
    axes = [k % x.dim() for k in axes]
    roi = (a.number(1) or []) if how.where == "tf_crop_and_resize" else []
    factors = [float(s) for s in scales or []]
    if sizes:
        factors = [float(F32(n) / F32(x.shape[k])) for k, n in zip(axes, sizes, strict=True)]
        if policy != "stretch":
            one = (min if policy == "not_larger" else max)(factors)
            factors, sizes = [one] * len(factors), [math.floor(F32(x.shape[k]) * F32(one) + F32(0.5)) for k in axes]
    found = {}
    for at, (k, factor) in enumerate(zip(axes, factors, strict=True)):
        part = (roi[at], roi[at + len(axes)]) if roi else (0.0, 1.0)
        extent = F32(x.shape[k]) * F32(factor)  # of the whole axis, cropped or not, as in ONNX Runtime
        found[k] = Axis(x.shape[k], int(sizes[at]) if sizes else math.floor(extent), factor, part)
    return found


def _resized(x: Tensor, axes: dict[int, Axis], how: How, from_sizes: bool) -> Tensor:
    # As ONNX Runtime, which leaves an axis alone whose scale is 1, even if a part of it were to be cropped.
    axes = {k: v for k, v in axes.items() if v.scale != 1 or v.wanted != v.size}
    if not axes:
        return x
    plain = _by_pytorch(x, axes, how, from_sizes)
    if plain is not None:
        return plain
    if how.mode == "nearest":
        return _nearest(x, axes, how)
    outside: list[Tensor] = []
    for k, axis in axes.items():
        weights, beyond = _weights(axis, how)
        matrix = torch.as_tensor(weights, dtype=x.dtype, device=x.device)
        x = torch.matmul(matrix, x) if k == x.dim() - 2 else torch.matmul(x.movedim(k, -1), matrix.t()).movedim(-1, k)
        if how.where == "tf_crop_and_resize" and beyond.any():
            shape = [1] * x.dim()
            shape[k] = -1
            outside.append(torch.as_tensor(beyond, device=x.device).reshape(shape))
    for places in outside:
        x = torch.where(places, torch.full((), how.extrapolation_value, dtype=x.dtype, device=x.device), x)
    return x


def _by_pytorch(x: Tensor, axes: dict[int, Axis], how: How, from_sizes: bool) -> Tensor | None:
    """What F.interpolate computes in the same way, and ops on active blocks know; else None."""
    if x.dim() != 4 or not set(axes) <= {2, 3} or not x.is_floating_point() or how.antialias or how.exclude_outside:
        return None
    both = [axes.get(k, Axis(x.shape[k], x.shape[k], 1.0)) for k in (2, 3)]
    factors, after = [v.scale for v in both], [v.wanted for v in both]
    grows = all(f == int(f) and f >= 1 and v.wanted == v.size * int(f) for f, v in zip(factors, both, strict=True))
    if how.mode == "nearest":
        floors = how.where == "asymmetric" and how.rounding in ("floor", "simple")
        rounds = how.where == "half_pixel" and how.rounding.startswith("round")
        return F.interpolate(x, scale_factor=factors) if grows and (floors or rounds) else None
    kind = {"linear": "bilinear", "cubic": "bicubic"}.get(how.mode, "")
    if not kind or (how.mode == "cubic" and abs(how.cubic_coeff_a + 0.75) > 1e-6):
        return None
    if how.where == "align_corners" and min(after) > 1:
        return F.interpolate(x, after, mode=kind, align_corners=True)
    if how.where not in ("half_pixel", "pytorch_half_pixel") or (how.where == "pytorch_half_pixel" and min(after) == 1):
        return None
    if from_sizes and not grows:
        return F.interpolate(x, after, mode=kind, align_corners=False)
    same = all(math.floor(v.size * v.scale) == v.wanted for v in both)
    return F.interpolate(x, scale_factor=factors, mode=kind, align_corners=False) if same else None


# ---- where output pixels lie


def _places(axis: Axis, where: str) -> np.ndarray:
    """Of each output pixel, in float32, in which ONNX Runtime computes them, too."""
    at, scale = np.arange(axis.wanted, dtype=F32), F32(axis.scale)
    last = F32(axis.size - 1)
    if where == "asymmetric":
        return at / scale
    if where == "half_pixel":
        return (at + F32(0.5)) / scale - F32(0.5)
    if where == "pytorch_half_pixel":
        return (at + F32(0.5)) / scale - F32(0.5) if axis.wanted > 1 else at * 0
    if where == "align_corners":
        return at * last / F32(axis.wanted - 1) if axis.wanted > 1 else at * 0
    if where == "tf_half_pixel_for_nn":
        return (at + F32(0.5)) / scale
    if where == "half_pixel_symmetric":
        real = F32(axis.size) * scale
        offset = F32(axis.size) / F32(2) * (F32(1) - F32(axis.wanted) / real)
        return offset + (at + F32(0.5)) / scale - F32(0.5)
    if where == "tf_crop_and_resize":
        start, end = F32(axis.roi[0]), F32(axis.roi[1])
        if axis.wanted == 1:
            return np.full(1, F32(0.5) * (start + end) * last, F32)
        return start * last + at * (end - start) * last / F32(axis.wanted - 1)
    raise Unsupported(f"attribute coordinate_transformation_mode: expected one of ONNX's, got {where}")


TIE = 1e-6  # so near to the middle ONNX Runtime takes a place for the middle
Rounding = Callable[[np.ndarray, bool], np.ndarray]
ROUNDING: dict[str, Rounding] = {
    "floor": lambda v, smaller: np.floor(v),
    "ceil": lambda v, smaller: np.ceil(v),
    "round_prefer_floor": lambda v, smaller: np.ceil(v.astype(np.float64) - 0.5 - TIE),
    "round_prefer_ceil": lambda v, smaller: np.floor(v.astype(np.float64) + 0.5 + TIE),
    "simple": lambda v, smaller: np.ceil(v) if smaller else np.trunc(v),
}


def _nearest(x: Tensor, axes: dict[int, Axis], how: How) -> Tensor:
    for k, axis in axes.items():
        places = _places(axis, how.where)
        rounded = ROUNDING[how.rounding](places, axis.scale < 1).clip(0, axis.size - 1).astype(np.int64)
        x = x.index_select(k, torch.as_tensor(rounded, device=x.device))
        beyond = (places < 0) | (places > axis.size - 1)
        if how.where == "tf_crop_and_resize" and beyond.any():
            shape = [1] * x.dim()
            shape[k] = -1
            value = torch.full((), how.extrapolation_value, dtype=x.dtype, device=x.device)
            x = torch.where(torch.as_tensor(beyond, device=x.device).reshape(shape), value, x)
    return x


def _weights(axis: Axis, how: How) -> tuple[Any, np.ndarray]:
    """([wanted, size] weights, which output pixels lie beyond the input) of a linear or cubic resize."""
    places = _places(axis, how.where).astype(np.float64)
    beyond = (places < 0) | (places > axis.size - 1)
    stretch = max(1.0, 1 / axis.scale) if how.antialias else 1.0
    radius = (1 if how.mode == "linear" else 2) * stretch
    kernel = _linear if how.mode == "linear" else _cubic(how.cubic_coeff_a)
    low = np.floor(places - radius).astype(np.int64)
    taps = low[:, None] + np.arange(math.ceil(2 * radius) + 2)
    values = kernel(np.abs(taps - places[:, None]) / stretch)
    outside = (taps < 0) | (taps > axis.size - 1)
    if how.exclude_outside:
        values = np.where(outside, 0, values)
    values = values / values.sum(1, keepdims=True)
    weights = np.zeros((axis.wanted, axis.size))
    np.add.at(weights, (np.arange(axis.wanted)[:, None], taps.clip(0, axis.size - 1)), values)
    return weights, beyond


def _linear(t: np.ndarray) -> np.ndarray:
    return np.maximum(1 - t, 0)


def _cubic(a: float) -> Callable[[np.ndarray], np.ndarray]:
    def kernel(t: np.ndarray) -> np.ndarray:
        near = ((a + 2) * t - (a + 3)) * t * t + 1
        far = a * (((t - 5) * t + 8) * t - 4)
        return np.where(t <= 1, near, np.where(t < 2, far, 0))

    return kernel
