"""Ops that look at one pixel alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.active import ActiveBlocks, Fringe
from sbnet.geometry import Window
from sbnet.graph.ir import Node, Ref, Step, Value
from sbnet.graph.kinds.kind import POINTWISE, Context, Get, Kind, edge
from sbnet.ops import sparse_fill, sparse_fill_, sparse_gather, sparse_pointwise, sparse_scatter_
from sbnet.ops.common import check_active
from sbnet.ops.masked.pointwise import OPERANDS, in_vectors, run_program


class Pixel(Kind):
    """steps: such ops, one after another (Step); or program, its params."""

    name = "pixel"
    written = planned = recorded = sizeless = True

    def window(self, node: Node, value: Value) -> Window | str:
        return POINTWISE

    def apply(
        self, node: Node, args: Any, kwargs: dict[str, Any], params: dict[str, Tensor], active: Any, everywhere: bool
    ) -> Any:
        if "program" in node.options:
            return sparse_pointwise(args[0], active, node.options["program"], *params.values())
        return sparse_fill(run_steps(node.options["steps"], list(args)), active)

    def lasts(self, node: Node, context: Context) -> bool:
        return in_vectors(node.options.get("program"))  # all else is PyTorch's

    def step(
        self, node: Node, get: Get, out: Tensor, active: ActiveBlocks, clear: Fringe | None, context: Context
    ) -> None:
        """A program runs on the active blocks, unless a CPU's kernel would compute its functions value by value. All
        else runs by PyTorch: on a CPU on gathered blocks, elsewhere, where that would wait for the count, on whole
        planes."""
        values = [*node.args, *node.params.values()]
        tensors = [context.constants[v] if v.constant else get(v) for v in values]
        program = node.options.get("program")
        if in_vectors(program) or (program is not None and out.device.type != "cpu"):
            check_active("sparse_pointwise_", active)
            torch.ops.sbnet.sparse_pointwise_.default(
                *tensors, *[None] * (1 + len(OPERANDS) - len(tensors)), active.indices, active.count,
                active.grid.numbers(), program, out, *edge(clear),
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
            _zero(out, clear)


def run_steps(steps: list[Step], tensors: list[Any]) -> Tensor:
    """What a pixel node computes, on planes, stacks of blocks, or anything else [N,C,H,W]."""
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


def _zero(out: Tensor, pixels: Fringe) -> None:
    """Zeroes pixels of a feature map on a CPU; on CUDA none are left, as all of it was written."""
    if out.device.type == "cpu":
        h, w = out.shape[2:]
        at = pixels.pixels[: int(pixels.count)].long()
        out[at // (h * w), :, at // w % h, at % w] = 0
