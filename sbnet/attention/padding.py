"""Attention of padded sequences, with a cache of keys or without: on the device, without reading it."""

from __future__ import annotations

import torch
from torch import Tensor

from sbnet.ops.attention.attention import block_attention
from sbnet.ops.attention.layout import AttentionLayout
from sbnet.ops.attention.patterns import seen_by
from sbnet.ops.attention.rule import NO_BAND, AttentionRule


def padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
    real: Tensor,
    first: int | Tensor,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """`block_attention` of sequences whose keys are not all there; the layout counts those that are.

    A sequence gives what it would give without its padding, on whichever side that lies, or between. A query that is
    padding itself stands behind its sequence.

    Args:
        q: [B, H, T, D].
        k, v: [B, H', S, D].
        layout: of the sequences without padding, up to S positions; one that holds blocks is made for S.
        real: [B, S] bool, the keys that are there.
        first: the key of the first query; the others follow. A number, or a tensor of one on the device.

    Returns:
        [B, H, T, D]. Differentiable.
    """
    order = torch.argsort(~real, dim=1, stable=True)  # keys that are there, then the others
    lengths = real.sum(1, dtype=torch.int32)
    if shows_all(layout):
        return _of_lengths(q, _taken(k, order), _taken(v, order), layout, lengths, scale, dropout_p)
    place = torch.argsort(order, dim=1).gather(1, first + torch.arange(q.shape[2], device=q.device).expand(len(q), -1))
    if q.shape[2] == 1 and not layout.has_blocks:
        return _one_query(q, k, v, layout, order, place, lengths, scale, dropout_p)
    spread = place[:, None, :, None].expand(q.shape)
    wide = q.new_zeros(*q.shape[:2], k.shape[2], q.shape[3]).scatter(2, spread, q)
    out = _of_lengths(wide, _taken(k, order), _taken(v, order), layout, lengths, scale, dropout_p)
    return out.gather(2, spread)


def _one_query(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, order: Tensor, place: Tensor, lengths: Tensor,
    scale: float | None, dropout_p: float,
) -> Tensor:  # fmt: skip
    """Of one query, the keys that a rule shows are all that is read."""
    rule, keys = layout.rule, torch.arange(k.shape[2], device=q.device)
    seen = seen_by(rule, place, keys) & (keys < lengths[:, None])
    first = torch.argsort(~seen, dim=1, stable=True)
    if rule.band != NO_BAND and not rule.stride:
        first = first[:, : rule.band + rule.prefix]
    of, lengths = order.gather(1, first), seen.sum(1, dtype=torch.int32)
    return _of_lengths(q, _taken(k, of), _taken(v, of), AttentionLayout.dense(), lengths, scale, dropout_p)


def shows_all(layout: AttentionLayout) -> bool:
    """Does every query see every key, wherever it stands?"""
    return not layout.has_blocks and layout.rule == AttentionRule()


def _of_lengths(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, lengths: Tensor, scale: float | None, dropout_p: float
) -> Tensor:
    out = block_attention(q, k, v, layout, scale, k_lengths=lengths, dropout_p=dropout_p)
    assert isinstance(out, Tensor)
    return out


def _taken(t: Tensor, order: Tensor) -> Tensor:
    """[B, H, S, D] by [B, n] -> [B, H, n, D]."""
    return t.gather(2, order[:, None, :, None].expand(-1, t.shape[1], -1, t.shape[3]))
