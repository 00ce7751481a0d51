"""What a network's convolutions cost, and how much of it is planned."""

from __future__ import annotations

import math
from collections import Counter

from sbnet.geometry import Pair
from sbnet.graph.ir import Graph, Node
from sbnet.graph.kinds import kind_of

# Of layers, by what kernels make of them.
FORMS = ("1x1", "depthwise", "3x3", "5x5", "7x7", "dilated", "transposed", "other")
Work = Counter[str]  # multiply-adds a pixel, by the form of the layer


def multiply_adds(node: Node) -> int:
    """Of a node with products of weights that gives more than one pixel, computed dense; 0 of anything else."""
    return kind_of(node).multiply_adds(node)


def planned_share(graph: Graph) -> float:
    """Of the convolutions' multiply-adds: those of nodes that write active blocks. 1 without convolutions."""
    total = sum(multiply_adds(node) for node in graph.nodes)
    return sum(multiply_adds(node) for node in graph.nodes if kind_of(node).written) / total if total else 1.0


def work(graph: Graph) -> dict[Pair, Work]:
    """What the convolutions that write each plane do for a pixel of it: {(height, width): multiply-adds by form}."""
    found: dict[Pair, Work] = {}
    for node in graph.nodes:
        given = node.outputs[0]
        if given.size is not None and (products := multiply_adds(node)):
            pixels = given.shape[0] * math.prod(given.size)
            found.setdefault(given.size, Counter())[kind_of(node).form(node)] += round(products / pixels)
    return found
