"""Response norms inside `sbnet.masked`. Networks write them out as arithmetic: G, the root of the sum of squares over
the plane; its mean over the channels, and eps; the quotient of both; x times that, a weight, a bias and x itself.

Each of these steps is left undone. The last one becomes a norm of active pixels; an op that reads another one has it
made first, by PyTorch.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sbnet.engine.arguments import FLOATS
from sbnet.engine.eager_nhwc import base_of
from sbnet.engine.eager_passes import first_derivatives
from sbnet.ops.common import pixels_of

if TYPE_CHECKING:
    from sbnet.engine.eager import masked
    from sbnet.engine.eager_open import OpenMaps

STEP = "_sbnet_step"  # a note of what is left undone
SUMS = {"add", "__add__", "__radd__"}
PRODUCTS = {"mul", "__mul__", "__rmul__", "multiply"}
QUOTIENTS = {"div", "__truediv__", "true_divide", "divide"}
KNOWN = {*SUMS, *PRODUCTS, *QUOTIENTS, "mean", "addcmul"}


@dataclass
class _Step:
    """A step: one of size (G), mean, divisor, share (their quotient), product (with x), weighted, shifted."""

    kind: str
    x: Tensor  # as the network has it
    nhwc: bool
    func: Any
    args: Any
    kwargs: dict[str, Any]
    eps: float = 0.0
    weight: Tensor | None = None
    bias: Tensor | None = None
    inside: Any = None  # of steps that are maps: block map and grid
    autocast: tuple[bool, torch.dtype] = (False, torch.float32)

    def run(self, args: Any) -> Tensor:
        on, dtype = self.autocast
        with torch.autocast(self.x.device.type, dtype, on) if on else contextlib.nullcontext():
            out = self.func(*args, **self.kwargs)
        if self.inside is None:
            return out
        block_map, grid, size = self.inside
        inside = pixels_of(block_map, grid, size)
        return torch.where(inside.permute(0, 2, 3, 1) if self.nhwc else inside, out, 0)


class _Undone(torch.autograd.Function):
    """A step, of no memory yet. tensors: those of its arguments."""

    @staticmethod
    def forward(ctx: Any, step: _Step, shape: Any, dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        ctx.step = step
        return torch.empty((), dtype=dtype, device=step.x.device).expand(shape)

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        step: _Step = ctx.step
        wanted = iter(ctx.needs_input_grad[3:])
        with torch.enable_grad():
            args = [t.detach().requires_grad_(next(wanted)) if isinstance(t, Tensor) else t for t in step.args]
            out = step.run(args)
        leaves = [t for t in args if isinstance(t, Tensor)]
        found = iter(torch.autograd.grad(out, [t for t in leaves if t.requires_grad], grad))
        return None, None, None, *(next(found) if t.requires_grad else None for t in leaves)


class Responses:
    """The undone steps of a context."""

    def __init__(self, mode: masked, maps: OpenMaps) -> None:
        self._mode, self._maps = weakref.proxy(mode), weakref.proxy(maps)
        self._seen: list[weakref.ref] = []

    def take(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """What an op gives that is a step; None of any other."""
        if name in ("norm", "linalg_vector_norm") and args:
            return self._size(func, args, kwargs)
        if name not in KNOWN or not any(isinstance(t, Tensor) and STEP in t.__dict__ for t in args):
            return None
        steps = [t.__dict__.get(STEP) if isinstance(t, Tensor) else None for t in args]
        if name == "mean":
            return self._mean(steps[0], func, args, kwargs)
        if kwargs or len(args) != (3 if name == "addcmul" else 2):
            return None
        if name == "addcmul":
            return self._shifted(func, args, steps[2], args[1], args[0]) if steps[0] is steps[1] is None else None
        for step, other, its in ((steps[0], args[1], steps[1]), (steps[1], args[0], steps[0])):
            found = None if step is None else self._next(name, func, args, step, other, its)
            if found is not None or name in QUOTIENTS:
                return found
        return None

    def make(self, t: Any) -> None:
        """Computes a step, by PyTorch."""
        step: _Step | None = t.__dict__.pop(STEP, None)
        if step is None:
            return
        for other in step.args:
            if isinstance(other, Tensor):
                self.make(other)
                self._maps.close(other)
        with torch.no_grad():
            t.data = step.run(step.args)

    def make_all(self) -> None:
        """All of those that somebody holds."""
        for reference in self._seen:
            t = reference()
            if t is not None:
                self.make(t)
        self._seen.clear()

    # ---- the steps

    def _size(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        x = args[0]
        found = _of_norm(*args, **kwargs) if isinstance(x, Tensor) and x.dim() == 4 else None
        nhwc = found is not None and self._mode.lies_nhwc(x) and base_of(x) is not None
        if found is None or not (nhwc or self._mode.keeps(x)) or found != ({1, 2} if nhwc else {2, 3}):
            return None
        shape = [n if d not in found else 1 for d, n in enumerate(x.shape)]
        on = torch.is_autocast_enabled(x.device.type)
        state = on, torch.get_autocast_dtype(x.device.type) if on else x.dtype
        return self._undone(_Step("size", x, nhwc, func, args, kwargs, autocast=state), shape)

    def _mean(self, step: _Step | None, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        if step is None or step.kind != "size" or len(args) > 3:
            return None
        given = dict(zip(("dim", "keepdim"), args[1:], strict=False)) | kwargs
        dim = given.pop("dim", None)
        dims = list(dim) if isinstance(dim, (tuple, list)) else [dim]
        if given != {"keepdim": True} or dims not in ([[3], [-1]] if step.nhwc else [[1], [-3]]):
            return None
        shape = [step.x.shape[0], 1, 1, 1]
        return self._undone(replace(step, kind="mean", func=func, args=args, kwargs=kwargs), shape)

    def _next(self, name: str, func: Any, args: Any, step: _Step, other: Any, its: _Step | None) -> Tensor | None:
        x, shape = step.x, list(step.x.shape)
        if name in QUOTIENTS:
            if step.kind != "size" or its is None or its.kind != "divisor" or its.x is not x:
                return None
            of_share = [n if d in ((0, 3) if step.nhwc else (0, 1)) else 1 for d, n in enumerate(shape)]
            return self._undone(replace(its, kind="share", func=func, args=args), of_share)
        if step.kind == "mean" and name in SUMS and isinstance(other, float) and other > 0:
            divisor = replace(step, kind="divisor", func=func, args=args, kwargs={}, eps=other)
            return self._undone(divisor, [shape[0], 1, 1, 1])
        if its is not None or not isinstance(other, Tensor):
            return None
        if step.kind == "share" and name in PRODUCTS and other is x:
            active = self._mode.active(shape[1:3] if step.nhwc else shape[2:])
            inside = active.block_map, active.grid.numbers(), shape[1:3] if step.nhwc else shape[2:]
            return self._undone(replace(step, kind="product", func=func, args=args, inside=inside), shape)
        if step.kind == "product" and name in PRODUCTS and self._of_channels(step, other):
            return self._undone(replace(step, kind="weighted", func=func, args=args, weight=other), shape)
        if step.kind == "weighted" and name in SUMS and self._of_channels(step, other):
            return self._undone(replace(step, kind="shifted", func=func, args=args, bias=other), shape)
        return self._whole(step) if step.kind == "shifted" and name in SUMS and other is x else None

    def _shifted(self, func: Any, args: Any, step: _Step | None, weight: Any, bias: Any) -> Tensor | None:
        if step is None or step.kind != "product" or not all(self._of_channels(step, t) for t in (weight, bias)):
            return None
        made = replace(step, kind="shifted", func=func, args=args, weight=weight, bias=bias)
        return self._undone(made, list(step.x.shape))

    def _of_channels(self, step: _Step, t: Any) -> bool:
        at = -1 if step.nhwc else -3
        channels = step.x.shape[at]
        return (
            isinstance(t, Tensor) and -at <= t.dim() <= 4 and t.numel() == channels == t.shape[at]
            and t.dtype in (torch.float32, step.x.dtype) and t.device == step.x.device
        )  # fmt: skip

    def _whole(self, step: _Step) -> Tensor | None:
        """The norm itself."""
        weight, bias = step.weight, step.bias
        x = base_of(step.x) if step.nhwc else step.x
        if x is None or weight is None or bias is None or not self._mode.keeps(x) or weight.dtype != bias.dtype:
            return None
        out = self._maps.norm2d(x, weight.reshape(-1), bias.reshape(-1), "response", 1, step.eps)
        return self._mode.as_nhwc(out) if step.nhwc else out

    def _undone(self, step: _Step, shape: Any) -> Tensor:
        out = _Undone.apply(step, shape, _dtype_of(step), *(t for t in step.args if isinstance(t, Tensor)))
        out.__dict__[STEP] = step
        self._seen.append(weakref.ref(out))
        self._mode.seen(out, step.nhwc, step.inside is not None)
        return out


def _of_norm(
    input: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None, out: Any = None,
    ord: Any = None,
) -> set[int] | None:  # fmt: skip
    """The dimensions of a root of sums of squares that stay, as ones; None of other norms."""
    order = p if ord is None else ord
    squares = order == "fro" or (isinstance(order, (int, float)) and order == 2)
    if not squares or not keepdim or dtype is not None or out is not None or not isinstance(dim, (tuple, list)):
        return None
    return {d % 4 for d in dim} if input.dtype in FLOATS else None


_DTYPES: dict[Any, torch.dtype] = {}


def _dtype_of(step: _Step) -> torch.dtype:
    """What its function gives of such dtypes, autocast or not: tried once, of single numbers."""
    key = step.func, tuple(t.dtype if isinstance(t, Tensor) else type(t) for t in step.args), step.autocast
    if key not in _DTYPES:
        args = [t.new_zeros((1,) * t.dim()) if isinstance(t, Tensor) else t for t in step.args]
        with torch.no_grad():
            _DTYPES[key] = replace(step, inside=None).run(args).dtype
    return _DTYPES[key]
