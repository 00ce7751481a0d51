"""Attention over packed tokens: of heads that are views of them, turned by tables or not, in one op or written out."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from sbnet.graph.axes import Axes, op_name
from sbnet.graph.builder import Builder, Call
from sbnet.graph.dense_attention import hide
from sbnet.graph.ir import Node, Value, computed
from sbnet.graph.token_views import channels, root_of, tokens_at
from sbnet.graph.tokens import Tokens
from sbnet.graph.turns import form_of, leaves_of, turns
from sbnet.graph.window_attention import Scores, WindowAttentions

ATEN = torch.ops.aten
MOST_STEPS = 64  # ops that turn heads


class Attentions:
    """Rules of attention; `attentions` counts those that were recognised.

    fixed: what the network holds is not written, as of an ONNX file.
    """

    attentions: int
    fixed = False
    windows: WindowAttentions
    _spread: dict[int, Value]
    _shown: dict[int, Value]
    _tables: dict[Any, tuple[Value, Value, bool]]

    def _add(
        self, b: Builder, kind: str, call: Call, args: list[Value], tokens: Tokens, channels: int, **more: Any
    ) -> Value:
        raise NotImplementedError

    def _attention(self, b: Builder, call: Call) -> Value | None:
        """Of heads [N,heads,T,dim] that are views of packed tokens, each of which sees all."""
        if call.argument("is_causal") or call.argument("dropout_p") or call.argument("enable_gqa"):
            return None
        q, k, v = call.args[:3]
        scale = call.argument("scale")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        mask = call.argument("attn_mask")
        at = len(q.shape) - 2
        scores = Scores(float(scale), biases=[] if mask is None else [mask])
        return self._attend(b, call, (q, k, v), (at, at, at), scores)

    def _weighted_sum(self, b: Builder, call: Call) -> Value | None:
        """softmax(q k^T, scaled, and with a bias) v, written out; of queries and keys divided by their length, too."""
        weights, v = call.args[:2]
        turned = v.producer if isinstance(v, Value) and len(v.shape) == 4 else None
        if turned is not None and swaps_last(turned) and is_weights(turned.args[0]):
            swapped = dataclasses.replace(call, args=(turned.args[0], weights), made=call.made.transpose(2, 3))
            made = self._weighted(b, swapped, 3)  # v (softmax ...)^T: the result is turned, too
            shape = list(call.made.shape)
            return None if made is None else b.move(made, ATEN.permute.default, [0, 1, 3, 2], shape, call)
        return self._weighted(b, call, len(weights.shape) - 2 if isinstance(weights, Value) else 0)

    def _weighted(self, b: Builder, call: Call, rows_of_v: int) -> Value | None:
        weights, v = call.args[:2]
        node = unguarded(weights).producer if isinstance(weights, Value) else None
        if node is None or node.kind != "aten" or op_name(node.target) != "softmax" or not 3 <= len(weights.shape) <= 5:
            return None
        if node.args[1] not in (-1, len(weights.shape) - 1) or weights.dtype != node.args[0].dtype:
            return None
        scores, biases, scales = unhidden(node.args[0]), list[Value](), list[Value]()
        while scores.producer is not None and scores.producer.kind == "aten":
            added, name = scores.producer, op_name(scores.producer.target)
            if name == "add" and scales:  # of a bias that is multiplied, too
                return None
            if name == "add" and not added.kwargs and len(added.args) == 2:
                inner = next((a for a in added.args if isinstance(a, Value) and is_product(a, self.fixed)), None)
                rest = [a for a in added.args if a is not inner]
                bias = next((a for a in rest if inner is not None or (isinstance(a, Value) and a.constant)), None)
                if not isinstance(bias, Value):
                    return None
                biases.append(bias)
                scores = next(a for a in added.args if a is not bias)
            elif name in ("reshape", "view"):  # a bias of windows is added to windows of images
                scores = added.args[0]
            elif name == "mul" and all_constant(added.args[1:]) and not is_number(added.args[1], self.fixed):
                scales.append(added.args[1])
                scores = added.args[0]
            else:
                break
        scores, scale = scaled(scores, self.fixed)
        product = scores.producer
        if product is None or product.kind != "aten" or op_name(product.target) not in ("matmul", "bmm"):
            return None
        (q, first), (k, second) = scaled(product.args[0], self.fixed), scaled(product.args[1], self.fixed)
        rank = len(weights.shape)
        (q, least, turned), (k, same, k_turned) = normalized(q, self.fixed), normalized(k, self.fixed)
        if least != same or turned or (least and not k_turned) or (scales and rank != 4) or (biases and rank == 5):
            return None
        found = Scores(scale * first * second, scales, biases, least)
        if not k_turned and rank == 4 and (rows := unswapped(k)) is not None:
            k, k_turned = rows, True
        return self._attend(b, call, (q, k, v), (rank - 2, rank - 2 if k_turned else rank - 1, rows_of_v), found)

    def _hides_nothing(self, mask: Value) -> bool:
        """Is it a mask that shows all keys, and is not written later?"""
        if mask.dtype != torch.bool or not mask.constant or not (self.fixed or not is_held(mask)):
            return False
        return bool(evaluated(mask).all())

    def _attend(
        self, b: Builder, call: Call, parts: tuple[Value, ...], at: tuple[int, ...], scores: Scores
    ) -> Value | None:
        """at: which dimension of q, k and v is that of tokens."""
        biases, scale = scores.biases, scores.scale
        biases = [v for v in biases if not self._hides_nothing(v)]
        if any(v.dtype == torch.bool for v in biases):
            return None
        if self.fixed:  # what exporters make of a mask that hides nothing
            biases = [v for v in biases if not v.constant or bool(evaluated(v).any())]
        scores = dataclasses.replace(scores, biases=biases)
        found = [one for v, k in zip(parts, at, strict=True) if (one := self._heads(b, call, v, k)) is not None]
        if not found:
            return self.windows.attend(b, call, parts, at, scores)
        if len(found) < 3 or len({one[2:] for one in found}) != 1 or len(biases) > 1 or not all_constant(biases):
            return None
        if scores.scales or scores.normalize:
            return None
        args, starts, (heads, dim, tokens) = [one[0] for one in found], tuple(one[1] for one in found), found[0][2:]
        length = tokens.length
        for bias in biases:
            shape = (1,) * (4 - len(bias.shape)) + tuple(bias.shape)
            if len(shape) > 4 or shape[0] != 1 or shape[1] not in (1, heads) or shape[2:] != (length, length):
                return None
            args.append(
                computed(f"{call.label}.bias", bias, lambda t, shape=shape: t.reshape(shape), bias, shape=shape)
            )
        options = {"starts": starts, "heads": heads, "dim": dim, "scale": scale}
        made = self._add(b, "attention", call, args, tokens, heads * dim, options=options)
        self.attentions += 1
        n = made.shape[0]
        split = b.move(made, ATEN.reshape.default, [n, heads, dim, length], [n, heads, dim, length], call)
        shown = b.move(split, ATEN.permute.default, [0, 1, 3, 2], [n, heads, length, dim], call)
        named = made.axes.dims  # type: ignore[union-attr]
        split.axes = Axes((named[0], (("C0", heads),), (("C1", dim),), named[2]))
        shown.axes = Axes((named[0], (("C0", heads),), named[2], (("C1", dim),)))
        return shown

    def _heads(self, b: Builder, call: Call, value: Value, at: int) -> tuple[Value, int, int, int, Tokens] | None:
        """(packed tokens, first channel, heads, dim, tokens) of what is [N,heads,T,dim], or has T at another place."""
        value = self._shown.get(id(value), value)
        root = root_of(value)
        if root is None:
            return self._turned(b, call, value) if at == 2 else None
        if tokens_at(value) != at or len(value.shape) != 4 or root.tokens is None:
            return None
        seen = channels(value)[0].select(at - 1, 0)  # [heads,dim]
        start = int(seen[0, 0])
        if not torch.equal(seen.flatten(), torch.arange(start, start + seen.numel(), dtype=seen.dtype)):
            return None
        return root, start, seen.shape[0], seen.shape[1], root.tokens

    def _turned(self, b: Builder, call: Call, value: Value) -> tuple[Value, int, int, int, Tokens] | None:
        """Heads turned by tables (rotary embeddings), whatever the ops: what they make of a few vectors says how."""
        shown = self._turned_view(value)
        if shown is None or len(value.shape) != 4:
            return None
        found = self._heads(b, call, shown, 2)
        if found is None:
            return None
        root, start, heads, dim, tokens = found
        start_of = self._spread[id(shown)]
        key = (dim, tokens, form_of(value, start_of))
        if key not in self._tables:
            leaves = leaves_of(value)
            tables = turns(value, start_of, dim, leaves, [v.tensor for v in leaves])  # type: ignore[misc]
            if tables is None:
                return None

            def table(at: int, *held: torch.Tensor) -> torch.Tensor:  # as often as one of them is written
                made = turns(value, start_of, dim, leaves, held)
                if made is None or made[2] != tables[2]:
                    expected = "tables that turn channels in the pairs they turned, got others, written since"
                    raise RuntimeError(f"sbnet: {call.path or 'the network'}: expected {expected}; sparsify it anew")
                rows = made[:2][at].t()[None, :, :, None]
                return rows.to(root.dtype).contiguous(memory_format=torch.channels_last)

            packed = []
            for at, name in enumerate(("cos", "sin")):
                like = Value("turn", (1, dim, tokens.length, 1), root.dtype, constant=True)
                made = functools.partial(table, at)
                rows = computed(f"{call.label}.{name}", like, made, *leaves, shape=like.shape)
                packed.append(self._add(b, "pack", call, [rows], tokens, dim))
            self._tables[key] = packed[0], packed[1], tables[2]
        cos, sin, halves = self._tables[key]
        options = {"start": start, "heads": heads, "dim": dim, "halves": halves}
        return self._add(b, "rope", call, [root, cos, sin], tokens, heads * dim, options=options), 0, heads, dim, tokens

    def _turned_view(self, value: Value) -> Value | None:
        """The one view of packed tokens, of heads, that a dense computation starts from."""
        seen, found, todo = set[int](), dict[int, Value](), [value]
        while todo:
            one = todo.pop()
            if id(one) in seen or one.constant:
                continue
            seen.add(id(one))
            shown = self._shown.get(id(one))
            if shown is not None and shown.shape == value.shape and tokens_at(shown) == 2:  # not a part of it
                found[id(shown)] = shown
                continue
            if one.producer is None or one.producer.kind != "aten" or len(seen) > MOST_STEPS:
                return None
            todo += one.producer.inputs()
        return next(iter(found.values())) if len(found) == 1 else None


def swaps_last(node: Node, rank: int = 4) -> bool:
    """Does it swap the last two dimensions?"""
    if op_name(node.target) == "permute":
        return [int(d) % rank for d in node.args[1]] == [*range(rank - 2), rank - 1, rank - 2]
    return op_name(node.target) == "transpose" and sorted(int(d) % rank for d in node.args[1:3]) == [rank - 2, rank - 1]


def unswapped(value: Value) -> Value | None:
    """Of a computed [N,heads,T,dim] whose last two dimensions were swapped, by whatever moves numbers, that value."""
    chain, shape = list[Node](), list(value.shape)
    while value.producer is not None and value.producer.moves and not value.producer.options.get("many"):
        chain.append(value.producer)
        value = value.producer.args[0]
        if list(value.shape) == [*shape[:2], shape[3], shape[2]] and value.producer is not None:
            numbers = torch.arange(math.prod(shape)).view(value.shape)
            moved: Any = numbers
            for node in chain[::-1]:
                moved = node.target(moved, *node.args[1:], **node.kwargs)
            if torch.equal(moved, numbers.transpose(2, 3)) and not value.producer.moves:
                return value
    return None


def unguarded(value: Value) -> Value:
    """Of where(isnan(x), 0, x), as exporters write a softmax that may see nothing, x; else the value."""
    node = value.producer
    if node is None or node.kind != "aten" or op_name(node.target) != "where" or len(node.args) != 3:
        return value
    asked, none, x = node.args
    test = asked.producer if isinstance(asked, Value) else None
    if test is None or op_name(test.target) != "isnan" or test.args[0] is not x:
        return value
    zero = bool((evaluated(none) == 0).all()) if isinstance(none, Value) and none.constant else none == 0
    return x if zero else value


def unhidden(scores: Value) -> Value:
    """Scores before those of keys that are not active were taken out."""
    node = scores.producer
    return node.args[0] if node is not None and node.target is hide else scores


def is_weights(value: Value) -> bool:
    node = unguarded(value).producer
    return node is not None and node.kind == "aten" and op_name(node.target) == "softmax"


def is_product(value: Value, fixed: bool) -> bool:
    node = scaled(value, fixed)[0].producer
    return node is not None and node.kind == "aten" and op_name(node.target) in ("matmul", "bmm")


def all_constant(values: Sequence[Any]) -> bool:
    return all(isinstance(value, Value) and value.constant for value in values)


def is_number(value: Any, fixed: bool) -> bool:
    """A number, or a constant of one that is not written; fixed: what modules hold is such."""
    if not isinstance(value, Value):
        return isinstance(value, (int, float))
    return value.constant and math.prod(value.shape) == 1 and (fixed or not made_of_tensors(value))


def number(value: Any) -> float:
    """What `is_number` says is one."""
    return float(evaluated(value)) if isinstance(value, Value) else float(value)


def made_of_tensors(value: Value) -> bool:
    """Is a constant made of tensors that a module holds?"""
    if value.producer is None:
        return True
    return value.tensor is not None or any(map(made_of_tensors, value.producer.inputs()))


def scaled(value: Value, fixed: bool) -> tuple[Value, float]:
    """A value, or of one that was scaled by a number that value and the number."""
    node, scale = value.producer, 1.0
    while node is not None and node.kind == "aten" and op_name(node.target) in ("mul", "div") and len(node.args) == 2:
        at = next((k for k, a in enumerate(node.args) if is_number(a, fixed)), None)
        if at is None or is_number(node.args[1 - at], fixed) or (at == 0 and op_name(node.target) == "div"):
            break
        factor = number(node.args[at])
        scale *= factor if op_name(node.target) == "mul" else 1 / factor
        value = node.args[1 - at]
        node = value.producer
    return value, scale


def normalized(value: Value, fixed: bool) -> tuple[Value, float, bool]:
    """Of what was divided by its length along its last dimension, or by the least of that: the value, the least, and
    were its last two dimensions then swapped? Else the value, 0 and False."""
    node, rank, turned = value.producer, len(value.shape), False
    if node is not None and node.kind == "aten" and swaps_last(node, rank):
        turned, node = True, node.args[0].producer
    if node is None or node.kind != "aten" or op_name(node.target) != "div" or not isinstance(node.args[1], Value):
        return value, 0.0, False
    inner, length = node.args[0], node.args[1].producer
    while length is not None and op_name(length.target) in ("expand", "expand_as"):
        length = length.args[0].producer
    least = least_of(length, fixed)
    norm = length.args[0].producer if length is not None and least is not None else None
    if length is None or norm is None or op_name(norm.target) != "linalg_vector_norm" or norm.args[0] is not inner:
        return value, 0.0, False
    power, dims = (*norm.args[1:3], *(2, None)[len(norm.args) - 1 :])[:2]
    if power != 2 or not dims or [int(d) % rank for d in dims] != [rank - 1] or least is None or least <= 0:
        return value, 0.0, False
    return inner, least, turned


def least_of(node: Node | None, fixed: bool) -> float | None:
    """What a clamp of the lower side alone gives at least, a number that is not written."""
    if node is None or op_name(node.target) not in ("clamp_min", "clamp") or len(node.args) < 2 or node.kwargs:
        return None
    low, above = node.args[1], node.args[2:]
    if any(v is not None for v in above) or low is None:
        return None
    if not is_number(low, fixed):
        return None
    return number(low)


def is_held(value: Value) -> bool:
    """Is a constant a tensor that the network holds, or made of one?"""
    if value.producer is None:
        return True
    return any(is_held(v) for v in value.producer.inputs())


def evaluated(value: Value) -> Any:
    """What a constant is now."""
    if value.tensor is not None:
        return value.tensor
    assert value.producer is not None
    args, kwargs = pytree.tree_map(
        lambda v: evaluated(v) if isinstance(v, Value) else v, (value.producer.args, value.producer.kwargs)
    )
    return value.producer.target(*args, **kwargs)
