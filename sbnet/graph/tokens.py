"""Tokens of a plane, packed: the active ones of each image side by side, in raster order, behind its prefix rows.

A transformer whose attention sees all tokens runs on a plane of its own, as long as its tokens and one wide, of which
the first rows of each image are active. In the planned graph it is eight wide, so that blocks of 8x8 are 64 tokens that
follow one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sbnet.active import ActiveBlocks, BlockGrid
from sbnet.geometry import Pair
from sbnet.graph.axes import Axes
from sbnet.graph.ir import Graph
from sbnet.ops import reduce_mask
from sbnet.ops.masked.token_rows import pack_tokens

WIDE = 8  # tokens of a row, and rows of a block
Plane = tuple[int, int, Pair]


@dataclass(frozen=True)
class Tokens:
    """The tokens of a plane of this size, between rows that are always active: `prefix` before them (class token,
    registers) and `suffix` behind them (what YOLOS detects with)."""

    size: Pair
    prefix: int = 0
    suffix: int = 0

    @property
    def length(self) -> int:
        return self.prefix + self.size[0] * self.size[1] + self.suffix

    @property
    def plane(self) -> Plane:
        """(height, width, block size) of the plane that holds them."""
        return -(-self.length // WIDE**2) * WIDE, WIDE, (WIDE, WIDE)

    def axes(self, batch: int, channels: int) -> Axes:
        """Of [N,C,length,1]: their dimension is named by what they are tokens of."""
        height, width = self.size
        name = f"T{self.prefix}:{height}:{width}:{self.suffix}:"
        return Axes(((("N", batch),), (("C", channels),), ((name, self.length),), (("?", 1),)))


@dataclass(frozen=True)
class TokenBlocks(ActiveBlocks):
    """Active blocks of a plane of packed tokens.

    Attributes:
        lengths: [N] int32, rows of each image that hold tokens.
        order: [N,rows] int64, which token (of prefix and plane) each row holds; 0 behind them.
        rows: [N,length] int64, the row of each active token; of others any row.
        mask: [N,length] bool, active tokens.
    """

    lengths: Tensor
    order: Tensor
    rows: Tensor
    mask: Tensor


def token_blocks(tokens: Tokens, source: ActiveBlocks) -> TokenBlocks:
    """Packs the pixels of active blocks of a plane. Nothing is read on the host."""
    height, width, block = tokens.plane
    packed = pack_tokens(source, tokens.size, tokens.prefix, tokens.suffix, height * width)
    made = reduce_mask(packed.filled.view(-1, height, width), BlockGrid.cover((height, width), block))
    return TokenBlocks(
        made.indices, made.count, made.total, made.block_map, made.grid, packed.lengths, packed.order, packed.rows,
        packed.mask,
    )  # fmt: skip


def with_tokens(planes: Sequence[ActiveBlocks], tokens: Sequence[tuple[Tokens, int]]) -> tuple[ActiveBlocks, ...]:
    """Lists of planes, and behind them those of tokens, each of the plane at an index."""
    return (*planes, *(token_blocks(some, planes[at]) for some, at in tokens))


def settle(graph: Graph) -> Graph:
    """Gives packed tokens the plane that holds them, WIDE tokens a row. Until then they were one a row, as the network
    counts them."""
    for node in graph.nodes:
        for value in node.outputs:
            if value.tokens is not None and value.shape[2] == value.tokens.length:
                n, c = value.shape[:2]
                value.shape = (n, c, *value.tokens.plane[:2])
                value.axes = Axes.planes(value.shape)
    return graph
