"""What networks compute of globally pooled maps, gates and classifiers: what of it sbnet's ops do, on planes of 1x1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sbnet.graph.axes import op_name
from sbnet.graph.ir import Node, Value
from sbnet.graph.passes.program import UNARY

if TYPE_CHECKING:
    from sbnet.graph.plan import Plan

# Which leave numbers and their order, where samples and channels stay as many.
VIEWS = {"flatten", "view", "reshape", "squeeze", "unsqueeze", "slice", "contiguous", "clone", "dropout"}


@dataclass(frozen=True)
class Pooled:
    """How a node that gives one vector a sample, [N,C], [N,C,1] or [N,C,1,1], runs.

    Attributes:
        kind: "pool", "view", "program" of one step, or "product" with a matrix [K,C] or [K,C,1,1].
        x: what it reads: of a pool a feature map, of others what such a node gave.
        program: of a program.
        weight, bias: of a product.
    """

    kind: str
    x: Value
    program: str = ""
    weight: Value | None = None
    bias: Value | None = None


def pooled(plan: Plan) -> dict[Node, Pooled]:
    """Global pools, and what reads nothing else. Of the masked contract, in which pools take lists of blocks."""
    found: dict[Node, Pooled] = {}
    for node in plan.graph.nodes if plan.mode == "masked" else ():
        if node.output.size is not None:
            continue
        if node.kind == "adaptive_pool" and node.options["size"] == (1, 1):
            found[node] = Pooled("pool", node.args[0])
        elif node.kind == "aten" and not node.kwargs and isinstance(node.args[0], Value):
            form = _form(node, *node.args) if node.args[0].producer in found else None
            if form is not None:
                found[node] = form
    return found


def _form(node: Node, x: Value, *args: Any) -> Pooled | None:
    name, y = op_name(node.target), node.output
    if y.dtype != x.dtype or len(y.shape) < 2 or any(side != 1 for side in y.shape[2:]) or y.shape[0] != x.shape[0]:
        return None
    if name in VIEWS and y.shape[1] == x.shape[1]:
        return Pooled("view", x)
    if name in UNARY and not args:
        return Pooled("program", x, name)
    if name == "linear" or (name == "conv2d" and _is_plain(*args[2:])):
        weight, bias = args[0], args[1] if len(args) > 1 else None
        given = [v for v in (weight, bias) if v is not None]
        if weight.shape[1:] == x.shape[1:] and all(_is_counted(v) and v.dtype == x.dtype for v in given):
            return Pooled("product", x, weight=weight, bias=bias)
    return None


def is_product(node: Node) -> bool:
    """Is it a 1x1 convolution of planes of 1x1, of floats, in one group?"""
    if op_name(node.target) != "conv2d" or node.kwargs or not all(isinstance(v, Value) for v in node.args[:2]):
        return False
    x, weight = node.args[:2]
    one = x.shape[2:] == weight.shape[2:] == (1, 1) and x.dtype.is_floating_point
    return one and x.shape[1] == weight.shape[1] and _is_plain(*node.args[3:])


def _is_plain(stride: Any = (1, 1), padding: Any = (0, 0), dilation: Any = (1, 1), groups: int = 1) -> bool:
    return list(padding) == [0] * len(padding) and groups == 1


def _is_counted(value: Value) -> bool:
    """Is it a constant of which PyTorch counts writes?"""
    return value.constant and not (value.tensor is not None and value.tensor.is_inference())
