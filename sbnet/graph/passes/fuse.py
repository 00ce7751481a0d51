"""What follows a convolution runs in its epilogue; what follows nothing of the kind becomes as few nodes as can be."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.graph.axes import op_name
from sbnet.graph.ir import Graph, Node, Ref, Step, Value, computed, only_user
from sbnet.graph.passes.fold import plain, skip
from sbnet.ops.common import activate


def fuse_residuals(graph: Graph) -> Graph:
    """conv(x) + y, where the convolution's result has no other consumer, is one node, in the sum's place."""
    for node in list(graph.nodes):
        if node.kind != "add" or node.args[0] is node.args[1]:  # y + y has no shortcut
            continue
        for at in (1, 0):  # the second operand is the shortcut in most networks' code; the later one in the graph wins
            conv, other = node.args[at].producer, node.args[1 - at]
            if conv is None or conv.kind != "conv" or not plain(conv) or only_user(node.args[at], graph) is not node:
                continue
            rival = other.producer
            both = rival is not None and rival.kind == "conv" and plain(rival) and only_user(other, graph) is node
            if both and graph.nodes.index(rival) > graph.nodes.index(conv):  # type: ignore[arg-type]
                continue
            fused = Node("conv", conv.args, [node.output], options=conv.options, path=conv.path, line=conv.line)
            fused.params = {**conv.params, "residual": other}
            graph.swap(node, fused, conv)
            break
    return graph


def fuse_residuals_after(graph: Graph) -> Graph:
    """act(conv(x)) + y, where the activation's result has no other consumer, is one node, in the sum's place."""
    for node in list(graph.nodes):
        if node.kind != "add" or node.options.get("activation") is not None or node.args[0] is node.args[1]:
            continue
        found = [k for k in (1, 0) if _takes_after(node.args[k], node, graph)]
        if found:  # the later one in the graph, which the other one's result is there for
            at = max(found, key=lambda k: graph.nodes.index(node.args[k].producer))  # type: ignore[arg-type]
            conv, other = node.args[at].producer, node.args[1 - at]
            fused = Node("conv", conv.args, [node.output], path=conv.path, line=conv.line)  # type: ignore[union-attr]
            fused.options = {**conv.options, "residual_after": True}  # type: ignore[union-attr]
            fused.params = {**conv.params, "residual": other}  # type: ignore[union-attr]
            graph.swap(node, fused, conv)  # type: ignore[arg-type]
    return graph


def _takes_after(value: Value, add: Node, graph: Graph) -> bool:
    conv = value.producer
    return conv is not None and conv.kind == "conv" and "residual" not in conv.params and only_user(value, graph) is add


GATES = {"sigmoid": "silu", "hardsigmoid": "hardswish"}


def recognise_activations(graph: Graph) -> Graph:
    """x * sigmoid(x), as ONNX files and some people write it, is silu; x * hardsigmoid(x) is hardswish."""
    for node in list(graph.nodes):
        if only_step(node) != "mul" or len(node.args) != 2:
            continue
        for x, gate in (node.args, node.args[::-1]):
            before = gate.producer
            name = None if before is None else GATES.get(only_step(before))
            if name is not None and before.args == [x] and only_user(gate, graph) is node:
                act = Node("act", [x], node.outputs, options={"activation": name}, path=node.path, line=node.line)
                graph.swap(node, act, before)
                break
    return graph


def only_step(node: Node) -> str:
    """The name of a pointwise node's only op of its arguments as they are; else nothing."""
    steps = node.options["steps"] if node.kind == "pointwise" else []
    if len(steps) != 1 or steps[0].kwargs or not all(isinstance(v, Ref) for v in steps[0].args):
        return ""
    return op_name(steps[0].target)


def fuse_activations(graph: Graph) -> Graph:
    """An activation of a convolution's result, or of a sum or affine function, without another consumer."""
    for node in list(graph.nodes):
        if node.kind != "act":
            continue
        before = node.args[0].producer
        if before is None or before.kind not in ("conv", "conv_transpose", "affine", "add"):
            continue
        if before.options.get("activation") is not None or only_user(node.args[0], graph) is not node:
            continue
        before.options, before.params = {**before.options, **node.options}, {**before.params, **node.params}
        skip(graph, node, before)
    return graph


def lower_affine(graph: Graph) -> Graph:
    """What is left of affine functions, sums and activations: pointwise nodes, act(x * scale + shift + y); a PReLU
    alone is a pointwise node."""
    for node in graph.nodes:
        if node.kind == "act" and "slope" in node.params:
            node.kind, node.args, node.params = "pointwise", [*node.args, node.params["slope"]], {}
            node.options = {"steps": [Step(torch.ops.aten.prelu.default, (Ref(0), Ref(1)), {})]}
        if node.kind == "add":
            node.params = {**node.params, "residual": node.args[1]}  # beside the slopes of a PReLU that joined
            node.args = [node.args[0]]
        if node.kind in ("affine", "add", "act"):
            params, x = node.params, node.args[0]
            node.kind, channels = "channelwise", x.shape[1]
            node.params = {"weight": _identity_weight(channels, x, params.get("scale"))}
            node.params |= {
                new: params[old]
                for new, old in (("bias", "shift"), ("residual", "residual"), ("slope", "slope"))
                if old in params
            }
            geometry = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": channels}
            node.options = {**geometry, **node.options}
    return graph


def fuse_pixels(graph: Graph) -> Graph:
    """Pointwise nodes after one another are one; channelwise ones between them join."""
    todo = [node for node in graph.nodes if node.kind == "pointwise"]
    while todo:
        node = todo.pop(0)
        if any(node is n for n in graph.nodes) and _join(graph, node):
            todo.insert(0, node.output.producer)  # type: ignore[arg-type]
    return graph


def join_slices(graph: Graph) -> Graph:
    """Operands of a concatenation that are neighbouring slices of one feature map are that map, where they are all of
    it: it can then be written where the concatenation needs it."""
    for node in graph.nodes:
        if node.kind != "cat":
            continue
        args: list[Value] = []
        at = 0
        while at < len(node.args):
            source, end, covered = node.args[at], at + 1, 0
            part = source.producer
            if part is not None and part.kind == "slice" and part.options["start"] == 0:
                end, whole = at, part.args[0]
                while end < len(node.args) and _continues(node.args[end], whole, covered):
                    covered += node.args[end].shape[1]
                    end += 1
                source, end = (whole, end) if covered == whole.shape[1] else (source, at + 1)
            args.append(source)
            at = end
        node.args = args
    return graph


def _continues(value: Value, whole: Value, start: int) -> bool:
    part = value.producer
    return part is not None and part.kind == "slice" and part.args[0] is whole and part.options["start"] == start


def as_pixel(node: Node) -> tuple[list[Value], list[Step]]:
    """A channelwise node as the steps of a pointwise node."""
    if node.kind == "pointwise":
        return list(node.args), list(node.options["steps"])
    args = list({id(v): v for v in [node.args[0], *node.params.values()]}.values())
    refs = {name: Ref(next(k for k, a in enumerate(args) if a is v)) for name, v in node.params.items()}
    options = {k: v for k, v in node.options.items() if k in ("activation", "negative_slope")}
    options |= {k: v for k, v in refs.items() if k == "slope"}
    return args, [Step(channelwise, (Ref(0), refs["weight"], refs.get("bias"), refs.get("residual")), options)]


def channelwise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None = None,
    negative_slope: float = 0.01,
    slope: Tensor | None = None,
) -> Tensor:
    """act(x * weight + bias + residual), one number a channel."""
    x = x * weight.to(x.dtype).reshape(-1, 1, 1)
    if bias is not None:
        x = x + bias.to(x.dtype)[:, None, None]
    if residual is not None:
        x = x + residual
    return activate(x, activation, negative_slope, slope)


def _join(graph: Graph, node: Node) -> bool:
    """Takes one node before `node`, which alone reads it, into it."""
    for value in node.args:
        before = value.producer
        if before is None or before.kind not in ("pointwise", "channelwise") or only_user(value, graph) is not node:
            continue
        if before.output.shape != node.output.shape:
            continue
        args, steps = as_pixel(before)
        kept = [v for v in node.args if v is not value]
        merged = list({id(v): v for v in [*args, *kept]}.values())

        def place(v: Value, merged: list[Value] = merged) -> int:
            return next(k for k, m in enumerate(merged) if m is v)

        moved = [_shifted(s, 0, {k: Ref(place(v)) for k, v in enumerate(args)}) for s in steps]
        last = Ref(len(steps) - 1, step=True)
        own = {k: last if v is value else Ref(place(v)) for k, v in enumerate(node.args)}
        moved += [_shifted(s, len(steps), own) for s in node.options["steps"]]
        joined = Node("pointwise", merged, node.outputs, options={"steps": moved}, path=node.path, line=node.line)
        graph.swap(node, joined, before)
        return True
    return False


def _shifted(step: Step, by: int, places: dict[int, Ref]) -> Step:
    def swap(v: Any) -> Any:
        if not isinstance(v, Ref):
            return v
        return Ref(v.at + by, True) if v.step else places[v.at]

    args, kwargs = pytree.tree_map(swap, (step.args, step.kwargs))
    return Step(step.target, args, kwargs)


def _identity_weight(channels: int, like: Value, scale: Value | None) -> Value:
    """The weight of the depthwise 1x1 convolution that a channelwise node is."""

    def made(scale: Tensor | None) -> Tensor:
        ones = torch.ones(channels, dtype=torch.float64)
        return (ones if scale is None else scale.double()).reshape(-1, 1, 1, 1)

    return computed(f"{like.name}.identity", like, made, scale, shape=(channels, 1, 1, 1))
