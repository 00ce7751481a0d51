"""Convolutions that a CPU runs tile by tile, so that what lies between them never leaves the cache."""

from __future__ import annotations

from collections.abc import Callable

from sbnet.graph.ir import Node, only_user
from sbnet.graph.plan import Plan


def chains(plan: Plan) -> dict[Node, int]:
    """{last: how many nodes}: a depthwise convolution with the 1x1 before it, behind it, or both, one after the other
    in the graph, where nothing else reads what lies between them.

    Of the masked contract alone: the cached one keeps what lies between, the exact one has a list for each.
    """
    found: dict[Node, int] = {}
    nodes = plan.graph.nodes

    def linked(at: int) -> bool:
        """Does node `at` read its neighbour before it, which has no other consumer?"""
        before, node = nodes[at - 1], nodes[at]
        return before.kind == "conv" and node.args[0] is before.output and only_user(before.output, plan.graph) is node

    for at, node in enumerate(nodes if plan.mode == "masked" else ()):
        if not _is(node, _is_depthwise):
            continue
        first = at - 1 if at and _is(nodes[at - 1], _is_plain) and linked(at) else at
        behind = at + 1 < len(nodes) and _is(nodes[at + 1], _is_plain) and linked(at + 1)
        last = at + 1 if behind else at
        if last > first:
            found[nodes[last]] = last + 1 - first
    return found


def _is(node: Node, what: Callable[[Node], bool]) -> bool:
    return node.kind == "conv" and what(node)


def _is_depthwise(node: Node) -> bool:
    weight = node.params["weight"].shape
    return node.options["groups"] == weight[0] and weight[1] == 1 and "residual" not in node.params


def _is_plain(node: Node) -> bool:
    weight, o = node.params["weight"].shape, node.options
    return tuple(weight[2:]) == (1, 1) and (o["stride"], o["padding"], o["groups"]) == ((1, 1), (0, 0), 1)
