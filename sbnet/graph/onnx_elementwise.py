"""Ops of ONNX that look at one element at a time, or at one axis, as ops of PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.graph.onnx import Arguments, Unsupported
from sbnet.graph.onnx_ops import OPS, op


def _one(function: Callable[..., Any]) -> Callable[[Arguments], Any]:
    return lambda a: function(a[0])


def _two(function: Callable[..., Any]) -> Callable[[Arguments], Any]:
    return lambda a: function(a[0], _scalar(a, 1))


def _fold(function: Callable[..., Any]) -> Callable[[Arguments], Any]:
    return lambda a: functools.reduce(function, [a[k] for k in range(len(a))])


def _axes(a: Arguments) -> Any:
    axes = a.either("axes", 1)
    return tuple(range(a[0].dim())) if axes is None else tuple(axes)


def _reduced(function: Callable[..., Any]) -> Callable[[Arguments], Any]:
    return lambda a: function(a[0], dim=_axes(a), keepdim=bool(a.option("keepdims", 1)))


UNARY: dict[str, Callable[..., Any]] = {
    "Relu": F.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "HardSwish": F.hardswish, "Softplus": F.softplus,
    "Mish": F.mish, "Erf": torch.erf, "Exp": torch.exp, "Log": torch.log, "Sqrt": torch.sqrt, "Abs": torch.abs,
    "Neg": torch.neg, "Reciprocal": torch.reciprocal, "Identity": lambda x: x, "Sin": torch.sin, "Cos": torch.cos,
    "Floor": torch.floor, "Ceil": torch.ceil, "Not": torch.logical_not, "Selu": F.selu,
}  # fmt: skip

BINARY: dict[str, Callable[..., Any]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": torch.div, "Pow": torch.pow, "Equal": torch.eq,
    "Greater": torch.gt, "Less": torch.lt, "GreaterOrEqual": torch.ge, "LessOrEqual": torch.le,
    "And": torch.logical_and, "Or": torch.logical_or, "MatMul": torch.matmul,
}  # fmt: skip
MANY: dict[str, Callable[..., Any]] = {"Max": torch.maximum, "Min": torch.minimum, "Sum": torch.add}
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "ReduceMean": torch.mean, "ReduceSum": torch.sum, "ReduceMax": torch.amax, "ReduceMin": torch.amin,
    "ReduceL2": torch.linalg.vector_norm,
}  # fmt: skip
for table, made in ((UNARY, _one), (BINARY, _two), (MANY, _fold), (REDUCTIONS, _reduced)):
    OPS.update({name: made(function) for name, function in table.items()})


def _scalar(a: Arguments, at: int) -> Any:
    """A constant of one element as a number: what PyTorch's own code has there."""
    known = a.numbers[at]
    return known.item() if known is not None and known.ndim == 0 and a.values[0] is not None else a[at]


@op("Clip")
def clip(a: Arguments) -> Tensor:
    return torch.clamp(a[0], a.either("min", 1), a.either("max", 2))


@op("LeakyRelu")
def leaky_relu(a: Arguments) -> Tensor:
    return F.leaky_relu(a[0], a.option("alpha", 0.01))


@op("PRelu")
def prelu(a: Arguments) -> Tensor:
    slope = a[1]
    channels = slope.numel() == 1 or list(slope.shape[-2:]) == [1, 1]
    return F.prelu(a[0], slope.reshape(-1)) if channels else torch.where(a[0] >= 0, a[0], a[0] * slope)


@op("Elu")
def elu(a: Arguments) -> Tensor:
    return F.elu(a[0], a.option("alpha", 1.0))


@op("Gelu")
def gelu(a: Arguments) -> Tensor:
    return F.gelu(a[0], approximate=a.option("approximate", "none"))


@op("HardSigmoid")
def hard_sigmoid(a: Arguments) -> Tensor:
    alpha, beta = a.option("alpha", 0.2), a.option("beta", 0.5)
    if abs(alpha - 1 / 6) < 1e-6 and beta == 0.5:
        return F.hardsigmoid(a[0])
    return torch.clamp(a[0] * alpha + beta, 0, 1)


@op("Softmax", "LogSoftmax")
def softmax(a: Arguments) -> Tensor:
    if a.opset < 13:
        raise Unsupported(f"expected opset 13 or later, where softmax has one axis, got {a.opset}")
    return F.softmax(a[0], a.option("axis", -1))


OPS["LogSoftmax"] = lambda a: F.log_softmax(a[0], a.option("axis", -1))


@op("Where")
def where(a: Arguments) -> Tensor:
    return torch.where(a[0], a[1], a[2])


@op("Dropout")
def dropout(a: Arguments) -> Tensor:
    return a[0]


TYPES = {1: torch.float32, 6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16, 11: torch.float64}


@op("Cast")
def cast(a: Arguments) -> Tensor:
    return a[0].to(TYPES[a.option("to")])
