"""Normalisations of ONNX, and its quantised tensors, as ops of PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.graph.onnx_elementwise import dtype_of
from sbnet.graph.onnx_run import Arguments, op
from sbnet.graph.onnx_windows import CONV, Geometry


@op("LpNormalization")
def lp_normalization(a: Arguments) -> Tensor:
    x = a[0]
    norm = torch.linalg.vector_norm(x, a.option("p"), a.option("axis"), keepdim=True)
    return torch.where(norm == 0, torch.zeros_like(x), x / norm)


@op("LRN")
def local_response(a: Arguments) -> Tensor:
    x, size = a[0], a.option("size")
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    squares = F.pad(x.square().flatten(2), (0, 0, before, after))
    total = sum((squares.narrow(1, k, x.shape[1]) for k in range(1, size)), squares.narrow(1, 0, x.shape[1]))
    return x / (a.option("bias") + a.option("alpha") / size * total.reshape(x.shape)).pow(a.option("beta"))


@op("BatchNormalization")
def batch_norm(a: Arguments) -> Any:
    x, scale, bias, mean, var = (a[k] for k in range(5))
    eps = a.option("epsilon")
    if not a.option("training_mode", 0):
        return F.batch_norm(x, mean, var, scale, bias, False, 0.0, eps)
    rest, keep = [k for k in range(x.dim()) if k != 1], a.option("momentum")
    now, spread = x.mean(rest), x.var(rest, correction=0)
    y = F.batch_norm(x, None, None, scale, bias, True, 0.0, eps)
    return [y, mean * keep + now * (1 - keep), var * keep + spread * (1 - keep)]


@op("InstanceNormalization")
def instance_norm(a: Arguments) -> Tensor:
    return _normalised(a, a[0].shape[1], a[1], a[2])


def _normalised(a: Arguments, groups: int, weight: Tensor, bias: Tensor) -> Tensor:
    x, eps = a[0], a.option("epsilon")
    if x[0].numel() == groups:  # a group is one number, its own mean, which PyTorch refuses
        return (x - x) * weight.reshape(-1, *[1] * (x.dim() - 2)) + bias.reshape(-1, *[1] * (x.dim() - 2))
    if groups == x.shape[1]:
        return F.instance_norm(x, weight=weight, bias=bias, eps=eps)
    return F.group_norm(x, groups, weight, bias, eps)


@op("MeanVarianceNormalization")
def mean_variance_norm(a: Arguments) -> Tensor:
    x, axes = a[0], a.option("axes")
    centred = x - x.mean(axes, keepdim=True)
    return centred / (centred.square().mean(axes, keepdim=True).sqrt() + 1e-9)


@op("LayerNormalization")
def layer_norm(a: Arguments) -> Tensor:
    x, axis = a[0], a.option("axis")
    shape = list(x.shape[axis % x.dim() :])
    weight, bias = (None if v is None else v.expand(shape) for v in (a[1], a[2]))
    return F.layer_norm(x, shape, weight, bias, a.option("epsilon"))


@op("GroupNormalization")
def group_norm(a: Arguments) -> Tensor:
    """Scale and bias are a number a group up to version 18, a number a channel from 21 on."""
    x, groups, weight, bias = a[0], a.option("num_groups"), a[1], a[2]
    if a.version < 21:
        weight, bias = (v.repeat_interleave(x.shape[1] // groups) for v in (weight, bias))
    return _normalised(a, groups, weight, bias)


# ---- bytes and their scales


def _by_axis(a: Arguments, v: Tensor | None, axis: int) -> Tensor | None:
    """A scale or zero point beside x: one number, or one for each place of an axis."""
    if v is None or v.numel() == 1:
        return None if v is None else v.reshape(())
    a.expect(v.dim() == 1, "input scale", "a number, or one for each place of an axis", f"shape {list(v.shape)}")
    shape = [1] * a[0].dim()
    shape[axis % a[0].dim()] = -1
    return v.reshape(shape)


@op("QuantizeLinear")
def quantize(a: Arguments) -> Tensor:
    x, axis = a[0], a.option("axis", 1)
    scale, zero = _by_axis(a, a[1], axis), _by_axis(a, a[2], axis)
    code = a.option("output_dtype", 0)
    dtype = (
        zero.dtype if zero is not None else dtype_of(code, a.floats, "attribute output_dtype") if code else torch.uint8
    )
    a.expect(dtype in (torch.uint8, torch.int8, torch.uint16, torch.int16), "input y_zero_point", "8 or 16 bits", dtype)
    limits, y = torch.iinfo(dtype), torch.round(x / scale)
    y = y if zero is None else y + zero.to(y.dtype)
    return y.clamp(limits.min, limits.max).to(torch.int32).to(dtype)


@op("DequantizeLinear")
def dequantize(a: Arguments) -> Tensor:
    axis = a.option("axis", 1)
    scale, zero = _by_axis(a, a[1], axis), _by_axis(a, a[2], axis)
    assert scale is not None
    code = a.option("output_dtype", 0)
    dtype = dtype_of(code, a.floats, "attribute output_dtype") if code else scale.dtype
    x = a[0].to(torch.int32)
    x = x if zero is None else x - zero.to(torch.int32)
    return (x.to(scale.dtype) * scale).to(dtype)


def _whole(v: Tensor, zero: Tensor | None, axis: int = 0) -> Tensor:
    """Bytes less their zero point, one number or one for each place of an axis, as floats: products of them are exact,
    and so are their sums up to 2^24, double ones up to 2^53."""
    y = v.to(torch.float64)
    if zero is None:
        return y
    shape = [1] * v.dim()
    if zero.numel() > 1:
        shape[axis] = -1
    return y - zero.to(torch.float64).reshape(shape)


def _rounded(sums: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """In bytes of another scale: float32 by float32, where ONNX Runtime rounds, too."""
    limits = torch.iinfo(zero.dtype)
    y = torch.round(sums.to(torch.float32) * scale.to(torch.float32)).to(torch.float64) + zero.to(torch.float64)
    return y.clamp(limits.min, limits.max).to(torch.int32).to(zero.dtype)


def _convolved(a: Arguments, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    g = Geometry(a, x, weight.shape[2:])
    x, padding = g.even(x)
    return CONV[g.rank - 1](x, weight, bias, g.stride, padding, g.dilation, a.option("group"))


@op("ConvInteger")
def conv_integer(a: Arguments) -> Tensor:
    return _convolved(a, _whole(a[0], a[2]), _whole(a[1], a[3])).to(torch.int32)


@op("QLinearConv")
def qlinear_conv(a: Arguments) -> Tensor:
    """x, its scale and zero point, weight, its, y's, bias."""
    bias = None if a[8] is None else a[8].to(torch.float64)
    sums = _convolved(a, _whole(a[0], a[2]), _whole(a[3], a[5]), bias)
    by_channel = a[4].reshape(-1, *[1] * (sums.dim() - 2)) if a[4].numel() > 1 else a[4]
    return _rounded(sums, a[1] * by_channel / a[6], a[7])


@op("MatMulInteger")
def matmul_integer(a: Arguments) -> Tensor:
    left, right = _whole(a[0], a[2], a[0].dim() - 2), _whole(a[1], a[3], a[1].dim() - 1)
    return torch.matmul(left, right).to(torch.int32)


@op("QLinearMatMul")
def qlinear_matmul(a: Arguments) -> Tensor:
    """a, its scale and zero point, b, its, y's."""
    a.expect(max(a[k].numel() for k in (1, 4)) == 1, "inputs scale", "one number each", "one for each row or column")
    sums = torch.matmul(_whole(a[0], a[2]), _whole(a[3], a[5]))
    return _rounded(sums, a[1] * a[4] / a[6], a[7])
