"""Layers that read windows and multiply by no weights: pools, resizes, rearrangements."""

from __future__ import annotations

from typing import Any

from sbnet.geometry import Window
from sbnet.graph.ir import Node, Value
from sbnet.graph.kinds.kind import Context, Get, Given, Kind, Target
from sbnet.ops import (
    sparse_avg_pool2d,
    sparse_avg_pool2d_,
    sparse_max_pool2d,
    sparse_max_pool2d_,
    sparse_rearrange,
    sparse_rearrange_,
    sparse_resize2d,
    sparse_resize2d_,
)


class WindowLayer(Kind):
    """A layer of x and numbers: `call` gives it, `write` writes it, both by `numbers`."""

    written = planned = recorded = True
    call: Any
    write: Any

    def numbers(self, node: Node) -> dict[str, Any]:
        return node.options

    def apply(self, node: Node, given: Given) -> Any:
        return self.call(given.args[0], given.active, **self.numbers(node))

    def step(self, node: Node, get: Get, to: Target, context: Context) -> None:
        self.write(get(node.args[0]), to.active, to.out, **self.numbers(node), fringe=to.clear)


class MaxPool(WindowLayer):
    """The options of PyTorch's pools."""

    name, sizeless = "max_pool", True
    call: Any = staticmethod(sparse_max_pool2d)
    write: Any = staticmethod(sparse_max_pool2d_)

    def window(self, node: Node, value: Value) -> Window | str:
        o = node.options
        return Window.conv(o["kernel_size"], o["stride"], o["padding"], o.get("dilation", (1, 1)))


class AvgPool(MaxPool):
    name = "avg_pool"
    call, write = staticmethod(sparse_avg_pool2d), staticmethod(sparse_avg_pool2d_)


class Resize(WindowLayer):
    """size, mode, align_corners, scale."""

    name = "resize"
    call, write = staticmethod(sparse_resize2d), staticmethod(sparse_resize2d_)

    def window(self, node: Node, value: Value) -> Window | str:
        o = node.options
        assert value.plane is not None
        ratios = o.get("ratios", (0.0, 0.0))
        if o["scale"] is not None:
            ratios = tuple(1 / s for s in o["scale"])
        return Window.resize(value.plane, o["size"], o["mode"], bool(o["align_corners"]), ratios)

    def numbers(self, node: Node) -> dict[str, Any]:
        o = node.options
        by = {"size": o["size"]} if o["scale"] is None else {"scale_factor": o["scale"]}
        return {**by, "mode": o["mode"], "align_corners": o["align_corners"]}

    def step(self, node: Node, get: Get, to: Target, context: Context) -> None:
        o = node.options  # the size is that of what it writes
        sparse_resize2d_(
            get(node.args[0]), to.active, to.out, scale_factor=o["scale"], mode=o["mode"],
            align_corners=o["align_corners"], fringe=to.clear,
        )  # fmt: skip


class Rearrange(WindowLayer):
    """up, down, groups, pad, value: shuffles of pixels and channels, padding."""

    name = "rearrange"
    call, write = staticmethod(sparse_rearrange), staticmethod(sparse_rearrange_)

    def window(self, node: Node, value: Value) -> Window | str:
        return Window.rearrange(node.options["up"], node.options["down"], node.options["pad"])
