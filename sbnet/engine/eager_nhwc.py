"""What `sbnet.masked` runs of feature maps that are seen as [N,H,W,C]."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.engine.arguments import FLOATS
from sbnet.engine.eager_norms import listed
from sbnet.engine.modes import open_of
from sbnet.ops import sparse_conv2d, sparse_fill, sparse_layer_norm2d, sparse_pointwise

if TYPE_CHECKING:
    from sbnet.engine.eager import masked

BASE = "_sbnet_base"  # a note: the feature map that one seen as [N,H,W,C] is a view of, and its grad_fn at that time


def base_of(x: Tensor) -> Tensor | None:
    """The map, where it is still what it was."""
    base, node = x.__dict__.get(BASE, (None, None))
    return base if base is not None and base.grad_fn is node else None


def turned(mode: masked, name: str, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """A map seen as [N,H,W,C], or one that was seen so: no pixel is read. None of any other op."""
    if name != "permute" or kwargs or len(args) < 2 or args[0].dim() != 4:
        return None
    x, order = args[0], list(args[1] if len(args) == 2 else args[1:])
    if order == [0, 2, 3, 1] and mode.keeps(x):
        return mode.as_nhwc(x)
    return base_of(x) if order == [0, 3, 1, 2] and mode.lies_nhwc(x) else None


def _map_of(mode: masked, x: Tensor) -> Tensor:
    base = base_of(x) if open_of(mode) is not None else None
    return mode.kept(x.permute(0, 3, 1, 2)) if base is None else base


def layer_norm(
    mode: masked, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:  # fmt: skip
    if list(normalized_shape) != [input.shape[3]]:
        return None
    x = _map_of(mode, input)
    if (maps := open_of(mode)) is not None and listed("layer", x.shape[1]):
        return mode.as_nhwc(maps.norm2d(x, weight, bias, "layer", 1, eps))
    return mode.as_nhwc(sparse_layer_norm2d(x, mode.active(x.shape[2:]), weight, bias, eps))


def linear(mode: masked, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A 1x1 convolution."""
    x = _map_of(mode, input)
    if (maps := open_of(mode)) is not None:
        return mode.as_nhwc(maps.conv(x, weight, bias, x.shape[2:], (1, 0, 1), 1))
    active = mode.active(x.shape[2:])
    return mode.as_nhwc(sparse_conv2d(x, weight[:, :, None, None], bias, active, x_active=active))


def gelu(mode: masked, input: Tensor, approximate: str = "none") -> Tensor | None:
    if approximate != "none":
        return None
    x = _map_of(mode, input)
    found = None if (maps := open_of(mode)) is None else maps.activate(x, "gelu", 0.0, False)
    return mode.as_nhwc(sparse_pointwise(x, mode.active(x.shape[2:]), "gelu") if found is None else found)


def add(mode: masked, input: Tensor, other: Any, alpha: Any = 1) -> Tensor | None:
    """Zeros outside of the blocks stay zeros."""
    if not isinstance(other, Tensor) or not mode.lies_nhwc(other) or other.shape != input.shape or alpha != 1:
        return None
    if (maps := open_of(mode)) is not None:
        alike = input.dtype == other.dtype and input is not other
        found = maps.add(_map_of(mode, input), _map_of(mode, other), False) if alike else None
        if found is not None:
            return mode.as_nhwc(found)
        maps.close_all((input, other))
    return mode.as_nhwc((input + other).permute(0, 3, 1, 2))


def by_any(mode: masked, func: Any, writes: str | None, args: Any, kwargs: dict[str, Any]) -> Any:
    """What any other op gives of such maps. In place it works on a copy, as on others."""
    if not writes:
        return pytree.tree_map(functools.partial(_again, mode), func(*args, **kwargs))
    copy = args[0].clone()
    out = func(copy, *args[1:], **kwargs)
    mode.seen(args[0].copy_(_again(mode, copy)), True)
    return args[0] if out is copy else out


def _again(mode: masked, out: Any) -> Any:
    """Masked where it is of its plane; else its last sides are no plane."""
    if isinstance(out, Tensor) and (out.dim() > 4 or (out.dim() == 4 and len(out) != len(mode.mask))):
        return mode.tokens.loose(out)
    if not isinstance(out, Tensor) or out.dim() != 4 or out.dtype not in FLOATS:
        return out
    size = int(out.shape[1]), int(out.shape[2])
    if not mode.met(size):
        return mode.seen(out, True, is_plane=False)
    return mode.as_nhwc(sparse_fill(out.permute(0, 3, 1, 2), mode.active(size)))


T = torch.Tensor
IN_NHWC: dict[Any, Any] = {
    F.layer_norm: layer_norm, F.linear: linear, F.gelu: gelu, torch.add: add, T.add: add, T.__add__: add,
}  # fmt: skip
