"""Graph passes on an exported model: NHWC inside, Transposes at the boundary; then zeros.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from sbnet.export import blocksparse, bottleneck, zeros
from sbnet.export.schemas import DOMAIN
from sbnet.export.translate import TO_NCHW, TO_NHWC

# Work on each element alone: a Transpose may go on either side.
UNARY = {
    "Abs", "Cast", "Ceil", "Clip", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity",
    "LeakyRelu", "Log", "Mish", "Neg", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Softplus", "Sqrt", "Tanh",
}  # fmt: skip
BINARY = {"Add", "Div", "Max", "Min", "Mul", "Pow", "Sub"}


def optimise(model: ir.Model, fuse_bottlenecks: bool = False) -> None:
    """All passes behind `fold_constants`, in place."""
    graph = model.graph
    fold_constants(graph)
    blocksparse.name_coords(graph)
    blocksparse.name_lists(graph)
    share(graph)
    while cancel(graph) + sink(graph) + flatten(graph):
        share(graph)
    fold_into_stacks(graph)
    if fuse_bottlenecks:
        bottleneck.fuse(graph)
    zeros.relax(graph)
    drop_unused(graph)
    graph.sort()


def transposes(graph: ir.Graph) -> Iterator[ir.Node]:
    return (node for node in list(graph) if node.domain == "" and node.op_type == "Transpose" and node.graph is graph)


def _perm(node: ir.Node | None) -> list[int] | None:
    if node is None or node.domain != "" or node.op_type != "Transpose" or "perm" not in node.attributes:
        return None
    return list(node.attributes["perm"].as_ints())


def _source(value: ir.Value | None, perm: Sequence[int]) -> ir.Value | None:
    """x where value = Transpose(x, perm)."""
    producer = value.producer() if value is not None else None
    return producer.inputs[0] if producer is not None and _perm(producer) == list(perm) else None


def _replace(graph: ir.Graph, old: ir.Value, new: ir.Value) -> bool:
    """Every use of old reads new. A graph output keeps its value (and name)."""
    if old.is_graph_output():
        return False
    ir.convenience.replace_all_uses_with(old, new)
    return True


def _permuted(value: ir.Value, perm: Sequence[int]) -> ir.Shape | None:
    return None if value.shape is None else ir.Shape([value.shape[p] for p in perm])


def _transpose(graph: ir.Graph, after: ir.Node, value: ir.Value, perm: Sequence[int]) -> ir.Value:
    node = ir.node("Transpose", [value], {"perm": list(perm)})
    out = node.outputs[0]
    out.type, out.shape = value.type, _permuted(value, perm)
    graph.insert_after(after, node)
    return out


def drop_unused(graph: ir.Graph) -> None:
    for node in reversed(list(graph)):
        if not any(out.is_graph_output() or out.uses() for out in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]


def fold_constants(graph: ir.Graph) -> None:
    """Weights are stored the way the ops read them."""
    made: dict[tuple[int, tuple[int, ...]], ir.Value] = {}
    for node in transposes(graph):
        value, perm = node.inputs[0], _perm(node)
        if value is None or value.const_value is None or value.is_graph_input() or perm is None:
            continue
        key = id(value), tuple(perm)
        if key not in made:
            made[key] = _transposed(graph, value, perm)
        _replace(graph, node.outputs[0], made[key])
    drop_unused(graph)


def _transposed(graph: ir.Graph, value: ir.Value, perm: list[int]) -> ir.Value:
    """An initializer; it has the name of the old one where nothing reads that in its own order."""
    old = value.const_value
    assert old is not None
    array = np.ascontiguousarray(old.numpy().transpose(perm))
    name = value.name or ""
    if value.is_graph_output() or any(_perm(user) != perm for user, _ in value.uses()):
        name += f"_{''.join(map(str, perm))}"
    elif name in graph.initializers:
        del graph.initializers[name]
    new = ir.Value(name=name, const_value=ir.Tensor(array, dtype=old.dtype, name=name))
    new.dtype, new.shape = old.dtype, ir.Shape(array.shape)
    graph.register_initializer(new)
    return new


def share(graph: ir.Graph) -> None:
    """One Transpose where several do the same."""
    seen: dict[tuple[int, tuple[int, ...]], ir.Value] = {}
    for node in transposes(graph):
        key = (id(node.inputs[0]), tuple(_perm(node) or ()))
        first = seen.setdefault(key, node.outputs[0])
        if first is not node.outputs[0]:
            _replace(graph, node.outputs[0], first)
    drop_unused(graph)


def cancel(graph: ir.Graph) -> int:
    """Transpose(Transpose(x)) that undo each other are x. Returns how many went."""
    changed = 0
    for node in transposes(graph):
        perm = _perm(node) or []
        inverse = [perm.index(k) for k in range(len(perm))]
        source = _source(node.inputs[0], inverse)
        if source is not None and node.outputs[0].uses():
            changed += _replace(graph, node.outputs[0], source)
    drop_unused(graph)
    return changed


def flatten(graph: ir.Graph) -> int:
    """Rows of tokens [N,H*W,C] are those of a plane [N,H,W,C], and the other way round: one Reshape where an NCHW
    plane, or its flat form, stood between. Returns how many went."""
    changed = 0
    for node in transposes(graph):
        perm, middle = _perm(node), node.inputs[0].producer() if node.inputs[0] is not None else None
        if perm not in ([0, 2, 1], TO_NHWC) or middle is None or middle.domain or middle.op_type != "Reshape":
            continue
        source = _source(middle.inputs[0], TO_NCHW if perm == [0, 2, 1] else [0, 2, 1])
        before, after = _sizes(middle.inputs[0]), _sizes(node.inputs[0])
        if source is None or not before or not after or before[:2] != after[:2]:
            continue
        if (len(before), len(after)) != ((4, 3) if perm == [0, 2, 1] else (3, 4)) or not node.outputs[0].uses():
            continue
        constant = ir.node("Constant", [], {"value_ints": [after[0], *after[2:], after[1]]})
        made = ir.node("Reshape", [source, constant.outputs[0]])
        constant.outputs[0].dtype, constant.outputs[0].shape = ir.DataType.INT64, ir.Shape([len(after)])
        made.outputs[0].type, made.outputs[0].shape = node.outputs[0].type, ir.Shape([after[0], *after[2:], after[1]])
        if node.outputs[0].is_graph_output():
            continue
        graph.insert_before(node, [constant, made])
        changed += _replace(graph, node.outputs[0], made.outputs[0])
    drop_unused(graph)
    return changed


def _sizes(value: ir.Value | None) -> list[int]:
    """Of a value whose sizes are all known, else nothing."""
    known = value is not None and value.shape is not None and value.shape.is_static()
    return [int(n) for n in value.shape] if known else []  # type: ignore[union-attr, arg-type]


def _scalar(value: ir.Value | None) -> bool:
    if value is None or value.shape is None or not value.shape.is_static():
        return value is None
    return value.const_value is not None and all(d == 1 for d in value.shape.numpy()) and len(value.shape) <= 4


def _elementwise(node: ir.Node) -> bool:
    """Could NHWC tensors go through this node? (Concatenating channels, too.)"""
    if node.domain != "" or len(node.outputs) != 1 or not any(_source(v, TO_NCHW) is not None for v in node.inputs):
        return False
    if node.op_type in UNARY:
        return _source(node.inputs[0], TO_NCHW) is not None and all(_scalar(v) for v in node.inputs[1:])
    if node.op_type in BINARY:
        return all(_source(v, TO_NCHW) is not None or _scalar(v) for v in node.inputs)
    if node.op_type == "Concat":
        axis = node.attributes["axis"].as_int()
        return axis in (1, -3) and all(_source(v, TO_NCHW) is not None for v in node.inputs)
    return False


def _wants_nhwc(value: ir.Value, seen: set[int]) -> bool:
    """Does the value, or an elementwise function of it, reach an op that takes NHWC?"""
    for user, _ in value.uses():
        if _perm(user) == TO_NHWC:
            return True
        known = user.op_type in UNARY | BINARY | {"Concat"} and user.domain == "" and id(user) not in seen
        if known and _wants_nhwc(user.outputs[0], seen | {id(user)}):
            return True
    return False


def sink(graph: ir.Graph) -> int:
    """f(Transpose(x)) = Transpose(f(x)) for elementwise f on the way to an op that takes NHWC."""
    changed = 0
    for node in list(graph):
        if not _elementwise(node) or not _wants_nhwc(node.outputs[0], set()):
            continue
        out = node.outputs[0]
        inputs = [v if (s := _source(v, TO_NCHW)) is None else s for v in node.inputs]
        attributes = dict(node.attributes)
        if node.op_type == "Concat":
            attributes["axis"] = ir.AttrInt64("axis", 3)
        inner = ir.Node("", node.op_type, inputs, list(attributes.values()), version=node.version)
        inner.outputs[0].type, inner.outputs[0].shape = out.type, _permuted(out, TO_NHWC)
        graph.insert_after(node, inner)
        back = _transpose(graph, inner, inner.outputs[0], TO_NCHW)
        if out.is_graph_output():
            back.name, out.name = out.name, None
            ir.convenience.replace_all_uses_with(out, back, replace_graph_outputs=True)
        else:
            ir.convenience.replace_all_uses_with(out, back)
        changed += 1
    drop_unused(graph)
    return changed


def fold_into_stacks(graph: ir.Graph) -> None:
    """sparse_gather and sparse_scatter transpose while they copy: NCHW stacks for whatever standard ops do to them."""
    for node in list(graph):
        if node.domain != DOMAIN:
            continue
        if node.op_type == "sparse_gather":
            out = node.outputs[0]
            users = [user for user, _ in out.uses()]
            if users and not out.is_graph_output() and all(_perm(u) == TO_NCHW for u in users):
                if any(u.outputs[0].is_graph_output() for u in users):
                    continue
                node.attributes["transpose"] = ir.AttrInt64("transpose", 1)
                out.shape = _permuted(out, TO_NCHW)
                for u in users:
                    _replace(graph, u.outputs[0], out)
        elif node.op_type == "sparse_scatter":
            source = _source(node.inputs[0], TO_NHWC)
            if source is not None:
                node.attributes["transpose"] = ir.AttrInt64("transpose", 1)
                node.replace_input_with(0, source)
    drop_unused(graph)
