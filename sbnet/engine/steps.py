"""How a planned node runs: written into memory that it is given, on active blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks, Fringe
from sbnet.graph.constants import Constants
from sbnet.graph.functional import norm_dense
from sbnet.graph.ir import Node, Value
from sbnet.graph.passes.fuse import run_steps
from sbnet.ops import (
    pack_conv_weight,
    sparse_avg_pool2d_,
    sparse_bottleneck2d_,
    sparse_fill_,
    sparse_gather,
    sparse_max_pool2d_,
    sparse_pointwise_,
    sparse_rearrange_,
    sparse_resize2d_,
    sparse_scatter_,
)
from sbnet.ops.common import check_active
from sbnet.ops.masked.conv import activation_name
from sbnet.ops.masked.layer import pairs
from sbnet.ops.masked.pointwise import OPERANDS, in_vectors, run_program

# Kinds that write into memory they are given.
WRITTEN = {
    "conv", "conv_quantized", "bottleneck", "conv_transpose", "pointwise", "max_pool", "avg_pool", "resize",
    "rearrange", "norm", "pixel",
}  # fmt: skip
# And those that say where something lies, or give few numbers.
PLANNED = WRITTEN | {"adaptive_pool", "squeeze_excite", "cat", "slice"}
# Of each kind of convolution, its op and the pairs that it takes.
GEOMETRY = {
    "conv": ("sparse_conv2d_", ("stride", "padding", "dilation")),
    "conv_quantized": ("sparse_conv2d_quantized_", ("stride", "padding", "dilation")),
    "pointwise": ("sparse_conv2d_", ("stride", "padding", "dilation")),
    "conv_transpose": ("sparse_conv_transpose2d_", ("stride", "padding", "output_padding", "dilation")),
}


class Bound(NamedTuple):
    """What a convolution takes beside tensors of the call: weight, bias, geometry and activation, packed weight,
    slopes."""

    weight: Tensor
    bias: Tensor | None
    options: list[Any]
    packed: Tensor | None
    slope: Tensor | None


@dataclass
class Context:
    """What steps share.

    Attributes:
        constants: of the graph.
        packed: weights as the CPU's kernels read them, by node.
        allow_tf32: float32 on CUDA may use tf32 tensor cores.
        keep: what is not active stays as it is (the cached contract).
        everywhere: a plane's statistics are those of all its pixels (the cached and the exact contract).
        bound: what ops take of a convolution that does not change from call to call, by node.
    """

    constants: Constants
    packed: dict[Node, Tensor]
    allow_tf32: bool = False
    keep: bool = False
    everywhere: bool = False
    bound: dict[Node, Bound] = field(default_factory=dict)

    def pack(self, nodes: list[Node]) -> None:
        """Packs the weights of convolutions anew."""
        for node in nodes:
            if node.kind not in GEOMETRY:
                continue
            if self.unseen(node):
                self.packed.pop(node, None)
                continue
            if node.kind == "conv_transpose":  # each phase of the output reads some taps of all channels of x
                self.packed[node] = self.weight(node).permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
            else:
                self.packed[node] = pack_conv_weight(self.weight(node), node.options["groups"])

    def conv(self, node: Node) -> Bound:
        found = self.bound.get(node)
        if found is None:
            o, (op, names) = node.options, GEOMETRY[node.kind]
            geometry = pairs(op, **{name: o[name] for name in names})
            activation = activation_name(op, o.get("activation")), float(o.get("negative_slope", 0.01))
            options = [*geometry, o["groups"], *activation, self.allow_tf32]
            slope = self.constants[node.params["slope"]] if "slope" in node.params else None
            found = Bound(self.weight(node), self.bias(node), options, self.packed.get(node), slope)
            if not self.unseen(node):
                self.bound[node] = found
        return found

    def unseen(self, node: Node) -> bool:
        """Is its weight a tensor of which PyTorch counts no writes? Then kernels read it as it is."""
        weight = node.params["weight"].tensor
        return weight is not None and weight.is_inference()

    def weight(self, node: Node) -> Tensor:
        """Of a convolution, or of the depthwise one that a pointwise node is."""
        return self.constants[node.params["weight"]]

    def bias(self, node: Node) -> Tensor | None:
        return self.constants[node.params["bias"]] if "bias" in node.params else None


Get = Callable[[Value], Tensor]


def run(node: Node, get: Get, out: Tensor, active: ActiveBlocks, clear: Fringe | None, context: Context) -> None:
    """Writes the active blocks of `out` and zeroes the pixels of `clear`."""
    RUN[node.kind](node, get, out, active, clear, context)


def _conv(node: Node, get: Get, out: Tensor, active: ActiveBlocks, clear: Fringe | None, context: Context) -> None:
    """sparse_conv2d_ without what its wrapper finds again at each call: shapes and options are the plan's, and the
    executor records no gradient."""
    check_active("sparse_conv2d_", active)
    weight, bias, options, packed, slope = context.conv(node)
    residual = node.params.get("residual")
    edge = (None, None) if clear is None else (clear.pixels, clear.count)
    torch.ops.sbnet.sparse_conv2d_.default(
        get(node.args[0]), weight, bias, None if residual is None else get(residual), active.indices, active.count,
        active.grid.numbers(), *options, out, *edge, packed, slope, node.options.get("residual_after", False),
    )  # fmt: skip


def _conv_quantized(
    node: Node, get: Get, out: Tensor, active: ActiveBlocks, clear: Fringe | None, context: Context
) -> None:
    check_active("sparse_conv2d_quantized_", active)
    weight, bias, (*geometry, _), packed, slope = context.conv(node)
    params, o = node.params, node.options
    residual = get(params["residual"]) if "residual" in params else None
    edge = (None, None) if clear is None else (clear.pixels, clear.count)
    torch.ops.sbnet.sparse_conv2d_quantized_.default(
        get(node.args[0]), weight, context.constants[params["scale"]], bias, residual, o["residual_scale"],
        active.indices, active.count, active.grid.numbers(), *geometry,
        o["out_scale"] or 0.0, out, *edge, packed, o["x_scale"] or 0.0, slope,
        o.get("residual_after", False),
    )  # fmt: skip


def _conv_transpose(
    node: Node, get: Get, out: Tensor, active: ActiveBlocks, clear: Fringe | None, context: Context
) -> None:
    check_active("sparse_conv_transpose2d_", active)
    weight, bias, options, packed, slope = context.conv(node)
    edge = (None, None) if clear is None else (clear.pixels, clear.count)
    torch.ops.sbnet.sparse_conv_transpose2d_.default(
        get(node.args[0]), weight if packed is None else packed, bias, None, active.indices, active.count,
        active.grid.numbers(), *options, out, *edge, slope,
    )  # fmt: skip


def _bottleneck(
    node: Node, get: Get, out: Tensor, active: ActiveBlocks, clear: Fringe | None, context: Context
) -> None:
    held = {name: context.constants[value] for name, value in node.params.items()}
    sparse_bottleneck2d_(
        get(node.args[0]), [held[f"weight{k}"] for k in range(3)], [held.get(f"bias{k}") for k in range(3)], active,
        out, fringe=clear, allow_tf32=context.allow_tf32, **node.options,
    )  # fmt: skip


def _max_pool(node: Node, get: Get, out: Tensor, active: ActiveBlocks, clear: Fringe | None, _: Context) -> None:
    sparse_max_pool2d_(get(node.args[0]), active, out, **node.options, fringe=clear)


def _avg_pool(node: Node, get: Get, out: Tensor, active: ActiveBlocks, clear: Fringe | None, _: Context) -> None:
    sparse_avg_pool2d_(get(node.args[0]), active, out, **node.options, fringe=clear)


def _resize(node: Node, get: Get, out: Tensor, active: ActiveBlocks, clear: Fringe | None, _: Context) -> None:
    o = node.options
    sparse_resize2d_(
        get(node.args[0]), active, out, scale_factor=o["scale"], mode=o["mode"], align_corners=o["align_corners"],
        fringe=clear,
    )  # fmt: skip


def _rearrange(node: Node, get: Get, out: Tensor, active: ActiveBlocks, clear: Fringe | None, _: Context) -> None:
    sparse_rearrange_(get(node.args[0]), active, out, **node.options, fringe=clear)


def _norm(node: Node, get: Get, out: Tensor, active: ActiveBlocks, clear: Fringe | None, context: Context) -> None:
    x, op = get(node.args[0]), "sparse_norm2d_"
    weight, bias = (context.constants[node.params[k]] if k in node.params else None for k in ("weight", "bias"))
    if context.everywhere and node.options["method"] == "group":
        out.copy_(torch.where(active.pixel_mask(out.shape[2:]), norm_dense(node, x, weight, bias), out))
        return
    check_active(op, active)
    edge = (None, None) if clear is None else (clear.pixels, clear.count)
    torch.ops.sbnet.sparse_norm2d_.default(
        x, weight, bias, active.indices, active.count, active.block_map, active.grid.numbers(), *node.options.values(),
        out, *edge,
    )  # fmt: skip


def _pixel(node: Node, get: Get, out: Tensor, active: ActiveBlocks, clear: Fringe | None, context: Context) -> None:
    """A program runs on the active blocks, unless a CPU's kernel would compute its functions value by value. All else
    runs by PyTorch: on a CPU on gathered blocks, elsewhere, where that would wait for the count, on whole planes."""
    values = [*node.args, *node.params.values()]
    tensors = [context.constants[v] if v.constant else get(v) for v in values]
    program = node.options.get("program")
    if in_vectors(program) or (program is not None and out.device.type != "cpu"):
        check_active("sparse_pointwise_", active)
        edge = (None, None) if clear is None else (clear.pixels, clear.count)
        torch.ops.sbnet.sparse_pointwise_.default(
            *tensors, *[None] * (1 + len(OPERANDS) - len(tensors)), active.indices, active.count,
            active.grid.numbers(), program, out, *edge,
        )  # fmt: skip
        return

    def compute(tensors: list[Tensor]) -> Tensor:
        return run_steps(node.options["steps"], tensors) if program is None else run_program(program, *tensors)

    if out.device.type != "cpu":
        y = compute(tensors)
        out.copy_(
            torch.where(active.pixel_mask(out.shape[2:]), y, out) if context.keep else sparse_fill_(_own(y), active)
        )
        return
    rows = active.trim()
    if rows.capacity == active.capacity:
        out.copy_(compute(tensors))
    elif rows.capacity:
        stacks = [_stack(t, v, rows) for t, v in zip(tensors, values, strict=True)]
        sparse_scatter_(compute(stacks), rows, out)
    if clear is not None:
        zero(out, clear)


def scale_by_gate(node: Node, get: Get, out: Tensor, active: ActiveBlocks) -> None:
    """out = x times what a squeeze_excite node of x gives, on the active blocks."""
    layers = [None if v is None else get(v) for v in map(node.params.get, ("weight1", "weight2", "bias1", "bias2"))]
    torch.ops.sbnet.sparse_squeeze_excite2d_.default(
        get(node.args[0]), *layers, active.block_map, active.grid.numbers(), node.options["activation"],
        node.options["gate"], out,
    )  # fmt: skip


def _own(x: Tensor) -> Tensor:
    return x if x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()


def _stack(tensor: Tensor, value: Value, rows: ActiveBlocks) -> Tensor:
    """Blocks of a feature map; of one number a sample and channel, that of each block's sample."""
    if value.plane is not None and not value.constant:
        return sparse_gather(tensor, rows, tail="undefined")
    if value.constant or tensor.dim() != 4 or tensor.shape[0] == 1:
        return tensor
    return tensor[rows.indices[:, 0].long()]


def zero(out: Tensor, pixels: Fringe) -> None:
    """Zeroes pixels of a feature map on a CPU; on CUDA none are left, as all of it was written."""
    if out.device.type == "cpu":
        h, w = out.shape[2:]
        at = pixels.pixels[: int(pixels.count)].long()
        out[at // (h * w), :, at // w % h, at % w] = 0


def copy(x: Tensor, out: Tensor, active: ActiveBlocks, clear: Fringe | None) -> None:
    """out = x on the active blocks: a program without steps."""
    sparse_pointwise_(x, active, "", out=out, fringe=clear)


RUN = {
    "conv": _conv, "conv_quantized": _conv_quantized, "conv_transpose": _conv_transpose, "pointwise": _conv,
    "max_pool": _max_pool, "avg_pool": _avg_pool, "resize": _resize, "rearrange": _rearrange, "norm": _norm,
    "pixel": _pixel, "bottleneck": _bottleneck,
}  # fmt: skip
