"""What a network's convolutions cost, and how much of it is planned."""

from __future__ import annotations

import math
from collections import Counter

from sbnet.geometry import Pair
from sbnet.graph.axes import op_name
from sbnet.graph.ir import Graph, Node

CONVOLUTIONS = ("conv", "conv_transpose")
# Of layers, by what kernels make of them.
FORMS = ("1x1", "depthwise", "3x3", "5x5", "7x7", "dilated", "transposed", "other")
Work = Counter[str]  # multiply-adds a pixel, by the form of the layer


def multiply_adds(node: Node) -> int:
    """Of a convolution that gives more than one pixel, computed dense; 0 of anything else."""
    transposed = node.kind == "conv_transpose"
    weight = node.params.get("weight") if node.kind in CONVOLUTIONS else None
    if node.kind == "aten" and "conv" in op_name(node.target) and math.prod(node.output.shape[2:]) > 1:
        weight = node.args[1]
        transposed = "transpose" in op_name(node.target)
    if node.kind == "bottleneck":
        n, _, h, w = node.output.shape
        return sum(n * h * w * math.prod(v.shape) for name, v in node.params.items() if name.startswith("weight"))
    if weight is None:
        return 0
    # A weight is [K,C/groups,R,S], a transposed convolution's [C,K/groups,R,S] for each pixel of its input. Some
    # networks convolve vectors.
    return math.prod((node.args[0] if transposed else node.output).shape) * math.prod(weight.shape[1:])


def planned_share(graph: Graph, planned: set[str]) -> float:
    """Of the convolutions' multiply-adds: those of nodes of the `planned` kinds. 1 without convolutions."""
    total = sum(multiply_adds(node) for node in graph.nodes)
    return sum(multiply_adds(node) for node in graph.nodes if node.kind in planned) / total if total else 1.0


def work(graph: Graph) -> dict[Pair, Work]:
    """What the convolutions that write each plane do for a pixel of it: {(height, width): multiply-adds by form}."""
    found: dict[Pair, Work] = {}
    for node in graph.nodes:
        given = node.outputs[0]
        if given.size is not None and (products := multiply_adds(node)):
            pixels = given.shape[0] * math.prod(given.size)
            found.setdefault(given.size, Counter())[_form(node)] += round(products / pixels)
    return found


def _form(node: Node) -> str:
    if node.kind not in CONVOLUTIONS:
        return "other"
    weight, options = node.params["weight"], node.options
    if node.kind == "conv_transpose":
        return "transposed" if options["groups"] == 1 else "other"
    if weight.shape[1] == 1 and options["groups"] > 1:
        return "depthwise"
    form = "x".join(str(side) for side in weight.shape[2:])
    plain = options["groups"] == 1 and tuple(options["stride"]) == tuple(options["dilation"]) == (1, 1)
    if form == "1x1" or (plain and form in FORMS):
        return form
    return "dilated" if options["groups"] == 1 and max(options["dilation"]) > 1 else "other"
