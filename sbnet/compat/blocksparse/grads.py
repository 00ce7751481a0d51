"""blocksparse.grads: gradients, and functions that run again in the backward pass instead of keeping what they made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def gradients(
    ys: Tensor | Sequence[Tensor],
    xs: Tensor | Sequence[Tensor],
    grad_ys: Tensor | Sequence[Tensor] | None = None,
    group_aggregations: int = 8,
    custom_matmul_grad: bool = True,
) -> list[Tensor | None]:
    """The gradients of the sum of ys with respect to each of xs, None where they do not depend on it."""
    given = [grad_ys] if isinstance(grad_ys, Tensor) else grad_ys
    outputs = [ys] if isinstance(ys, Tensor) else list(ys)
    inputs = [xs] if isinstance(xs, Tensor) else list(xs)
    seeds = [torch.ones_like(y) for y in outputs] if given is None else list(given)
    return list(torch.autograd.grad(outputs, inputs, seeds, allow_unused=True))


class recomputable:
    """A decorator: called with recompute=True, a function keeps its arguments alone and runs again for its gradient.

    `@recomputable` (blocksparse) and `@recomputable("name")` (sparse_attention).

    >>> @recomputable
    ... def block(x):
    ...     return torch.relu(x) * x
    >>> y = block(torch.randn(4, requires_grad=True), recompute=True)
    """

    def __init__(self, func: Callable[..., Any] | str) -> None:
        self.func: Callable[..., Any] | None = None
        if not isinstance(func, str):
            self._hold(func)

    def _hold(self, func: Callable[..., Any]) -> recomputable:
        self.func = func
        functools.update_wrapper(self, func)
        return self

    def __call__(self, *args: Any, recompute: bool = False, **kwargs: Any) -> Any:
        if self.func is None:
            return self._hold(args[0])
        if recompute:
            return checkpoint(self.func, *args, use_reentrant=False, **kwargs)
        return self.func(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self.__call__, instance)
