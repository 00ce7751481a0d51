"""Tokens of a plane, packed, and copies of their rows: what runs beside the layers of planes, a launch each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks
from sbnet.ops.common import empty4, refuse_meta_mix
from sbnet.ops.masked.layer import in_place_fake, no_gradient

_ops = torch.ops.sbnet
MOST_OFFSETS = 16  # of merge_pixels_: core/masked/token_rows.h


class PackedTokens(NamedTuple):
    """lengths [N] int32, order [N,capacity] int64, rows [N,tokens] int64, mask [N,tokens] bool: those of TokenBlocks;
    filled [N,capacity] bool: rows that hold a token."""

    lengths: Tensor
    order: Tensor
    rows: Tensor
    mask: Tensor
    filled: Tensor


def pack_tokens(
    active: ActiveBlocks, size: Sequence[int], prefix: int = 0, suffix: int = 0, capacity: int | None = None
) -> PackedTokens:
    """Which row each active pixel of an H x W plane gets, in raster order, behind `prefix` rows and before `suffix`.

    Raises:
        RuntimeError: fewer rows (`capacity`) than tokens.
    """
    tokens = prefix + size[0] * size[1] + suffix
    numbers = active.grid.numbers()
    return PackedTokens(
        *_ops.pack_tokens(
            active.block_map, numbers, list(size), prefix, suffix, tokens if capacity is None else capacity
        )
    )


def move_rows_(
    x: Tensor,
    out: Tensor,
    *,
    table: Tensor | None = None,
    index: Tensor | None = None,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    start: int = 0,
    keep: bool = False,
) -> None:
    """Writes rows r < lengths[n] of out [N,rows,C]: row index[n,r] of x [N or 1,rows,C], or row r + start; beside a
    table, its first `start` rows, then those of x, then the rest of the table, which ends at lengths[n]. Where a
    mask [N,rows] says that nothing is there: zeros, or, with `keep`, what was there."""
    _ops.move_rows_(x, table, index, lengths, mask, start, keep, out)


def move_rows(
    x: Tensor,
    rows: int,
    *,
    table: Tensor | None = None,
    index: Tensor | None = None,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    start: int = 0,
) -> Tensor:
    """[N,rows,C]: what `move_rows_` writes, and zeros behind it. Records no gradient."""
    return _ops.move_rows(x, table, index, lengths, mask, start, rows)


def pack_patches_(x: Tensor, index: Tensor, lengths: Tensor, patch: Sequence[int], out: Tensor) -> None:
    """Writes rows r < lengths[n] of out [N,rows,C * height * width]: the numbers of patch index[n,r] of x [N,C,H,W]."""
    _ops.pack_patches_(x, index, lengths, list(patch), out)


def pack_patches(x: Tensor, index: Tensor, lengths: Tensor, patch: Sequence[int]) -> Tensor:
    """[N,rows,C * height * width]: what `pack_patches_` writes, and zeros behind it. Records no gradient."""
    return _ops.pack_patches(x, index, lengths, list(patch))


def merge_pixels_(
    x: Tensor, active: ActiveBlocks, factor: int, offsets: Sequence[tuple[int, int]], out: Tensor
) -> None:
    """Writes the active pixels (i, j) of out [N,offsets * C,H,W]: x [N,C,H',W'] at (i, j) * factor + each offset, side
    by side in channels. Both channels_last, of one dtype; at most MOST_OFFSETS offsets.

    Raises:
        RuntimeError: other shapes, dtypes or memory formats; an offset that points past x.
    """
    flat = [n for offset in offsets for n in offset]
    _ops.merge_pixels_(x, active.block_map, active.grid.numbers(), factor, flat, out)


def merge_pixels(x: Tensor, active: ActiveBlocks, factor: int, offsets: Sequence[tuple[int, int]]) -> Tensor:
    """[N,offsets * C,H // factor,W // factor]: what `merge_pixels_` writes, zeros elsewhere. Records no gradient."""
    flat = [n for offset in offsets for n in offset]
    return _ops.merge_pixels(x, active.block_map, active.grid.numbers(), factor, flat)


@torch.library.register_fake("sbnet::move_rows")
def _move_rows_fake(
    x: Tensor,
    table: Tensor | None,
    index: Tensor | None,
    lengths: Tensor | None,
    mask: Tensor | None,
    start: int,
    rows: int,
) -> Tensor:
    refuse_meta_mix("move_rows", x, table, index, lengths, mask)
    by = next((t for t in (index, mask, lengths) if t is not None), x)
    return x.new_empty((by.shape[0], rows, x.shape[2]))


@torch.library.register_fake("sbnet::pack_patches")
def _pack_patches_fake(x: Tensor, index: Tensor, lengths: Tensor, patch: list[int]) -> Tensor:
    refuse_meta_mix("pack_patches", x, index, lengths)
    return x.new_empty((*index.shape, x.shape[1] * patch[0] * patch[-1]))


@torch.library.register_fake("sbnet::merge_pixels")
def _merge_pixels_fake(x: Tensor, block_map: Tensor, grid: list[int], factor: int, offsets: list[int]) -> Tensor:
    refuse_meta_mix("merge_pixels", x, block_map)
    n, c, h, w = x.shape
    return empty4(x, (n, c * (len(offsets) // 2), h // factor, w // factor), True)


@torch.library.register_fake("sbnet::pack_tokens")
def _pack_tokens_fake(
    block_map: Tensor, grid: list[int], size: list[int], prefix: int, suffix: int, capacity: int
) -> tuple[Tensor, ...]:
    refuse_meta_mix("pack_tokens", block_map)
    n, tokens = block_map.shape[0], prefix + size[0] * size[1] + suffix
    return (
        block_map.new_empty((n,), dtype=torch.int32),
        block_map.new_empty((n, capacity), dtype=torch.int64),
        block_map.new_empty((n, tokens), dtype=torch.int64),
        block_map.new_empty((n, tokens), dtype=torch.bool),
        block_map.new_empty((n, capacity), dtype=torch.bool),
    )


for _name in ("move_rows_", "pack_patches_", "merge_pixels_"):
    in_place_fake(_name)
    no_gradient(_name.rstrip("_"))
