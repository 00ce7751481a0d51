"""Networks of sbnet.nn as benchmarks see them: their dense forms, and their result by the masked contract."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbnet.benchmarks.harness.registry import Setting, Side, close
from sbnet.engine import MaskedRunner, masked_oracle, plane_masks
from sbnet.engine.masked import Lists
from sbnet.engine.planner import Plane, Step, geometry
from sbnet.nn import SparseConv2d

MOST_PIXELS = 2**20  # of a batch: beyond, PyTorch's ops one by one take twice the fused ones' time, and much of ours
MASKED = ("masked", "masked, in place", "mask and layers", "layers")  # sides whose results are the contract's


def dense_sides(runner: MaskedRunner, x: Tensor, setting: Setting, compiled: bool = False) -> dict[str, Side]:
    """The runner's layers on whole planes, in the same order: PyTorch's ops, cuDNN's fused ones, torch.compile."""

    def all_steps(step: Callable[[Step, list[Tensor]], Tensor], x: Tensor) -> Tensor:
        tensors = [x]
        for s in runner.plan.steps:
            tensors.append(step(s, tensors))
        return tensors[runner.plan.outputs[0]]

    forms = {}
    if not x.is_cuda or x[:, 0].numel() <= MOST_PIXELS:
        forms["PyTorch"] = Side(lambda: all_steps(_plain, x))
    if x.is_cuda:
        forms["fused cuDNN"] = Side(lambda: all_steps(_fused, x))
        if compiled and setting.compiled:
            run = torch.compile(lambda x: all_steps(_plain, x), mode="max-autotune-no-cudagraphs")
            forms["torch.compile"] = Side(lambda: run(x))
    return forms


def _plain(step: Step, tensors: list[Tensor]) -> Tensor:
    layer: Any = step.layer
    y = layer(tensors[step.source])
    if step.residual is not None:
        y = y.add_(tensors[step.residual])
    return F.relu_(y) if step.options.get("activation") == "relu" else y


def _fused(step: Step, tensors: list[Tensor]) -> Tensor:
    layer: Any = step.layer
    if not isinstance(layer, SparseConv2d) or step.options.get("activation") != "relu":
        return _plain(step, tensors)
    _, stride, padding, dilation = geometry(layer)
    arguments = layer.bias, stride, padding, dilation, layer.groups
    x = tensors[step.source]
    if step.residual is None:
        return torch.cudnn_convolution_relu(x, layer.weight, *arguments)
    return torch.cudnn_convolution_add_relu(x, layer.weight, tensors[step.residual], 1.0, *arguments)


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


def flops_and_bytes(runner: MaskedRunner, lists: Lists) -> tuple[float, float]:
    """(floating-point operations, bytes) of an ideal implementation on the active blocks: every layer reads its input
    and its weight, and its residual, and writes its output, once."""
    flops = size = 0.0
    steps: list[Any] = runner.plan.steps
    inside = [float(a.pixel_mask(p[:2]).sum()) for a, p in zip(lists.active, runner.planes, strict=True)]
    for step in steps:
        layer = step.layer
        pixels = inside[step.plane]
        _, stride, _, _ = geometry(layer)
        read = pixels * stride[0] * stride[1]
        channels = runner.plan.shape[1] if not step.source else steps[step.source - 1].shape[1]
        planes = step.shape[1] * (1 if step.residual is None else 2)
        size += read * channels + pixels * planes
        if isinstance(layer, SparseConv2d):
            flops += 2 * pixels * layer.weight.numel()
            size += layer.weight.numel()
    return flops, size * steps[0].layer.weight.element_size()


def densities(lists: Lists) -> list[float]:
    """Share of active blocks, by plane."""
    return [round(int(active.count) / active.capacity, 4) for active in lists.active]
