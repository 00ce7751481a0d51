"""The part of an attention layout that is a rule: numbers instead of blocks."""

from __future__ import annotations

from typing import NamedTuple

BLOCK_SIZES = (8, 16, 32, 64, 128)
NO_DIAGONAL, NO_BAND = 1 << 30, 2**31 - 1  # core/attention/layout.h


class AttentionRule(NamedTuple):
    """Key k is visible to query q if k < prefix, or if k <= q + diagonal and either k > q + diagonal - band or
    (q + diagonal - k) % stride == 0. With `phases` > 1 all of it holds within each interleaved sequence."""

    diagonal: int = NO_DIAGONAL
    band: int = NO_BAND
    prefix: int = 0
    stride: int = 0
    phases: int = 1


def make_rule(causal: bool, diagonal: int, band: int | None, prefix: int) -> AttentionRule:
    if not causal and (diagonal or band is not None or prefix):
        raise ValueError("AttentionLayout: causal: expected True with a diagonal, a band or a prefix")
    if prefix < 0 or (band is not None and (band < 1 or prefix)):
        raise ValueError(f"AttentionLayout: expected a band of 1 or more, or a prefix, got {band} and {prefix}")
    if not causal:
        return AttentionRule()
    return AttentionRule(int(diagonal), NO_BAND if band is None else int(band), int(prefix))


def positive(name: str, argument: str, value: int) -> int:
    if value < 1 or value > 1 << 29:
        raise ValueError(f"AttentionLayout.{name}: {argument}: expected 1 to 2^29, got {value}")
    return int(value)


def check_block_size(block_size: int) -> None:
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"AttentionLayout: block_size: expected 8, 16, 32, 64 or 128, got {block_size}")
