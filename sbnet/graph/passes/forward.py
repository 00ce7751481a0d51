"""Affine functions into the weights of the convolution after them."""

from __future__ import annotations

from torch import Tensor

from sbnet.graph.ir import Graph, Node, Value, computed, only_user


def fold_forward(graph: Graph) -> Graph:
    """x * scale + shift, which a convolution alone reads that looks at one pixel, is part of that one's weights. (The
    zeros around a plane, and beyond its active blocks, are no x: a wider window reads them instead of the shift.) After
    activations are fused: what is left follows one, as in the blocks of PP-LCNet and PP-OCR."""
    for node in list(graph.nodes):
        if node.kind != "affine" or node.options.get("activation") is not None:
            continue
        conv = only_user(node.output, graph)
        if conv is not None and _looks_at_a_pixel(conv) and conv.args == [node.output]:
            _fold(graph, node, conv)
    return graph


def _looks_at_a_pixel(conv: Node) -> bool:
    options = conv.options
    if conv.kind != "conv" or tuple(conv.params["weight"].shape[2:]) != (1, 1):
        return False
    return tuple(options["stride"]) == (1, 1) and tuple(options["padding"]) == (0, 0)


def _fold(graph: Graph, affine: Node, conv: Node) -> None:
    weight, bias, groups = conv.params["weight"], conv.params.get("bias"), conv.options["groups"]
    scale, shift = affine.params.get("scale"), affine.params.get("shift")

    def of_inputs(numbers: Tensor, weight: Tensor) -> Tensor:
        """A number an input channel as [K,C/groups]."""
        return numbers.double().view(groups, 1, -1).expand(-1, len(weight) // groups, -1).flatten(0, 1)

    def scaled(weight: Tensor, scale: Tensor) -> Tensor:
        return weight.double() * of_inputs(scale, weight)[:, :, None, None]

    def shifted(weight: Tensor, bias: Tensor | None, shift: Tensor) -> Tensor:
        found = (weight.double().flatten(1) * of_inputs(shift, weight)).sum(1)
        return found if bias is None else found + bias.double()

    own = conv.inputs()
    if shift is not None:
        conv.params["bias"] = computed(
            f"{weight.name}.shifted", bias if bias is not None else weight, shifted, weight, bias, shift,
            shape=(weight.shape[0],),
        )  # fmt: skip
    if scale is not None:
        conv.params["weight"] = computed(f"{weight.name}.scaled", weight, scaled, weight, scale)
    conv.args = [affine.args[0]]
    graph.swap(affine, None)
    _users(graph, conv, own)


def _users(graph: Graph, node: Node, before: list[Value]) -> None:
    """Keeps true who reads what, of a node that read other values before."""
    for value in before:
        value.users = [user for user in value.users if user is not node]
    for value in {id(v): v for v in node.inputs()}.values():
        value.users.append(node)
