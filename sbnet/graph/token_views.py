"""Views of packed tokens: which, and of which channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.graph.axes import REARRANGING, Axes, is_tokens, op_name, role
from sbnet.graph.builder import Builder, Call, feature_map
from sbnet.graph.ir import Value
from sbnet.graph.tracing import take


def axes_of(value: Any) -> Axes | None:
    return value.axes if isinstance(value, Value) else None


def expanded(value: Value) -> bool:
    """Is it one row, or many of the same?"""
    return value.producer is not None and getattr(value.producer.target, "__name__", "").startswith("expand")


def letters(value: Value) -> list[str]:
    """The roles of a view's dimensions: N, T, C."""
    return [] if value.axes is None else ["".join(role(name) for name, _ in dim) for dim in value.axes.dims]


def in_order(root: Value, names: str) -> Axes:
    """Axes of a view of packed tokens: "NTC" or "NCT"."""
    assert root.axes is not None
    return Axes(tuple(root.axes.dims["NCT".index(name)] for name in names))


def tokens_at(value: Value) -> int | None:
    """The dimension of packed tokens of a view of them."""
    dims = () if value.axes is None or value.constant else value.axes.dims
    found = [k for k, dim in enumerate(dims) if len(dim) == 1 and is_tokens(dim[0][0])]
    return found[0] if len(found) == 1 else None


def root_of(value: Value) -> Value | None:
    """The packed tokens [N,C,T,1] of which a value is a view."""
    while value.tokens is None:
        node = value.producer
        if value.constant or node is None or node.kind != "aten" or not (node.moves or node.target is take):
            return None
        if value.dtype != node.args[0].dtype:
            return None
        value = node.args[0]
    return value


def channels(value: Value, call: Call | None = None) -> Tensor:
    """Which channel of the packed tokens each number of a view is; of a call, of what it makes of the view."""
    chain, root = [], value
    while root.tokens is None:
        assert root.producer is not None
        chain.append((root.producer, root.producer.outputs.index(root)))
        root = root.producer.args[0]
    n, c, t, _ = root.shape
    seen: Any = torch.arange(c, dtype=torch.int32).view(1, c, 1, 1).expand(n, c, t, 1)
    for node, at in chain[::-1]:
        seen = node.target(seen, *node.args[1:], **node.kwargs)
        seen = seen[at] if node.options.get("many") else seen
    return seen if call is None else call.target(seen, *call.args[1:], **call.kwargs)


def repeated_row(value: Value) -> Value | None:
    """Of a computed row [N,1,C] that is repeated for each token, [N,T,C], that row."""
    chain, wanted = list[Any](), (value.shape[0], 1, value.shape[-1])
    row = value
    while row.shape != wanted:
        node = row.producer
        if row.constant or node is None or node.kind != "aten" or op_name(node.target) not in REARRANGING:
            return None
        if node.options.get("many") or not isinstance(node.args[0], Value):
            return None
        chain.append(node)
        row = node.args[0]
    if row.constant or row.dtype != value.dtype or not chain:
        return None
    numbers = torch.arange(wanted[0] * wanted[2]).view(wanted)
    seen: Any = numbers
    for node in chain[::-1]:
        args, kwargs = pytree.tree_map(  # expand_as asks for a shape alone
            lambda v: torch.empty(v.shape, device="meta") if isinstance(v, Value) else v, (node.args[1:], node.kwargs)
        )
        seen = node.target(seen, *args, **kwargs)
    return row if torch.equal(seen, numbers.expand(value.shape)) else None


def with_row(add: Callable[..., Value], b: Builder, call: Call) -> Value | None:
    """Channels of packed tokens [N,T,C] beside a row of each image's own that is repeated, as DPT joins its class
    token to each pixel."""
    parts = call.args[0]
    if len(parts) != 2 or call.argument("dim", 0) not in (-1, 2) or not all(isinstance(v, Value) for v in parts):
        return None
    for first, (raw, other) in enumerate((parts, parts[::-1])):
        root = feature_map(raw)
        if root is None or root.tokens is None or letters(raw) != ["N", "T", "C"] or len(other.shape) != 3:
            continue
        row = repeated_row(other) if other.shape[:2] == raw.shape[:2] and other.dtype == raw.dtype else None
        if row is not None and feature_map(row) is None and root_of(row) is None:
            options = {"first": bool(first)}
            made = add(b, "beside", call, [root, row], root.tokens, call.made.shape[2], options=options)
            return b.arranged(made, in_order(made, "NTC"), call)
    return None
