"""Pools of whole planes and large windows, which read active pixels alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sbnet.graph.axes import op_name
from sbnet.graph.ir import Graph, Node, Value

METHODS = {"adaptive_avg_pool2d": "avg", "mean": "avg", "adaptive_max_pool2d": "max", "amax": "max"}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def recognise_pools(graph: Graph) -> Graph:
    """Dense nodes that pool a feature map become `adaptive_pool` nodes. (The network's input is not masked: what pools
    it stays as it is.)"""
    for node in graph.nodes:
        method = METHODS.get(op_name(node.target)) if node.kind == "aten" else None
        x = node.args[0] if node.args else None
        if method is None or not isinstance(x, Value) or x.plane is None or x.dtype not in FLOATS or x.given:
            continue
        if node.output.dtype != x.dtype or any(v.users or graph.is_output(v) for v in node.outputs[1:]):
            continue  # the places of maxima are needed as well
        given = _arguments(node)
        if op_name(node.target).startswith("adaptive"):
            size, keep = tuple(node.output.shape[2:]), True
        elif sorted(int(d) % 4 for d in given("dim") or ()) == [2, 3]:
            size, keep = (1, 1), bool(given("keepdim"))
        else:
            continue
        node.kind, node.args, node.kwargs, node.reason = "adaptive_pool", [x], {}, ""
        node.outputs, node.options = node.outputs[:1], {"size": size, "method": method, "keep": keep}
    return graph


def _arguments(node: Node) -> Callable[[str], Any]:
    names = [argument.name for argument in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return given.get
