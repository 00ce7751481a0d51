"""Convolutions in int8 or float8: which, at what scales, and which feature maps between them are of bytes too.

Such a convolution reads bytes, or floats that it rounds as it reads; it adds a residual of either and writes either.
So nothing but convolutions changes: a feature map that they alone read is of bytes, every other one of floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sbnet.graph.ir import Graph, Node, Value, computed
from sbnet.graph.kinds import kind_of

KIND = "conv_quantized"
MOST_PRODUCTS, MOST_DEPTHWISE = 131071, 1024  # of int8 in a sum in 32 bits, and in float32
NARROW = 2, 4, 8  # channels of a group, in and out: float32 kernels read them from x itself, and are faster
LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}  # symmetric


@dataclass(frozen=True)
class Quantization:
    """What `quantize` is told.

    Attributes:
        ranges: largest magnitudes of feature maps, by the value's name.
        keep: paths of modules that stay in float.
        ends: first and last layers are rounded, too.
        dtype: torch.int8 or torch.float8_e4m3fn.
        groups: layers in groups are rounded, too, where it pays. Only int8 kernels of CPUs are fast at them.
    """

    ranges: Mapping[str, float] = field(default_factory=dict)
    keep: Sequence[str] = ()
    ends: bool = False
    dtype: torch.dtype = torch.int8
    groups: bool = True

    def scale(self, value: Value) -> float:
        """Units that 1 of a feature map's form in bytes counts."""
        return (self.ranges[value.name] or 1.0) / LARGEST[self.dtype]


def stays_float(graph: Graph, told: Quantization) -> dict[Node, str]:
    """Why each convolution that stays in float does; the others may become int8 or float8."""
    first, last = _first(graph), _last(graph)
    reasons: dict[Node, str] = {}
    for node in graph.nodes:
        if kind_of(node).filters:
            reason = _reason(node, told)
            if any(node.path == path or node.path.startswith(path + ".") for path in told.keep):
                reason = "kept"
            elif not reason and not told.ends and node in first | last:
                reason = "first layer" if node in first else "last layer"
            if reason:
                reasons[node] = reason
    while told.groups:  # each may make its residual one of floats
        chosen = [node for node in graph.nodes if node.kind == "conv" and node not in reasons]
        stored = _stored(graph, chosen)
        found = [n for n in chosen if _depthwise(n) and stored.isdisjoint((n.args[0], n.output))]
        if not found:
            break
        reasons.update(dict.fromkeys(found, "depthwise from floats to floats"))  # where no byte is saved
    return reasons


def _depthwise(node: Node) -> bool:
    return node.options["groups"] > 1 and node.params["weight"].shape[1] == 1


def _reason(node: Node, told: Quantization) -> str:
    if node.kind != "conv":
        return "transposed" if node.kind == "conv_transpose" else ""
    weight, groups = node.params["weight"], node.options["groups"]
    if not weight.constant or ("bias" in node.params and not node.params["bias"].constant):
        return "weights that the network computes"
    if groups > 1 and not told.groups:
        return "depthwise" if _depthwise(node) else f"{groups} groups"
    if told.dtype != torch.int8:
        return ""
    if math.prod(weight.shape[1:]) > (MOST_DEPTHWISE if _depthwise(node) else MOST_PRODUCTS):
        return "too many products for an exact sum"
    if groups > 1 and weight.shape[1] in NARROW and weight.shape[0] == groups * weight.shape[1]:
        return f"groups of {weight.shape[1]} channels"
    return ""


def _weighted(node: Node) -> bool:
    """Does it multiply by a matrix of constants?"""
    if kind_of(node).filters:
        return True
    return node.kind == "aten" and any(v.constant and len(v.shape) > 1 for v in node.inputs())


def _first(graph: Graph) -> set[Node]:
    """Layers that no other one with weights comes before."""
    found: set[Node] = set()
    reached = {v for v in graph.inputs if v is not None}
    for node in graph.nodes:
        if reached.intersection(v for v in node.inputs() if not v.constant):
            if _weighted(node):
                found.add(node)
            else:
                reached.update(node.outputs)
    return found


def _last(graph: Graph) -> set[Node]:
    """Layers that no other one with weights comes after."""
    found: set[Node] = set()
    reached = {v for v in graph.outputs if isinstance(v, Value)}
    for node in reversed(graph.nodes):
        if reached.intersection(node.outputs):
            if _weighted(node):
                found.add(node)
            else:
                reached.update(node.inputs())
    return found


def _stored(graph: Graph, chosen: Sequence[Node]) -> set[Value]:
    """What chosen convolutions write and they alone read: of bytes."""

    def between(value: Value) -> bool:
        return bool(value.users) and not graph.is_output(value) and all(user in chosen for user in value.users)

    return {node.output for node in chosen if between(node.output)}


def quantize(graph: Graph, told: Quantization) -> Graph:
    """Makes convolutions int8 or float8, in place. Of an optimised graph without bottlenecks."""
    kept = stays_float(graph, told)
    chosen = [node for node in graph.nodes if node.kind == "conv" and node not in kept]
    for value in _stored(graph, chosen):
        value.dtype = told.dtype
    for node in chosen:
        x, residual, options = node.args[0], node.params.get("residual"), dict(node.options)
        node.kind = KIND
        node.options = {
            **options,
            "x_scale": None if x.dtype == told.dtype else told.scale(x),
            "residual_scale": told.scale(residual) if residual is not None and residual.dtype == told.dtype else 1.0,
            "out_scale": told.scale(node.output) if node.output.dtype == told.dtype else None,
        }
        _weights(node, told.scale(x), told.dtype)
    return graph.link()


def _weights(node: Node, scale: float, dtype: torch.dtype) -> None:
    """A weight of bytes, symmetric a channel of the output, and what a sum of its products with x counts."""
    weight, name = node.params["weight"], str(dtype).removeprefix("torch.")

    def steps(weight: Tensor) -> Tensor:
        largest = weight.double().abs().amax((1, 2, 3))
        return torch.where(largest > 0, largest, 1) / LARGEST[dtype]

    def rounded(weight: Tensor, steps: Tensor) -> Tensor:
        whole = weight.double() / steps[:, None, None, None]
        whole = whole.round() if dtype == torch.int8 else whole.float()
        return whole.to(dtype).contiguous(memory_format=torch.channels_last)

    made = computed(f"{weight.name}.steps", weight, steps, weight, shape=weight.shape[:1])
    node.params["weight"] = computed(f"{weight.name}.{name}", weight, rounded, weight, made)
    node.params["weight"].dtype = dtype
    node.params["scale"] = _scaled(f"{weight.name}.scale", made, lambda steps: (steps * scale).float())
    for name in ("bias", "slope"):
        if name in node.params:
            node.params[name] = _scaled(f"{weight.name}.{name}", node.params[name], Tensor.float)


def _scaled(name: str, value: Value, function: Callable[[Tensor], Tensor]) -> Value:
    made = computed(name, value, function, value)
    made.dtype = torch.float32
    return made
