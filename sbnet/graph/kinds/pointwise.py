"""Ops that look at one pixel alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.active import ActiveBlocks, Fringe
from sbnet.geometry import Window
from sbnet.graph.ir import Node, Ref, Step, Value
from sbnet.graph.kinds.kind import POINTWISE, Context, Get, Given, Kind, Target, edge
from sbnet.ops import sparse_fill, sparse_fill_, sparse_gather, sparse_pointwise, sparse_pointwise_, sparse_scatter_
from sbnet.ops.common import check_active
from sbnet.ops.masked.pointwise import OPERANDS, in_vectors, run_program


class Pointwise(Kind):
    """steps: such ops, one after another (Step); or program, its params."""

    name = "pointwise"
    written = planned = recorded = sizeless = True

    def window(self, node: Node, value: Value) -> Window | str:
        return POINTWISE

    def apply(self, node: Node, given: Given) -> Any:
        if "program" in node.options:
            return sparse_pointwise(given.args[0], given.active, node.options["program"], *given.params.values())
        return sparse_fill(run_steps(node.options["steps"], list(given.args)), given.active)

    def lasts(self, node: Node, context: Context) -> bool:
        return in_vectors(node.options.get("program"))  # all else is PyTorch's

    def step(self, node: Node, get: Get, to: Target, context: Context) -> None:
        """A program runs on the active blocks, unless a CPU's kernel would compute its functions value by value. All
        else runs by PyTorch: on a CPU on gathered blocks, elsewhere, where that would wait for the count, on whole
        planes."""
        values = [*node.args, *node.params.values()]
        tensors = [context.constants[v] if v.constant else get(v) for v in values]
        program = node.options.get("program")
        if in_vectors(program) or (program is not None and to.out.device.type != "cpu"):
            check_active("sparse_pointwise_", to.active)
            torch.ops.sbnet.sparse_pointwise_.default(
                *tensors, *[None] * (1 + len(OPERANDS) - len(tensors)), to.active.indices, to.active.count,
                to.active.grid.numbers(), program, to.out, *edge(to.clear),
            )  # fmt: skip
            return

        def compute(tensors: list[Tensor]) -> Tensor:
            return run_steps(node.options["steps"], tensors) if program is None else run_program(program, *tensors)

        if to.out.device.type != "cpu":
            y = compute(tensors)
            to.out.copy_(
                torch.where(to.active.pixel_mask(to.out.shape[2:]), y, to.out)
                if context.keep
                else sparse_fill_(_own(y), to.active)
            )
            return
        rows = to.active.trim()
        if rows.capacity == to.active.capacity:
            to.out.copy_(compute(tensors))
        elif rows.capacity:
            stacks = [_stack(t, v, rows) for t, v in zip(tensors, values, strict=True)]
            sparse_scatter_(compute(stacks), rows, to.out)
        if to.clear is not None:
            zero(to.out, to.clear)


class Table(Kind):
    """x + args[1], a constant of its shape: an embedding of positions."""

    name = "table"
    written = planned = True

    def window(self, node: Node, value: Value) -> Window | str:
        return POINTWISE

    def apply(self, node: Node, given: Given) -> Any:
        return sparse_pointwise(given.args[0], given.active, "add a", given.args[1])

    def step(self, node: Node, get: Get, to: Target, context: Context) -> None:
        sparse_pointwise_(
            get(node.args[0]), to.active, "add a", context.constants[node.args[1]], out=to.out, fringe=to.clear
        )


def run_steps(steps: list[Step], tensors: list[Any]) -> Tensor:
    """What a pointwise node computes, on planes, stacks of blocks, or anything else [N,C,H,W]."""
    found: list[Any] = []
    for step in steps:

        def value(v: Any) -> Any:
            return v if not isinstance(v, Ref) else found[v.at] if v.step else tensors[v.at]

        args, kwargs = pytree.tree_map(value, (step.args, step.kwargs))
        found.append(step.target(*args, **kwargs))
    return found[-1]


def _own(x: Tensor) -> Tensor:
    return x if x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()


def _stack(tensor: Tensor, value: Value, rows: ActiveBlocks) -> Tensor:
    """Blocks of a feature map; of one number a sample and channel, that of each block's sample."""
    if value.plane is not None and not value.constant:
        return sparse_gather(tensor, rows, tail="undefined")
    if value.constant or tensor.dim() != 4 or tensor.shape[0] == 1:
        return tensor
    return tensor[rows.indices[:, 0].long()]


def put(made: Tensor, to: Target, pixels: Tensor, context: Context) -> None:
    """Writes what PyTorch made of a whole feature map: those pixels alone, where others stay as they are."""
    to.out.copy_(torch.where(pixels, made, to.out) if context.keep else made)


def zero(out: Tensor, pixels: Fringe) -> None:
    """Zeroes pixels of a feature map on a CPU; on CUDA none are left, as all of it was written."""
    if out.device.type == "cpu":
        h, w = out.shape[2:]
        at = pixels.pixels[: int(pixels.count)].long()
        out[at // (h * w), :, at // w % h, at % w] = 0
