"""Attention over a dense mask, in the dtype of its arguments."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sbnet.ops.attention.layout import AttentionLayout

MASK32 = 0xFFFFFFFF


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout | Tensor,
    scale: float | None = None,
    return_lse: bool = False,
    *,
    q_lengths: Tensor | None = None,
    k_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v with the layout written out, [B, H, T, D]; `layout` may be the mask itself, bool."""
    heads, q_length, k_length = q.shape[1], q.shape[2], k.shape[2]
    if isinstance(layout, AttentionLayout):
        phases = layout.rule.phases
        mask = layout.visible(heads, q_length, k_length)
    else:
        phases, mask = 1, layout
    mask = mask.to(q.device).expand(q.shape[0], heads, q_length, k_length)
    for lengths, axis in ((q_lengths, 2), (k_lengths, 3)):
        if lengths is not None:
            size = [1, 1, 1, 1]
            size[axis] = mask.shape[axis]
            at = torch.arange(mask.shape[axis], device=q.device).view(size)
            mask = mask & (at < lengths.to(q.device).view(-1, 1, 1, 1))
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask, -math.inf)
    sees = mask.any(-1, keepdim=True)
    weights = torch.where(sees, torch.where(sees, scores, 0.0).softmax(-1), 0.0)
    if dropout_p:
        assert seed is not None
        kept = dropout_kept(seed, dropout_p, q.shape[0], heads, q_length, k_length, phases).to(q.device)
        weights = torch.where(kept, weights / (1 - dropout_p), 0.0)
    out = weights @ v
    return (out, scores.logsumexp(-1)) if return_lse else out


def dropout_kept(
    seed: Tensor, p: float, batch: int, heads: int, q_length: int, k_length: int, phases: int = 1
) -> Tensor:
    """[batch, heads, q_length, k_length] bool: the weights that `block_attention` keeps (Philox-4x32-10)."""
    key, offset = (int(s) & (2**64 - 1) for s in seed.tolist())
    key ^= offset * 0x9E3779B97F4A7C15 & (2**64 - 1)
    plane = torch.arange(batch * heads).view(batch, heads, 1, 1) * phases
    q, octet = torch.arange(q_length).view(-1, 1), torch.arange(-(-k_length // phases) // 8 + 1)
    words = philox(key, octet, q // phases, plane + q % phases, torch.tensor(offset >> 32))
    bits = torch.stack([words[i >> 1] >> 16 * (i & 1) & 0xFFFF for i in range(8)], -1).flatten(-2)
    kept = bits >= int(p * 65536 + 0.5)  # of position k // phases of the query's phase
    return kept[..., torch.arange(k_length) // phases]


def philox(key: int, *counter: Tensor) -> list[Tensor]:
    """Philox-4x32-10 (Salmon et al., 2011) of 32-bit words in int64 tensors."""
    c = [t.expand(torch.broadcast_shapes(*(u.shape for u in counter))) for t in counter]
    k0, k1 = key & MASK32, key >> 32
    for _ in range(10):
        (a1, a0), (b1, b0) = product(0xD2511F53, c[0]), product(0xCD9E8D57, c[2])
        c = [b1 ^ c[1] ^ k0, b0, a1 ^ c[3] ^ k1, a0]
        k0, k1 = k0 + 0x9E3779B9 & MASK32, k1 + 0xBB67AE85 & MASK32
    return c


def product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low word of a 32 x 32-bit product, without a 64-bit one that would overflow."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    total = low + ((high & 0xFFFF) << 16)
    return (high >> 16) + (total >> 32) & MASK32, total & MASK32
