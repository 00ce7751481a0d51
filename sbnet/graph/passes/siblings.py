"""Convolutions of one feature map with the same window become one, whose channels they share out: a launch less."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sbnet.graph.ir import Graph, Node, Value, computed

if TYPE_CHECKING:
    from sbnet.graph.plan import Plan

WORD = 8  # channels of 16 bits; a part of a feature map that kernels read must begin with a whole word


def join_siblings(plan: Plan) -> Plan:
    """Of a plan for CUDA, as a detector's heads have them. (In the exact mode each tensor has a list of its own.)"""
    graph = plan.graph
    for node in list(graph.nodes) if plan.mode != "exact" else ():
        if any(node is n for n in graph.nodes) and _joins(node, graph):
            key = _key(node)
            found = [n for n in node.args[0].users if n.kind == "conv" and _joins(n, graph) and _key(n) == key]
            if len(found) > 1:
                _join(graph, sorted(found, key=graph.nodes.index))
    return plan


def _joins(node: Node, graph: Graph) -> bool:
    """A convolution in one group, of whole words of channels, that other convolutions alone read."""
    if node.kind != "conv" or node.options["groups"] != 1 or {"residual", "slope"} & set(node.params):
        return False
    y = node.output
    readers = all(n.kind == "conv" and n.args[0] is y and n.params.get("residual") is not y for n in y.users)
    return readers and bool(y.users) and y.shape[1] % WORD == 0 and not graph.is_output(y)


def _key(node: Node) -> Any:
    options = tuple(sorted((name, value) for name, value in node.options.items() if name != "residual_after"))
    return options, tuple(node.params["weight"].shape[1:]), "bias" in node.params, node.output.dtype


def _join(graph: Graph, nodes: list[Node]) -> None:
    first = nodes[0]
    x, y = first.args[0], first.output
    channels = sum(n.output.shape[1] for n in nodes)

    def joined(*parts: Tensor) -> Tensor:
        return torch.cat([part.double() for part in parts])

    whole = Value(f"{y.name}.joined", (y.shape[0], channels, *y.shape[2:]), y.dtype, axes=y.axes)
    conv = Node("conv", [x], [whole], options=dict(first.options), path=first.path, line=first.line)
    for name in ("weight", "bias"):
        parts = [n.params[name] for n in nodes if name in n.params]
        if parts:
            shape = (channels, *parts[0].shape[1:])
            conv.params[name] = computed(f"{parts[0].name}.joined", parts[0], joined, *parts, shape=shape)
    whole.producer = conv
    slices, start = [], 0
    for node in nodes:
        slices.append(Node("slice", [whole], node.outputs, options={"start": start}, path=node.path, line=node.line))
        node.output.producer = slices[-1]
        start += node.output.shape[1]
    at = graph.nodes.index(first)
    graph.nodes[at : at + 1] = [conv, *slices]
    graph.nodes = [n for n in graph.nodes if not any(n is gone for gone in nodes)]
    graph.find_users()
