"""What losses are made of, inside `sbnet.masked`: differences, products, squares and sums of maps on active blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sbnet.engine.eager_chains import note_clean
from sbnet.engine.eager_passes import Plane, first_derivatives, like
from sbnet.engine.eager_whole import densely, whole
from sbnet.engine.modes import open_of

if TYPE_CHECKING:
    from sbnet.engine.eager import masked

_ops = torch.ops.sbnet


def _run(program: str, x: Tensor, other: Tensor | None, plane: Plane, ring: int = 0) -> Tensor:
    """A program of sparse_pointwise on active blocks, into an open map."""
    indices, count, _, grid = plane.lists()
    out = like(x, x.shape)
    if other is not None and not any(other.stride()):  # a number for all pixels
        other = other[:1, :1, :1, :1]
    _ops.sparse_pointwise_(
        x, other, None, None, None, indices, count, grid, program, out, *plane.edge(ring)
    )  # fmt: skip
    note_clean(out, ring)
    return out


class Product(torch.autograd.Function):
    """`square` of x; `mul` or `sub` of x and another map; `mul` of x by a number. ring: wanted of the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Any, plane: Plane, name: str, ring: bool) -> Tensor:
        ctx.of = plane, name, ring
        number = None if other is None or isinstance(other, Tensor) else float(other)
        ctx.number = number
        kept = () if name == "sub" or number is not None else (x.detach(), *([] if other is None else [other.detach()]))
        ctx.save_for_backward(*kept)
        program = name if other is None else f"{name} a" if number is None else f"{name} {number!r}"
        return _run(program, x, None if number is not None else other, plane)

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        plane, name, ring = ctx.of
        of_x: Tensor | None
        of_other: Tensor | None = None
        if name == "square":
            (x,) = ctx.saved_tensors
            of_x = _run("mul 2.0; mul a", x, grad, plane, ring)
        elif name == "sub":
            of_x = grad
            of_other = _run("neg", grad, None, plane) if ctx.needs_input_grad[1] else None
        elif ctx.number is not None:
            of_x = _run(f"mul {ctx.number!r}", grad, None, plane, ring)
        else:
            x, other = ctx.saved_tensors
            of_x = _run("mul a", other, grad, plane, ring) if ctx.needs_input_grad[0] else None
            of_other = _run("mul a", x, grad, plane) if ctx.needs_input_grad[1] else None
        return of_x, of_other, None, None, None


class Total(torch.autograd.Function):
    """The sum of a float32 map, or its mean over all pixels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plane: Plane, mean: bool) -> Tensor:
        _, _, block_map, grid = plane.lists()
        averages = _ops.sparse_adaptive_pool2d(x, block_map, grid, [1, 1], "avg", True)
        ctx.shape, ctx.share = x.shape, 1 / x.numel() if mean else 1.0
        return averages.mean() if mean else averages.sum() * (x.shape[2] * x.shape[3])

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        return (grad * ctx.share).expand(ctx.shape), None, None


def square(mode: masked, input: Any, exponent: Any = 2) -> Tensor | None:
    if (maps := open_of(mode)) is None or not mode.keeps(input) or isinstance(exponent, Tensor) or exponent != 2:
        return None
    if whole(mode, input.shape[2:]):
        return densely(mode, torch.square, input)
    return maps.product(input, None, "square")


def mul(mode: masked, input: Any, other: Any) -> Tensor | None:
    return _binary(mode, input, other, "mul")


def sub(mode: masked, input: Any, other: Any, alpha: Any = 1) -> Tensor | None:
    return _binary(mode, input, other, "sub") if alpha == 1 and isinstance(other, Tensor) else None


def _binary(mode: masked, input: Any, other: Any, name: str) -> Tensor | None:
    if (maps := open_of(mode)) is None or not mode.keeps(input):
        return None
    if isinstance(other, Tensor):
        same = other.shape == input.shape and other.dtype == input.dtype and other.device == input.device
        if not same or (other.requires_grad and not mode.keeps(other)):
            return None
    elif not isinstance(other, (int, float)) or isinstance(other, bool):
        return None
    if whole(mode, input.shape[2:]):
        return densely(mode, getattr(torch, name), input, other)
    return maps.product(input, other, name)


def mean(mode: masked, input: Any, *more: Any, **options: Any) -> Tensor | None:
    return _total(mode, input, True, more, options)


def total(mode: masked, input: Any, *more: Any, **options: Any) -> Tensor | None:
    return _total(mode, input, False, more, options)


def _total(mode: masked, input: Any, mean: bool, more: Any, options: Any) -> Tensor | None:
    if (maps := open_of(mode)) is None or more or options or not mode.keeps(input) or input.dtype != torch.float32:
        return None
    return maps.total(input, mean) if input.numel() and not whole(mode, input.shape[2:]) else None


T = torch.Tensor
LOSSES: dict[Any, Any] = {
    torch.square: square, T.square: square, T.pow: square, torch.pow: square, T.__pow__: square, torch.mul: mul,
    T.mul: mul, T.__mul__: mul, T.__rmul__: mul, torch.sub: sub, T.sub: sub, T.__sub__: sub, torch.mean: mean,
    T.mean: mean, torch.sum: total, T.sum: total,
}  # fmt: skip
