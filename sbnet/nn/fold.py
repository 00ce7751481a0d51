"""Batch normalisation folded into the convolution before it."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

from sbnet.nn.layers import SparseBatchNorm2d, SparseConv2d

Module = TypeVar("Module", bound=nn.Module)


@torch.no_grad()
def fold_batch_norm(module: Module) -> Module:
    """A copy of `module` for inference, in eval mode, without batch normalisation.

    Every module with a `folds` attribute, pairs of names (convolution, normalisation after it), has the second of each
    pair folded into the first, in float64. One that follows no convolution (the first of a pre-activation block)
    becomes a depthwise 1x1 convolution, which takes the activation along. Results differ from the module's by rounding.
    Layers of PyTorch itself (nn.BatchNorm2d, nn.Conv2d) stay as they are.

    >>> fast = fold_batch_norm(SparseBasicBlock(64, 64))
    """
    folded = copy.deepcopy(module).eval()
    for parent in list(folded.modules()):
        for conv, norm in getattr(parent, "folds", ()):
            if isinstance(getattr(parent, norm, None), SparseBatchNorm2d):
                setattr(parent, conv, fold_pair(getattr(parent, conv), getattr(parent, norm)))
                setattr(parent, norm, nn.Identity())
    for parent in list(folded.modules()):
        for name, child in parent.named_children():
            if isinstance(child, SparseBatchNorm2d):
                setattr(parent, name, _as_convolution(child))
    for parameter in folded.parameters():
        if parameter.dim() == 4:  # of convolutions without a normalisation, too
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return folded


def _affine(norm: nn.BatchNorm2d) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, shift) [C] float64: what the normalisation multiplies by and adds."""
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError("sbnet.nn.fold_batch_norm: a normalisation without running statistics cannot be folded")
    scale = torch.rsqrt(norm.running_var.double() + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.double()
    shift = -norm.running_mean.double() * scale
    return scale, shift if norm.bias is None else shift + norm.bias.double()


def fold_pair(conv: SparseConv2d, norm: nn.BatchNorm2d) -> SparseConv2d:
    """A convolution that does what conv and the normalisation after it do in eval mode."""
    scale, shift = _affine(norm)
    if conv.bias is not None:
        shift = shift + conv.bias.double() * scale
    weight = conv.weight.double() * scale[:, None, None, None]
    return _set(copy.deepcopy(conv), weight, shift)


def _as_convolution(norm: SparseBatchNorm2d) -> SparseConv2d:
    scale, shift = _affine(norm)
    channels = norm.num_features
    like = norm.weight if norm.weight is not None else norm.running_mean
    assert like is not None
    conv = SparseConv2d(channels, channels, 1, groups=channels, device=like.device, dtype=like.dtype).eval()
    return _set(conv, scale[:, None, None, None], shift)


def _set(conv: SparseConv2d, weight: torch.Tensor, bias: torch.Tensor) -> SparseConv2d:
    old = conv.weight
    weight = weight.to(old.dtype, memory_format=torch.channels_last)  # as kernels read it
    conv.weight = nn.Parameter(weight, old.requires_grad)
    conv.bias = nn.Parameter(bias.to(old.dtype), old.requires_grad)
    return conv
