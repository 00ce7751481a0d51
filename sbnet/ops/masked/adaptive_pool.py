"""Pools of the active pixels of whole planes or large windows: global pools, adaptive ones to k x k."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.active import ActiveBlocks
from sbnet.geometry import to_pair
from sbnet.ops.common import empty4, mark_written, refuse_gradient, refuse_meta_mix, require_tensor
from sbnet.ops.masked.layer import in_place_fake, layer_inputs, whole_gradient

_ops = torch.ops.sbnet


def sparse_adaptive_avg_pool2d(
    x: Tensor, active: ActiveBlocks, output_size: int | Sequence[int] = 1, *, count_inactive: bool = True
) -> Tensor:
    """Averages of the active pixels of x over output_size windows; 1 is the global average.

    Equals F.adaptive_avg_pool2d(where(active, x, 0), output_size): inactive pixels are not read and count as zeros.
    Sums are float32, in an order that does not change from call to call.

    Args:
        x: [N,C,H,W] float32, float16 or bfloat16, any layout; channels_last is the fast one.
        active: active blocks of x's plane. (The output is dense.)
        output_size: an int or (H_out, W_out); windows overlap where it does not divide the plane, as in PyTorch.
        count_inactive: False: divide by the active pixels of each window; 0 where it has none.

    Returns:
        [N,C,H_out,W_out], channels_last. Differentiable.

    Raises:
        RuntimeError, ValueError, TypeError: wrong shapes, dtypes, devices or grid.

    >>> sbnet.sparse_adaptive_avg_pool2d(x, active).shape
    torch.Size([1, 16, 1, 1])
    """
    return _functional("sparse_adaptive_avg_pool2d", x, active, output_size, "avg", count_inactive)


def sparse_adaptive_max_pool2d(
    x: Tensor, active: ActiveBlocks, output_size: int | Sequence[int] = 1, *, count_inactive: bool = True
) -> Tensor:
    """Maxima of the active pixels of x over output_size windows; 1 is the global maximum.

    Equals F.adaptive_max_pool2d(where(active, x, 0), output_size); NaN in an active pixel passes through. Arguments,
    result and errors are those of `sparse_adaptive_avg_pool2d`; count_inactive=False: the zeros of inactive pixels do
    not count, and a window without active ones gives 0.

    >>> sbnet.sparse_adaptive_max_pool2d(x, active, 7).shape
    torch.Size([1, 16, 7, 7])
    """
    return _functional("sparse_adaptive_max_pool2d", x, active, output_size, "max", count_inactive)


def sparse_adaptive_avg_pool2d_(x: Tensor, active: ActiveBlocks, out: Tensor, *, count_inactive: bool = True) -> None:
    """As `sparse_adaptive_avg_pool2d`, into `out`, whose size is the output size. All of it is written.

    Args:
        out: [N,C,H_out,W_out] of x's dtype, any layout; must not share memory with x.

    >>> out = torch.empty(1, 16, 1, 1)
    >>> sbnet.sparse_adaptive_avg_pool2d_(x, active, out)
    """
    _in_place("sparse_adaptive_avg_pool2d_", x, active, out, "avg", count_inactive)


def sparse_adaptive_max_pool2d_(x: Tensor, active: ActiveBlocks, out: Tensor, *, count_inactive: bool = True) -> None:
    """As `sparse_adaptive_max_pool2d`, into `out`, whose size is the output size. All of it is written.

    >>> out = torch.empty(1, 16, 7, 7)
    >>> sbnet.sparse_adaptive_max_pool2d_(x, active, out)
    """
    _in_place("sparse_adaptive_max_pool2d_", x, active, out, "max", count_inactive)


def _functional(
    op: str, x: Tensor, active: ActiveBlocks, output_size: int | Sequence[int], method: str, count_inactive: bool
) -> Tensor:
    _, _, grid = layer_inputs(op, x, active)
    size = list(to_pair(output_size, f"{op}: output_size"))
    return _ops.sparse_adaptive_pool2d(x, active.block_map, grid, size, method, count_inactive)


def _in_place(op: str, x: Tensor, active: ActiveBlocks, out: Tensor, method: str, count_inactive: bool) -> None:
    _, _, grid = layer_inputs(op, x, active)
    require_tensor(op, "out", out)
    refuse_gradient(op, op.rstrip("_"), x, out)
    _ops.sparse_adaptive_pool2d_(x, active.block_map, grid, method, count_inactive, out)
    mark_written(out)


def adaptive_pool_whole(
    x: Tensor, inside: Tensor, output_size: Sequence[int], method: str, count_inactive: bool
) -> Tensor:
    """What `sparse_adaptive_pool2d` gives, by PyTorch; `inside` [N,1,H,W] bool: active pixels."""
    size = output_size[0], output_size[1]
    if method == "avg":
        mean = F.adaptive_avg_pool2d(torch.where(inside, x, torch.zeros_like(x)), size)
        if count_inactive:
            return mean
        share = F.adaptive_avg_pool2d(inside.to(torch.promote_types(x.dtype, torch.float32)), size)
        return torch.where(share > 0, mean / share.where(share > 0, torch.ones_like(share)), 0.0).to(x.dtype)
    if count_inactive:
        return F.adaptive_max_pool2d(torch.where(inside, x, torch.zeros_like(x)), size)
    most = F.adaptive_max_pool2d(torch.where(inside, x, torch.full_like(x, -torch.inf)), size)
    some = F.adaptive_max_pool2d(inside.to(x.dtype), size) > 0
    return torch.where(some, most, torch.zeros_like(most))


# ---- fake implementations and gradients


@torch.library.register_fake("sbnet::sparse_adaptive_pool2d")
def _sparse_adaptive_pool2d_fake(
    x: Tensor, block_map: Tensor, grid: list[int], output_size: list[int], method: str, count_inactive: bool
) -> Tensor:
    refuse_meta_mix("sparse_adaptive_pool2d", x, block_map)
    return empty4(x, (x.shape[0], x.shape[1], *output_size), True)


in_place_fake("sparse_adaptive_pool2d_")


whole_gradient("sparse_adaptive_pool2d", adaptive_pool_whole)
