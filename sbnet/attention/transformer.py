"""The three ops of blocksparse's transformer: products of blocks, and the softmax between them."""

from __future__ import annotations

import torch
from torch import Tensor

from sbnet.ops.attention import patterns
from sbnet.ops.attention.layout import AttentionLayout, check_block_size


class BlocksparseTransformer:
    """Attention in three steps whose results are tensors: weights [B, blocks, bs, bs] of a layout's active blocks.

    `block_attention` does the same at once, faster and in less memory; these are for what goes between the steps.
    Plain PyTorch ops, differentiable any number of times.

    Args:
        layout: which keys a query sees.
        heads, q_length, k_length: of q [B, heads, q_length, D] and k; lengths are multiples of the block.
        block_size: 8, 16, 32, 64 or 128.

    >>> bst = BlocksparseTransformer(AttentionLayout.local(64), heads=4, q_length=256)
    >>> w = bst.masked_softmax(bst.query_key_op(q, k), scale=D**-0.5)
    >>> y = bst.weight_value_op(w, v)
    """

    def __init__(
        self, layout: AttentionLayout, heads: int, q_length: int, k_length: int | None = None, block_size: int = 32
    ) -> None:
        k_length = q_length if k_length is None else k_length
        check_block_size(block_size)
        if q_length % block_size or k_length % block_size:
            raise ValueError(
                f"BlocksparseTransformer: block_size: expected a divisor of {q_length} and {k_length} positions, got "
                f"{block_size}"
            )
        mask = layout.visible(heads, q_length, k_length)
        if mask.dim() != 3:
            raise ValueError("BlocksparseTransformer: layout: expected one that is known on the host")
        tiles = patterns.split(mask.expand(heads, -1, -1), block_size)
        active = tiles.any(-1).any(-1)
        self.block_size, self.heads, self.rows, self.columns = block_size, *active.shape
        self.coords = active.nonzero()  # [blocks, 3]: head, row and column of each block
        self.mask = tiles[active]  # [blocks, bs, bs]: the elements that count
        before = active.int().cumsum(-1)[active] - 1
        self._slot = before.long()  # which block of its row
        self._slots = int(active.sum(-1).max()) if active.numel() else 0
        self._on: dict[torch.device, tuple[Tensor, ...]] = {}

    @property
    def blocks(self) -> int:
        return len(self.coords)

    def _tensors(self, device: torch.device) -> tuple[Tensor, ...]:
        """head, row, column, row over all heads, slot, mask."""
        if device not in self._on:
            head, row, column = self.coords.unbind(1)
            parts = head, row, column, head * self.rows + row, self._slot, self.mask
            self._on[device] = tuple(t.to(device) for t in parts)
        return self._on[device]

    def _tiles(self, name: str, x: Tensor, count: int) -> Tensor:
        if x.dim() != 4 or x.shape[1] != self.heads or x.shape[2] != count * self.block_size:
            raise ValueError(
                f"BlocksparseTransformer: {name}: expected [B, {self.heads}, {count * self.block_size}, D], got "
                f"{tuple(x.shape)}"
            )
        return x.unflatten(2, (count, self.block_size))

    def query_key_op(self, q: Tensor, k: Tensor) -> Tensor:
        """q k^T on the active blocks: [B, blocks, bs, bs]."""
        head, row, column, *_ = self._tensors(q.device)
        left, right = self._tiles("q", q, self.rows), self._tiles("k", k, self.columns)
        return left[:, head, row] @ right[:, head, column].mT

    def weight_value_op(self, w: Tensor, v: Tensor) -> Tensor:
        """w v: [B, heads, q_length, D]."""
        head, _, column, of, *_ = self._tensors(v.device)
        parts = w @ self._tiles("v", v, self.columns)[:, head, column]
        sums = parts.new_zeros(v.shape[0], self.heads * self.rows, *parts.shape[2:]).index_add(1, of, parts)
        return sums.unflatten(1, (self.heads, self.rows)).flatten(2, 3)

    def weight_value_transposed_op(self, w: Tensor, x: Tensor) -> Tensor:
        """w^T x, x [B, heads, q_length, D]: [B, heads, k_length, D]."""
        head, row, column, *_ = self._tensors(x.device)
        parts = w.mT @ self._tiles("x", x, self.rows)[:, head, row]
        of = head * self.columns + column
        sums = parts.new_zeros(x.shape[0], self.heads * self.columns, *parts.shape[2:]).index_add(1, of, parts)
        return sums.unflatten(1, (self.heads, self.columns)).flatten(2, 3)

    def masked_softmax(self, w: Tensor, scale: float = 1.0) -> Tensor:
        """softmax(scale w) of every query over the blocks of its row, in float32; zeros where nothing is visible."""
        return self._softmax(w, scale, self._tensors(w.device)[-1].expand(w.shape))

    def masked_top_k_softmax(self, w: Tensor, k: int, scale: float = 1.0) -> Tensor:
        """As masked_softmax, over the k largest visible weights of every query."""
        *_, of, slot, mask = self._tensors(w.device)
        if k < 1:
            raise ValueError(f"BlocksparseTransformer: k: expected 1 or more, got {k}")
        size, batch = self.block_size, w.shape[0]
        rows = w.new_full((batch, self.heads * self.rows, self._slots, size, size), -torch.inf)
        rows[:, of, slot] = w.detach().masked_fill(~mask, -torch.inf)
        rows = rows.transpose(2, 3).flatten(3)  # [B, rows, query, keys]
        best = rows.topk(min(k, rows.shape[-1]), -1).indices
        kept = torch.zeros_like(rows, dtype=torch.bool).scatter_(-1, best, True)
        kept = kept.unflatten(-1, (self._slots, size)).transpose(2, 3)
        return self._softmax(w, scale, kept[:, of, slot] & mask)

    def _softmax(self, w: Tensor, scale: float, mask: Tensor) -> Tensor:
        of = self._tensors(w.device)[3]
        shape = w.shape[0], self.heads * self.rows, self.block_size
        scores = (w.float() * scale).masked_fill(~mask, -torch.inf)
        top = scores.new_full(shape, -torch.inf)
        index = of.view(1, -1, 1).expand(w.shape[:3])
        top = top.scatter_reduce(1, index, scores.detach().amax(-1), "amax")
        top = top.masked_fill(top == -torch.inf, 0.0)[:, of]
        e = (scores - top[..., None]).exp()
        total = e.new_zeros(shape).index_add(1, of, e.sum(-1))
        total = total.masked_fill(total == 0, 1.0)[:, of]
        return (e / total[..., None]).to(w.dtype)
