"""The ops of the SBNet release on tensors of its shapes, [N, H, W, C], with its argument names.

`sbnet_module = sbnet.compat.sbnet` stands for `tf.load_op_library("libsbnet.so")`. Stacks have a row for every block
that a list may hold, those past the count zeros: nothing waits for the device. An empty mask gives a count of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sbnet import ops
from sbnet.active import ActiveBlocks, BlockGrid


class ReducedMask(NamedTuple):
    """What `reduce_mask` returns.

    Attributes:
        bin_counts: [1] int32: active blocks.
        active_block_indices: [capacity, 3] int32: (n, i, j) of each, in raster order; -1 past the count.
    """

    bin_counts: Tensor
    active_block_indices: Tensor


def reduce_mask(
    mask: Tensor,
    dynamic_bcount: Any = None,
    dynamic_bsize: Any = None,
    dynamic_bstride: Any = None,
    dynamic_boffset: Any = None,
    *,
    tol: float = 0.5,
    avgpool: bool = False,
    bsize: Sequence[int] | None = None,
    bstride: Sequence[int] | None = None,
    boffset: Sequence[int] | None = None,
    bcount: Sequence[int] | None = None,
    name: str | None = None,
) -> ReducedMask:
    """The blocks whose largest (or, with avgpool, average) value is greater than tol. mask [N, H, W, 1].

    The numbers of the grid, two each, are given as `bsize` and so on, or as `dynamic_bsize` and so on.
    """
    op = "reduce_mask"
    _require(op, "mask", mask, 1)
    size, stride, offset = _numbers(op, (bsize, bstride, boffset), (dynamic_bsize, dynamic_bstride, dynamic_boffset))
    count = _pair(op, "bcount", bcount if bcount is not None else dynamic_bcount)
    active = ops.reduce_mask(mask[..., 0], BlockGrid(size, stride, offset, count), tol, avgpool)
    return ReducedMask(active.count, active.indices)


def sparse_gather(
    x: Tensor,
    bin_counts: Tensor,
    active_block_indices: Tensor,
    dynamic_bsize: Any = None,
    dynamic_bstride: Any = None,
    dynamic_boffset: Any = None,
    *,
    bsize: Sequence[int] | None = None,
    bstride: Sequence[int] | None = None,
    boffset: Sequence[int] | None = None,
    transpose: bool = False,
    name: str | None = None,
) -> Tensor:
    """Blocks of x [N, H, W, C]: [capacity, bh, bw, C], or [capacity, C, bh, bw] with transpose. Differentiable."""
    op = "sparse_gather"
    _require(op, "x", x)
    grid = _grid(op, x, (bsize, bstride, boffset), (dynamic_bsize, dynamic_bstride, dynamic_boffset))
    active = _active(op, x, bin_counts, active_block_indices, grid)
    stack = ops.sparse_gather(x.contiguous().permute(0, 3, 1, 2), active, transpose)
    return stack if transpose else stack.permute(0, 2, 3, 1)


def sparse_scatter(
    x: Tensor,
    bin_counts: Tensor,
    active_block_indices: Tensor,
    ybase: Tensor,
    dynamic_bsize: Any = None,
    dynamic_bstride: Any = None,
    dynamic_boffset: Any = None,
    *,
    bsize: Sequence[int] | None = None,
    bstride: Sequence[int] | None = None,
    boffset: Sequence[int] | None = None,
    add: bool = False,
    atomic: bool = False,
    transpose: bool = False,
    name: str | None = None,
) -> Tensor:
    """ybase [N, H, W, C] with the blocks x, [rows, bh, bw, C] or, with transpose, [rows, C, bh, bw], written over it or
    added to it.

    Where blocks that are written overlap, the last one of the list stands. Differentiable with respect to x and ybase.
    """
    op = "sparse_scatter"
    _require(op, "ybase", ybase)
    grid = _grid(op, ybase, (bsize, bstride, boffset), (dynamic_bsize, dynamic_bstride, dynamic_boffset))
    active = _active(op, ybase, bin_counts, active_block_indices, grid)
    blocks = x if transpose else x.permute(0, 3, 1, 2)
    base = ybase.contiguous().permute(0, 3, 1, 2)
    if grid.overlaps and not add:
        return _write_in_order(blocks, active, base).permute(0, 2, 3, 1)
    return ops.sparse_scatter(blocks, active, base, add=add, atomic=atomic, transpose=transpose).permute(0, 2, 3, 1)


@torch.no_grad()
def sparse_scatter_var(
    x: Tensor,
    bin_counts: Tensor,
    active_block_indices: Tensor,
    ybase: Tensor,
    *args: Any,
    **options: Any,
) -> Tensor:
    """`sparse_scatter` into ybase itself, which it returns. Records no gradient."""
    return ybase.copy_(sparse_scatter(x, bin_counts, active_block_indices, ybase, *args, **options))


def _require(op: str, argument: str, x: Any, channels: int | None = None) -> None:
    if not isinstance(x, Tensor) or x.dim() != 4 or (channels is not None and x.shape[3] != channels):
        came = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{op}: {argument}: expected a tensor [N, H, W, {channels or 'C'}], got {came}")


def _pair(op: str, argument: str, value: Any) -> tuple[int, int]:
    if value is None:
        raise ValueError(f"{op}: {argument}: expected two numbers, got None")
    numbers = [int(v) for v in value]
    if len(numbers) != 2:
        raise ValueError(f"{op}: {argument}: expected two numbers, got {numbers}")
    return numbers[0], numbers[1]


def _numbers(op: str, static: Sequence[Any], dynamic: Sequence[Any]) -> list[tuple[int, int]]:
    names = "bsize", "bstride", "boffset"
    return [_pair(op, n, d if s is None else s) for n, s, d in zip(names, static, dynamic, strict=True)]


def _grid(op: str, x: Tensor, static: Sequence[Any], dynamic: Sequence[Any]) -> BlockGrid:
    """The grid with every block that touches x: which counts the mask's list had is not said again."""
    size, stride, offset = _numbers(op, static, dynamic)
    count = [max(1, -(-(length - o) // s)) for length, o, s in zip(x.shape[1:3], offset, stride, strict=True)]
    return BlockGrid(size, stride, offset, (count[0], count[1]))


def _active(op: str, x: Tensor, counts: Tensor, indices: Tensor, grid: BlockGrid) -> ActiveBlocks:
    if indices.dim() != 2 or indices.shape[1] != 3 or counts.numel() != 1:
        raise ValueError(
            f"{op}: expected active_block_indices [rows, 3] and bin_counts [1], got {list(indices.shape)} and "
            f"{list(counts.shape)}"
        )
    rows = torch.arange(len(indices), dtype=torch.int32, device=indices.device)
    limits = torch.tensor([x.shape[0], *grid.bcount], device=indices.device)
    there = (rows < counts.view(-1)) & ((indices >= 0) & (indices < limits)).all(1)
    n, i, j = indices.long().unbind(1)
    places = x.shape[0] * grid.bcount[0] * grid.bcount[1]
    at = torch.where(there, (n * grid.bcount[0] + i) * grid.bcount[1] + j, places)
    block_map = rows.new_full((places + 1,), -1).scatter(0, at, rows)[:places]
    count = counts.view(1).to(torch.int32)
    return ActiveBlocks(
        indices.to(torch.int32).contiguous(), count, count, block_map.view(x.shape[0], *grid.bcount), grid
    )


def _write_in_order(blocks: Tensor, active: ActiveBlocks, base: Tensor) -> Tensor:
    """base [N, C, H, W] under blocks [rows, C, bh, bw] of which the last over a pixel counts."""
    (bh, bw), (sh, sw), (oh, ow), _ = active.grid.bsize, active.grid.bstride, active.grid.boffset, None
    images, _, height, width = base.shape
    device = base.device
    n, i, j = (t[: len(blocks), None, None] for t in active.indices.long().unbind(1))
    row = torch.arange(len(blocks), device=device)[:, None, None]
    y = i * sh + oh + torch.arange(bh, device=device)[:, None]
    x = j * sw + ow + torch.arange(bw, device=device)
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width) & (row < active.count) & (n >= 0) & (i >= 0) & (j >= 0)
    pixel = torch.where(inside, (n * height + y) * width + x, images * height * width)
    source = (row * bh + torch.arange(bh, device=device)[:, None]) * bw + torch.arange(bw, device=device)
    last = source.new_full((images * height * width + 1,), -1)
    last = last.scatter_reduce(0, pixel.flatten(), source.expand_as(pixel).flatten(), "amax")[:-1]
    last = last.view(images, height, width)
    values = blocks.permute(0, 2, 3, 1).reshape(-1, blocks.shape[1])
    if not len(values):
        return base.clone()
    return torch.where((last >= 0)[:, None], values[last.clamp(min=0)].permute(0, 3, 1, 2), base)
