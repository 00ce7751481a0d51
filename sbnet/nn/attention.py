"""Multi-head attention over a layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sbnet.ops.attention.attention import block_attention
from sbnet.ops.attention.layout import AttentionLayout


class BlockSparseAttention(nn.Module):
    """nn.MultiheadAttention (batch_first) whose layout says which keys a query sees.

    Args:
        embed_dim: of queries, keys, values and the result; a multiple of num_heads.
        num_heads: heads of 16 to 256 features, a multiple of 8.
        layout: which keys a query sees.
        kv_heads: fewer heads of keys and values (a divisor of num_heads); as many by default.
        bias: of the projections.
        dropout: of the weights, in training.

    >>> layer = sbnet.nn.BlockSparseAttention(64, 4, sbnet.AttentionLayout.local(128))
    >>> layer(torch.rand(1, 256, 64)).shape
    torch.Size([1, 256, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        layout: AttentionLayout,
        kv_heads: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if kv_heads is None else kv_heads
        if embed_dim % num_heads or num_heads % kv_heads:
            raise ValueError(
                f"BlockSparseAttention: num_heads: expected a divisor of {embed_dim} and a multiple of {kv_heads}, got "
                f"{num_heads}"
            )
        self.num_heads, self.layout, self.dropout = num_heads, layout, dropout
        width = embed_dim // num_heads * kv_heads
        self.q_proj, self.k_proj = nn.Linear(embed_dim, embed_dim, bias), nn.Linear(embed_dim, width, bias)
        self.v_proj, self.out_proj = nn.Linear(embed_dim, width, bias), nn.Linear(embed_dim, embed_dim, bias)

    @classmethod
    def from_dense(cls, attention: nn.MultiheadAttention, layout: AttentionLayout) -> BlockSparseAttention:
        """With the weights of a dense layer (copies)."""
        if attention.in_proj_weight is None or attention.bias_k is not None or attention.add_zero_attn:
            raise ValueError("BlockSparseAttention.from_dense: expected one width, and no extra keys")
        bias = attention.in_proj_bias is not None
        layer = cls(attention.embed_dim, attention.num_heads, layout, bias=bias, dropout=attention.dropout)
        layer = layer.to(attention.in_proj_weight.device, attention.in_proj_weight.dtype)
        with torch.no_grad():
            parts = zip((layer.q_proj, layer.k_proj, layer.v_proj), attention.in_proj_weight.chunk(3), strict=True)
            for linear, weight in parts:
                linear.weight.copy_(weight)
            if bias:
                for linear, part in zip(
                    (layer.q_proj, layer.k_proj, layer.v_proj), attention.in_proj_bias.chunk(3), strict=True
                ):
                    linear.bias.copy_(part)
        layer.out_proj.load_state_dict(attention.out_proj.state_dict())
        return layer.train(attention.training)

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        """[B, T, embed_dim] of queries, and of keys and values (the queries by default) [B, S, embed_dim].

        lengths: [B] int32, keys from there on are padding.
        """
        key = query if key is None else key
        value = key if value is None else value
        dropout = self.dropout if self.training else 0.0
        out = block_attention(
            self.q_proj(query),
            self.k_proj(key),
            self.v_proj(value),
            self.layout,
            heads=self.num_heads,
            k_lengths=lengths,
            dropout_p=dropout,
        )
        return self.out_proj(out)
