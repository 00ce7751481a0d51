"""Ops of ONNX as ops of PyTorch, a function each: what `OnnxNetwork` runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.graph.onnx import Arguments, Unsupported

OPS: dict[str, Callable[[Arguments], Any]] = {}


def op(*names: str) -> Callable[[Callable[[Arguments], Any]], Callable[[Arguments], Any]]:
    def register(function: Callable[[Arguments], Any]) -> Callable[[Arguments], Any]:
        OPS.update(dict.fromkeys(names, function))
        return function

    return register


# ---- windows


def _pads(a: Arguments, x: Tensor, kernel: list[int]) -> tuple[list[int], list[int]]:
    """(before, after) of height and width."""
    if x.dim() != 4:
        raise Unsupported(f"expected a plane [N,C,H,W], got {x.dim()} dimensions")
    how = a.option("auto_pad", "NOTSET")
    stride, dilation = a.option("strides", [1, 1]), a.option("dilations", [1, 1])
    if how in ("SAME_UPPER", "SAME_LOWER"):
        total = [
            max((math.ceil(n / s) - 1) * s + d * (k - 1) + 1 - n, 0)
            for n, s, d, k in zip(x.shape[2:], stride, dilation, kernel, strict=True)
        ]
        small, large = [t // 2 for t in total], [t - t // 2 for t in total]
        return (small, large) if how == "SAME_UPPER" else (large, small)
    pads = a.option("pads", [0, 0, 0, 0]) if how == "NOTSET" else [0, 0, 0, 0]
    return pads[:2], pads[2:]


def _even(x: Tensor, before: list[int], after: list[int], fill: float = 0.0) -> tuple[Tensor, list[int]]:
    """x, padded where the sides differ, and the padding left to the op."""
    if before == after:
        return x, before
    return F.pad(x, (before[1], after[1], before[0], after[0]), value=fill), [0, 0]


@op("Conv")
def conv(a: Arguments) -> Tensor:
    kernel = list(a[1].shape[2:])
    x, padding = _even(a[0], *_pads(a, a[0], kernel))
    return F.conv2d(
        x, a[1], a[2], a.option("strides", [1, 1]), padding, a.option("dilations", [1, 1]), a.option("group", 1)
    )


@op("ConvTranspose")
def conv_transpose(a: Arguments) -> Tensor:
    if a.option("auto_pad", "NOTSET") != "NOTSET" or a.option("output_shape"):
        raise Unsupported("expected pads, got auto_pad or output_shape")
    stride, extra = a.option("strides", [1, 1]), a.option("output_padding", [0, 0])
    before, after = _pads(a, a[0], list(a[1].shape[2:]))
    groups, dilation = a.option("group", 1), a.option("dilations", [1, 1])
    if before != after:  # less at the end: as if more were put out there
        extra = [e + b - f for e, b, f in zip(extra, before, after, strict=True)]
    return F.conv_transpose2d(a[0], a[1], a[2], stride, before, extra, groups, dilation)


@op("MaxPool")
def max_pool(a: Arguments) -> Tensor:
    kernel = a.option("kernel_shape")
    x, padding = _even(a[0], *_pads(a, a[0], kernel), fill=-math.inf)
    stride, dilation = a.option("strides", [1, 1]), a.option("dilations", [1, 1])
    return F.max_pool2d(x, kernel, stride, padding, dilation, bool(a.option("ceil_mode", 0)))


@op("AveragePool")
def average_pool(a: Arguments) -> Tensor:
    kernel = a.option("kernel_shape")
    before, after = _pads(a, a[0], kernel)
    counted = bool(a.option("count_include_pad", 0))
    if before != after and not counted:
        raise Unsupported("expected the same padding on both sides, got different ones that do not count")
    x, padding = _even(a[0], before, after)
    return F.avg_pool2d(x, kernel, a.option("strides", [1, 1]), padding, bool(a.option("ceil_mode", 0)), counted)


@op("GlobalAveragePool")
def global_average(a: Arguments) -> Tensor:
    return F.adaptive_avg_pool2d(a[0], 1)


@op("GlobalMaxPool")
def global_max(a: Arguments) -> Tensor:
    return F.adaptive_max_pool2d(a[0], 1)


# ---- sizes


@op("Resize", "Upsample")
def resize(a: Arguments) -> Tensor:
    x, mode = a[0], a.option("mode", "nearest")
    old = len(a) < 3 and "coordinate_transformation_mode" not in a.options  # Upsample, and Resize of opset 10
    where = a.option("coordinate_transformation_mode", "asymmetric" if old else "half_pixel")
    scales, sizes = (a.either("scales", 1), None) if len(a) < 3 else (a.number(2), a.number(3))
    if a.option("axes") is not None or x.dim() != 4:
        raise Unsupported("expected scales or sizes of all of [N,C,H,W]")
    before = x.shape[2:]
    factors = [n / m for n, m in zip(sizes[2:], before, strict=True)] if sizes else [float(f) for f in scales[2:]]
    after = [int(n) for n in sizes[2:]] if sizes else [math.floor(n * f) for n, f in zip(before, factors, strict=True)]
    grows = all(f == int(f) for f in factors)
    if mode == "nearest":
        rounding = a.option("nearest_mode", "floor" if old else "round_prefer_floor")
        if grows and ((where, rounding) == ("asymmetric", "floor") or where == "half_pixel"):
            return F.interpolate(x, scale_factor=factors)
        if sizes and (where, rounding) == ("asymmetric", "floor"):
            return F.interpolate(x, after)
        rows, columns = (
            _nearest(*axis, where, rounding, x.device) for axis in zip(before, after, factors, strict=True)
        )
        return x.index_select(2, rows).index_select(3, columns)
    if mode not in ("linear", "cubic") or where not in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        raise Unsupported(f"expected a linear or cubic resize of half pixels or aligned corners, got {mode}, {where}")
    if mode == "cubic" and abs(a.option("cubic_coeff_a", -0.75) + 0.75) > 1e-6:
        raise Unsupported("expected cubic_coeff_a -0.75")
    kind, aligned = {"linear": "bilinear", "cubic": "bicubic"}[mode], where == "align_corners"
    if aligned or (sizes and not grows):
        return F.interpolate(x, after, mode=kind, align_corners=aligned)
    return F.interpolate(x, scale_factor=factors, mode=kind, align_corners=False)


Rounding = Callable[[np.ndarray], np.ndarray]
ROUNDING: dict[str, Rounding] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round_prefer_floor": lambda v: np.ceil(v - 0.5),
    "round_prefer_ceil": lambda v: np.floor(v + 0.5),
}


def _nearest(size: int, wanted: int, scale: float, where: str, rounding: str, device: torch.device) -> Tensor:
    """The pixel of each output pixel, along one axis."""
    at = np.arange(wanted, dtype=np.float64)
    if where == "asymmetric":
        at = at / scale
    elif where == "half_pixel" or (where == "pytorch_half_pixel" and wanted > 1):
        at = (at + 0.5) / scale - 0.5
    elif where == "align_corners":
        at = at * (size - 1) / max(wanted - 1, 1)
    elif where == "pytorch_half_pixel":
        at = at * 0
    else:
        raise Unsupported(f"expected asymmetric, half_pixel or align_corners, got {where}")
    return torch.as_tensor(ROUNDING[rounding](at).clip(0, size - 1).astype(np.int64), device=device)


@op("DepthToSpace")
def depth_to_space(a: Arguments) -> Tensor:
    x, factor = a[0], a.option("blocksize")
    if a.option("mode", "DCR") == "DCR":  # channels of one place lie together: brought into PyTorch's order
        n, c, h, w = x.shape
        x = x.reshape(n, factor**2, c // factor**2, h, w).transpose(1, 2).reshape(n, c, h, w)
    return F.pixel_shuffle(x, factor)


@op("SpaceToDepth")
def space_to_depth(a: Arguments) -> Tensor:
    x, factor = a[0], a.option("blocksize")
    n, c, _, _ = x.shape
    y = F.pixel_unshuffle(x, factor)
    return y.reshape(n, c, factor**2, *y.shape[2:]).transpose(1, 2).reshape(n, -1, *y.shape[2:])


@op("Pad")
def pad(a: Arguments) -> Tensor:
    x, mode = a[0], a.option("mode", "constant")
    pads, axes = a.either("pads", 1), a.number(3)
    axes = list(range(x.dim())) if axes is None else [k % x.dim() for k in axes]
    per_axis = {k: (pads[i], pads[i + len(axes)]) for i, k in enumerate(axes)}
    flat = [n for k in reversed(range(x.dim())) for n in per_axis.get(k, (0, 0))]
    if mode == "constant":
        return F.pad(x, flat, value=float(a.either("value", 2, 0.0) or 0.0))
    if any(flat[4:]) or mode not in ("reflect", "edge"):
        raise Unsupported(f"expected constant, or reflect or edge of the plane, got {mode}")
    return F.pad(x, flat[:4], mode={"reflect": "reflect", "edge": "replicate"}[mode])


# ---- normalisations


@op("BatchNormalization")
def batch_norm(a: Arguments) -> Tensor:
    return F.batch_norm(a[0], a[3], a[4], a[1], a[2], False, 0.0, a.option("epsilon", 1e-5))


@op("InstanceNormalization")
def instance_norm(a: Arguments) -> Tensor:
    return F.instance_norm(a[0], weight=a[1], bias=a[2], eps=a.option("epsilon", 1e-5))


@op("LayerNormalization")
def layer_norm(a: Arguments) -> Tensor:
    shape = list(a[0].shape[a.option("axis", -1) :])
    return F.layer_norm(a[0], shape, a[1], a[2], a.option("epsilon", 1e-5))


@op("GroupNormalization")
def group_norm(a: Arguments) -> Tensor:
    return F.group_norm(a[0], a.option("num_groups"), a[1], a[2], a.option("epsilon", 1e-5))


# ---- products


@op("Gemm")
def gemm(a: Arguments) -> Tensor:
    x, weight = (a[0].t() if a.option("transA", 0) else a[0]), a[1]
    if a.option("alpha", 1.0) != 1 or a.option("beta", 1.0) != 1:
        raise Unsupported("expected alpha and beta 1")
    return F.linear(x, weight if a.option("transB", 0) else weight.t(), a[2])


OPS["ArgMax"] = lambda a: torch.argmax(a[0], a.option("axis", 0), keepdim=bool(a.option("keepdims", 1)))


# ---- arrangement


@op("Concat")
def concat(a: Arguments) -> Tensor:
    return torch.cat([a[k] for k in range(len(a))], a.option("axis"))


@op("Split")
def split(a: Arguments) -> Any:
    axis, sizes = a.option("axis", 0), a.either("split", 1)
    if sizes is None:
        return torch.chunk(a[0], a.option("num_outputs", 2), axis)
    return torch.split(a[0], sizes, axis)


@op("Slice")
def cut(a: Arguments) -> Tensor:
    x = a[0]
    starts, ends = a.either("starts", 1), a.either("ends", 2)
    axes, steps = a.either("axes", 3) or range(len(starts)), a.number(4) or [1] * len(starts)
    index: list[Any] = [slice(None)] * x.dim()
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if step < 1:
            raise Unsupported("expected steps forward")
        index[axis] = slice(start, end, step)
    return x[tuple(index)]


@op("Gather")
def gather(a: Arguments) -> Tensor:
    index, axis = a.number(1), a.option("axis", 0)
    if isinstance(index, list):
        flat = torch.as_tensor(np.asarray(index).reshape(-1), device=a[0].device)
        shape = list(a[0].shape)
        shape[axis : axis + 1 or None] = np.asarray(index).shape
        return a[0].index_select(axis, flat).reshape(shape)
    return a[0].select(axis, index)


@op("Reshape")
def reshape(a: Arguments) -> Tensor:
    shape = a.either("shape", 1)
    kept = [a[0].shape[k] if n == 0 and not a.option("allowzero", 0) else n for k, n in enumerate(shape)]
    return a[0].reshape(kept)


@op("Flatten")
def flatten(a: Arguments) -> Tensor:
    axis = a.option("axis", 1)
    return a[0].flatten(axis) if axis == 1 else a[0].reshape(math.prod(a[0].shape[:axis]), -1)


@op("Transpose")
def transpose(a: Arguments) -> Tensor:
    return a[0].permute(a.option("perm", list(range(a[0].dim()))[::-1]))


@op("Squeeze")
def squeeze(a: Arguments) -> Tensor:
    axes = a.either("axes", 1)
    return a[0].squeeze() if axes is None else a[0].squeeze(tuple(axes))


@op("Unsqueeze")
def unsqueeze(a: Arguments) -> Tensor:
    x, axes = a[0], a.either("axes", 1)
    for axis in sorted(k % (a[0].dim() + len(axes)) for k in axes):
        x = x.unsqueeze(axis)
    return x


@op("Expand")
def expand(a: Arguments) -> Tensor:
    return a[0] * torch.ones(a.number(1), dtype=a[0].dtype, device=a[0].device)


@op("Shape")
def shape(a: Arguments) -> np.ndarray:
    sizes = list(a.values[0].shape)
    return np.asarray(sizes[a.option("start", 0) : a.option("end", len(sizes))], dtype=np.int64)
