"""Norms that networks and exporters write out as arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sbnet.graph.axes import op_name
from sbnet.graph.ir import Node, Ref, Value
from sbnet.graph.token_attention import is_number, number
from sbnet.graph.token_views import letters, root_of


def rms_eps(x: Any, divisor: Any, shown: Mapping[int, Value], fixed: bool) -> float | None:
    """The eps where a divisor is 1 / sqrt(mean(x x) + eps), the mean that of the last dimension; None where it is not.

    shown: of values that stand for others, those. fixed: the tensors of modules never change.
    """
    inverse = _made(divisor, "rsqrt", "reciprocal")
    if inverse is not None and op_name(inverse.target) == "reciprocal":
        inverse = _made(inverse.args[0], "sqrt")
    total = None if inverse is None else _made(inverse.args[0], "add")
    if total is None or not isinstance(x, Value) or not is_number(total.args[1], fixed):
        return None
    mean = _made(total.args[0], "mean")
    if mean is None or list(mean.args[1:]) not in ([[-1], True], [[len(x.shape) - 1], True]):
        return None
    return number(total.args[1]) if _are_squares(mean.args[0], x, shown, fixed) else None


def _are_squares(value: Any, x: Value, shown: Mapping[int, Value], fixed: bool) -> bool:
    """Of x, computed of whole tensors or of packed tokens, as x is arranged."""
    view = shown.get(id(value))
    if view is not None:
        root = root_of(view)
        node = None if root is None else root.producer
        if (
            node is None
            or node.kind != "pointwise"
            or len(node.options["steps"]) != 1
            or node.args[0] is not root_of(x)
        ):
            return False
        (step,) = node.options["steps"]
        if letters(view) != letters(x) or letters(x) != ["N", "T", "C"] or step.kwargs or len(node.args) != 1:
            return False
        first, *rest = step.args
        return _squares(op_name(step.target), rest, first, fixed)
    node = _made(value, "pow", "mul", "square")
    if node is None:
        return False
    of, *rest = (shown.get(id(v), v) if isinstance(v, Value) else v for v in node.args)
    return of is x and _squares(op_name(node.target), rest, x, fixed)


def _squares(name: str, rest: list[Any], x: Any, fixed: bool) -> bool:
    """Of x, by an op with these further arguments."""
    if name == "pow":
        return len(rest) == 1 and is_number(rest[0], fixed) and number(rest[0]) == 2
    if name == "square":
        return not rest
    return name == "mul" and len(rest) == 1 and (rest[0] is x or (isinstance(x, Ref) and rest[0] == x))


def _made(value: Any, *names: str) -> Node | None:
    """The node of a value that one of these ops made, without keywords."""
    node = value.producer if isinstance(value, Value) else None
    known = node is not None and node.kind == "aten" and op_name(node.target) in names and not node.kwargs
    return node if known else None
