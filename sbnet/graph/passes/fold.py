"""Weights made from weights: normalisations into the convolutions before them, parallel convolutions into one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.graph.ir import Graph, Node, Value, computed, only_user
from sbnet.graph.kinds import kind_of


def fold_affine(graph: Graph) -> Graph:
    """An affine function of a convolution's result alone is part of its weights; one of another is part of that."""
    for node in list(graph.nodes):
        if node.kind != "affine":
            continue
        x: Value = node.args[0]
        before = x.producer
        if before is None or only_user(x, graph) is not node:
            continue
        if kind_of(before).filters and not plain(before):
            continue
        if kind_of(before).filters:
            _into_convolution(before, node)
        elif before.kind == "affine":
            _into_affine(before, node)
        else:
            continue
        skip(graph, node, before)
    return graph


def plain(conv: Node) -> bool:
    """Nothing follows the convolution in its node yet."""
    return "residual" not in conv.params and conv.options.get("activation") is None


def skip(graph: Graph, node: Node, before: Node) -> None:
    """`before` gives what `node` gave."""
    graph.swap(node, None)
    before.outputs = [node.output]
    node.output.producer = before


def _into_convolution(conv: Node, affine: Node) -> None:
    weight, bias = conv.params["weight"], conv.params.get("bias")
    scale, shift = affine.params.get("scale"), affine.params.get("shift")
    transposed, groups = conv.kind == "conv_transpose", conv.options["groups"]

    def scaled(weight: Tensor, scale: Tensor) -> Tensor:
        weight = weight.double()
        if not transposed:
            return weight * scale[:, None, None, None]
        return weight * scale.view(groups, 1, -1).expand(groups, weight.shape[0] // groups, -1).reshape(
            weight.shape[0], -1
        )[:, :, None, None]  # fmt: skip

    def shifted(bias: Tensor | None, scale: Tensor | None, shift: Tensor | None) -> Tensor:
        found = 0.0 if bias is None else bias.double() if scale is None else bias.double() * scale
        return found + shift if shift is not None else found  # type: ignore[return-value]

    if scale is not None:
        conv.params["weight"] = computed(f"{weight.name}.folded", weight, scaled, weight, scale)
    if bias is not None or shift is not None:
        like = bias if bias is not None else shift
        assert like is not None
        conv.params["bias"] = computed(f"{weight.name}.bias", like, shifted, bias, scale, shift)


def _into_affine(first: Node, second: Node) -> None:
    scale, shift = first.params.get("scale"), first.params.get("shift")
    more, offset = second.params.get("scale"), second.params.get("shift")
    if scale is not None and more is not None:
        first.params["scale"] = computed(f"{scale.name}.scaled", scale, torch.mul, scale, more)
    elif more is not None:
        first.params["scale"] = more
    if shift is not None or offset is not None:

        def moved(shift: Tensor | None, more: Tensor | None, offset: Tensor | None) -> Tensor:
            found = None if shift is None else shift if more is None else shift * more
            return offset if found is None else found if offset is None else found + offset  # type: ignore[return-value]

        like = shift if shift is not None else offset
        assert like is not None
        first.params["shift"] = computed(f"{like.name}.moved", like, moved, shift, more, offset)


def merge_branches(graph: Graph) -> Graph:
    """conv(x) + conv(x) is one convolution, and x or an affine function of it is one as well (RepVGG, MobileOne)."""
    for node in list(graph.nodes):
        if node.kind == "add":
            _merge(graph, node)
    return graph


def _merge(graph: Graph, node: Node) -> bool:
    left, right = (v.producer for v in node.args)
    if left is None or right is None or left is right:
        return False
    if any(only_user(v, graph) is not node for v in node.args):
        return False
    if left.kind != "conv" and right.kind != "conv":
        return False
    if left.kind != "conv":
        left, right = right, left
    if not plain(left) or left.args[0] is not right.args[0] or right.kind not in ("conv", "affine"):
        return False
    if right.kind == "conv" and not plain(right):
        return False
    window = _common_window(left, right)
    if window is None:
        return False
    kernel, padding = window
    groups, channels = left.options["groups"], left.params["weight"].shape[1]
    shape = (*left.params["weight"].shape[:2], *kernel)
    weights = [_as_kernel(n, kernel, groups, channels) for n in (left, right)]
    biases = [n.params.get("bias" if n.kind == "conv" else "shift") for n in (left, right)]
    like = left.params["weight"]
    merged = Node("conv", [left.args[0]], [node.output], options=dict(left.options, padding=padding), path=left.path)
    merged.line = left.line
    merged.params["weight"] = computed(f"{like.name}.merged", like, torch.add, *weights, shape=shape)
    given = [bias for bias in biases if bias is not None]
    if given:

        def summed(*terms: Tensor) -> Tensor:
            return sum(t.double() for t in terms)  # type: ignore[return-value]

        merged.params["bias"] = computed(f"{like.name}.merged_bias", given[0], summed, *given)
    graph.swap(node, merged, left, right)
    return True


def _geometry(node: Node) -> dict[str, Any]:
    if node.kind == "affine":
        return {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "kernel": (1, 1)}
    return {
        **{k: node.options[k] for k in ("stride", "padding", "dilation")},
        "kernel": node.params["weight"].shape[2:],
    }


def _common_window(left: Node, right: Node) -> tuple[Any, Any] | None:
    """(kernel size, padding) of the larger window, where both are centred on the same pixel."""
    a, b = _geometry(left), _geometry(right)
    if right.kind == "conv" and left.options["groups"] != right.options["groups"]:
        return None
    if a["stride"] != b["stride"] or max(*a["dilation"], *b["dilation"]) > 1:
        return None
    big = a if a["kernel"][0] >= b["kernel"][0] else b
    small = b if big is a else a
    fits = all(
        big["kernel"][d] - small["kernel"][d] == 2 * (big["padding"][d] - small["padding"][d]) >= 0 for d in range(2)
    )
    return (tuple(big["kernel"]), big["padding"]) if fits else None


def _as_kernel(node: Node, kernel: Any, groups: int, channels: int) -> Value:
    """A node's weight in float64, padded to the kernel's size."""
    if node.kind == "affine":
        scale = node.params.get("scale", node.params.get("shift"))
        ones = "scale" not in node.params
        assert scale is not None

        def identity(scale: Tensor) -> Tensor:
            scale = torch.ones_like(scale, dtype=torch.float64) if ones else scale.double()
            outputs = len(scale)
            weight = scale.new_zeros(outputs, channels, *kernel)
            rows = torch.arange(outputs, device=scale.device)
            weight[rows, rows % channels, kernel[0] // 2, kernel[1] // 2] = scale
            return weight

        return computed(f"{scale.name}.kernel", scale, identity, scale)
    weight = node.params["weight"]
    dy, dx = ((kernel[d] - weight.shape[2 + d]) // 2 for d in range(2))
    return computed(f"{weight.name}.padded", weight, lambda w: F.pad(w.double(), (dx, dx, dy, dy)), weight)
