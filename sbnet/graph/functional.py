"""A planned graph as an nn.Module of functional ops: what export writes down, and what gradients flow through."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

from sbnet.active import ActiveBlocks, BlockGrid
from sbnet.graph.axes import Axes
from sbnet.graph.constants import Constants
from sbnet.graph.ir import Node, Value
from sbnet.graph.lists import ExactLists
from sbnet.graph.passes.fuse import run_steps
from sbnet.graph.plan import Plan
from sbnet.masks.grow import grow
from sbnet.ops import (
    mask_pyramid,
    reduce_mask,
    sparse_adaptive_avg_pool2d,
    sparse_adaptive_max_pool2d,
    sparse_avg_pool2d,
    sparse_bottleneck2d,
    sparse_conv2d,
    sparse_conv2d_quantized,
    sparse_conv_transpose2d,
    sparse_fill,
    sparse_group_norm,
    sparse_layer_norm2d,
    sparse_max_pool2d,
    sparse_pointwise,
    sparse_rearrange,
    sparse_resize2d,
    sparse_softmax2d,
    sparse_squeeze_excite2d,
)


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
            listed = listed_as(node, self.plan.mode)
            blocks = active[of(listed)] if listed is not None else None
            found = apply(node, args, kwargs, params, blocks, self.plan.mode != "masked")
            for value, tensor in zip(node.outputs, found if node.options.get("many") else [found], strict=True):
                if value in old:
                    assert value.axes is not None
                    assert value.size is not None
                    pixels = value.axes.arrange(active[of(value)].pixel_mask(value.size))
                    tensor = _chosen(pixels, tensor, old[value])
                elif node.kind in ("aten", "adaptive_pool") and self.plan.mode == "masked" and _holds(node, value):
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
        return mask_pyramid(mask, self.plan.planes, margin=self.margin).planes


# Planned nodes whose options are of no size, as those of a resize are.
SIZELESS = (
    "conv", "pointwise", "conv_quantized", "bottleneck", "max_pool", "avg_pool", "norm", "pixel", "slice", "cat",
)  # fmt: skip


def _check_sizeless(plan: Plan) -> None:
    shape = plan.graph.inputs[0].shape  # type: ignore[union-attr]
    other = [node.path or node.kind for node in plan.graph.nodes if node.kind not in SIZELESS]
    if plan.mode != "masked" or other or [plane[:2] for plane in plan.planes] != [tuple(shape[2:])]:
        what = f"{other[0]}, which is of one size" if other else f"{len(plan.planes)} planes in {plan.mode} mode"
        raise ValueError(
            "sbnet: export: dynamic: expected a masked network whose planned layers keep the input's height and width, "
            f"got {what}"
        )


def _holds(node: Node, value: Value) -> bool:
    """Does a node compute it on a plane, so that what is not active is the contract's to say? (Others rearrange.)"""
    spatial = value.size is not None and (value.dtype.is_floating_point or node.kind == "conv_quantized")
    return spatial and not node.moves and node.kind != "slice"


def listed_as(node: Node, mode: str) -> Value | None:
    """The value whose active blocks a node takes; None where it takes none."""
    if node.kind == "squeeze_excite":
        return node.args[0]
    if node.kind == "adaptive_pool":
        return None if mode == "cached" else node.args[0]  # all pixels hold something then
    return node.output if node.output.size is not None else None


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


def apply(
    node: Node, args: Any, kwargs: dict[str, Any], params: dict[str, Tensor], active: ActiveBlocks | None,
    everywhere: bool = False,
) -> Any:  # fmt: skip
    """What a node gives; planned ones are zero outside the active blocks.

    everywhere: a plane's statistics are those of all its pixels (the cached and the exact contract).
    """
    if node.kind == "aten":
        return node.target(*args, **kwargs)
    if node.kind == "adaptive_pool":
        return adaptive_pool(node, args[0], active)
    assert active is not None
    if node.kind == "squeeze_excite":
        return squeeze_excite(node, args[0], params, active)
    o, x = node.options, args[0]
    match node.kind:
        case "conv" | "pointwise":
            return sparse_conv2d(
                x, params["weight"], params.get("bias"), active,
                stride=o["stride"], padding=o["padding"], dilation=o["dilation"], groups=o["groups"],
                activation=o.get("activation"), negative_slope=o.get("negative_slope", 0.01),
                residual=params.get("residual"), slope=params.get("slope"),
                residual_after=o.get("residual_after", False),
            )  # fmt: skip
        case "conv_quantized":
            written = node.output.dtype
            return sparse_conv2d_quantized(
                x, params["weight"], params["scale"], params.get("bias"), active, slope=params.get("slope"),
                residual=params.get("residual"), dtype=None if o["out_scale"] or written == torch.float32 else written,
                **o,
            )  # fmt: skip
        case "bottleneck":
            weights, biases = ([params.get(f"{name}{k}") for k in range(3)] for name in ("weight", "bias"))
            return sparse_bottleneck2d(x, weights, biases, active, **o)  # type: ignore[arg-type]
        case "conv_transpose":
            return sparse_conv_transpose2d(
                x, params["weight"], params.get("bias"), active, slope=params.get("slope"), **o
            )
        case "max_pool":
            return sparse_max_pool2d(x, active, **o)
        case "avg_pool":
            return sparse_avg_pool2d(x, active, **o)
        case "resize":
            return sparse_resize2d(x, active, **resize_options(o))
        case "rearrange":
            return sparse_rearrange(x, active, **o)
        case "norm":
            weight, bias = params.get("weight"), params.get("bias")
            if everywhere and o["method"] == "group":
                return sparse_fill(norm_dense(node, x, weight, bias), active)
            return _sparse_norm(node, x, weight, bias, active)
        case "pixel" if "program" in o:
            return sparse_pointwise(x, active, o["program"], *params.values())
        case "slice":
            return x[:, o["start"] : o["start"] + node.output.shape[1]]
        case "cat":
            return sparse_fill(torch.cat(list(args), 1), active)
    return sparse_fill(whole(node, args, params), active)


def adaptive_pool(node: Node, x: Tensor, active: ActiveBlocks | None) -> Tensor:
    """What an adaptive_pool node gives of x's active pixels, or of all."""
    size, average = node.options["size"], node.options["method"] == "avg"
    if active is None:
        y = F.adaptive_avg_pool2d(x, size) if average else F.adaptive_max_pool2d(x, size)
    else:
        y = (sparse_adaptive_avg_pool2d if average else sparse_adaptive_max_pool2d)(x, active, size)
    return y if node.options["keep"] else y.flatten(1)


def squeeze_excite(node: Node, x: Tensor, params: dict[str, Tensor], active: ActiveBlocks) -> Tensor:
    """What a squeeze_excite node gives."""
    layers = [params.get(f"{name}{k}") for k in (1, 2) for name in ("weight", "bias")]
    steps = {name: node.options[name] for name in ("activation", "gate")}
    y = sparse_squeeze_excite2d(x, active, *layers, **steps)  # type: ignore[arg-type]
    return y if len(node.options["shape"]) == 4 else y.flatten(1)


def norm_dense(node: Node, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """A norm node of groups, of all pixels: of one channel each as instance_norm, whose rounding is another."""
    groups, eps = node.options["groups"], node.options["eps"]
    if groups == x.shape[1]:
        return F.instance_norm(x, weight=weight, bias=bias, eps=eps)
    return F.group_norm(x, groups, weight, bias, eps)


def _sparse_norm(node: Node, x: Tensor, weight: Tensor | None, bias: Tensor | None, active: ActiveBlocks) -> Tensor:
    match node.options["method"]:
        case "group":
            return sparse_group_norm(x, active, node.options["groups"], weight, bias, node.options["eps"])
        case "layer":
            return sparse_layer_norm2d(x, active, weight, bias, node.options["eps"])
        case method:
            return sparse_softmax2d(x, active, log=method == "log_softmax")


def resize_options(options: dict[str, Any]) -> dict[str, Any]:
    """Of a resize node, as `sbnet.sparse_resize2d` takes them."""
    by = {"size": options["size"]} if options["scale"] is None else {"scale_factor": options["scale"]}
    return {**by, "mode": options["mode"], "align_corners": options["align_corners"]}


def whole(node: Node, args: Any, params: dict[str, Tensor]) -> Tensor:
    """A planned node's op on whole planes, by PyTorch."""
    assert node.kind == "pixel"
    return run_steps(node.options["steps"], list(args))
