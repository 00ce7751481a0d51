"""reduce_mask: a mask becomes a list of active blocks (Ren et al., arXiv 1801.02108)."""

from __future__ import annotations

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks, BlockGrid
from sbnet.ops.common import mask_planes

_ops = torch.ops.sbnet


def reduce_mask(
    mask: Tensor, grid: BlockGrid, tol: float = 0.5, avgpool: bool = False, capacity: int | None = None
) -> ActiveBlocks:
    """The blocks of `grid` in which the mask exceeds `tol`.

    A block is active iff its pooled value is strictly greater than tol. The maximum ignores pixels outside the plane
    and NaN; the average is the in-plane sum over the FULL block area.

    Args:
        mask: [N,H,W], [N,H,W,1] or [N,1,H,W] (a shape that is both is refused); bool, integers or floating.
        grid: the blocks.
        tol: threshold, in the mask's units; compared in float32 (float64 masks: float64, maximum only).
        avgpool: pool with the average instead of the maximum.
        capacity: rows of the list; default: all blocks of the batch. Active blocks past it are dropped in raster order;
            `ActiveBlocks.total` still counts them.

    Returns:
        ActiveBlocks on the mask's device, in raster order; nothing is read on the host.

    >>> active = sbnet.reduce_mask(mask, sbnet.BlockGrid.cover((48, 80), 8))
    >>> int(active.count)
    10
    """
    op = "reduce_mask"
    mask = mask_planes(op, mask)
    if not isinstance(grid, BlockGrid):
        raise TypeError(f"sbnet::{op}: grid: expected an sbnet.BlockGrid, got {type(grid).__name__}")
    if capacity is None:
        capacity = mask.shape[0] * grid.bcount[0] * grid.bcount[1]
    indices, count, total, block_map = _ops.reduce_mask(mask, grid.numbers(), tol, avgpool, capacity)
    return ActiveBlocks(indices, count, total, block_map, grid)


@torch.library.register_fake("sbnet::reduce_mask")
def _reduce_mask_fake(mask: Tensor, grid: list[int], tol: float, avgpool: bool, capacity: int) -> tuple[Tensor, ...]:
    return (
        mask.new_empty((capacity, 3), dtype=torch.int32),
        mask.new_empty((1,), dtype=torch.int32),
        mask.new_empty((1,), dtype=torch.int32),
        mask.new_empty((mask.shape[0], grid[6], grid[7]), dtype=torch.int32),
    )
