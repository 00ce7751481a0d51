"""Layers that reduce the active pixels of a feature map to a few numbers a sample."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sbnet.geometry import Window
from sbnet.graph.ir import Node, Value
from sbnet.graph.kinds.kind import ACTIVE, Context, Get, Given, Kind, Target
from sbnet.ops import sparse_adaptive_avg_pool2d, sparse_adaptive_max_pool2d, sparse_squeeze_excite2d


class AdaptivePool(Kind):
    """size, method ("avg" or "max"), keep: [N,C,*size], or [N,C]; of the active pixels of its input."""

    name = "adaptive_pool"
    planned = dense = True

    def window(self, node: Node, value: Value) -> Window | str:
        return ACTIVE

    def demanded(self, node: Node, value: Value, window: Window | str) -> Window | str:
        """An inactive pixel of a window counts as 0, so all of them are needed."""
        return window if value.size is None else Window.adaptive(value.size, node.options.get("size", (1, 1)))

    def listed(self, node: Node, mode: str) -> Value | None:
        return None if mode == "cached" else node.args[0]  # all pixels hold something then

    def apply(self, node: Node, given: Given) -> Any:
        x, size, average = given.args[0], node.options["size"], node.options["method"] == "avg"
        if given.active is None:
            y = F.adaptive_avg_pool2d(x, size) if average else F.adaptive_max_pool2d(x, size)
        else:
            y = (sparse_adaptive_avg_pool2d if average else sparse_adaptive_max_pool2d)(x, given.active, size)
        return y if node.options["keep"] else y.flatten(1)


class SqueezeExcite(AdaptivePool):
    """A gate: activation, gate, shape ([N,C] or [N,C,1,1]); weight1, bias1, weight2, bias2."""

    name = "squeeze_excite"

    def listed(self, node: Node, mode: str) -> Value | None:
        return node.args[0]

    def apply(self, node: Node, given: Given) -> Any:
        layers = [given.params.get(f"{name}{k}") for k in (1, 2) for name in ("weight", "bias")]
        steps = {name: node.options[name] for name in ("activation", "gate")}
        y = sparse_squeeze_excite2d(given.args[0], given.active, *layers, **steps)  # type: ignore[arg-type]
        return y if len(node.options["shape"]) == 4 else y.flatten(1)

    def step(self, node: Node, get: Get, to: Target, context: Context) -> None:
        """Of a gate that scales (passes/gates.py): x times it."""
        layers = [context.held(node, name) for name in ("weight1", "weight2", "bias1", "bias2")]
        torch.ops.sbnet.sparse_squeeze_excite2d_.default(
            get(node.args[0]), *layers, to.active.block_map, to.active.grid.numbers(), node.options["activation"],
            node.options["gate"], to.out,
        )  # fmt: skip
