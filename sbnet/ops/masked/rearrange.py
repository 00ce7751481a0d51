"""What only moves elements, on active blocks: pixel shuffles, channel shuffles, padding and cropping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.active import ActiveBlocks, Fringe
from sbnet.ops.masked.layer import layer_fakes, run_layer, run_layer_

_ops = torch.ops.sbnet


def sparse_rearrange(
    x: Tensor,
    active: ActiveBlocks,
    *,
    up: int = 1,
    down: int = 1,
    groups: int = 1,
    pad: Sequence[int] = (0, 0, 0, 0),
    value: float = 0.0,
) -> Tensor:
    """Elements of x in other places, on active blocks of the OUTPUT plane only; zeros elsewhere.

    Equals where(active, F.pad(F.channel_shuffle(F.pixel_unshuffle(F.pixel_shuffle(x, up), down), groups), pad,
    value=value), 0), bit for bit and in one pass: what is not asked for has the number 1, or 0 pixels.

    Args:
        x: [N,C,H,W] float32, float16 or bfloat16, any layout; channels_last is the fast one.
        active: active blocks of the output plane.
        up: a pixel of x becomes up x up pixels; its square divides C.
        down: down x down pixels become one; it divides the sides.
        groups: of channels, whose members are interleaved.
        pad: left, right, top, bottom as in F.pad; negative numbers crop.
        value: of the padding.

    Returns:
        [N,C/up^2*down^2,H*up/down+top+bottom,W*up/down+left+right] in x's memory format. Differentiable.

    Raises:
        RuntimeError, ValueError, TypeError: wrong shapes, dtypes, devices, grid or numbers.

    >>> small = torch.rand(1, 64, 24, 40)
    >>> sbnet.sparse_rearrange(small, active, up=2).shape  # a pixel shuffle
    torch.Size([1, 16, 48, 80])
    """
    op = "sparse_rearrange"
    return run_layer(op, x, active, *_arguments(op, up, down, groups, pad, value))


def sparse_rearrange_(
    x: Tensor,
    active: ActiveBlocks,
    out: Tensor,
    *,
    up: int = 1,
    down: int = 1,
    groups: int = 1,
    pad: Sequence[int] = (0, 0, 0, 0),
    value: float = 0.0,
    fringe: Fringe | None = None,
) -> None:
    """As `sparse_rearrange`, writing the active blocks of `out`, zeroing the pixels of `fringe` and leaving the rest.

    Args:
        out: of the shape that `sparse_rearrange` returns and x's dtype, any layout; must not share memory with x.
        fringe: from `sbnet.fringe`, or None.

    >>> sbnet.sparse_rearrange_(torch.rand(1, 64, 24, 40), active, torch.empty_like(x), up=2)
    """
    op = "sparse_rearrange_"
    run_layer_(op, x, active, out, fringe, *_arguments(op, up, down, groups, pad, value))


def sparse_pixel_shuffle(x: Tensor, active: ActiveBlocks, factor: int) -> Tensor:
    """F.pixel_shuffle on active blocks of the output plane: `sparse_rearrange(x, active, up=factor)`.

    >>> small = torch.rand(1, 64, 24, 40)
    >>> sbnet.sparse_pixel_shuffle(small, active, 2).shape
    torch.Size([1, 16, 48, 80])
    """
    return sparse_rearrange(x, active, up=factor)


def sparse_pixel_unshuffle(x: Tensor, active: ActiveBlocks, factor: int) -> Tensor:
    """F.pixel_unshuffle on active blocks of the output plane: `sparse_rearrange(x, active, down=factor)`.

    >>> sbnet.sparse_pixel_unshuffle(torch.rand(1, 16, 96, 160), active, 2).shape
    torch.Size([1, 64, 48, 80])
    """
    return sparse_rearrange(x, active, down=factor)


def _arguments(op: str, up: int, down: int, groups: int, pad: Sequence[int], value: float) -> tuple[Any, ...]:
    for name, number in (("up", up), ("down", down), ("groups", groups)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"sbnet::{op}: {name}: expected an int, got {number!r}")
    if isinstance(pad, int) or not isinstance(pad, Sequence) or len(pad) != 4:
        raise ValueError(f"sbnet::{op}: pad: expected left, right, top, bottom, got {pad!r}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"sbnet::{op}: value: expected a number, got {value!r}")
    return up, down, groups, list(pad), float(value)


def rearrange_whole(
    x: Tensor, up: int = 1, down: int = 1, groups: int = 1, pad: Sequence[int] = (0, 0, 0, 0), value: float = 0.0
) -> Tensor:
    """The map of `sparse_rearrange` on a whole plane, by PyTorch."""
    x = F.pixel_shuffle(x, up) if up > 1 else x
    x = F.pixel_unshuffle(x, down) if down > 1 else x
    x = channel_shuffle(x, groups)
    return F.pad(x, list(pad), value=value) if any(pad) else x


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    """F.channel_shuffle, of any dtype and number of groups."""
    return x.unflatten(1, (groups, x.shape[1] // groups)).transpose(1, 2).flatten(1, 2) if groups > 1 else x


# ---- fake implementations and gradients


def _size(
    shape: Sequence[int], up: int, down: int, groups: int, pad: Sequence[int], value: float
) -> tuple[int, int, int, int]:
    n, c, h, w = shape
    return n, c // (up * up) * (down * down), h * up // down + pad[2] + pad[3], w * up // down + pad[0] + pad[1]


layer_fakes("sparse_rearrange", _size)


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, _indices, _count, block_map, grid, *how = inputs
    ctx.save_for_backward(block_map)
    ctx.grid, ctx.how, ctx.shape = grid, how, x.shape


def _backward(ctx: Any, grad: Tensor) -> tuple:
    """The way back on the whole plane, of the gradient of active blocks."""
    (block_map,) = ctx.saved_tensors
    up, down, groups, pad, _ = ctx.how
    grad = _ops.sparse_fill(grad, block_map, ctx.grid, 0.0)
    grad = F.pad(grad, [-n for n in pad])
    found = rearrange_whole(channel_shuffle(grad, grad.shape[1] // groups), up=down, down=up)
    return found.reshape(ctx.shape), *[None] * 9  # F.pixel_unshuffle leaves a batch of no images as it is


torch.library.register_autograd("sbnet::sparse_rearrange", _backward, setup_context=_setup)
