"""Windows of a plane with rows of their own, as RF-DETR's DINOv2 has a class token a window: packed tokens, whose
prefix are the rows of all windows. A window is an arrangement of them, which is traced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sbnet.graph.axes import Axes
from sbnet.graph.builder import Builder, Call, feature_map
from sbnet.graph.ir import Node, Value
from sbnet.graph.tokens import Tokens
from sbnet.graph.tracing import rows_of, traced

if TYPE_CHECKING:
    from sbnet.graph.token_rules import TokenRules

ATEN = torch.ops.aten


def windows_with_rows(rules: TokenRules, b: Builder, call: Call) -> Value | None:
    """Rows [N*windows,p,C] before the pixels of the windows of a plane [N*windows,pixels,C]."""
    parts = call.args[0]
    if len(parts) != 2 or call.argument("dim", 0) not in (1, -2) or not rules.pack:
        return None
    if not all(isinstance(v, Value) and not v.constant and len(v.shape) == 3 for v in parts):
        return None
    rows, pixels = parts
    found = traced(pixels) if rows.dtype == pixels.dtype and feature_map(pixels) is None else None
    index = None if found is None else rows_of(found)
    if found is None or index is None or found.root.tokens is not None or found.root.plane is None:
        return None
    (n, c, h, w), p = found.root.shape, rows.shape[1]
    if index.shape[0] % n or index.numel() != n * h * w or rows.shape[0] != index.shape[0]:
        return None
    images = torch.arange(n, dtype=index.dtype).view(n, 1, 1)
    each = index.long().unflatten(0, (n, -1)) - 1 - images * (h * w)
    own = each[0]
    if not torch.equal(each, own.expand_as(each)) or not torch.equal(own.flatten().sort().values, torch.arange(h * w)):
        return None
    prefix = len(own) * p
    tokens = Tokens((h, w), prefix)
    shape = [n, prefix, c]
    before = b.move(rules.dense(b, rows, call), ATEN.reshape.default, shape, shape, call)
    packed = rules._add(b, "pack", call, [found.root], Tokens((h, w)), c)
    made = rules._add(b, "prefix", call, [packed, before], tokens, c, options={"start": prefix})
    table = torch.cat([torch.arange(prefix).view(-1, p), prefix + own], 1)
    numbers = 1 + table + images * tokens.length
    return rules.windows.taken(b, call, made, numbers.flatten(0, 1).to(torch.int32))


def plane_of_tokens(b: Builder, call: Call, root: Value) -> Value:
    """The feature map of packed tokens behind a prefix."""
    assert root.tokens is not None
    (n, c), tokens = root.shape[:2], Tokens(root.tokens.size)
    node = Node("bare", [root], [], path=call.path, line=call.line, options={"start": root.tokens.prefix})
    shape, axes = (n, c, tokens.length, 1), tokens.axes(n, c)
    node.outputs.append(Value(f"{call.label}_{len(b.nodes)}", shape, root.dtype, axes, producer=node, tokens=tokens))
    b.nodes.append(node)
    made = b.add("unpack", call, [node.output], (n, c, *tokens.size))
    made.axes, made.tokens = Axes.planes(made.shape), None
    return made


def attended_tokens(b: Builder, call: Call, parts: Any, table: Value, options: dict[str, Any]) -> Value | None:
    """Of q, k and v that are packed tokens (Part): in windows, or of all."""
    q, k, v = parts
    if set(options) != {"scale"} or q.root.tokens is None or len({part.root.tokens for part in parts}) != 1:
        return None
    if q.channels.shape != v.channels.shape or not torch.equal(q.index, k.index):
        return None
    heads, dim = q.channels.shape
    options = {**options, "starts": tuple(part.start for part in parts), "heads": heads, "dim": dim}
    roots, shape = [part.root for part in parts], (q.root.shape[0], heads * dim, *q.root.shape[2:])
    if len(table.shape) == 2 and table.shape[0] == 1:
        return b.add("attention", call, roots, shape, options=options)
    return b.add("token_windows", call, [*roots, table], shape, options=options)
