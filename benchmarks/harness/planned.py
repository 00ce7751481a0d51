"""Networks of sbnet.nn as benchmarks see them: their dense forms, and their result by the masked contract."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbnet.benchmarks.harness.registry import Setting, Side, close
from sbnet.engine import SparseRun, masked_oracle, plane_masks
from sbnet.engine.lists import Lists
from sbnet.graph.ir import Node, Value
from sbnet.graph.plan import Plan, Plane

MOST_PIXELS = 2**20  # of a batch: beyond, PyTorch's ops one by one take twice the fused ones' time, and much of ours
MASKED = ("masked", "masked, in place", "mask and layers", "layers")  # sides whose results are the contract's


def dense_sides(run: SparseRun, x: Tensor, setting: Setting, compiled: bool = False) -> dict[str, Side]:
    """The run's layers on whole planes, in the same order: PyTorch's ops, cuDNN's fused ones, torch.compile."""

    nodes, constants = layers_of(run.plan), run.compiled.constants
    (source,), (result,) = run.plan.graph.inputs, run.plan.graph.outputs

    def all_nodes(step: Callable[[Node, list[Any]], Tensor], x: Tensor) -> Tensor:
        made = {source: x}
        for node in nodes:
            values = (node.args[0], *(node.params.get(name) for name in ("weight", "bias", "residual")))
            made[node.output] = step(
                node, [constants[v] if v is not None and v.constant else made.get(v) for v in values]
            )
        return made[result]

    forms = {}
    if not x.is_cuda or x[:, 0].numel() <= MOST_PIXELS:
        forms["PyTorch"] = Side(lambda: all_nodes(_plain, x))
    if x.is_cuda:
        forms["fused cuDNN"] = Side(lambda: all_nodes(_fused, x))
        if compiled and setting.compiled:
            fast = torch.compile(lambda x: all_nodes(_plain, x), mode="max-autotune-no-cudagraphs")
            forms["torch.compile"] = Side(lambda: fast(x))
    return forms


def layers_of(plan: Plan) -> list[Node]:
    """The nodes of a plan, blocks that run as one taken apart into their convolutions."""
    found: list[Node] = []
    for node in plan.graph.nodes:
        if node.kind != "bottleneck":
            found.append(node)
            continue
        x = node.args[0]
        for k in range(3):
            weight = node.params[f"weight{k}"]
            pad = weight.shape[2] // 2
            geometry = {"stride": (1, 1), "padding": (pad, pad), "dilation": (1, 1), "groups": 1}
            y = node.output
            if k < 2:
                y = Value(f"{y.name}{k}", (y.shape[0], weight.shape[0], *y.shape[2:]), y.dtype)
                plan.lists[y] = plan.plane(node.output)
            params = {"weight": weight}
            if f"bias{k}" in node.params:
                params["bias"] = node.params[f"bias{k}"]
            if k == 2:
                params["residual"] = node.args[0]
            found.append(Node("conv", [x], [y], options={**geometry, **node.options}, params=params))
            x = y
    return found


def _plain(node: Node, tensors: list[Any]) -> Tensor:
    (x, weight, bias, residual), o = tensors, node.options
    if node.kind == "max_pool":
        return F.max_pool2d(x, **o)
    y = F.conv2d(x, weight, bias, *_geometry(node))
    if residual is not None:
        y = y.add_(residual)
    return F.relu_(y) if o.get("activation") == "relu" else y


def _fused(node: Node, tensors: list[Any]) -> Tensor:
    (x, weight, bias, residual), o = tensors, node.options
    if node.kind != "conv" or o.get("activation") != "relu":
        return _plain(node, tensors)
    if residual is None:
        return torch.cudnn_convolution_relu(x, weight, bias, *_geometry(node))
    return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *_geometry(node))


def _geometry(node: Node) -> tuple[Any, ...]:
    return tuple(node.options[name] for name in ("stride", "padding", "dilation", "groups"))


def contract(net: nn.Module, x: Tensor, mask: Tensor, planes: list[Plane]) -> Callable[[str, Tensor], float]:
    """A check of masked and dense results: `net` in eval mode with normalisations; net(x) runs it dense.

    Halves are compared with float32, float32 with float64, by the project's error measure.
    """
    wide = torch.float64 if x.dtype == torch.float32 else torch.float32
    masks = plane_masks(mask, planes)
    whole = {size: torch.ones_like(m) for size, m in masks.items()}

    @functools.cache
    def of(masked: bool) -> tuple[Tensor, Tensor]:
        results = []
        for dtype in (x.dtype, wide):
            # from the parameters that the run in x's dtype has
            net.to(x.dtype).to(dtype)
            results.append(masked_oracle(net, x.to(dtype), masks if masked else whole))
        return results[0], results[1]

    def check(side: str, got: Tensor) -> float:
        return close(got, *of(side in MASKED))

    return check


def flops_and_bytes(run: SparseRun, lists: Lists) -> tuple[float, float]:
    """(floating-point operations, bytes) of an ideal implementation on the active blocks: every layer reads its input
    and its weight, and its residual, and writes its output, once."""
    flops = size = 0.0
    plan = run.plan
    inside = [float(a.pixel_mask(p[:2]).sum()) for a, p in zip(lists.active, plan.planes, strict=True)]
    for node in layers_of(plan):
        pixels = inside[plan.plane(node.output)]
        stride = node.options.get("stride", (1, 1))
        planes = node.output.shape[1] * (1 if "residual" not in node.params else 2)
        weights = sum(math.prod(v.shape) for name, v in node.params.items() if name == "weight")
        flops += 2 * pixels * weights
        size += pixels * stride[0] * stride[1] * node.args[0].shape[1] + pixels * planes + weights
    return flops, size * run.example[0].element_size()


def densities(lists: Lists) -> list[float]:
    """Share of active blocks, by plane."""
    return [round(int(active.count) / active.capacity, 4) for active in lists.active]
