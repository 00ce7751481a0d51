"""sparse_gather, sparse_scatter: active blocks as a stack, and back (Ren et al., arXiv 1801.02108)."""

from __future__ import annotations

import reprlib
from typing import Any

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks, BlockGrid
from sbnet.ops.common import (
    check_active,
    empty4,
    is_channels_last,
    mark_written,
    refuse_gradient,
    refuse_meta_mix,
    require_active,
    require_tensor,
    zeros4,
)

_ops = torch.ops.sbnet


def sparse_gather(
    x: Tensor, active: ActiveBlocks, transpose: bool = False, *, grid: BlockGrid | None = None, tail: str = "zero"
) -> Tensor:
    """The active blocks of x as one stack.

    Args:
        x: [N,C,H,W] in any layout; any dtype of up to 8 bytes.
        active: which blocks.
        transpose: give the stack the other memory format than x has (contiguous <-> channels_last).
        grid: read the blocks of this grid instead of active.grid (as many blocks; halos, another resolution).
        tail: what rows past the count hold: "zero", or "undefined" to save the writes.

    Returns:
        [capacity,C,bh,bw], row r = block active.indices[r]; pixels outside the plane are 0. `active.trim()` makes the
        rows equal the count. Differentiable with respect to x.

    >>> blocks = sbnet.sparse_gather(x, active.trim())
    >>> blocks.shape  # ten active blocks of 8x8
    torch.Size([10, 16, 8, 8])
    """
    op = "sparse_gather"
    require_tensor(op, "x", x)
    require_active(op, active)
    if tail not in ("zero", "undefined"):
        raise ValueError(f"sbnet::{op}: tail: expected 'zero' or 'undefined', got {reprlib.repr(tail)}")
    if grid is not None:
        active = active.with_grid(grid)
    check_active(op, active)
    return _ops.sparse_gather(
        x, active.indices, active.count, active.block_map, active.grid.numbers(), transpose, tail == "zero"
    )


@torch.library.register_fake("sbnet::sparse_gather")
def _sparse_gather_fake(
    x: Tensor, indices: Tensor, count: Tensor, block_map: Tensor, grid: list[int], transpose: bool, zero_tail: bool
) -> Tensor:
    refuse_meta_mix("sparse_gather", x, indices, count, block_map)
    return empty4(x, (indices.shape[0], x.shape[1], grid[0], grid[1]), is_channels_last(x) != transpose)


def _sparse_gather_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, indices, count, block_map, grid, transpose, _ = inputs
    ctx.save_for_backward(indices, count, block_map)
    ctx.grid, ctx.transpose, ctx.x_shape, ctx.x_channels_last = grid, transpose, x.shape, is_channels_last(x)


def _sparse_gather_backward(ctx: Any, grad: Tensor) -> tuple:
    base = zeros4(grad, ctx.x_shape, ctx.x_channels_last)
    grad_x = _ops.sparse_scatter(grad, *ctx.saved_tensors, base, ctx.grid, True, False, ctx.transpose)
    return grad_x, None, None, None, None, None, None


torch.library.register_autograd("sbnet::sparse_gather", _sparse_gather_backward, setup_context=_sparse_gather_setup)


def sparse_scatter(
    blocks: Tensor,
    active: ActiveBlocks,
    base: Tensor,
    grid: BlockGrid | None = None,
    add: bool = False,
    atomic: bool = False,
    transpose: bool = False,
) -> Tensor:
    """A copy of `base` with the active blocks overwritten by (or increased by) the rows of `blocks`.

    Args:
        blocks: [rows,C,bh,bw], rows <= capacity, dtype of base.
        active: which blocks.
        base: [N,C,H,W] in any layout.
        grid: write to the blocks of this grid instead of active.grid (as many blocks).
        add: add instead of overwriting (float32, float16, bfloat16). Overwriting needs blocks that do not overlap.
        atomic: add overlapping blocks with atomics (order not fixed). Otherwise every pixel sums the blocks over it in
            raster order: the same bits each time, at a cost that follows the plane.
        transpose: states that blocks and base differ in memory format. Layouts are read off the strides, so either
            value is right in torch; ONNX, whose shapes are explicit, needs it.

    Returns:
        [N,C,H,W] like base; pixels outside the plane are dropped, inactive ones keep base. Differentiable with respect
        to blocks and base.

    >>> blocks = sbnet.sparse_gather(x, active.trim())
    >>> y = sbnet.sparse_scatter(2 * blocks, active, x)  # x, doubled in the active blocks
    >>> torch.equal(y, torch.where(active.pixel_mask((48, 80)), 2 * x, x))
    True
    """
    arguments = _scatter_arguments("sparse_scatter", blocks, active, base, grid)
    return _ops.sparse_scatter(*arguments, add, atomic, transpose)


def sparse_scatter_(
    blocks: Tensor,
    active: ActiveBlocks,
    base: Tensor,
    grid: BlockGrid | None = None,
    add: bool = False,
    atomic: bool = False,
    transpose: bool = False,
) -> Tensor:
    """`sparse_scatter` in place: writes base and returns it. Records no gradient.

    >>> blocks, base = sbnet.sparse_gather(x, active.trim()), torch.zeros_like(x)
    >>> base is sbnet.sparse_scatter_(blocks, active, base)
    True
    """
    arguments = _scatter_arguments("sparse_scatter_", blocks, active, base, grid)
    refuse_gradient("sparse_scatter_", "sparse_scatter", blocks, base)
    _ops.sparse_scatter_(*arguments, add, atomic, transpose)
    mark_written(base)
    return base


def _scatter_arguments(
    op: str, blocks: Tensor, active: ActiveBlocks, base: Tensor, grid: BlockGrid | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[int]]:
    require_tensor(op, "blocks", blocks)
    require_tensor(op, "base", base)
    require_active(op, active)
    if grid is not None:
        active = active.with_grid(grid)
    check_active(op, active)
    return blocks, active.indices, active.count, active.block_map, base, active.grid.numbers()


@torch.library.register_fake("sbnet::sparse_scatter")
def _sparse_scatter_fake(
    blocks: Tensor,
    indices: Tensor,
    count: Tensor,
    block_map: Tensor,
    base: Tensor,
    grid: list[int],
    add: bool,
    atomic: bool,
    transpose: bool,
) -> Tensor:
    refuse_meta_mix("sparse_scatter", blocks, indices, count, block_map, base)
    _refuse_overlap("sparse_scatter", grid, add)
    return torch.empty_like(base)


@torch.library.register_fake("sbnet::sparse_scatter_")
def _sparse_scatter_in_place_fake(*arguments: Any) -> None:
    refuse_meta_mix("sparse_scatter_", *arguments)
    _refuse_overlap("sparse_scatter_", arguments[5], arguments[6])


def _refuse_overlap(op: str, grid: list[int], add: bool) -> None:
    """As core's validate does: which of two blocks a pixel gets would be chance."""
    bh, bw, sh, sw, _, _, rows, columns = grid
    overlap = (sh < bh and rows > 1) or (sw < bw and columns > 1)
    torch._check(
        add or not overlap,
        lambda: (
            f"sbnet::{op}: grid: expected blocks that do not overlap "
            f"(or add=True), got size {(bh, bw)} at stride {(sh, sw)}"
        ),
    )


def _sparse_scatter_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    blocks, indices, count, block_map, _base, grid, add, _atomic, _transpose = inputs
    ctx.save_for_backward(indices, count, block_map)
    ctx.grid, ctx.add, ctx.rows, ctx.blocks_channels_last = grid, add, blocks.shape[0], is_channels_last(blocks)


def _sparse_scatter_backward(ctx: Any, grad: Tensor) -> tuple:
    indices, count, block_map = ctx.saved_tensors
    transpose = is_channels_last(grad) != ctx.blocks_channels_last
    grad_blocks = _ops.sparse_gather(grad, indices[: ctx.rows], count, block_map, ctx.grid, transpose, True)
    grad_base = grad
    if not ctx.add:
        grad_base = _ops.sparse_scatter(
            torch.zeros_like(grad_blocks), indices, count, block_map, grad, ctx.grid, False, False, transpose
        )
    return grad_blocks, None, None, None, grad_base, None, None, None, None


torch.library.register_autograd("sbnet::sparse_scatter", _sparse_scatter_backward, setup_context=_sparse_scatter_setup)
