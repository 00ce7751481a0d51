"""The cached contract of transformers: who reads other tokens than its own reads those of the frame before, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbnet.graph.axes import Axes
from sbnet.graph.ir import Node, Value

if TYPE_CHECKING:
    from sbnet.graph.plan import Plan


def remember_tokens(plan: Plan) -> None:
    """Keys and values, and packed tokens that something dense reads, are kept for all tokens, each as the last frame
    computed it in which it was active."""
    found: dict[tuple[int, int, int], Value] = {}

    def remembered(packed: Value, start: int, end: int, user: Node) -> Value:
        key = id(packed), start, end
        if key not in found:
            n, _, h, w = packed.shape
            shape = (n, end - start, h, w)
            node = Node("remember", [packed], [], options={"start": start}, path=user.path, line=user.line)
            made = Value(f"{packed.name}_{start}_all", shape, packed.dtype, Axes.planes(shape), producer=node)
            made.tokens = packed.tokens
            node.outputs.append(made)
            plan.graph.nodes.insert(plan.graph.nodes.index(user), node)
            plan.lists[made] = plan.lists[packed]
            found[key] = made
        return found[key]

    for node in list(plan.graph.nodes):
        if node.kind in ("attention", "token_windows"):
            (_, k, v), (first, *starts) = node.args[:3], node.options["starts"]
            width = node.options["heads"] * node.options["dim"]
            if k is v:
                least = min(starts)
                held = [remembered(k, least, max(starts) + width, node)] * 2
                starts = [start - least for start in starts]
            else:
                held = [remembered(x, s, s + width, node) for x, s in zip((k, v), starts, strict=True)]
                starts = [0, 0]
            node.args = [node.args[0], *held, *node.args[3:]]
            node.options |= {"starts": (first, *starts), "remembered": True}
        elif node.kind in ("spread", "token_mean"):
            packed = node.args[0]
            node.args = [remembered(packed, 0, packed.shape[1], node)]
            node.options |= {"remembered": True}
    plan.graph.link()
