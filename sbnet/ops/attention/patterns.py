"""The arithmetic of attention layouts, on the CPU: rules, the paper's fixed pattern, element masks as bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def rule_mask(rule: Any, q_length: int, k_length: int) -> Tensor:
    """[q_length, k_length] bool: what AttentionRule says."""
    return seen_by(rule, torch.arange(q_length)[:, None], torch.arange(k_length)[None])


def seen_by(rule: Any, q: Tensor, k: Tensor) -> Tensor:
    """Does a query at position q see a key at position k? Of positions that go together."""
    same = q % rule.phases == k % rule.phases
    q, k = q // rule.phases, k // rule.phases
    distance = q + rule.diagonal - k
    seen = distance < rule.band
    if rule.stride:
        seen = seen | (distance % rule.stride == 0)
    return same & ((k < rule.prefix) | ((distance >= 0) & seen))


def check_fixed(l: int, num_verts: int, vertsize: int, block_size: int) -> None:  # noqa: E741
    if l % block_size:
        raise ValueError(f"AttentionLayout.fixed: l: expected a multiple of the block, {block_size}, got {l}")
    blocks = l // block_size
    if blocks % vertsize:
        raise ValueError(f"AttentionLayout.fixed: vertsize: expected a divisor of {blocks} blocks, got {vertsize}")
    if num_verts * vertsize > blocks:
        raise ValueError(
            f"AttentionLayout.fixed: num_verts: expected at most {blocks // vertsize} groups of {vertsize} blocks, got "
            f"{num_verts}"
        )


def fixed_blocks(
    l: int,  # noqa: E741
    num_verts: int,
    vertsize: int,
    block_size: int,
    heads: int,
    q_length: int,
    k_length: int,
) -> Tensor:
    """[1 or heads, Q, K] bool."""
    if q_length % block_size or k_length % block_size:
        raise ValueError(
            f"AttentionLayout.fixed: expected lengths that are multiples of the block, {block_size}, got {q_length} "
            f"and {k_length}"
        )
    if heads % num_verts:
        raise ValueError(f"AttentionLayout.fixed: num_verts: expected a divisor of {heads} heads, got {num_verts}")
    s = l // block_size
    q, k = torch.arange(q_length // block_size)[:, None], torch.arange(k_length // block_size)[None]
    layouts = []
    for group in range(num_verts):
        last = s - 1 - group * vertsize  # this group's verticals: blocks last, last - 1, ... of each chunk
        vertical = (k % s <= last) & (k % s > last - vertsize)
        layouts.append((k <= q) & ((q // s == k // s) | vertical))
    if num_verts == 1:
        return torch.stack(layouts)
    return torch.stack([layouts[h % num_verts] for h in range(heads)])


def split(mask: Tensor, block_size: int) -> Tensor:
    """[heads, q, k] -> [heads, Q, K, bs, bs], padded with False."""
    heads, q, k = mask.shape
    rows, columns = -(-q // block_size), -(-k // block_size)
    padded = mask.new_zeros(heads, rows * block_size, columns * block_size)
    padded[:, :q, :k] = mask
    return padded.view(heads, rows, block_size, columns, block_size).transpose(2, 3)


def join(tiles: Tensor) -> Tensor:
    """The other way."""
    heads, rows, columns, size, _ = tiles.shape
    return tiles.transpose(2, 3).reshape(heads, rows * size, columns * size)


def element_masks(
    mask: Callable[[int, int, int], Any], blocks: Tensor, block_size: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Blocks without those that show nothing, the index of each block's mask (-1: all visible) and the masks' bits."""
    blocks, index = blocks.clone(), torch.full(blocks.shape, -1, dtype=torch.int32)
    found: dict[bytes, int] = {}
    for h, i, j in blocks.nonzero().tolist():
        tile = torch.as_tensor(mask(h, i, j)).detach().cpu().bool()
        if tile.shape != (block_size, block_size):
            raise ValueError(
                f"AttentionLayout.from_callback: mask: expected [{block_size}, {block_size}], got {tuple(tile.shape)}"
            )
        if not tile.any():
            blocks[h, i, j] = False
        elif not tile.all():
            index[h, i, j] = found.setdefault(packed(tile), len(found))
    if not found:
        return blocks, None, None
    words = max(block_size // 32, 1)
    masks = np.frombuffer(b"".join(found), np.int32).reshape(len(found), block_size, words)
    return blocks, index, torch.from_numpy(masks.copy())


def packed(tile: Tensor) -> bytes:
    """[bs, bs] bool -> [bs, ceil(bs / 32)] words, bit k % 32 of word k / 32."""
    bits = np.packbits(tile.numpy(), axis=1, bitorder="little")
    return np.pad(bits, ((0, 0), (0, -bits.shape[1] % 4))).tobytes()


def unpacked(index: Tensor, masks: Tensor, block_size: int) -> Tensor:
    """[heads, Q, K, bs, bs] bool."""
    bits = (masks[..., None] >> torch.arange(32, dtype=torch.int32) & 1).bool().flatten(-2)[..., :block_size]
    full = torch.cat([bits, bits.new_ones(1, block_size, block_size)])
    return full[index.long()]  # -1: the last
