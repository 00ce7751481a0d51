"""The layouts that attention is measured with: as an AttentionLayout, and as FlexAttention's mask function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sbnet import AttentionLayout

Mask = Callable[..., Tensor]
CHUNK = 128  # of strided and fixed
ROWS = 4096  # queries whose mask is written out at a time


class Pattern(NamedTuple):
    """One way to attend. shown: bool of batch, head, query and key, any shapes that broadcast."""

    layout: AttentionLayout
    shown: Mask
    block: int = 128  # of FlexAttention's block mask
    per_head: bool = False
    causal: bool = True
    table: Tensor | None = None  # [heads, blocks, blocks] bool: all that decides

    def rows(self, head: int, length: int, device: str) -> Iterator[tuple[slice, Tensor]]:
        """Queries, and [queries, length] bool: which keys they see."""
        keys = torch.arange(length, device=device)
        for start in range(0, length, ROWS):
            queries = keys[start : start + ROWS]
            zero = torch.zeros((), dtype=torch.int64, device=device)
            seen = self.shown(zero, zero + head, queries[:, None], keys[None])
            yield slice(start, start + len(queries)), seen

    def pairs(self, heads: int, length: int, device: str) -> float:
        """Of queries and keys that see each other, in the mean head."""
        counted = heads if self.per_head else 1
        return sum(int(seen.sum()) for head in range(counted) for _, seen in self.rows(head, length, device)) / counted


def pattern(name: str, heads: int, length: int, device: str) -> Pattern:
    """By its name in the tables: `causal`, `local 128`, `random 64, 25 %` (blocks of 64, and those of the diagonal)."""
    kind, *numbers = name.replace(",", "").split()
    if kind == "causal":
        return Pattern(AttentionLayout.causal(), lambda b, h, q, k: k <= q)
    if kind == "local":
        reach = int(numbers[0])
        return Pattern(AttentionLayout.local(reach), lambda b, h, q, k: (k <= q) & (q - k < reach))
    if kind == "strided":
        return Pattern(AttentionLayout.strided(CHUNK), lambda b, h, q, k: (k <= q) & ((q - k) % CHUNK == 0))
    if kind == "fixed":
        verticals = 2 if heads % 4 else 4

        def fixed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            vertical = k % CHUNK // 32 == 3 - h % verticals
            return (k <= q) & ((q // CHUNK == k // CHUNK) | vertical)

        return Pattern(AttentionLayout.fixed(CHUNK, verticals), fixed, per_head=True)
    block, density = int(numbers[0]), int(numbers[1]) / 100
    blocks = torch.rand(heads, length // block, length // block) < density
    blocks |= torch.eye(length // block, dtype=torch.bool)
    table = blocks.to(device)
    layout = AttentionLayout.from_blocks(blocks, block)
    return Pattern(layout, lambda b, h, q, k: table[h, q // block, k // block], block, True, False, table)
