"""torch.ops.sbnet.* of tokens and of windows as nodes of the domain `sbnet`: see translate.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sbnet.export.translate import Value, first, grid_attributes, last, node


def pack_tokens(
    block_map: Value, grid: Sequence[int], size: Sequence[int], prefix: int, suffix: int, capacity: int
) -> Any:
    numbers = {"size": list(size), "prefix": prefix, "suffix": suffix, "capacity": capacity}
    return node("pack_tokens")(block_map, **grid_attributes(grid), **numbers)


def move_rows(
    x: Value,
    table: Value | None,
    index: Value | None,
    lengths: Value | None,
    mask: Value | None,
    start: int,
    rows: int,
) -> Value:
    return node("move_rows")(x, table, index, lengths, mask, start=start, rows=rows)


def pack_patches(x: Value, index: Value, lengths: Value, patch: Sequence[int]) -> Value:
    return node("pack_patches")(x, index, lengths, patch=list(patch))


def merge_pixels(x: Value, block_map: Value, grid: Sequence[int], factor: int, offsets: Sequence[int]) -> Value:
    numbers = {"factor": factor, "offsets": list(offsets)}
    return first(node("merge_pixels")(last(x), block_map, **grid_attributes(grid), **numbers))


def window_attention(
    q: Value,
    k: Value,
    v: Value,
    rows: Value,
    keys: Value,
    block_map: Value,
    active_keys: Value | None,
    bias: Value | None,
    row_table: Value | None,
    column_table: Value | None,
    scales: Value | None,
    k_fill: Value | None,
    v_fill: Value | None,
    grid: Sequence[int],
    starts: Sequence[int],
    heads: int,
    dim: int,
    value_dim: int,
    scale: float,
    normalize: float,
) -> Value:
    extras = (active_keys, bias, row_table, column_table, scales, k_fill, v_fill)
    numbers = {"starts": list(starts), "heads": heads, "dim": dim, "value_dim": value_dim}
    made = node("window_attention")(
        *map(last, (q, k, v)), rows, keys, block_map, *extras,
        **grid_attributes(grid), **numbers, scale=float(scale), normalize=float(normalize),
    )  # fmt: skip
    return first(made)
