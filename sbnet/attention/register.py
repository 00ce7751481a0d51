"""Block-sparse attention in Hugging Face models, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sbnet.attention.padding import padded_attention, shows_all
from sbnet.ops.attention.attention import block_attention
from sbnet.ops.attention.layout import AttentionLayout
from sbnet.ops.attention.rule import NO_DIAGONAL

# What models add to scores, or do to them, and no layout says.
NOT_TAKEN = ("softcap", "position_bias", "s_aux", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k", "block_table")
ACROSS = (
    "{name}: expected self-attention, got attention to another sequence, {queries} queries and {keys} keys: only "
    "AttentionLayout.dense() has a meaning there"
)


class _Said(NamedTuple):
    """What a model says of its keys, in place of a mask of queries x keys. The mask itself, which models hand on to
    their layers and look at, is a tensor [batch, 1, 1, keys] bool of the keys that are there.

    Attributes:
        first: the key of the first query; on the device, where a cache keeps its length there.
        padded: may a key up to the last query not be there?
        across: are they keys of another sequence?
    """

    first: int | Tensor
    padded: bool
    across: bool


SAID = "_sbnet_said"  # an attribute of such a tensor


def register_attention(name: str, layout: AttentionLayout) -> None:
    """Makes `layout` an attention implementation of the transformers library, for models with attn_implementation=name.

    The layout says all: whether attention is causal, too. Padding is taken on either side, lengths stay on the device,
    and a padded sequence gives what it gives alone: the layout counts its tokens. With a cache of keys, dynamic or
    static, queries stand where the cache says. Layouts that hold blocks are for one number of keys.

    What a layout does not say is refused: masks that are tensors of four dimensions, sliding windows, packed sequences,
    biases of positions, capped scores, weights of attention as outputs; and attention to another sequence, but by
    `AttentionLayout.dense()`.

    Raises:
        ImportError: a transformers without AttentionMaskInterface (older than 4.53), which would drop masks.

    >>> register_attention("sbnet_local", AttentionLayout.local(256))
    >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sbnet_local")
    """
    if not isinstance(layout, AttentionLayout):
        raise TypeError(f"register_attention: layout: expected an sbnet.AttentionLayout, got {type(layout).__name__}")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError:
        import transformers

        found = f"got {transformers.__version__}"
        raise ImportError(f"register_attention: expected transformers 4.53 or newer, {found}") from None

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        **others: Any,
    ) -> tuple[Tensor, None]:
        for argument in NOT_TAKEN:
            if others.get(argument) is not None:
                raise ValueError(f"{name}: {argument}: expected none, got one: no layout says what it does")
        if others.get("output_attentions"):
            raise ValueError(f"{name}: output_attentions: expected False, got True: weights are never made")
        if getattr(module, "is_cross_attention", False) and not shows_all(layout):
            raise ValueError(ACROSS.format(name=name, queries=query.shape[2], keys=key.shape[2]))
        out = _attend(name, layout, query, key, value, attention_mask, scaling, dropout)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _mask_of(name))


def _attend(
    name: str, layout: AttentionLayout, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None, dropout: float
) -> Tensor:
    said, real = _Said(0, False, k.shape[2] != q.shape[2]), None
    if mask is not None:
        if not hasattr(mask, SAID):
            came = f"one of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"{name}: attention_mask: expected [batch, tokens], or none, got {came}")
        said, real = getattr(mask, SAID), mask[:, 0, 0]
        if real.shape[1] != k.shape[2]:
            raise ValueError(f"{name}: attention_mask: expected one for {k.shape[2]} keys, got {real.shape[1]}")
    first = said.first
    if said.across and not shows_all(layout):
        raise ValueError(ACROSS.format(name=name, queries=q.shape[2], keys=k.shape[2]))
    if isinstance(first, int) and not (layout.has_blocks and first + q.shape[2] != k.shape[2]):
        if not said.across and first + q.shape[2] < k.shape[2]:  # a static cache, not full yet
            k, v = k[:, :, : first + q.shape[2]], v[:, :, : first + q.shape[2]]
        of = None if said.padded else _from(layout, first)
        if of is not None:
            out = block_attention(q, k, v, of, scale, dropout_p=dropout)
            assert isinstance(out, Tensor)
            return out
    if real is None:
        real = torch.ones(len(q), k.shape[2], dtype=torch.bool, device=q.device)
    return padded_attention(q, k, v, layout, real[:, : k.shape[2]], first, scale, dropout)


def _from(layout: AttentionLayout, first: int) -> AttentionLayout | None:
    """For queries that stand so many positions after the first key; None: no rule says that."""
    rule = layout.rule
    if not first or shows_all(layout):
        return layout
    if layout.has_blocks or rule.phases > 1 or rule.diagonal == NO_DIAGONAL:
        return None
    return AttentionLayout._of(rule._replace(diagonal=rule.diagonal + first))


def _mask_of(name: str) -> Callable[..., Tensor | None]:
    """What makes a model's mask."""

    def make(
        batch_size: int,
        q_length: int | None = None,
        kv_length: int = 0,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        mask_function: Any = None,
        attention_mask: Tensor | None = None,
        cache_position: Tensor | None = None,  # of transformers before 5: where the queries stand
        device: Any = "cpu",
        **others: Any,
    ) -> Tensor | None:
        if cache_position is not None:
            q_length, q_offset = cache_position.shape[0], cache_position[0]
        assert q_length is not None
        across = _is_bidirectional(mask_function) and kv_length != q_length
        tracing = torch.compiler.is_compiling() or isinstance(q_offset, torch._subclasses.FakeTensor)
        if isinstance(q_offset, Tensor) and not tracing:
            q_offset = int(q_offset)
        if kv_offset:
            raise ValueError(f"{name}: expected a cache of all keys, got one that has dropped the first {kv_offset}")
        sizes = batch_size, q_length, kv_length, q_offset
        if not _is_plain(mask_function, sizes, device, tracing):
            raise ValueError(
                f"{name}: expected a mask of padding, got one that says more (a sliding window, packed sequences, "
                "chunks, blocks): the layout alone says which keys a query sees"
            )
        keys = torch.arange(kv_length, device=device)
        there = keys >= 0 if across else keys < q_offset + q_length  # not what a static cache has not written
        there = there.expand(batch_size, -1)
        padded = tracing or attention_mask is not None
        if attention_mask is not None:
            more = max(kv_length - attention_mask.shape[1], 0)
            real = torch.nn.functional.pad(attention_mask.to(torch.bool), (0, more))[:, :kv_length] & there
            padded = tracing or bool((real != there).any())
            there = real
        if not padded and kv_length == q_length:
            return None
        mask = there[:, None, None, :].clone()
        setattr(mask, SAID, _Said(q_offset, padded, across))
        return mask

    return make


def _is_bidirectional(function: Any) -> bool:
    from transformers import masking_utils

    return function is masking_utils.bidirectional_mask_function


def _is_plain(function: Any, sizes: tuple[int, int, int, Any], device: Any, tracing: bool) -> bool:
    """Is it a mask of causal attention, or of all keys? One that a model made itself is looked at."""
    from transformers import masking_utils as known

    if function is None or function in (known.causal_mask_function, known.bidirectional_mask_function):
        return True
    if tracing:
        return False
    batch, q_length, kv_length, first = sizes
    q, k = torch.arange(q_length, device=device) + first, torch.arange(kv_length, device=device)
    grid = torch.arange(batch, device=device)[:, None, None, None], torch.zeros((), dtype=torch.long, device=device)
    try:
        found = function(*grid, q[:, None], k)
    except Exception:  # a user's function that takes numbers, not tensors
        return False
    causal, there = k <= q[:, None], k < first + q_length  # what a static cache has not written is hidden elsewhere
    return any(bool((found == wanted).logical_or(~there).all()) for wanted in (causal, torch.ones_like(causal)))
