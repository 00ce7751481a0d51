"""Block-sparse attention in Hugging Face models, by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sbnet.ops.attention.attention import block_attention
from sbnet.ops.attention.layout import AttentionLayout
from sbnet.ops.attention.rule import NO_DIAGONAL, AttentionRule


def register_attention(name: str, layout: AttentionLayout) -> None:
    """Makes `layout` an attention implementation of the transformers library, for models with attn_implementation=name.

    The layout says all: whether attention is causal, too. Masks of padding are not taken (batches without padding, or
    padding at the end of causal rows). With a cache of keys, queries are the last positions: for layouts of a rule.

    >>> register_attention("sbnet_local", AttentionLayout.local(256))
    >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sbnet_local")
    """
    from transformers import AttentionInterface

    if not isinstance(layout, AttentionLayout):
        raise TypeError(f"register_attention: layout: expected an sbnet.AttentionLayout, got {type(layout).__name__}")

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None:
            raise ValueError(f"{name}: attention_mask: expected none, got one of shape {tuple(attention_mask.shape)}")
        of = _at_the_end(name, layout, key.shape[2] - query.shape[2])
        out = block_attention(query, key, value, of, scaling, dropout_p=dropout)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, attention)


def _at_the_end(name: str, layout: AttentionLayout, cached: int) -> AttentionLayout:
    """For queries that stand `cached` positions after the first key."""
    rule = layout.rule
    if not cached or (not layout.has_blocks and rule == AttentionRule()):
        return layout
    if layout.has_blocks or rule.phases > 1 or rule.diagonal == NO_DIAGONAL:
        raise ValueError(f"{name}: expected as many queries as keys (use_cache=False), got {cached} cached keys")
    return AttentionLayout._of(rule._replace(diagonal=rule.diagonal + cached))
