"""Ops of ONNX that move elements and compute none, as ops of PyTorch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.graph.onnx_elementwise import dtype_of
from sbnet.graph.onnx_run import Arguments, Unsupported, op


@op("Concat")
def concat(a: Arguments) -> Tensor:
    return torch.cat(a.all(), a.option("axis"))


@op("Split")
def split(a: Arguments) -> Any:
    x, axis, sizes = a[0], a.option("axis"), a.either("split", 1)
    if sizes is None:  # the last is smaller where they do not come out even
        count = a.option("num_outputs", None) or len(a.node.output)
        each = -(-x.shape[axis] // count)
        sizes = [min(each, x.shape[axis] - k * each) for k in range(count)]
        a.expect(min(sizes) >= 0, "attribute num_outputs", f"a number that parts {x.shape[axis]}", count)
    return list(torch.split(x, sizes, axis))


@op("Slice")
def cut(a: Arguments) -> Tensor:
    x = a[0]
    starts, ends = a.either("starts", 1), a.either("ends", 2)
    axes, steps = a.either("axes", 3) or range(len(starts)), a.number(4) or [1] * len(starts)
    index: list[Any] = [slice(None)] * x.dim()
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        chosen = range(x.shape[axis])[start:end:step]  # Python's, which ONNX's is; a start below -n begins at 0
        if step < 0:  # as many, from the other end on, turned round
            x = x.flip(axis)
            chosen = (
                range(x.shape[axis] - 1 - chosen.start, x.shape[axis] - 1 - chosen.stop, -step) if chosen else chosen
            )
        index[axis] = slice(chosen.start, max(chosen.stop, chosen.start), chosen.step) if chosen else slice(0, 0)
    return x[tuple(index)]


def _positive(index: Tensor, length: int) -> Tensor:
    return torch.where(index < 0, index + length, index)


@op("Gather")
def gather(a: Arguments) -> Tensor:
    x, axis = a[0], a.option("axis") % a[0].dim()
    known = a.numbers[1]
    if known is not None and known.ndim == 0:
        return x.select(axis, int(known))
    index = (
        a[1] if known is None else torch.as_tensor(np.where(known < 0, known + x.shape[axis], known), device=x.device)
    )
    index = _positive(index, x.shape[axis]) if known is None else index
    return x.index_select(axis, index.reshape(-1)).reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


@op("GatherElements")
def gather_elements(a: Arguments) -> Tensor:
    axis = a.option("axis")
    return torch.gather(a[0], axis, _positive(a[1].long(), a[0].shape[axis]))


@op("GatherND")
def gather_nd(a: Arguments) -> Tensor:
    x, index, batch = a[0], a[1].long(), a.option("batch_dims", 0)
    shape, depth = list(x.shape), index.shape[-1]
    flat_x, flat = x.reshape(-1, *shape[batch:]), index.reshape(math.prod(shape[:batch]), -1, depth)
    places = [_positive(flat[..., k], shape[batch + k]) for k in range(depth)]
    rows = torch.arange(flat.shape[0], device=x.device)[:, None].expand(flat.shape[:2])
    return flat_x[(rows, *places)].reshape(*index.shape[:-1], *shape[batch + depth :])


REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@op("Scatter", "ScatterElements")
def scatter_elements(a: Arguments) -> Tensor:
    x, axis, how = a[0], a.option("axis"), a.option("reduction", "none")
    index = _positive(a[1].long(), x.shape[axis])
    return x.scatter(axis, index, a[2]) if how == "none" else x.scatter_reduce(axis, index, a[2], REDUCTIONS[how])


@op("ScatterND")
def scatter_nd(a: Arguments) -> Tensor:
    x, index, updates, how = a[0], a[1].long(), a[2], a.option("reduction", "none")
    depth, rest = index.shape[-1], list(x.shape[index.shape[-1] :])
    places = torch.zeros_like(index[..., 0])
    for k in range(depth):  # of rows of what is left, as they lie one after another
        places = places * x.shape[k] + _positive(index[..., k], x.shape[k])
    rows, width = x.reshape(math.prod(x.shape[:depth]), -1), math.prod(rest)
    where, what = places.reshape(-1, 1).expand(-1, width), updates.reshape(-1, width)
    y = rows.scatter(0, where, what) if how == "none" else rows.scatter_reduce(0, where, what, REDUCTIONS[how])
    return y.reshape(x.shape)


@op("Compress")
def compress(a: Arguments) -> Tensor:
    keep, axis = a.number(1), a.option("axis", None)
    x = a[0].reshape(-1) if axis is None else a[0]
    index = torch.as_tensor([k for k, kept in enumerate(keep) if kept], dtype=torch.int64, device=x.device)
    return x.index_select(axis or 0, index)


@op("Reshape")
def reshape(a: Arguments) -> Tensor:
    shape, allow = a.number(1), a.option("allowzero", 0)
    return a[0].reshape([a[0].shape[k] if n == 0 and not allow else n for k, n in enumerate(shape)])


@op("Flatten")
def flatten(a: Arguments) -> Tensor:
    x, axis = a[0], a.option("axis")
    axis = axis + x.dim() if axis < 0 else axis
    return x.flatten(1) if axis == 1 and x.dim() > 1 else x.reshape(math.prod(x.shape[:axis]), -1)


@op("Transpose")
def transpose(a: Arguments) -> Tensor:
    return a[0].permute(a.option("perm", None) or list(range(a[0].dim()))[::-1])


@op("Squeeze")
def squeeze(a: Arguments) -> Tensor:
    x, axes = a[0], a.either("axes", 1)
    if axes is None:
        return x.squeeze()
    a.expect(all(x.shape[k] == 1 for k in axes), "axes", "axes of length 1", axes)
    return x.squeeze(tuple(axes))


@op("Unsqueeze")
def unsqueeze(a: Arguments) -> Tensor:
    x, axes = a[0], a.either("axes", 1)
    for axis in sorted(k % (a[0].dim() + len(axes)) for k in axes):
        x = x.unsqueeze(axis)
    return x


@op("Expand")
def expand(a: Arguments) -> Tensor:
    x, shape = a[0], a.number(1)
    return x.expand(torch.broadcast_shapes(x.shape, shape))


@op("Tile")
def tile(a: Arguments) -> Tensor:
    return a[0].repeat(a.number(1))


@op("Trilu")
def trilu(a: Arguments) -> Tensor:
    k = int(a.number(1, 0))
    return torch.triu(a[0], k) if a.option("upper") else torch.tril(a[0], k)


@op("ReverseSequence")
def reverse_sequence(a: Arguments) -> Tensor:
    x, lengths, batch, time = a[0], a.number(1), a.option("batch_axis"), a.option("time_axis")
    n = x.shape[time]
    rows = [list(range(m))[::-1] + list(range(m, n)) for m in lengths]
    index = torch.as_tensor(rows, device=x.device)
    index = index if batch < time else index.t()
    shape = [1] * x.dim()
    shape[batch], shape[time] = x.shape[batch], n
    return torch.gather(x, time, index.reshape(shape).expand(x.shape))


@op("Shape")
def shape(a: Arguments) -> np.ndarray:
    sizes = list(a.values[0].shape)
    return np.asarray(sizes[a.option("start", 0) : a.option("end", len(sizes))], dtype=np.int64)


@op("Size")
def size(a: Arguments) -> np.ndarray:
    return np.asarray(math.prod(a.values[0].shape), dtype=np.int64)


@op("Range")
def numbers(a: Arguments) -> np.ndarray:
    start, limit, step = a.number(0), a.number(1), a.number(2)
    return np.arange(start, limit, step).astype(a.numbers[0].dtype)


@op("ConstantOfShape")
def constant_of_shape(a: Arguments) -> np.ndarray:
    value = a.option("value", np.zeros(1, np.float32))
    return np.full(a.number(0), value.reshape(-1)[0], value.dtype)


MODES = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}


@op("Pad")
def pad(a: Arguments) -> Tensor:
    x, mode = a[0], a.option("mode")
    pads, axes = a.either("pads", 1), a.number(3)
    axes = list(range(x.dim())) if axes is None else [k % x.dim() for k in axes]
    per_axis = {k: (pads[i], pads[i + len(axes)]) for i, k in enumerate(axes)}
    flat = [n for k in reversed(range(x.dim())) for n in per_axis.get(k, (0, 0))]
    if mode == "constant":
        return F.pad(x, flat, value=a.option("value", 0.0) if a.version < 11 else a.number(2, 0) or 0)
    if mode not in MODES:
        raise Unsupported(f"attribute mode: expected constant, reflect, edge or wrap, got {mode}")
    if mode != "wrap" and x.dim() == 4 and not any(flat[4:]) and min(flat) >= 0 and x.is_floating_point():
        return F.pad(x, flat[:4], mode=MODES[mode])
    for axis, (before, after) in per_axis.items():
        x = _extended(x, axis, before, after, mode)
    return x


def _extended(x: Tensor, axis: int, before: int, after: int, mode: str) -> Tensor:
    """Along one axis: which pixel each place shows."""
    n = x.shape[axis]
    places = np.arange(-before, n + after)
    if mode == "edge":
        places = places.clip(0, n - 1)
    elif mode == "wrap":
        places = places % n
    else:
        period = max(2 * (n - 1), 1)
        places = np.abs((places + n - 1) % period - (n - 1)) if n > 1 else places * 0
    if before == after == 0:
        return x
    return x.index_select(axis, torch.as_tensor(places, device=x.device))


@op("OneHot")
def one_hot(a: Arguments) -> Tensor:
    depth, (off, on), axis = int(np.asarray(a.number(1)).reshape(-1)[0]), a[2], a.option("axis")
    index = a[0].long()
    places = torch.arange(depth, device=index.device)
    hot = torch.where(index < 0, index + depth, index).unsqueeze(axis).transpose(axis, -1) == places
    return torch.where(hot.transpose(axis, -1), on, off)


@op("EyeLike")
def eye_like(a: Arguments) -> Tensor:
    x, code = a[0], a.option("dtype", None)
    dtype = x.dtype if code is None else dtype_of(code, a.floats, "attribute dtype")
    ones = torch.ones(x.shape, dtype=torch.int32, device=x.device)
    return (torch.triu(torch.tril(ones, a.option("k")), a.option("k"))).to(dtype)
