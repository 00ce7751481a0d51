"""Views of packed tokens: which, and of which channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sbnet.graph.axes import Axes, is_tokens, role
from sbnet.graph.builder import Call
from sbnet.graph.ir import Value


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
        if value.constant or node is None or node.kind != "aten" or not node.moves or value.dtype != node.args[0].dtype:
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
