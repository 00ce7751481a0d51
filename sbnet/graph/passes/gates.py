"""Gates of squeeze and excitation: a global average, two products and two activations are one node."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from sbnet.graph.axes import op_name
from sbnet.graph.ir import Graph, Node, Value, computed, only_user
from sbnet.graph.passes.pooled import VIEWS, is_product
from sbnet.ops.masked.squeeze_excite import STEPS

if TYPE_CHECKING:
    from torch import Tensor

    from sbnet.graph.passes.storage import Storage
    from sbnet.graph.plan import Plan

MOST = 12288  # channels that the op takes


class Gate(NamedTuple):
    """What a gate is made of, the last node first."""

    nodes: list[Node]
    steps: list[str]
    products: list[Node]
    pool: Node


def join_gates(plan: Plan) -> Plan:
    """Of a plan for CUDA, where launches wait for one another. (The cached contract's pools read all pixels.)"""
    for last in list(plan.graph.nodes) if plan.mode != "cached" else ():
        gate = _gate(last, plan.graph)
        if gate is None:
            continue
        x, y = gate.pool.args[0], last.output
        node = Node("squeeze_excite", [x], [y], path=last.path, line=last.line)
        node.options = {"activation": gate.steps[1], "gate": gate.steps[0], "shape": tuple(y.shape)}
        for k, product in enumerate(reversed(gate.products), 1):
            weight, bias = product.args[1], product.args[2] if len(product.args) > 2 else None
            node.params[f"weight{k}"] = _matrix(weight)
            if bias is not None:
                node.params[f"bias{k}"] = bias
        plan.graph.swap(last, node, *gate.nodes[1:])
    return plan


def gates_that_scale(plan: Plan, storage: Storage) -> dict[Node, Node]:
    """Gates whose launch may multiply by them, too, what the next node would: {gate: that node}. Its output is then
    written a launch early, which is in order where the two are neighbours on one stream."""
    found, beside = {}, storage.lanes
    for gate, then in pairwise(plan.graph.nodes if plan.mode == "masked" else ()):
        if gate.kind != "squeeze_excite" or then.options.get("program") != "mul a" or then.output not in storage.place:
            continue
        x, (root, _) = gate.args[0], storage.place[then.output]
        if then.args[0] is not x or then.params["a"] is not gate.output or only_user(gate.output, plan.graph) is None:
            continue
        clears = root.kept or root.fringe is not None
        if clears or x not in storage.place or storage.place[x][0].buffer == root.buffer:
            continue
        if beside is None or (beside.of[gate] == beside.of[then] and not beside.waits.get(then)):
            found[gate] = then
    return found


def _gate(last: Node, graph: Graph) -> Gate | None:
    """From its last activation back."""
    nodes, steps, products = [last], [_step(last)], list[Node]()
    while steps[0]:
        value = nodes[-1].args[0] if nodes[-1].args else None
        before = value.producer if isinstance(value, Value) else None
        if (
            before is None
            or value is None
            or only_user(value, graph) is not nodes[-1]
            or value.dtype != last.output.dtype
        ):
            return None
        nodes.append(before)
        if before.kind == "adaptive_pool":
            break
        if _is_product(before) and len(products) < 2:
            products.append(before)
        elif _step(before) and len(products) == 1 and len(steps) == 1:
            steps.append(_step(before))
        elif not _is_view(before):
            return None
    pool = nodes[-1]
    if pool.kind != "adaptive_pool" or not len(products) == len(steps) == 2:
        return None
    if pool.options["size"] != (1, 1) or pool.options["method"] != "avg":
        return None
    wide, narrow = pool.args[0].shape[1], products[1].args[1].shape[0]
    fits = products[0].args[1].shape[0] == wide and max(wide, narrow) <= MOST
    biases = {v.dtype for p in products for v in p.args[2:3] if isinstance(v, Value)}
    return Gate(nodes, steps, products, pool) if fits and biases <= {last.output.dtype} else None


def _step(node: Node) -> str:
    """The name of an op that is one of the gate's activations; else nothing."""
    name = op_name(node.target) if node.kind == "aten" else ""
    plain = name in STEPS and len(node.args) == 1 and not node.kwargs and node.output.size is None
    return name if plain else ""


def _is_product(node: Node) -> bool:
    if node.kind != "aten" or node.kwargs or node.output.size is not None:
        return False
    weights = [v for v in node.args[1:3] if isinstance(v, Value)]
    plain = op_name(node.target) == "linear" or is_product(node)
    return plain and all(v.constant and v.dtype == node.output.dtype for v in weights)


def _is_view(node: Node) -> bool:
    """Does it leave each sample's numbers as they are?"""
    x = node.args[0] if node.kind == "aten" and node.args else None
    name = op_name(node.target) if node.kind == "aten" else ""
    return name in VIEWS and isinstance(x, Value) and x.shape[:2] == node.output.shape[:2] and node.output.size is None


def _matrix(weight: Value) -> Value:
    """A weight [K,C] or [K,C,1,1] as [K,C]."""
    if len(weight.shape) == 2:
        return weight

    def flat(t: Any) -> Tensor:
        return t.flatten(1)

    return computed(f"{weight.name}.rows", weight, flat, weight, shape=weight.shape[:2])
