"""Batch normalisation folded into the convolution before it."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import fx, nn

from sbnet.nn.layers import SparseBatchNorm2d, SparseConv2d

Module = TypeVar("Module", bound=nn.Module)


@torch.no_grad()
def fold_batch_norm(module: Module) -> Module:
    """A copy of `module` for inference, in eval mode, without batch normalisation.

    Every module with a `folds` attribute, pairs of names (convolution, normalisation after it), has the second of each
    pair folded into the first, in float64; so is every nn.BatchNorm2d that a trace of the module finds behind an
    nn.Conv2d alone. One that follows no convolution (the first of a pre-activation block), or in a module that cannot
    be traced, becomes a depthwise 1x1 convolution. Results differ from the module's by rounding.

    >>> fast = sbnet.nn.fold_batch_norm(sbnet.nn.SparseBasicBlock(16, 16).eval())
    """
    folded = copy.deepcopy(module).eval()
    for parent in list(folded.modules()):
        for conv, norm in getattr(parent, "folds", ()):
            if isinstance(getattr(parent, norm, None), nn.BatchNorm2d):
                setattr(parent, conv, fold_pair(getattr(parent, conv), getattr(parent, norm)))
                setattr(parent, norm, Folded())
    if any(isinstance(m, nn.BatchNorm2d) and not isinstance(m, SparseBatchNorm2d) for m in folded.modules()):
        for conv, norm in _pairs(folded):
            folded.set_submodule(conv, fold_pair(folded.get_submodule(conv), folded.get_submodule(norm)))
            folded.set_submodule(norm, Folded())
    if isinstance(folded, nn.BatchNorm2d):
        return _as_convolution(folded)  # type: ignore[return-value]
    for parent in list(folded.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, _as_convolution(child))
    for parameter in folded.parameters():
        if parameter.dim() == 4:  # of convolutions without a normalisation, too
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return folded


class Folded(nn.Identity):
    """What is left of a normalisation: x. Modules may go on calling it with active blocks."""

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        return x


class _Leaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (nn.Conv2d, nn.BatchNorm2d)) or super().is_leaf_module(m, module_qualified_name)


def _pairs(module: nn.Module) -> list[tuple[str, str]]:
    """(convolution, the normalisation that alone reads it), where each is called once."""
    try:
        graph = _Leaves().trace(module)
    except Exception:  # the module's own code meets stand-ins for tensors: anything may come
        return []
    calls = [node for node in graph.nodes if node.op == "call_module"]
    once = {name for name in (n.target for n in calls) if [n.target for n in calls].count(name) == 1}
    found = []
    for node in calls:
        before: Any = node.args[0] if node.args else None
        if (
            {node.target, getattr(before, "target", None)} <= once
            and type(module.get_submodule(node.target)) is nn.BatchNorm2d
            and isinstance(module.get_submodule(before.target), nn.Conv2d)
            and len(before.users) == 1
        ):
            found.append((before.target, node.target))
    return found


def _affine(norm: nn.BatchNorm2d) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, shift) [C] float64: what the normalisation multiplies by and adds."""
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError("sbnet.nn.fold_batch_norm: a normalisation without running statistics cannot be folded")
    scale = torch.rsqrt(norm.running_var.double() + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.double()
    shift = -norm.running_mean.double() * scale
    return scale, shift if norm.bias is None else shift + norm.bias.double()


def fold_pair(conv: Any, norm: Any) -> Any:
    """A convolution that does what conv and the normalisation after it do in eval mode."""
    scale, shift = _affine(norm)
    if conv.bias is not None:
        shift = shift + conv.bias.double() * scale
    weight = conv.weight.double() * scale[:, None, None, None]
    return _set(copy.deepcopy(conv), weight, shift)


def _as_convolution(norm: nn.BatchNorm2d) -> nn.Conv2d:
    kind = SparseConv2d if isinstance(norm, SparseBatchNorm2d) else nn.Conv2d
    scale, shift = _affine(norm)
    channels = norm.num_features
    like = norm.weight if norm.weight is not None else norm.running_mean
    assert like is not None
    conv = kind(channels, channels, 1, groups=channels, device=like.device, dtype=like.dtype).eval()
    return _set(conv, scale[:, None, None, None], shift)


def _set(conv: nn.Conv2d, weight: torch.Tensor, bias: torch.Tensor) -> nn.Conv2d:
    old = conv.weight
    weight = weight.to(old.dtype, memory_format=torch.channels_last)  # as kernels read it
    conv.weight = nn.Parameter(weight, old.requires_grad)
    conv.bias = nn.Parameter(bias.to(old.dtype), old.requires_grad)
    return conv
