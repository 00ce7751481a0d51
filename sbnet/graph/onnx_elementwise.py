"""Ops of ONNX that look at one element at a time, or at one axis, as ops of PyTorch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.graph.onnx_run import OPS, TYPES, Arguments, Unsupported, op


def _one(function: Callable[..., Any]) -> Callable[[Arguments], Any]:
    return lambda a: function(a[0])


def _two(function: Callable[..., Any]) -> Callable[[Arguments], Any]:
    return lambda a: function(a[0], _scalar(a, 1))


def _fold(function: Callable[..., Any]) -> Callable[[Arguments], Any]:
    return lambda a: functools.reduce(function, a.all())


UNARY: dict[str, Callable[..., Any]] = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "BitwiseNot": torch.bitwise_not, "Ceil": torch.ceil, "Cos": torch.cos,
    "Cosh": torch.cosh, "Det": torch.linalg.det, "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor,
    "HardSwish": F.hardswish, "Identity": lambda x: x, "IsNaN": torch.isnan, "Log": torch.log, "Mish": F.mish,
    "Neg": torch.neg, "Not": torch.logical_not, "Reciprocal": torch.reciprocal, "Relu": F.relu, "Round": torch.round,
    "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin, "Sinh": torch.sinh, "Softplus": F.softplus,
    "Softsign": F.softsign, "Sqrt": torch.sqrt, "Tan": torch.tan, "Tanh": torch.tanh,
}  # fmt: skip

BINARY: dict[str, Callable[..., Any]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Equal": torch.eq, "Greater": torch.gt, "Less": torch.lt,
    "GreaterOrEqual": torch.ge, "LessOrEqual": torch.le,
}  # fmt: skip
PAIRS: dict[str, Callable[..., Any]] = {
    "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor, "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor, "MatMul": torch.matmul,
}  # fmt: skip
MANY: dict[str, Callable[..., Any]] = {"Max": torch.maximum, "Min": torch.minimum, "Sum": torch.add}
for names, made in ((UNARY, _one), (BINARY, _two), (MANY, _fold)):
    OPS.update({name: made(function) for name, function in names.items()})


def _pair(function: Callable[..., Any]) -> Callable[[Arguments], Any]:
    return lambda a: function(a[0], a[1])


OPS.update({name: _pair(function) for name, function in PAIRS.items()})


def _scalar(a: Arguments, at: int) -> Any:
    """A constant of one element as a number: what PyTorch's own code has there."""
    known = a.numbers[at]
    return known.item() if known is not None and known.ndim == 0 and a.has(0) else a[at]


@op("Div")
def divide(a: Arguments) -> Tensor:
    whole = not a[0].is_floating_point()  # integers are cut towards zero
    return torch.div(a[0], _scalar(a, 1), rounding_mode="trunc") if whole else torch.div(a[0], _scalar(a, 1))


@op("Pow")
def power(a: Arguments) -> Tensor:
    """In the dtype of the base."""
    x, exponent = a[0], _scalar(a, 1)
    return torch.pow(x, exponent).to(x.dtype)


@op("Mod")
def modulo(a: Arguments) -> Tensor:
    """fmod: the sign is the dividend's; else, of integers alone, the divisor's."""
    if not a.option("fmod"):
        a.expect(not a[0].is_floating_point(), "attribute fmod", "1 for floats", 0)
        return torch.remainder(a[0], a[1])
    return torch.fmod(a[0], a[1])


@op("BitShift")
def shift(a: Arguments) -> Tensor:
    left = a.option("direction") == "LEFT"
    return (torch.bitwise_left_shift if left else torch.bitwise_right_shift)(a[0], a[1])


@op("Mean")
def mean(a: Arguments) -> Tensor:
    total = functools.reduce(torch.add, a.all())
    return total / len(a) if len(a) > 1 else total


@op("IsInf")
def is_inf(a: Arguments) -> Tensor:
    below, above = a.option("detect_negative"), a.option("detect_positive")
    found = torch.isinf(a[0])
    if below and above:
        return found
    return found & (a[0] > 0 if above else a[0] < 0) if above or below else torch.zeros_like(found)


@op("Clip")
def clip(a: Arguments) -> Tensor:
    low, high = a.either("min", 1), a.either("max", 2)
    return a[0] if low is None and high is None else torch.clamp(a[0], low, high)


@op("LeakyRelu")
def leaky_relu(a: Arguments) -> Tensor:
    return F.leaky_relu(a[0], a.option("alpha"))


@op("PRelu")
def prelu(a: Arguments) -> Tensor:
    x, slope = a[0], a[1]
    if slope.numel() == 1:
        return F.prelu(x, slope.reshape(-1))
    shape = [1] * (x.dim() - slope.dim()) + list(slope.shape)
    if x.dim() > 1 and shape[1] == slope.numel() == x.shape[1]:  # a number a channel
        return F.prelu(x, slope.reshape(-1))
    return torch.where(x >= 0, x, x * slope)


@op("Elu")
def elu(a: Arguments) -> Tensor:
    return F.elu(a[0], a.option("alpha"))


@op("Celu")
def celu(a: Arguments) -> Tensor:
    return F.celu(a[0], a.option("alpha"))


USUAL_SELU = 1.6732632, 1.050701  # alpha and gamma, to the digits that schemas and exporters write


@op("Selu")
def selu(a: Arguments) -> Tensor:
    alpha, gamma = a.option("alpha"), a.option("gamma")
    usual = all(abs(v - u) < 1e-4 for v, u in zip((alpha, gamma), USUAL_SELU, strict=True))
    return F.selu(a[0]) if usual and a.version > 1 else F.elu(a[0], alpha) * gamma


@op("Gelu")
def gelu(a: Arguments) -> Tensor:
    return F.gelu(a[0], approximate=a.option("approximate"))


@op("Swish")
def swish(a: Arguments) -> Tensor:
    alpha = a.option("alpha")
    return F.silu(a[0]) if alpha == 1 else a[0] * torch.sigmoid(a[0] * alpha)


@op("ThresholdedRelu")
def thresholded_relu(a: Arguments) -> Tensor:
    return F.threshold(a[0], a.option("alpha"), 0.0)


@op("Shrink")
def shrink(a: Arguments) -> Tensor:
    x, bias, lambd = a[0], a.option("bias"), a.option("lambd")
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, torch.zeros_like(x)))


@op("HardSigmoid")
def hard_sigmoid(a: Arguments) -> Tensor:
    alpha, beta = a.option("alpha"), a.option("beta")
    if abs(alpha - 1 / 6) < 1e-6 and beta == 0.5:
        return F.hardsigmoid(a[0])
    return torch.clamp(a[0] * alpha + beta, 0, 1)


# ---- one axis


def _along(a: Arguments, function: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Of the axis alone; before version 13 of all axes from there on, taken as one."""
    x, axis = a[0], a.option("axis")
    axis = axis % x.dim() if x.dim() else 0
    if a.version >= 13 or axis == x.dim() - 1 or math.prod(x.shape[axis + 1 :]) == 1:
        return function(x, axis)
    return function(x.flatten(axis), axis).reshape(x.shape)


@op("Softmax")
def softmax(a: Arguments) -> Tensor:
    return _along(a, F.softmax)


@op("LogSoftmax")
def log_softmax(a: Arguments) -> Tensor:
    return _along(a, F.log_softmax)


@op("Hardmax")
def hardmax(a: Arguments) -> Tensor:
    def first_largest(x: Tensor, axis: int) -> Tensor:
        return torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1.0)

    return _along(a, first_largest)


def _axes(a: Arguments) -> tuple[int, ...] | None:
    """Those that a reduction goes over; None where it leaves all as they are."""
    x, axes = a[0], a.either("axes", 1)
    if axes is None or len(axes) == 0:
        return None if a.option("noop_with_empty_axes", 0) else tuple(range(x.dim()))
    return tuple(int(axis) % x.dim() for axis in axes)


def _product(x: Tensor, dim: tuple[int, ...], keepdim: bool) -> Tensor:
    for axis in sorted(dim, reverse=True):
        x = x.prod(axis, keepdim=keepdim)
    return x


def _absolute_sum(x: Tensor, dim: tuple[int, ...], keepdim: bool) -> Tensor:
    return x.abs().sum(dim, keepdim)


def _root_of_squares(x: Tensor, dim: tuple[int, ...], keepdim: bool) -> Tensor:
    return torch.linalg.vector_norm(x, 2, dim, keepdim)


REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "ReduceL1": _absolute_sum, "ReduceL2": _root_of_squares,
    "ReduceLogSum": lambda x, dim, keepdim: x.sum(dim, keepdim).log(), "ReduceLogSumExp": torch.logsumexp,
    "ReduceMax": torch.amax, "ReduceMean": torch.mean, "ReduceMin": torch.amin, "ReduceProd": _product,
    "ReduceSum": torch.sum, "ReduceSumSquare": lambda x, dim, keepdim: x.square().sum(dim, keepdim),
}  # fmt: skip


def _reduced(function: Callable[..., Tensor]) -> Callable[[Arguments], Tensor]:
    def run(a: Arguments) -> Tensor:
        axes, x, keep = _axes(a), a[0], bool(a.option("keepdims"))
        if axes is None or x.dim() == 0:  # each element by itself is reduced, as if along an axis of length 1
            return function(x[..., None], (x.dim(),), False).to(x.dtype)
        if x.dtype == torch.bool:  # of version 20: a maximum is "any", a minimum "all"
            return function(x.to(torch.uint8), axes, keep).to(torch.bool)
        return function(x, axes, keep).to(x.dtype)

    return run


OPS.update({name: _reduced(function) for name, function in REDUCTIONS.items()})


def _arg(function: Callable[..., Tensor]) -> Callable[[Arguments], Tensor]:
    def run(a: Arguments) -> Tensor:
        x, axis, keep = a[0], a.option("axis"), bool(a.option("keepdims"))
        if not a.option("select_last_index", 0):
            return function(x, axis, keepdim=keep)
        return x.shape[axis] - 1 - function(x.flip(axis), axis, keepdim=keep)

    return run


OPS.update({"ArgMax": _arg(torch.argmax), "ArgMin": _arg(torch.argmin)})


def _running(function: Callable[..., Tensor], start: float) -> Callable[[Arguments], Tensor]:
    def run(a: Arguments) -> Tensor:
        x = a[0]
        axis = int(torch.as_tensor(a.number(1)).reshape(-1)[0]) % x.dim()
        x = x.flip(axis) if a.option("reverse") else x
        if a.option("exclusive"):
            first = torch.full_like(x.narrow(axis, 0, 1), start)
            x = torch.cat([first, x.narrow(axis, 0, x.shape[axis] - 1)], axis)
        y = function(x, axis, dtype=x.dtype)
        return y.flip(axis) if a.option("reverse") else y

    return run


OPS.update({"CumSum": _running(torch.cumsum, 0.0), "CumProd": _running(torch.cumprod, 1.0)})


@op("TopK")
def top_k(a: Arguments) -> Any:
    count = int(torch.as_tensor(a.either("k", 1)).reshape(-1)[0])
    return list(torch.topk(a[0], count, a.option("axis"), bool(a.option("largest", 1)), True))


# ---- dtypes


@op("Where")
def where(a: Arguments) -> Tensor:
    return torch.where(a[0], a[1], a[2])


@op("Dropout")
def dropout(a: Arguments) -> Any:
    training = a.number(2, False)
    a.expect(not training, "input training_mode", "false", training)
    if len(a.node.output) == 1:
        return a[0]
    if a.version >= 12:  # all are kept
        return [a[0], torch.ones_like(a[0], dtype=torch.bool)]
    return [a[0], torch.zeros_like(a[0], dtype=torch.bool if a.version == 10 else a[0].dtype)]  # ONNX Runtime's


def dtype_of(code: int, floats: tuple[torch.dtype, torch.dtype], what: str) -> torch.dtype:
    """PyTorch's dtype of ONNX's number; the file's main floating dtype is what it has become."""
    from onnx import TensorProto

    if code not in TYPES:
        raise Unsupported(f"{what}: expected a dtype that is read, got {TensorProto.DataType.Name(code)}")
    return floats[1] if TYPES[code] == floats[0] else TYPES[code]


@op("Cast")
def cast(a: Arguments) -> Tensor:
    return a[0].to(dtype_of(a.option("to"), a.floats, "attribute to"))


@op("CastLike")
def cast_like(a: Arguments) -> Tensor:
    return a[0].to(a[1].dtype)
