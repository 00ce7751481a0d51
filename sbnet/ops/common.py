"""What every family of ops needs: layouts as the C++ side sees them, and the opt-in debug check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet import _library
from sbnet.active import ActiveBlocks, BlockGrid

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_traces(function: Function) -> Function:
    """torch.compiler.assume_constant_result, which would import torch._dynamo: that takes as long as torch itself."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_channels_last(x: Tensor) -> bool:
    """Channels lie next to each other and columns do not. As torch_binding/common.h and weights/conv.cpp.

    Strides alone, without is_contiguous(): torch 2.11 cannot decide that with dynamic shapes.
    """
    return bool(x.stride(1) == 1) and bool(x.stride(-1) != 1)


def empty4(like: Tensor, size: Sequence[int], channels_last: bool, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of NCHW shape `size`, packed in either memory format."""
    n, c, h, w = size
    shape = (n, h, w, c) if channels_last else (n, c, h, w)
    made = like.new_empty(shape, dtype=dtype)
    return made.permute(0, 3, 1, 2) if channels_last else made


def zeros4(like: Tensor, size: Sequence[int], channels_last: bool) -> Tensor:
    """As empty4, filled with zeros."""
    n, c, h, w = size
    return like.new_zeros((n, h, w, c)).permute(0, 3, 1, 2) if channels_last else like.new_zeros((n, c, h, w))


def check_active(op: str, active: ActiveBlocks) -> None:
    """With SBNET_DEBUG=1, raises if a row within the count names no block or the count exceeds the capacity.

    Kernels skip such rows. The check reads device data on the host (a synchronisation), hence opt-in.
    """
    if not _library.DEBUG or torch.compiler.is_compiling():
        return
    count = int(active.count)
    if not 0 <= count <= active.capacity:
        raise IndexError(f"sbnet::{op}: active: expected a count of 0 to the capacity, {active.capacity}, got {count}")
    rows = active.indices[:count]
    limit = torch.tensor([active.batch, *active.grid.bcount], device=rows.device)
    bad = ((rows < 0) | (rows >= limit)).any(1).nonzero()
    if len(bad):
        row = int(bad[0])
        raise IndexError(
            f"sbnet::{op}: active: expected blocks (n, i, j) below {tuple(limit.tolist())}, "
            f"got {tuple(rows[row].tolist())} in row {row} of indices"
        )


def pixels_of(block_map: Tensor, grid: Sequence[int], size: Sequence[int]) -> Tensor:
    """[N,1,H,W] bool: the active pixels of a tiling grid's numbers, for what has the block map alone."""
    blocks = (block_map.view(-1, *grid[6:]) >= 0).repeat_interleave(grid[0], 1).repeat_interleave(grid[1], 2)
    return blocks[:, None, : size[0], : size[1]]


def is_recorded(*tensors: Tensor | None) -> bool:
    """Does autograd record what is done to them?"""
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def refuse_gradient(op: str, instead: str, *tensors: Tensor | None) -> None:
    """In-place ops record no gradient: refuse tensors that want one instead of dropping it."""
    if is_recorded(*tensors):
        raise RuntimeError(
            f"sbnet::{op}: works in place and has no gradient, but an input requires one; use {instead}, "
            "or torch.no_grad()"
        )


def mark_written(x: Tensor) -> None:
    """Tells autograd that an in-place op wrote x, so that a backward pass that saved it earlier raises."""
    if not torch.compiler.is_compiling() and not x.is_inference():
        torch.autograd.graph.increment_version(x)


def require_tensor(op: str, argument: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"sbnet::{op}: {argument}: expected a torch.Tensor, got {type(value).__name__}")


def require_active(op: str, value: Any) -> None:
    if not isinstance(value, ActiveBlocks):
        raise TypeError(f"sbnet::{op}: active: expected an sbnet.ActiveBlocks, got {type(value).__name__}")
    if not isinstance(value.grid, BlockGrid):
        raise TypeError(f"sbnet::{op}: active: grid: expected an sbnet.BlockGrid, got {type(value.grid).__name__}")


def require_batch(op: str, x: Tensor, active: ActiveBlocks) -> None:
    """Images past the list's would be skipped, blocks of images past x's as well: neither can be meant."""
    if x.dim() == 4 and x.shape[0] != active.batch:  # another rank is the op's to refuse
        raise ValueError(f"sbnet::{op}: active: expected the images of x, {x.shape[0]}, got {active.batch}")


def refuse_meta_mix(op: str, *arguments: Any) -> None:
    """For fake implementations, which answer, with unwritten memory, where one tensor of several is meta."""
    devices = {t.device for t in arguments if isinstance(t, Tensor)}
    if len(devices) > 1 and any(device.type == "meta" for device in devices):
        names = " and ".join(sorted(map(str, devices)))
        raise RuntimeError(f"sbnet::{op}: expected tensors on one device, got {names}")


def mask_planes(op: str, mask: Any) -> Tensor:
    """A mask of any shape and dtype that ops take as [N,H,W], in a dtype that kernels read."""
    require_tensor(op, "mask", mask)
    if mask.is_complex():
        raise ValueError(f"sbnet::{op}: mask: dtype: expected bool, integers or real floats, got {mask.dtype}")
    if mask.dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        mask = mask.double()
    shape = tuple(mask.shape)
    if mask.dim() == 4 and mask.shape[1] == mask.shape[3] == 1 != mask.shape[2]:
        raise ValueError(
            f"sbnet::{op}: mask: shape: expected [N,H,W], since {shape} is one of a single row or of a single column"
        )
    if mask.dim() == 4 and mask.shape[1] == 1:
        mask = mask.squeeze(1)
    elif mask.dim() == 4 and mask.shape[3] == 1:
        mask = mask.squeeze(3)
    if mask.dim() != 3:
        raise ValueError(f"sbnet::{op}: mask: shape: expected [N,H,W], [N,H,W,1] or [N,1,H,W], got {shape}")
    return mask


def set_pixels(op: str, mask: Any) -> Tensor:
    """The same as [N,H,W] bool: pixels greater than 0.5, as `mask_pyramid` and `reduce_mask` have it by default."""
    mask = mask_planes(op, mask)
    return mask if mask.dtype == torch.bool else mask > 0.5


def activate(x: Tensor, activation: str | None, negative_slope: float = 0.01, slope: Tensor | None = None) -> Tensor:
    """An activation as PyTorch's ops compute it, of a whole x. slope: of leaky_relu, a number a channel."""
    if activation in (None, "none"):
        return x
    if slope is not None:
        return torch.where(x > 0, x, x * slope.to(x.dtype).reshape(-1, 1, 1))
    if activation == "leaky_relu":
        return F.leaky_relu(x, negative_slope)
    if activation not in ("relu", "relu6", "silu", "gelu", "hardswish"):
        raise ValueError(f"sbnet: activation: expected None or one of sparse_conv2d's, got {activation!r}")
    return getattr(F, activation)(x)
