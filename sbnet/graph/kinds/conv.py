"""Convolutions, and what runs by their kernels."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sbnet.geometry import Window
from sbnet.graph.ir import Node, Value
from sbnet.graph.kinds.kind import POINTWISE, Context, Get, Given, Kind, Target, edge
from sbnet.ops import (
    pack_conv_weight,
    sparse_bottleneck2d,
    sparse_bottleneck2d_,
    sparse_conv2d,
    sparse_conv2d_quantized,
    sparse_conv_transpose2d,
)
from sbnet.ops.common import check_active
from sbnet.ops.masked.conv import activation_name
from sbnet.ops.masked.layer import pairs

PLAIN = ("1x1", "3x3", "5x5", "7x7")  # kernels that have forms of their own


class Bound(NamedTuple):
    """What a convolution takes beside tensors of the call: weight, bias, geometry and activation, packed weight,
    slopes."""

    weight: Tensor
    bias: Tensor | None
    options: list[Any]
    packed: Tensor | None
    slope: Tensor | None


class Convolution(Kind):
    """What all kinds of convolutions share. weight, bias; stride, padding, dilation, groups.

    Attributes:
        op: that its nodes run by.
        geometry: options that are pairs, in the op's order.
    """

    op = ""
    geometry: tuple[str, ...] = ("stride", "padding", "dilation")
    written = planned = recorded = filters = True

    def window(self, node: Node, value: Value) -> Window | str:
        o, kernel = node.options, tuple(node.params["weight"].shape[2:])
        return Window.conv(kernel, o["stride"], o["padding"], o["dilation"])

    def pack(self, node: Node, context: Context) -> None:
        if _unseen(node):
            context.packed.pop(node, None)
        else:
            context.packed[node] = self.packed(node, context.constants[node.params["weight"]])

    def packed(self, node: Node, weight: Tensor) -> Tensor:
        return pack_conv_weight(weight, node.options["groups"])

    def bound(self, node: Node, context: Context) -> Bound:
        found = context.bound.get(node)
        if found is None:
            o = node.options
            geometry = pairs(self.op, **{name: o[name] for name in self.geometry})
            activation = activation_name(self.op, o.get("activation")), float(o.get("negative_slope", 0.01))
            options = [*geometry, o["groups"], *activation]
            weight, bias, slope = (
                context.constants[node.params["weight"]],
                *(context.held(node, name) for name in ("bias", "slope")),
            )
            found = Bound(weight, bias, options, context.packed.get(node), slope)
            if not _unseen(node):
                context.bound[node] = found
        return found

    def multiply_adds(self, node: Node) -> int:
        # A weight is [K,C/groups,R,S]. Some networks convolve vectors.
        return math.prod(node.output.shape) * math.prod(node.params["weight"].shape[1:])


def _unseen(node: Node) -> bool:
    """Is its weight a tensor of which PyTorch counts no writes? Then kernels read it as it is."""
    weight = node.params["weight"].tensor
    return weight is not None and weight.is_inference()


class Conv(Convolution):
    """conv2d: also residual; activation, negative_slope; or slope, a number a channel; residual_after: the residual is
    added to what the activation gives."""

    name, op, sizeless = "conv", "sparse_conv2d_", True

    def apply(self, node: Node, given: Given) -> Any:
        o = node.options
        return sparse_conv2d(
            given.args[0], given.params["weight"], given.params.get("bias"), given.active,
            stride=o["stride"], padding=o["padding"], dilation=o["dilation"], groups=o["groups"],
            activation=o.get("activation"), negative_slope=o.get("negative_slope", 0.01),
            residual=given.params.get("residual"), slope=given.params.get("slope"),
            residual_after=o.get("residual_after", False),
        )  # fmt: skip

    def step(self, node: Node, get: Get, to: Target, context: Context) -> None:
        """sparse_conv2d_ without what its wrapper finds again at each call: shapes and options are the plan's, and the
        executor records no gradient."""
        check_active(self.op, to.active)
        weight, bias, options, packed, slope = self.bound(node, context)
        residual = node.params.get("residual")
        torch.ops.sbnet.sparse_conv2d_.default(
            get(node.args[0]), weight, bias, None if residual is None else get(residual), slope, to.active.indices,
            to.active.count, to.active.grid.numbers(), *options, node.options.get("residual_after", False),
            context.allow_tf32, to.out, *edge(to.clear), packed,
        )  # fmt: skip

    def form(self, node: Node) -> str:
        weight, o = node.params["weight"], node.options
        if weight.shape[1] == 1 and o["groups"] > 1:
            return "depthwise"
        form = "x".join(str(side) for side in weight.shape[2:])
        plain = o["groups"] == 1 and tuple(o["stride"]) == tuple(o["dilation"]) == (1, 1)
        if form == "1x1" or (plain and form in PLAIN):
            return form
        return "dilated" if o["groups"] == 1 and max(o["dilation"]) > 1 else "other"


class Channelwise(Conv):
    """One product and one sum a channel, with a residual and an activation: a depthwise 1x1 convolution."""

    name, filters = "channelwise", False

    def multiply_adds(self, node: Node) -> int:
        return 0

    def form(self, node: Node) -> str:
        return "other"


class ConvTranspose(Convolution):
    """conv_transpose2d: also output_padding; activation, negative_slope; or slope."""

    name, op = "conv_transpose", "sparse_conv_transpose2d_"
    geometry = ("stride", "padding", "output_padding", "dilation")

    def window(self, node: Node, value: Value) -> Window | str:
        o, kernel = node.options, tuple(node.params["weight"].shape[2:])
        return Window.conv_transpose(kernel, o["stride"], o["padding"], o["dilation"])

    def packed(self, node: Node, weight: Tensor) -> Tensor:
        """Each phase of the output reads some taps of all channels of x."""
        return weight.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)

    def apply(self, node: Node, given: Given) -> Any:
        params = given.params
        return sparse_conv_transpose2d(
            given.args[0], params["weight"], params.get("bias"), given.active, slope=params.get("slope"), **node.options
        )

    def step(self, node: Node, get: Get, to: Target, context: Context) -> None:
        check_active(self.op, to.active)
        weight, bias, options, packed, slope = self.bound(node, context)
        torch.ops.sbnet.sparse_conv_transpose2d_.default(
            get(node.args[0]), weight if packed is None else packed, bias, None, slope, to.active.indices,
            to.active.count, to.active.grid.numbers(), *options, context.allow_tf32, to.out, *edge(to.clear),
        )  # fmt: skip

    def multiply_adds(self, node: Node) -> int:
        # A weight is [C,K/groups,R,S], for each pixel of the input.
        return math.prod(node.args[0].shape) * math.prod(node.params["weight"].shape[1:])

    def form(self, node: Node) -> str:
        return "transposed" if node.options["groups"] == 1 else "other"


class ConvQuantized(Convolution):
    """conv in bytes: weight, scale, bias, slope, residual; x_scale, residual_scale, out_scale."""

    name, op, sizeless, casts = "conv_quantized", "sparse_conv2d_quantized_", True, False

    def apply(self, node: Node, given: Given) -> Any:
        o, params, written = node.options, given.params, node.output.dtype
        return sparse_conv2d_quantized(
            given.args[0], params["weight"], params["scale"], params.get("bias"), given.active,
            slope=params.get("slope"), residual=params.get("residual"),
            dtype=None if o["out_scale"] or written == torch.float32 else written, **o,
        )  # fmt: skip

    def step(self, node: Node, get: Get, to: Target, context: Context) -> None:
        check_active(self.op, to.active)
        weight, bias, options, packed, slope = self.bound(node, context)
        params, o = node.params, node.options
        residual = get(params["residual"]) if "residual" in params else None
        torch.ops.sbnet.sparse_conv2d_quantized_.default(
            get(node.args[0]), weight, context.constants[params["scale"]], bias, residual, slope,
            to.active.indices, to.active.count, to.active.grid.numbers(), *options, o.get("residual_after", False),
            o["x_scale"] or 0.0, o["residual_scale"], o["out_scale"] or 0.0, to.out, *edge(to.clear), packed,
        )  # fmt: skip


class Bottleneck(Kind):
    """A residual block in one kernel: weight0 to weight2, bias0 to bias2; activation, negative_slope."""

    name = "bottleneck"
    written = planned = recorded = sizeless = True

    def window(self, node: Node, value: Value) -> Window | str:
        return POINTWISE  # its 3x3 reads zeros outside the active blocks, not x

    def apply(self, node: Node, given: Given) -> Any:
        weights, biases = ([given.params.get(f"{name}{k}") for k in range(3)] for name in ("weight", "bias"))
        return sparse_bottleneck2d(given.args[0], weights, biases, given.active, **node.options)  # type: ignore[arg-type]

    def step(self, node: Node, get: Get, to: Target, context: Context) -> None:
        weights, biases = ([context.held(node, f"{name}{k}") for k in range(3)] for name in ("weight", "bias"))
        sparse_bottleneck2d_(
            get(node.args[0]), weights, biases, to.active, to.out, fringe=to.clear,  # type: ignore[arg-type]
            allow_tf32=context.allow_tf32, **node.options,
        )  # fmt: skip

    def multiply_adds(self, node: Node) -> int:
        n, _, h, w = node.output.shape
        return sum(n * h * w * math.prod(v.shape) for name, v in node.params.items() if name.startswith("weight"))
