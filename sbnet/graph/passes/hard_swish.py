"""Hard swish as files and older code write it, x * relu6(x + 3) / 6: an activation that convolutions do themselves."""

from __future__ import annotations

from typing import Any

from sbnet.graph.ir import Graph, Node, Value, only_user
from sbnet.graph.passes.fuse import only_step


def recognise_hard_swish(graph: Graph) -> Graph:
    """(x * relu6(x + 3)) / 6 and x * (relu6(x + 3) / 6), where nothing else reads what lies between, and 3 and 6 are
    numbers, no parameters that may be written. Before affine functions are folded into one another."""
    last: Any
    for node in list(graph.nodes):
        if only_step(node) != "mul" or len(node.args) != 2:
            continue
        for x, gate in (node.args, node.args[::-1]):
            scaled = gate.producer
            if _is_affine(scaled, "scale", 1 / 6) and only_user(gate, graph) is node:
                last, user, gate = node, scaled, scaled.args[0]
            else:
                last, user = only_user(node.output, graph), node
                if not _is_affine(last, "scale", 1 / 6):
                    continue
            found = _relu6_of_shifted(gate, user, x, graph)
            if found:
                options = {"activation": "hardswish"}
                act = Node("act", [x], last.outputs, options=options, path=node.path, line=node.line)
                graph.swap(last, act, user, *found)
                break
    return graph


def _relu6_of_shifted(gate: Value, user: Node, x: Value, graph: Graph) -> list[Node]:
    """The nodes of relu6(x + 3), which `user` alone reads; else none."""
    relu6 = gate.producer
    if relu6 is None or relu6.kind != "act" or relu6.options != {"activation": "relu6"}:
        return []
    shift = relu6.args[0].producer
    alone = only_user(gate, graph) is user and only_user(relu6.args[0], graph) is relu6
    return [relu6, shift] if alone and _is_affine(shift, "shift", 3.0) and shift.args[0] is x else []


def _is_affine(node: Any, what: str, number: float) -> bool:
    """Is it x * number ("scale") or x + number ("shift"), of a number that stands in the network's code?"""
    if not isinstance(node, Node) or node.kind != "affine" or set(node.params) != {what}:
        return False
    made = node.params[what].producer
    if made is None or not all(isinstance(v, (int, float)) for v in made.args):
        return False
    return abs(float(made.target(*made.args)[0]) - number) < 1e-6
