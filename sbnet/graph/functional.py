"""A planned graph as an nn.Module of functional ops: what export writes down, and what gradients flow through."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from sbnet.active import ActiveBlocks, BlockGrid
from sbnet.graph.axes import Axes
from sbnet.graph.constants import Constants
from sbnet.graph.ir import Node, Value
from sbnet.graph.kinds import Given, kind_of
from sbnet.graph.lists import ExactLists
from sbnet.graph.plan import Plan
from sbnet.graph.tokens import with_tokens
from sbnet.masks.grow import grow
from sbnet.ops import mask_pyramid, reduce_mask, sparse_fill


class PlannedModule(nn.Module):
    """`forward(*inputs, mask)` computes what the plan says under its mode's contract; weights are copies.

    Of the cached contract: `forward(*inputs, mask, *states)` gives a tuple, what the network returns and the states for
    the next frame. The first frame's mask is full; states may then hold anything.

    Args:
        margin: pixels by which the mask is grown.
        dynamic: height and width are those of each call.
        block_maps: `forward` gives a tuple, what the network returns and the block map of every plane.

    Attributes:
        states: values that a cached module takes and gives, in order; else none.
        watch: if set, called with each value that lies on a plane, what it holds and its active pixels.

    >>> planned = PlannedModule(plan, constants)
    >>> y = planned(x, mask)

    Raises:
        ValueError: a dynamic module of a plan that is of one size alone.
    """

    def __init__(
        self, plan: Plan, constants: Constants, margin: int = 0, *, dynamic: bool = False, block_maps: bool = False
    ) -> None:
        super().__init__()
        if dynamic:
            _check_sizeless(plan)
        self.plan, self.margin, self.dynamic, self.block_maps = plan, margin, dynamic, block_maps
        self.exact = ExactLists(plan) if plan.mode == "exact" else None
        self.states = [v for n in plan.graph.nodes for v in n.outputs if _holds(n, v)] if plan.mode == "cached" else []
        self.watch: Callable[[Value, Tensor, Tensor], None] | None = None
        self.names: dict[int, str] = {}
        for key, value in constants.wanted.items():
            held = constants.held[key]
            if isinstance(held, Tensor):
                self.names[key] = name = re.sub(r"\W", "_", value.name)
                while hasattr(self, self.names[key]):
                    self.names[key] = f"{name}_{len(self.names)}"
                self.register_buffer(self.names[key], held.detach().clone())

    def forward(self, *args: Any) -> Any:
        """What the network returns for inputs, after which comes the mask [N,H,W]."""
        graph, count = self.plan.graph, len(self.plan.graph.inputs)
        inputs, mask = args[:count], args[count]
        old = dict(zip(self.states, args[count + 1 :], strict=True))
        of = self.plan.plane if self.exact is None else self.exact.of
        active = self._lists(mask)
        env: dict[Value, Any] = {v: x for v, x in zip(graph.inputs, inputs, strict=True) if v is not None}

        def get(value: Any) -> Any:
            if not isinstance(value, Value):
                return value
            return getattr(self, self.names[id(value)]) if value.constant else env[value]

        for node in graph.nodes:
            args, kwargs = pytree.tree_map(get, (node.args, node.kwargs))
            params = {name: get(value) for name, value in node.params.items()}
            kind, listed = kind_of(node), kind_of(node).listed(node, self.plan.mode)
            blocks = active[of(listed)] if listed is not None else None
            found = kind.apply(node, Given(args, kwargs, params, blocks, self.plan.mode != "masked"))
            for value, tensor in zip(node.outputs, found if node.options.get("many") else [found], strict=True):
                if value in old:
                    tensor = _chosen(kind.pixels(value, active[of(value)]), tensor, old[value])
                elif kind.dense and self.plan.mode == "masked" and _holds(node, value):
                    tensor = masked(tensor, value.axes, active[of(value)])  # type: ignore[arg-type]
                env[value] = tensor
                if self.watch is not None and value.size is not None and value.axes is not None:
                    self.watch(value, tensor, value.axes.arrange(active[of(value)].pixel_mask(value.size)))
        result = pytree.tree_unflatten([get(v) for v in graph.outputs], graph.out_spec)
        more = [env[v] for v in self.states]
        if self.block_maps:
            more += [plane.block_map for plane in active]
        return (result, *more) if more else result

    def _lists(self, mask: Tensor) -> Sequence[ActiveBlocks]:
        if self.exact is not None:
            return self.exact(mask, self.margin)[0]
        if self.dynamic:
            mask = grow(mask, self.margin) if self.margin else mask
            return [reduce_mask(mask, BlockGrid.cover((mask.shape[1], mask.shape[2]), self.plan.planes[0][2]))]
        return with_tokens(mask_pyramid(mask, self.plan.images, margin=self.margin).planes, self.plan.tokens)


def _check_sizeless(plan: Plan) -> None:
    shape = plan.graph.inputs[0].shape  # type: ignore[union-attr]
    other = [node.path or node.kind for node in plan.graph.nodes if not kind_of(node).sizeless]
    if plan.mode != "masked" or other or [plane[:2] for plane in plan.planes] != [tuple(shape[2:])]:
        what = f"{other[0]}, which is of one size" if other else f"{len(plan.planes)} planes in {plan.mode} mode"
        raise ValueError(
            "sbnet: export: dynamic: expected a masked network whose planned layers keep the input's height and width, "
            f"got {what}"
        )


def _holds(node: Node, value: Value) -> bool:
    """Does a node compute it on a plane, so that what is not active is the contract's to say? (Others rearrange.)"""
    spatial = value.size is not None and (value.dtype.is_floating_point or kind_of(node).written)
    packed = value.tokens is not None and node.kind != "remember"  # no two frames have the same rows
    return spatial and not packed and not node.moves and node.kind != "slice"


def _chosen(pixels: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """new where pixels are set, else old. ONNX's Where takes no float8: float16 holds its values."""
    if new.dtype != torch.float8_e4m3fn:
        return torch.where(pixels, new, old)
    return torch.where(pixels, new.half(), old.half()).to(new.dtype)


def masked(x: Tensor, axes: Axes, active: ActiveBlocks) -> Tensor:
    """x where its pixels are active, else 0."""
    if axes.is_planes and x.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return sparse_fill(x, active)
    assert axes.size is not None
    return torch.where(axes.arrange(active.pixel_mask(axes.size)), x, torch.zeros_like(x))
