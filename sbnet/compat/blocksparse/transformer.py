"""blocksparse.transformer: ops on rows (top-k, softmax with masks, cross entropy) and block-sparse attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sbnet.compat.blocksparse.constants import Constants
from sbnet.ops.attention.layout import check_block_size


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of x [..., K], largest first: (values, indices) [..., k]."""
    _check_k("top_k", x, k)
    values, indices = torch.topk(x, k)
    return values, indices


def rectified_top_k(x: Tensor, k: int, rebase: bool = True) -> Tensor:
    """The k largest of each row of x [..., K] where they are positive, zeros elsewhere.

    rebase: less the k-th largest, where that is positive. The gradient passes where the result is not zero, and knows
    nothing of what was subtracted, as in blocksparse.
    """
    values, indices = top_k(x, k)
    if rebase:
        values = values - values.detach()[..., -1:].clamp(min=0)
    return torch.zeros_like(x).scatter(-1, indices, torch.relu(values))


def softmax(x: Tensor, scale: float = 1.0, bench: int = 0) -> Tensor:
    """softmax(scale x) over the last axis, in float32, returned in x's dtype."""
    return masked_softmax(x, None, scale)


def masked_softmax(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, bench: int = 0) -> Tensor:
    """softmax(scale mask x) over the last axis where mask is not 0, zeros elsewhere; a row without any is all zeros.

    mask: numbers that broadcast against x, as many axes; or None. In float32, returned in x's dtype.
    """
    if mask is None:
        return torch.softmax(x if scale == 1 else x.float() * scale, -1).to(x.dtype)
    _check_mask("masked_softmax", x, mask)
    # Halves times float32 are float32: no pass over memory that widens x.
    return _softmax_where(x * (mask.float() * scale), mask != 0, x.dtype)


def masked_top_k_softmax(x: Tensor, k: int, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """As `masked_softmax`, over the k largest of scale mask x in each row; zeros elsewhere."""
    _check_k("masked_top_k_softmax", x, k)
    scores, there = x.float() * scale, torch.ones((), dtype=torch.bool, device=x.device)
    if mask is not None:
        _check_mask("masked_top_k_softmax", x, mask)
        scores, there = scores * mask, mask != 0
    best = scores.detach().masked_fill(~there, -torch.inf).topk(k).indices
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    return _softmax_where(scores, kept & there, x.dtype)


def _softmax_where(scores: Tensor, there: Tensor, dtype: torch.dtype) -> Tensor:
    """`scores` are overwritten."""
    # The fill is finite, so that neither a row without any nor its gradient is NaN.
    absent = ~there
    filled = scores.masked_fill_(absent, torch.finfo(scores.dtype).min)
    return torch.softmax(filled, -1).to(dtype).masked_fill(absent, 0.0)


def _check_k(op: str, x: Tensor, k: int) -> None:
    if not 1 <= k <= x.shape[-1]:
        raise ValueError(f"{op}: k: expected 1 to {x.shape[-1]}, got {k}")


def _check_mask(op: str, x: Tensor, mask: Tensor) -> None:
    if mask.dim() != x.dim() or any(m not in (1, n) for m, n in zip(mask.shape, x.shape, strict=True)):
        raise ValueError(f"{op}: mask: expected 1 or the size of x in {list(x.shape)}, got {list(mask.shape)}")


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits as they are, not the softmax in float32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, labels)
        return -torch.log_softmax(logits, -1, dtype=torch.float32).gather(-1, labels[..., None])[..., 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        logits, labels = ctx.saved_tensors
        p = torch.softmax(logits, -1, dtype=torch.float32)
        p.scatter_add_(-1, labels[..., None], p.new_full((), -1.0).expand(*labels.shape, 1))
        return p.mul_(dy[..., None]).to(logits.dtype), None


def softmax_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(logits)[labels] of each row: logits [..., K] of any float, labels [...] -> float32 [...].

    Computed in float32 from halves. The gradient is of the logits' dtype.
    """
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"softmax_cross_entropy: labels: expected {list(logits.shape[:-1])}, got {list(labels.shape)}")
    return _CrossEntropy.apply(logits, labels.long())


def transpose_2d(x: Tensor) -> Tensor:
    """[A, B] -> [B, A], in memory, too."""
    return x.t().contiguous()


def transpose_0213(x: Tensor) -> Tensor:
    """[A, B, C, D] -> [A, C, B, D], in memory, too."""
    return x.permute(0, 2, 1, 3).contiguous()


class BlocksparseTransformer:
    """Attention in three steps: products of the blocks of a layout, the softmax between them, products with values.

    Results of the first two are tensors [B, heads, blocks, block_size, block_size]. `sbnet.block_attention` does all of
    it at once, faster and in less memory; this class is for what goes between the steps. Plain PyTorch ops,
    differentiable any number of times. Source: blocksparse's class of this name; results have the dtype of the
    operands, where the reference rounds weights to bfloat16 or float16.

    Args:
        layout: [query blocks, key blocks] of 0 and 1, shared by all heads, or [heads, query blocks, key blocks] with as
            many blocks for every head.
        block_size: 8, 16, 32, 64 or 128.
        heads: expected where heads share a layout.
        mask_callback: `mask_callback((block_size, block_size), head, query block, key block, block)` gives the elements
            of a block that count, as an array of bools; called once for each block.

    >>> bst = BlocksparseTransformer(np.tril(np.ones((8, 8))), block_size=32, heads=4)
    >>> w = bst.masked_softmax(bst.query_key_op(q, k), scale=0.125)  # q, k, v [B, 256, 4 * D]
    >>> y = bst.weight_value_op(w, v)
    """

    def __init__(
        self,
        layout: Any,
        block_size: int = 64,
        heads: int | None = None,
        mask_callback: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        op = "BlocksparseTransformer"
        check_block_size(block_size)
        table = torch.as_tensor(np.asarray(layout)) > 0
        if table.dim() == 2:
            if heads is None:
                raise ValueError(f"{op}: heads: expected their number, since they share a layout, got None")
            table = table[None]
        if table.dim() != 3:
            raise ValueError(f"{op}: layout: expected 2 or 3 dimensions, got {table.dim()}")
        self.heads = len(table) if heads is None else heads
        if len(table) not in (1, self.heads):
            raise ValueError(f"{op}: layout: expected one for all heads or {self.heads}, got {len(table)}")
        counts = table.flatten(1).sum(1)
        if len(counts.unique()) > 1:
            raise ValueError(f"{op}: layout: expected as many blocks for every head, got {counts.tolist()}")
        self.blk_size, self.blk_shape = block_size, (block_size, block_size)
        self.lut_heads, self.ctx_blks_q, self.ctx_blks_k = table.shape
        self.blocks = int(counts[0])
        coords = table.nonzero()[:, 1:].view(self.lut_heads, self.blocks, 2)
        self.nt_list = [[(int(q), int(k)) for q, k in head] for head in coords.tolist()]
        self.mask = None if mask_callback is None else self._masks(mask_callback)
        first = torch.zeros(self.lut_heads, self.ctx_blks_q + 1, dtype=torch.int64)
        first[:, 1:] = table.sum(-1).cumsum(-1)
        slots = torch.arange(self.blocks) - first.gather(1, coords[..., 0])  # which block of its row
        self._widest = int(table.sum(-1).max()) if self.blocks else 0
        wide = (self.heads, self.blocks)
        head = torch.arange(self.heads)[:, None]
        everywhere = torch.ones(1, 1, 1, 1, dtype=torch.bool) if self.mask is None else self.mask
        self._constants = Constants(
            *(t.expand(wide).contiguous() for t in (head, coords[..., 0], coords[..., 1], slots)), everywhere
        )

    def _masks(self, mask_callback: Callable[..., Any]) -> Tensor:
        """[1 or heads, blocks, bs, bs] bool."""
        found = [
            np.stack([np.asarray(mask_callback(self.blk_shape, h, q, k, b), bool) for b, (q, k) in enumerate(head)])
            for h, head in enumerate(self.nt_list)
        ]
        mask = torch.from_numpy(np.stack(found))
        if mask.shape[2:] != self.blk_shape:
            raise ValueError(
                f"BlocksparseTransformer: mask_callback: expected {self.blk_shape}, got {tuple(mask.shape[2:])}"
            )
        return mask

    def block_coord(self, block: int, head: int = 0) -> tuple[int, int]:
        """(query block, key block) of a block."""
        return self.nt_list[head if self.lut_heads > 1 else 0][block]

    def _tensors(self, device: torch.device) -> tuple[Tensor, ...]:
        """Head, row, column and slot of every block, [heads, blocks] each; the mask of their elements."""
        return self._constants.on(device)

    def _tiles(self, name: str, x: Tensor, count: int) -> Tensor:
        """[B, T, heads * D] as [B, heads, count, bs, D]."""
        if x.dim() != 3 or x.shape[1] != count * self.blk_size or x.shape[2] % self.heads:
            raise ValueError(
                f"BlocksparseTransformer: {name}: expected [B, {count * self.blk_size}, {self.heads} * D], got "
                f"{list(x.shape)}"
            )
        return x.view(x.shape[0], count, self.blk_size, self.heads, -1).permute(0, 3, 1, 2, 4)

    def _merge(self, parts: Tensor, index: Tensor, count: int) -> Tensor:
        """Sums [B, heads, blocks, bs, D] by block row: [B, count * bs, heads * D]."""
        head = self._tensors(parts.device)[0]
        flat = (head * count + index).flatten()
        sums = parts.new_zeros(parts.shape[0], self.heads * count, *parts.shape[3:])
        sums = sums.index_add(1, flat, parts.flatten(1, 2)).unflatten(1, (self.heads, count))
        return sums.permute(0, 2, 3, 1, 4).reshape(parts.shape[0], count * self.blk_size, -1)

    def query_key_op(self, q: Tensor, k: Tensor, name: str | None = None, bench: int = 0) -> Tensor:
        """q k^T on the blocks of the layout: q [B, T, heads * D], k -> [B, heads, blocks, bs, bs]."""
        head, row, column, *_ = self._tensors(q.device)
        left, right = self._tiles("q", q, self.ctx_blks_q), self._tiles("k", k, self.ctx_blks_k)
        return left[:, head, row] @ right[:, head, column].mT

    nt_op = query_key_op

    def weight_value_op(self, w: Tensor, v: Tensor, name: str | None = None, bench: int = 0) -> Tensor:
        """w v: [B, heads, blocks, bs, bs] and [B, T, heads * D] -> [B, T, heads * D]."""
        head, row, column, *_ = self._tensors(v.device)
        return self._merge(w @ self._tiles("v", v, self.ctx_blks_k)[:, head, column], row, self.ctx_blks_q)

    nn_op = weight_value_op

    def tn_op(self, a: Tensor, b: Tensor, name: str | None = None, bench: int = 0) -> Tensor:
        """a^T b: weights [B, heads, blocks, bs, bs] and what queries hold -> [B, key positions, heads * D]."""
        head, row, column, *_ = self._tensors(b.device)
        return self._merge(a.mT @ self._tiles("b", b, self.ctx_blks_q)[:, head, row], column, self.ctx_blks_k)

    def masked_softmax(
        self, x: Tensor, scale: float = 1.0, autoregress_at_key: int | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """softmax(scale x) of every query over the blocks of its row, in float32; zeros where nothing is visible.

        autoregress_at_key: of the keys from this one on a query sees those up to its own position, and no others; for
        layouts with a mask_callback. dtype: of the result, by default x's.
        """
        if self.mask is None:
            if autoregress_at_key is not None:
                raise ValueError("BlocksparseTransformer: autoregress_at_key: expected a mask_callback beside it")
            return self.softmax(x, scale, dtype)
        return self._softmax(x, scale, self._visible(x.device, autoregress_at_key), dtype)

    def softmax(self, x: Tensor, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """softmax(scale x) of every query over all of the blocks of its row."""
        return self._softmax(x, scale, torch.ones((), dtype=torch.bool, device=x.device), dtype)

    def masked_top_k_softmax(self, x: Tensor, k: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """As `masked_softmax`, over the k largest visible weights of every query."""
        if k < 1:
            raise ValueError(f"BlocksparseTransformer: k: expected 1 or more, got {k}")
        head, row, _, slot, _ = self._tensors(x.device)
        mask = self._visible(x.device, None)
        rows = x.new_full((x.shape[0], self.heads, self.ctx_blks_q, self._widest, *self.blk_shape), -torch.inf)
        rows[:, head, row, slot] = x.detach().masked_fill(~mask, -torch.inf)
        rows = rows.transpose(3, 4).flatten(4)  # [B, heads, rows, query, keys]
        best = rows.topk(min(k, rows.shape[-1]), -1).indices
        kept = torch.zeros_like(rows, dtype=torch.bool).scatter_(-1, best, True)
        kept = kept.unflatten(-1, (self._widest, self.blk_size)).transpose(3, 4)
        return self._softmax(x, scale, kept[:, head, row, slot] & mask, dtype)

    def _visible(self, device: torch.device, key: int | None) -> Tensor:
        _, row, column, _, mask = self._tensors(device)
        if key is None:
            return mask
        at = torch.arange(self.blk_size, device=device)
        queries = row[..., None, None] * self.blk_size + at[:, None]
        keys = column[..., None, None] * self.blk_size + at
        return mask & ((keys < key) | (keys <= queries))

    def _softmax(self, x: Tensor, scale: float, mask: Tensor, dtype: torch.dtype | None) -> Tensor:
        head, row, *_ = self._tensors(x.device)
        of = (head * self.ctx_blks_q + row).flatten()
        shape = x.shape[0], self.heads * self.ctx_blks_q, self.blk_size
        scores = (x.float() * scale).masked_fill(~mask, -torch.inf).flatten(1, 2)
        top = scores.new_full(shape, -torch.inf)
        index = of.view(1, -1, 1).expand(scores.shape[:3])
        top = top.scatter_reduce(1, index, scores.detach().amax(-1), "amax")
        top = top.masked_fill(top == -torch.inf, 0.0)[:, of]
        e = (scores - top[..., None]).exp()
        total = e.new_zeros(shape).index_add(1, of, e.sum(-1))
        total = total.masked_fill(total == 0, 1.0)[:, of]
        return (e / total[..., None]).to(dtype or x.dtype).view(x.shape)
