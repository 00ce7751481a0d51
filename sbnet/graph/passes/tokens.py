"""Patches of an image that one product makes tokens of: only those of active tokens are read."""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor

from sbnet.graph.axes import Axes
from sbnet.graph.ir import Graph, Node, Value, computed, only_user


def pack_patches(graph: Graph) -> Graph:
    """Packed tokens of a convolution whose kernel is its stride become packed patches and a product."""
    for node in list(graph.nodes):
        conv = node.args[0].producer if node.kind == "pack" else None
        if conv is None or conv.kind != "conv" or only_user(conv.output, graph) is not node:
            continue
        x, weight, o = conv.args[0], conv.params["weight"], conv.options
        patch = tuple(weight.shape[2:])
        whole = x.plane is not None and all(n % p == 0 for n, p in zip(x.plane, patch, strict=True))
        plain = (o["stride"], o["padding"], o["dilation"], o["groups"]) == (patch, (0, 0), (1, 1), 1)
        if not (whole and plain) or patch[0] != patch[1] or patch == (1, 1) or "residual" in conv.params:
            continue
        channels = x.shape[1] * math.prod(patch)
        packed = Node("pack", [x], [], options={"patch": patch}, path=conv.path, line=conv.line)
        n, _, height, width = node.output.shape
        shape = (n, channels, height, width)
        packed.outputs.append(
            dataclasses.replace(
                node.output,
                name=f"{conv.output.name}_patches",
                shape=shape,
                axes=Axes.planes(shape),
                producer=packed,
                users=[],
            )
        )
        conv.args, conv.options = [packed.output], {**o, "stride": (1, 1)}
        conv.params["weight"] = _as_product(weight, channels)
        node.output.producer, conv.outputs = conv, node.outputs
        at = graph.nodes.index(conv)
        graph.nodes.insert(at, packed)
        graph.nodes.remove(node)
        graph.find_users()
    return graph


def _as_product(weight: Value, channels: int) -> Value:
    def as_rows(w: Tensor) -> Tensor:
        return w.flatten(1)[:, :, None, None]

    return computed(f"{weight.name}.patches", weight, as_rows, weight, shape=(weight.shape[0], channels, 1, 1))
