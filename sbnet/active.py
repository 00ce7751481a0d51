"""Block grids and what names blocks on them: lists of active blocks, fringes, pyramids of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.geometry import Pair, to_pair, to_window


@dataclass(frozen=True)
class BlockGrid:
    """Where the blocks of a plane lie: block (n, i, j) covers rows boffset[0] + i*bstride[0] ... + bsize[0] and columns
    boffset[1] + j*bstride[1] ... + bsize[1] of image n.

    Blocks may overlap (bstride < bsize), leave gaps (bstride > bsize) and reach past the plane on any side.

    Args (each a pair of ints, or one int for both directions; pixels, bcount in blocks):
        bsize: block size, at least 1.
        bstride: distance of neighbouring blocks, at least 1.
        boffset: corner of block (0, 0); may be negative.
        bcount: number of blocks, at least 0.

    >>> BlockGrid.cover((400, 704), 16)
    BlockGrid(bsize=(16, 16), bstride=(16, 16), boffset=(0, 0), bcount=(25, 44))
    """

    bsize: Pair
    bstride: Pair
    boffset: Pair
    bcount: Pair

    def __post_init__(self) -> None:
        for name, least in (("bsize", 1), ("bstride", 1), ("boffset", None), ("bcount", 0)):
            pair = to_pair(getattr(self, name), f"BlockGrid: {name}")
            if least is not None and min(pair) < least:
                raise ValueError(f"sbnet::BlockGrid: {name}: expected at least {least}, got {pair}")
            object.__setattr__(self, name, pair)

    @classmethod
    def cover(cls, size: Sequence[int], bsize: int | Sequence[int]) -> BlockGrid:
        """The tiling grid of an H x W plane: blocks side by side from (0, 0), the last ones clipped by the plane."""
        height, width = to_pair(size, "BlockGrid.cover: size")
        bh, bw = to_pair(bsize, "BlockGrid.cover: bsize")
        if min(bh, bw) < 1:
            raise ValueError(f"sbnet::BlockGrid.cover: bsize: expected at least 1, got {(bh, bw)}")
        if any(isinstance(v, int) and v < 0 for v in (height, width)):
            raise ValueError(f"sbnet::BlockGrid.cover: size: expected at least 0, got {(height, width)}")
        return cls((bh, bw), (bh, bw), (0, 0), (-(-height // bh), -(-width // bw)))

    def conv_input(
        self,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
    ) -> BlockGrid:
        """The grid of what a convolution reads to write the blocks of this grid (same bcount). Chains of convolutions
        compose: apply it from the last one backwards. `padding` is the padding before (top, left)."""
        op = "BlockGrid.conv_input"
        k, s, p, d = to_window(op, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation)
        size, step, offset = (
            tuple(f(a) for a in range(2))
            for f in (
                lambda a: (self.bsize[a] - 1) * s[a] + (k[a] - 1) * d[a] + 1,
                lambda a: self.bstride[a] * s[a],
                lambda a: self.boffset[a] * s[a] - p[a],
            )
        )
        return BlockGrid(size, step, offset, self.bcount)  # type: ignore[arg-type]

    @property
    def overlaps(self) -> bool:
        """Do neighbouring blocks share pixels?"""
        return any(self.bstride[a] < self.bsize[a] and self.bcount[a] > 1 for a in range(2))

    def numbers(self) -> list[int]:
        """The eight numbers that torch.ops.sbnet.* take."""
        return [*self.bsize, *self.bstride, *self.boffset, *self.bcount]


@dataclass(frozen=True)
class ActiveBlocks:
    """The active blocks of a batch of planes: what `reduce_mask` returns and every sparse op takes. A pytree.

    Attributes:
        indices: [capacity, 3] int32, rows (n, i, j) in raster order; rows past the count hold -1.
        count: [1] int32 on the device, active blocks in the list. No op reads it on the host.
        total: [1] int32 on the device, active blocks before the capacity cut them.
        block_map: [N, *grid.bcount] int32, the row of each block in `indices`, or -1.
        grid: where the blocks lie.
    """

    indices: Tensor
    count: Tensor
    total: Tensor
    block_map: Tensor
    grid: BlockGrid

    @property
    def capacity(self) -> int:
        """Rows of the list: the most blocks it can hold."""
        return self.indices.shape[0]

    @property
    def batch(self) -> int:
        return self.block_map.shape[0]

    def with_grid(self, grid: BlockGrid) -> ActiveBlocks:
        """The same blocks on another grid of as many blocks (what a convolution reads, another plane's resolution)."""
        if not isinstance(grid, BlockGrid):
            raise TypeError(
                f"sbnet::ActiveBlocks.with_grid: grid: expected an sbnet.BlockGrid, got {type(grid).__name__}"
            )
        if grid.bcount != self.grid.bcount:
            raise ValueError(
                f"sbnet::ActiveBlocks.with_grid: grid: expected the bcount "
                f"of the blocks, {self.grid.bcount}, got {grid.bcount}"
            )
        return ActiveBlocks(self.indices, self.count, self.total, self.block_map, grid)

    def to(self, device: torch.device | str) -> ActiveBlocks:
        """The same list on another device."""
        indices, count, total, block_map = (
            t.to(device) for t in (self.indices, self.count, self.total, self.block_map)
        )
        return ActiveBlocks(indices, count, total, block_map, self.grid)

    def trim(self) -> ActiveBlocks:
        """The list cut to its count. Reads the count on the host: one device synchronisation (free on CPU)."""
        return ActiveBlocks(self.indices[: max(int(self.count), 0)], self.count, self.total, self.block_map, self.grid)

    def pixel_mask(self, size: int | Sequence[int]) -> Tensor:
        """[N, 1, H, W] bool: pixels of an H x W plane that lie in an active block."""
        op = "ActiveBlocks.pixel_mask"
        height, width = to_pair(size, f"{op}: size")
        if not isinstance(self.grid, BlockGrid):
            raise TypeError(f"sbnet::{op}: grid: expected an sbnet.BlockGrid, got {type(self.grid).__name__}")
        blocks = (self.block_map >= 0).to(torch.int8)
        (bh, bw), (sh, sw), (oh, ow), (ch, cw) = (
            self.grid.bsize,
            self.grid.bstride,
            self.grid.boffset,
            self.grid.bcount,
        )
        device = blocks.device
        rows = _covers(height, ch, bh, sh, oh, device)  # [H, ch]
        columns = _covers(width, cw, bw, sw, ow, device)
        hits = torch.einsum("yi,nij,xj->nyx", rows, blocks.float(), columns)
        return (hits > 0)[:, None]

    @staticmethod
    def from_indices(indices: Tensor, grid: BlockGrid, batch: int) -> ActiveBlocks:
        """A list of one's own: indices [rows, 3] int32 or int64 (n, i, j), all of them blocks of the grid, none twice.

        On the CPU both is checked; on CUDA, where it would make the host wait, it is taken on trust.
        """
        op = "ActiveBlocks.from_indices"
        if not isinstance(indices, Tensor) or indices.dim() != 2 or indices.shape[1] != 3:
            came = tuple(indices.shape) if isinstance(indices, Tensor) else type(indices).__name__
            raise ValueError(f"sbnet::{op}: indices: expected a tensor [rows, 3] of (n, i, j), got {came}")
        if indices.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"sbnet::{op}: indices: dtype: expected int32 or int64, got {indices.dtype}")
        if not isinstance(grid, BlockGrid):
            raise TypeError(f"sbnet::{op}: grid: expected an sbnet.BlockGrid, got {type(grid).__name__}")
        if indices.device.type == "cpu" and not torch.compiler.is_compiling():
            limit = torch.tensor([batch, *grid.bcount])
            bad = ((indices < 0) | (indices >= limit)).any(1).nonzero()
            if len(bad):
                row = tuple(indices[int(bad[0])].tolist())
                raise IndexError(
                    f"sbnet::{op}: indices: expected blocks (n, i, j) below {tuple(limit.tolist())}, got {row}"
                )
            if len(torch.unique(indices, dim=0)) < len(indices):
                raise ValueError(f"sbnet::{op}: indices: expected each block once, got one more than once")
        indices = indices.to(torch.int32)
        n, i, j = indices.long().unbind(1)
        block_map = indices.new_full((batch, *grid.bcount), -1)
        block_map[n, i, j] = torch.arange(len(indices), dtype=torch.int32, device=indices.device)
        count = indices.new_full((1,), len(indices))
        return ActiveBlocks(indices.contiguous(), count, count.clone(), block_map, grid)


def _covers(length: int, count: int, size: int, stride: int, offset: int, device: torch.device) -> Tensor:
    """[length, count] float: does block i cover coordinate v?"""
    v = torch.arange(length, device=device)[:, None] - offset - torch.arange(count, device=device) * stride
    return ((v >= 0) & (v < size)).float()


@dataclass(frozen=True)
class Fringe:
    """Pixels of a tensor that a consumer reads and no active block of the producer writes. A pytree.

    Attributes:
        pixels: [capacity] int32, linear indices (n*H + y)*W + x, ascending; -1 past the count.
        count: [1] int32 on the device.
    """

    pixels: Tensor
    count: Tensor


@dataclass(frozen=True)
class MaskPyramid:
    """The active blocks of every plane of a network and the fringes of its tensors: what `mask_pyramid` returns. A
    pytree.

    Attributes:
        planes: ActiveBlocks of each plane that was asked for, in that order.
        fringes: Fringe of each tensor that was asked for, in that order.
    """

    planes: tuple[ActiveBlocks, ...]
    fringes: tuple[Fringe, ...]


def _register(cls: type, fields: tuple[str, ...]) -> None:
    def flatten(value: Any) -> tuple[list[Any], Any]:
        return [getattr(value, f) for f in fields], getattr(value, "grid", None)

    def flatten_with_keys(value: Any) -> tuple[list[Any], Any]:
        leaves, context = flatten(value)
        return [(pytree.GetAttrKey(f), leaf) for f, leaf in zip(fields, leaves, strict=True)], context

    def unflatten(leaves: Any, context: Any) -> Any:
        return cls(*leaves) if context is None else cls(*leaves, context)

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"sbnet.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
        to_dumpable_context=lambda grid: None if grid is None else grid.numbers(),
        from_dumpable_context=lambda v: None if v is None else BlockGrid(*zip(v[::2], v[1::2], strict=True)),
    )


_register(ActiveBlocks, ("indices", "count", "total", "block_map"))
_register(Fringe, ("pixels", "count"))
_register(MaskPyramid, ("planes", "fringes"))
# torch.load(weights_only=True), and with it torch.export.load of programs that take or return them.
torch.serialization.add_safe_globals([ActiveBlocks, BlockGrid, Fringe, MaskPyramid])
