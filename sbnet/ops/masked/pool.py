"""Block-sparse 2-D pooling: PyTorch's max_pool2d and avg_pool2d on the active blocks of the output plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks, Fringe
from sbnet.geometry import pool_output_size, to_pair
from sbnet.ops.common import empty4, is_channels_last, refuse_meta_mix
from sbnet.ops.masked.layer import in_place_fake, layer_fakes, pairs, run_layer, run_layer_

_ops = torch.ops.sbnet
_aten = torch.ops.aten


def sparse_max_pool2d(
    x: Tensor,
    active: ActiveBlocks,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """Max pooling computed on active blocks of the OUTPUT plane only; zeros elsewhere.

    Equals where(active, F.max_pool2d(x, ...), 0): the border is -inf, NaN passes through. x is read as it is.

    Args:
        x: [N,C,H,W] float32, float16 or bfloat16, any layout; channels_last is the fast one.
        active: active blocks of the output plane (the tiling grid of `sbnet.pool_output_size`).
        kernel_size, stride, padding, dilation, ceil_mode: as in F.max_pool2d; stride None is the kernel size.

    Returns:
        [N,C,H_out,W_out] in x's memory format. Differentiable: of equal values the first gets the
        gradient, as in PyTorch.

    Raises:
        RuntimeError, ValueError, TypeError: wrong shapes, dtypes, devices or grid.

    >>> sbnet.sparse_max_pool2d(torch.rand(1, 16, 96, 160), active, 3, 2, 1).shape
    torch.Size([1, 16, 48, 80])
    """
    op = "sparse_max_pool2d"
    window = *_window(op, kernel_size, stride, padding), *pairs(op, dilation=dilation)
    return run_layer(op, x, active, *window, ceil_mode)


def sparse_max_pool2d_(
    x: Tensor,
    active: ActiveBlocks,
    out: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    *,
    fringe: Fringe | None = None,
) -> None:
    """As `sparse_max_pool2d`, writing the active blocks of `out`, zeroing the pixels of `fringe` and leaving the rest.

    Args:
        out: [N,C,H_out,W_out] of x's dtype, any layout; must not share memory with x.
        fringe: from `sbnet.fringe`, or None.

    >>> sbnet.sparse_max_pool2d_(torch.rand(1, 16, 96, 160), active, torch.empty_like(x), 3, 2, 1)
    """
    op = "sparse_max_pool2d_"
    window = *_window(op, kernel_size, stride, padding), *pairs(op, dilation=dilation)
    run_layer_(op, x, active, out, fringe, *window, ceil_mode)


def sparse_avg_pool2d(
    x: Tensor,
    active: ActiveBlocks,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Average pooling computed on active blocks of the OUTPUT plane only; zeros elsewhere.

    Equals where(active, F.avg_pool2d(x, ...), 0). Arguments, result and errors are those of `sparse_max_pool2d` and
    F.avg_pool2d; sums are float32.

    >>> sbnet.sparse_avg_pool2d(torch.rand(1, 16, 96, 160), active, 2).shape
    torch.Size([1, 16, 48, 80])
    """
    op = "sparse_avg_pool2d"
    window = _window(op, kernel_size, stride, padding)
    return run_layer(op, x, active, *window, ceil_mode, count_include_pad, divisor_override)


def sparse_avg_pool2d_(
    x: Tensor,
    active: ActiveBlocks,
    out: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    fringe: Fringe | None = None,
) -> None:
    """As `sparse_avg_pool2d`, writing the active blocks of `out`, zeroing the pixels of `fringe` and leaving the rest.

    Args:
        out: [N,C,H_out,W_out] of x's dtype, any layout; must not share memory with x.
        fringe: from `sbnet.fringe`, or None.

    >>> sbnet.sparse_avg_pool2d_(torch.rand(1, 16, 96, 160), active, torch.empty_like(x), 2)
    """
    op = "sparse_avg_pool2d_"
    window = _window(op, kernel_size, stride, padding)
    run_layer_(op, x, active, out, fringe, *window, ceil_mode, count_include_pad, divisor_override)


def _window(op: str, kernel_size: Any, stride: Any, padding: Any) -> tuple[list[int], list[int], list[int]]:
    kernel = list(to_pair(kernel_size, f"{op}: kernel_size"))
    return (
        kernel,
        kernel if stride is None else list(to_pair(stride, f"{op}: stride")),
        list(to_pair(padding, f"{op}: padding")),
    )


# ---- fake implementations and gradients
layer_fakes("sparse_max_pool2d", lambda shape, *window: (*shape[:2], *pool_output_size(shape[2:], *window)))
layer_fakes(
    "sparse_avg_pool2d",
    lambda shape, kernel, stride, padding, ceil, *_: (
        *shape[:2], *pool_output_size(shape[2:], kernel, stride, padding, 1, ceil)
    ),
)  # fmt: skip


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, _indices, _count, block_map, grid, *window = inputs
    ctx.save_for_backward(x, block_map)
    ctx.grid, ctx.window = grid, window


def _max_backward(ctx: Any, grad: Tensor) -> tuple:
    x, block_map = ctx.saved_tensors
    kernel, stride, padding, dilation, ceil = ctx.window
    given = _ops.sparse_pool2d_grad(
        grad, x, block_map, ctx.grid, True, kernel, stride, padding, dilation, ceil, True, 0
    )
    return given, *[None] * 9


def _avg_backward(ctx: Any, grad: Tensor) -> tuple:
    x, block_map = ctx.saved_tensors
    kernel, stride, padding, ceil, counted, divisor = ctx.window
    given = _ops.sparse_pool2d_grad(
        grad, x, block_map, ctx.grid, False, kernel, stride, padding, [1, 1], ceil, counted, divisor or 0
    )
    return given, *[None] * 10


torch.library.register_autograd("sbnet::sparse_max_pool2d", _max_backward, setup_context=_setup)
torch.library.register_autograd("sbnet::sparse_avg_pool2d", _avg_backward, setup_context=_setup)


@torch.library.register_fake("sbnet::sparse_pool2d_grad")
def _grad_fake(grad: Tensor, x: Tensor, block_map: Tensor, *_: Any) -> Tensor:
    refuse_meta_mix("sparse_pool2d_grad", grad, x, block_map)
    return empty4(x, x.shape, is_channels_last(x))


in_place_fake("sparse_pool2d_grad_")


def _grad_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _grad, x, block_map, ctx.grid, ctx.maximum, *ctx.window = inputs
    ctx.save_for_backward(x, block_map)


def _grad_backward(ctx: Any, grad: Tensor) -> tuple:
    """It is linear in dy: of an average, the average again; of a maximum, what is where the maximum was."""
    x, block_map = ctx.saved_tensors
    kernel, stride, padding, dilation, ceil, counted, divisor = ctx.window
    if ctx.maximum:
        y, at = _aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil)
        given = grad.flatten(2).gather(2, at.flatten(2)).view_as(y)
    else:
        given = _aten.avg_pool2d(grad, kernel, stride, padding, ceil, counted, divisor or None)
    return _ops.sparse_fill(given, block_map, ctx.grid, 0.0), *[None] * 11


torch.library.register_autograd("sbnet::sparse_pool2d_grad", _grad_backward, setup_context=_grad_setup)
