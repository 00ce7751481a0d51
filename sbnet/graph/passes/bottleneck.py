"""Residual blocks that one kernel serves: three convolutions and a shortcut become one node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sbnet._library import kernel_capability
from sbnet.geometry import to_pair
from sbnet.graph.ir import Graph, Node, Value, only_user
from sbnet.select import bottleneck_in_one_kernel

if TYPE_CHECKING:
    from sbnet.graph.plan import Plan, Plane

GEOMETRIES = (((1, 1), (0, 0)), ((3, 3), (1, 1)), ((1, 1), (0, 0)))  # (kernel, padding) of the three


def fuse_bottlenecks(plan: Plan, device: torch.device | None) -> Plan:
    """Blocks of 1x1, 3x3, 1x1 convolution and shortcut become one node where one kernel is faster.

    Of blocks without other consumers inside; under the masked contract alone, as what lies between is not kept. device:
    where it will run; None: not known yet (an exported model), then those that gain with any number of blocks.
    """
    graph = plan.graph
    for last in list(graph.nodes) if plan.mode == "masked" else ():
        block = _block(plan, last)
        if block is None or not one_kernel(device, block[0].output, last.output, plan.planes[plan.plane(last.output)]):
            continue
        node = Node("bottleneck", [block[0].args[0]], last.outputs, path=last.path.rpartition(".")[0], line=last.line)
        node.options = _activation(last)
        for k, conv in enumerate(block):
            node.params |= {f"{name}{k}": conv.params[name] for name in ("weight", "bias") if name in conv.params}
        graph.swap(last, node, *block[:2])
    return plan


def one_kernel(device: torch.device | None, first: Value, last: Value, plane: Plane) -> bool:
    """Has this device one kernel for such a block, and is it the faster way?

    With more than 96 hidden channels what it computes twice outweighs the launches that it saves, where tiles may be
    many: such blocks are run as layers above 16 tiles of 8x8 a multiprocessor (docs/kernels/bottleneck.md).
    """
    (height, width, of), hidden, channels = plane, first.shape[1], last.shape[1]
    if device is not None and (device.type != "cuda" or kernel_capability(device) != 90):
        return False
    block = to_pair(of, "plan: block size")
    if last.dtype not in (torch.float16, torch.bfloat16) or not bottleneck_in_one_kernel(channels, hidden, block):
        return False
    if hidden <= 96 or device is None:
        return hidden <= 96
    tiles = last.shape[0] * -(-height // 8) * -(-width // 8)
    return tiles <= 16 * torch.cuda.get_device_properties(device).multi_processor_count


def _block(plan: Plan, last: Node) -> tuple[Node, Node, Node] | None:
    """The convolutions of a bottleneck block that ends with `last`."""
    graph, middle = plan.graph, _alone(plan.graph, last)
    first = _alone(graph, middle) if middle is not None else None
    if first is None or middle is None:
        return None
    block = (first, middle, last)
    x: Value = first.args[0]
    if last.options.get("residual_after"):
        return None
    if last.params.get("residual") is not x or any("residual" in node.params for node in block[:2]):
        return None
    if x.shape != last.output.shape or any(_activation(node) != _activation(last) for node in block):
        return None
    if any("slope" in node.params for node in block):  # its kernels take none
        return None
    if any(plan.plane(node.output) != plan.plane(last.output) for node in block):
        return None
    if len({node.params["bias"].dtype for node in block if "bias" in node.params}) > 1:
        return None
    fits = all(_geometry(node) == wanted for node, wanted in zip(block, GEOMETRIES, strict=True))
    return block if fits else None


def _alone(graph: Graph, node: Node) -> Node | None:
    """The convolution that `node`, a convolution, alone reads."""
    before = node.args[0].producer if node.kind == "conv" else None
    if before is None or before.kind != "conv" or only_user(before.output, graph) is not node:
        return None
    return before


def _activation(node: Node) -> dict[str, Any]:
    return {
        "activation": node.options.get("activation"),
        "negative_slope": node.options.get("negative_slope", 0.01),
    }


def _geometry(node: Node) -> tuple[Any, Any] | None:
    """(kernel, padding) of an ordinary convolution of stride 1; None: another."""
    o = node.options
    if (o["stride"], o["dilation"], o["groups"]) != ((1, 1), (1, 1), 1):
        return None
    return tuple(node.params["weight"].shape[2:]), o["padding"]
