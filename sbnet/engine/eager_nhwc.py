"""What `sbnet.masked` runs of feature maps that are seen as [N,H,W,C]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.ops import sparse_conv2d, sparse_layer_norm2d, sparse_pointwise

if TYPE_CHECKING:
    from sbnet.engine.eager import masked


def layer_norm(
    mode: masked, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:  # fmt: skip
    if list(normalized_shape) != [input.shape[3]]:
        return None
    x = input.permute(0, 3, 1, 2)
    return mode.as_nhwc(sparse_layer_norm2d(x, mode.active(x.shape[2:]), weight, bias, eps))


def linear(mode: masked, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A 1x1 convolution."""
    x = input.permute(0, 3, 1, 2)
    active = mode.active(x.shape[2:])
    return mode.as_nhwc(sparse_conv2d(x, weight[:, :, None, None], bias, active, x_active=active))


def gelu(mode: masked, input: Tensor, approximate: str = "none") -> Tensor | None:
    if approximate != "none":
        return None
    x = input.permute(0, 3, 1, 2)
    return mode.as_nhwc(sparse_pointwise(x, mode.active(x.shape[2:]), "gelu"))


def add(mode: masked, input: Tensor, other: Any, alpha: Any = 1) -> Tensor | None:
    """Zeros outside of the blocks stay zeros."""
    if not isinstance(other, Tensor) or not mode.lies_nhwc(other) or other.shape != input.shape or alpha != 1:
        return None
    return mode.as_nhwc((input + other).permute(0, 3, 1, 2))


def mul(mode: masked, input: Tensor, other: Any) -> Tensor | None:
    """By numbers of images and channels, the same."""
    if isinstance(other, Tensor) and (other.dim() != 4 or other.shape[1:3] != (1, 1)):
        return None
    return mode.as_nhwc((input * other).permute(0, 3, 1, 2))


T = torch.Tensor
IN_NHWC: dict[Any, Any] = {
    F.layer_norm: layer_norm, F.linear: linear, F.gelu: gelu, torch.add: add, T.add: add,
    T.__add__: add, torch.mul: mul, T.mul: mul, T.__mul__: mul,
}  # fmt: skip
