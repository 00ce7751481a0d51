"""Convolution, batch normalisation and pools on active blocks."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import EllipsisType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbnet.active import ActiveBlocks, BlockGrid, Fringe
from sbnet.ops import (
    sparse_adaptive_avg_pool2d,
    sparse_adaptive_avg_pool2d_,
    sparse_adaptive_max_pool2d,
    sparse_adaptive_max_pool2d_,
    sparse_avg_pool2d,
    sparse_avg_pool2d_,
    sparse_conv2d,
    sparse_conv_transpose2d,
    sparse_fill,
    sparse_max_pool2d,
    sparse_max_pool2d_,
    sparse_rearrange,
    sparse_rearrange_,
    sparse_resize2d,
    sparse_resize2d_,
)
from sbnet.ops.common import activate
from sbnet.ops.masked.batch_norm import batch_norm2d, batch_norm_whole, synchronized_batch_norm2d

# `active` of a layer: active blocks, or None for the dense layer. Left out, it is dense, too, but says so once.
Active = ActiveBlocks | None | EllipsisType


def given(active: Active, layer: nn.Module) -> ActiveBlocks | None:
    """`active`, with a warning where it was left out: who forgets it waits for a speed that never comes."""
    if isinstance(active, EllipsisType):
        if not torch.compiler.is_compiling():
            _say_dense(type(layer).__name__)
        return None
    return active


@functools.cache  # once a kind of layer
def _say_dense(layer: str) -> None:
    warnings.warn(
        f"sbnet.nn.{layer}: called without active blocks, it runs "
        f"dense; pass `active`, or active=None where dense is meant",
        stacklevel=6,
    )


class SparseConv2d(nn.Conv2d):
    """nn.Conv2d computed on active blocks of its output, with the residual and the activation that follow it.

    Arguments and parameters of nn.Conv2d; zero padding, given in pixels.

    >>> conv = sbnet.nn.SparseConv2d(16, 64, 3, padding=1)
    >>> conv(x, active, activation="relu").shape  # zeros outside the active blocks
    torch.Size([1, 64, 48, 80])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.padding_mode != "zeros" or isinstance(self.padding, str):
            raise ValueError(
                f"sbnet.nn.SparseConv2d: padding: expected zeros, a number "
                f"of pixels, got {self.padding!r} of {self.padding_mode!r}"
            )

    def geometry(self) -> dict[str, Any]:
        """The keyword arguments of `sbnet.sparse_conv2d` that are the layer's."""
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}

    def forward(
        self, x: Tensor, active: Active = ..., *, activation: str | None = None, negative_slope: float = 0.01,
        residual: Tensor | None = None, slope: Tensor | None = None, residual_after: bool = False,
        x_active: ActiveBlocks | None = None,
    ) -> Tensor:  # fmt: skip
        """act(conv(x) + residual), or act(conv(x)) + residual with residual_after: x [N,C,H,W], residual
        [N,K,H_out,W_out], active of the H_out x W_out plane. slope [K] or [1]: of "leaky_relu"; x_active: the list of
        x's plane, where x is 0 elsewhere, as in `sparse_conv2d`."""
        blocks = given(active, self)
        if blocks is not None:
            return sparse_conv2d(
                x, self.weight, self.bias, blocks,
                activation=activation, negative_slope=negative_slope, residual=residual, slope=slope,
                residual_after=residual_after, x_active=x_active, **self.geometry(),
            )  # fmt: skip
        y = super().forward(x)
        before, after = (None, residual) if residual_after else (residual, None)
        y = activate(y if before is None else y + before, activation, negative_slope, slope)
        return y if after is None else y + after


class SparseConvTranspose2d(nn.ConvTranspose2d):
    """nn.ConvTranspose2d computed on active blocks of its output, with the residual and the activation that follow it.

    Arguments and parameters of nn.ConvTranspose2d.

    >>> up = sbnet.nn.SparseConvTranspose2d(16, 32, 2, stride=2)
    >>> up(torch.rand(1, 16, 24, 40), active, activation="relu").shape  # zeros outside the active blocks
    torch.Size([1, 32, 48, 80])
    """

    def geometry(self) -> dict[str, Any]:
        """The keyword arguments of `sbnet.sparse_conv_transpose2d` that are the layer's."""
        names = ("stride", "padding", "output_padding", "dilation", "groups")
        return {name: getattr(self, name) for name in names}

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        active: Active = ...,
        *,
        activation: str | None = None,
        negative_slope: float = 0.01,
        residual: Tensor | None = None,
        slope: Tensor | None = None,
    ) -> Tensor:
        """act(conv_transpose(x) + residual): x [N,C,H,W], active of the plane it writes, `sparse_conv2d`'s slope."""
        blocks = given(active, self)
        if blocks is not None:
            return sparse_conv_transpose2d(
                x, self.weight, self.bias, blocks,
                activation=activation, negative_slope=negative_slope, residual=residual, slope=slope,
                **self.geometry(),
            )  # fmt: skip
        y = super().forward(x)
        return activate(y if residual is None else y + residual, activation, negative_slope, slope)


class SparseBatchNorm2d(nn.BatchNorm2d):
    """nn.BatchNorm2d whose statistics, in training, are those of the active pixels.

    Running statistics are kept as PyTorch keeps them (momentum, unbiased variance). A batch without an active pixel
    leaves them alone and is not counted. Arguments, parameters and buffers of nn.BatchNorm2d.

    Args:
        synchronized: in training, the statistics are those of all processes of torch.distributed, where it is
            initialised, as nn.SyncBatchNorm's are.

    >>> y = sbnet.nn.SparseBatchNorm2d(16)(x, active)  # statistics of the active pixels
    """

    def __init__(self, *args: Any, synchronized: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.synchronized = synchronized

    def forward(self, x: Tensor, active: Active = ...) -> Tensor:
        """x [N,C,H,W], its active blocks -> the same shape, zeros outside of them."""
        blocks = given(active, self)
        if blocks is None:
            return super().forward(x)
        if not self.training and self.running_mean is not None:
            y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
            return sparse_fill(y, blocks)
        self._check(x, blocks)
        weight, bias = self.weight, self.bias
        many = self.synchronized and torch.distributed.is_available() and torch.distributed.is_initialized()
        if x.dtype == torch.float64:
            y, statistics = self._in_double(x, blocks)
        else:
            y, statistics = (synchronized_batch_norm2d if many else batch_norm2d)(x, blocks, weight, bias, self.eps)
        if self.training and self.track_running_stats:
            count = self.num_features
            self._follow(statistics[:count], statistics[count:-1], statistics[-1])
        return y

    def _in_double(self, x: Tensor, active: ActiveBlocks) -> tuple[Tensor, Tensor]:
        """By PyTorch's ops: kernels know no doubles."""
        inside = active.pixel_mask(x.shape[2:])
        pixels = inside.sum().to(x.dtype)
        values = torch.where(inside, x, 0.0).detach()
        mean = values.sum((0, 2, 3)) / pixels.clamp(min=1)
        apart = torch.where(inside, values - mean[:, None, None], 0.0)
        variance = apart.square().sum((0, 2, 3)) / pixels.clamp(min=1)
        return batch_norm_whole(x, self.weight, self.bias, inside, self.eps), torch.cat([mean, variance, pixels[None]])

    def _check(self, x: Tensor, active: ActiveBlocks) -> None:
        """Rejects inputs that batch statistics would silently accept."""
        op = "sbnet.nn.SparseBatchNorm2d"
        if not isinstance(active, ActiveBlocks):
            raise TypeError(f"{op}: active: expected an sbnet.ActiveBlocks, got {type(active).__name__}")
        if x.dim() != 4 or x.shape[1] != self.num_features or not x.is_floating_point():
            raise ValueError(
                f"{op}: x: expected a floating tensor [N,{self.num_features},H,W], got {tuple(x.shape)} {x.dtype}"
            )
        wanted = BlockGrid.cover(x.shape[2:], active.grid.bsize)
        if active.batch != x.shape[0] or active.grid != wanted:
            raise ValueError(f"{op}: active: expected {x.shape[0]} images, {wanted}, got {active.batch}, {active.grid}")

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor, pixels: Tensor) -> None:
        """Moves the running statistics. Nothing is read on the host."""
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(pixels > 0)
        mean_of_all = self.momentum is None
        factor = 1 / self.num_batches_tracked.clamp(min=1) if mean_of_all else pixels.new_tensor(self.momentum)
        factor = torch.where(pixels > 0, factor, 0.0)
        unbiased = variance * pixels / (pixels - 1).clamp(min=1)
        for running, now in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.lerp_(now.to(running.dtype), factor.to(running.dtype))


class _Pool(nn.Module):
    """What pools have in common: the options of their ops are attributes of PyTorch's layer."""

    options: tuple[str, ...]
    op: Callable[..., Tensor]
    op_: Callable[..., None]

    def geometry(self) -> dict[str, Any]:
        """The keyword arguments of its op."""
        return {name: getattr(self, name) for name in self.options}

    def forward(self, x: Tensor, active: Active = ...) -> Tensor:
        """x [N,C,H,W], active blocks of the plane it writes."""
        blocks = given(active, self)
        return super().forward(x) if blocks is None else self.op(x, blocks, **self.geometry())  # type: ignore[misc]

    def run_(self, x: Tensor, active: ActiveBlocks, out: Tensor, fringe: Fringe | None) -> None:
        """Writes the active blocks of `out` and zeroes the pixels of `fringe`."""
        self.op_(x, active, out, **self.geometry(), fringe=fringe)


class SparseMaxPool2d(_Pool, nn.MaxPool2d):
    """nn.MaxPool2d on active blocks of its output. Inactive pixels of x are what they hold: zeros.

    >>> sbnet.nn.SparseMaxPool2d(3, 2, 1)(torch.rand(1, 16, 96, 160), active).shape
    torch.Size([1, 16, 48, 80])
    """

    options = "kernel_size", "stride", "padding", "dilation", "ceil_mode"
    op, op_ = staticmethod(sparse_max_pool2d), staticmethod(sparse_max_pool2d_)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.return_indices:
            raise ValueError("sbnet.nn.SparseMaxPool2d: return_indices: expected False, got True")


class SparseAvgPool2d(_Pool, nn.AvgPool2d):
    """nn.AvgPool2d on active blocks of its output. Inactive pixels of a window count, as the zeros they hold.

    >>> sbnet.nn.SparseAvgPool2d(2)(torch.rand(1, 16, 96, 160), active).shape
    torch.Size([1, 16, 48, 80])
    """

    options = "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"
    op, op_ = staticmethod(sparse_avg_pool2d), staticmethod(sparse_avg_pool2d_)


class _AdaptivePool(nn.Module):
    """What adaptive pools have in common. `active` is of the plane that they READ."""

    def output(self, x: Tensor) -> tuple[int, int]:
        """(height, width) of what it gives."""
        size = self.output_size if isinstance(self.output_size, tuple) else (self.output_size, self.output_size)
        return tuple(side if n is None else n for n, side in zip(size, x.shape[2:], strict=True))  # type: ignore


class SparseAdaptiveAvgPool2d(_AdaptivePool, nn.AdaptiveAvgPool2d):
    """nn.AdaptiveAvgPool2d of active pixels; inactive ones count, as the zeros they stand for.

    >>> sbnet.nn.SparseAdaptiveAvgPool2d(1)(x, active).shape
    torch.Size([1, 16, 1, 1])
    """

    def forward(self, x: Tensor, active: Active = ...) -> Tensor:
        """x [N,C,H,W], active blocks of x's plane."""
        blocks = given(active, self)
        return super().forward(x) if blocks is None else sparse_adaptive_avg_pool2d(x, blocks, self.output(x))

    def run_(self, x: Tensor, active: ActiveBlocks, out: Tensor) -> None:
        """Writes all of `out`."""
        sparse_adaptive_avg_pool2d_(x, active, out)


class SparseAdaptiveMaxPool2d(_AdaptivePool, nn.AdaptiveMaxPool2d):
    """nn.AdaptiveMaxPool2d of active pixels; inactive ones count, as the zeros they stand for.

    >>> sbnet.nn.SparseAdaptiveMaxPool2d(1)(x, active).shape
    torch.Size([1, 16, 1, 1])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.return_indices:
            raise ValueError("sbnet.nn.SparseAdaptiveMaxPool2d: return_indices: expected False, got True")

    def forward(self, x: Tensor, active: Active = ...) -> Tensor:
        """x [N,C,H,W], active blocks of x's plane."""
        blocks = given(active, self)
        return super().forward(x) if blocks is None else sparse_adaptive_max_pool2d(x, blocks, self.output(x))

    def run_(self, x: Tensor, active: ActiveBlocks, out: Tensor) -> None:
        """Writes all of `out`."""
        sparse_adaptive_max_pool2d_(x, active, out)


class SparseUpsample(nn.Upsample):
    """nn.Upsample of 2-D planes on active blocks of its output, up and down.

    >>> sbnet.nn.SparseUpsample(scale_factor=2)(torch.rand(1, 16, 24, 40), active).shape
    torch.Size([1, 16, 48, 80])
    """

    def geometry(self) -> dict[str, Any]:
        """The keyword arguments of `sbnet.sparse_resize2d`."""
        return {
            "size": self.size,
            "scale_factor": self.scale_factor,
            "mode": self.mode,
            "align_corners": self.align_corners,
        }

    def forward(self, x: Tensor, active: Active = ...) -> Tensor:
        """x [N,C,H,W], active blocks of the plane it writes."""
        blocks = given(active, self)
        return super().forward(x) if blocks is None else sparse_resize2d(x, blocks, **self.geometry())

    def run_(self, x: Tensor, active: ActiveBlocks, out: Tensor, fringe: Fringe | None) -> None:
        """Writes the active blocks of `out`, whose plane is `size` where that is given, and zeroes `fringe`."""
        how = {name: value for name, value in self.geometry().items() if name != "size"}
        sparse_resize2d_(x, active, out, **how, fringe=fringe)


class _Rearranged(nn.Module):
    """What modules that only move elements have in common."""

    def geometry(self) -> dict[str, Any]:
        """The keyword arguments of `sbnet.sparse_rearrange`."""
        raise NotImplementedError

    def forward(self, x: Tensor, active: Active = ...) -> Tensor:
        """x [N,C,H,W], active blocks of the plane it writes."""
        blocks = given(active, self)
        return super().forward(x) if blocks is None else sparse_rearrange(x, blocks, **self.geometry())

    def run_(self, x: Tensor, active: ActiveBlocks, out: Tensor, fringe: Fringe | None) -> None:
        """Writes the active blocks of `out` and zeroes the pixels of `fringe`."""
        sparse_rearrange_(x, active, out, **self.geometry(), fringe=fringe)


class SparsePixelShuffle(_Rearranged, nn.PixelShuffle):
    """nn.PixelShuffle on active blocks of its output.

    >>> sbnet.nn.SparsePixelShuffle(2)(torch.rand(1, 64, 24, 40), active).shape
    torch.Size([1, 16, 48, 80])
    """

    def geometry(self) -> dict[str, Any]:
        return {"up": self.upscale_factor}


class SparsePixelUnshuffle(_Rearranged, nn.PixelUnshuffle):
    """nn.PixelUnshuffle on active blocks of its output.

    >>> sbnet.nn.SparsePixelUnshuffle(2)(torch.rand(1, 16, 96, 160), active).shape
    torch.Size([1, 64, 48, 80])
    """

    def geometry(self) -> dict[str, Any]:
        return {"down": self.downscale_factor}


class SparseChannelShuffle(_Rearranged, nn.ChannelShuffle):
    """nn.ChannelShuffle on active blocks.

    >>> y = sbnet.nn.SparseChannelShuffle(4)(x, active)
    """

    def geometry(self) -> dict[str, Any]:
        return {"groups": self.groups}


class SparseConstantPad2d(_Rearranged, nn.ConstantPad2d):
    """nn.ConstantPad2d on active blocks of its output; negative padding crops.

    >>> around = sbnet.reduce_mask(mask.new_ones(1, 50, 82), sbnet.BlockGrid.cover((50, 82), 8))
    >>> sbnet.nn.SparseConstantPad2d(1, 0.5)(x, around).shape
    torch.Size([1, 16, 50, 82])
    """

    def geometry(self) -> dict[str, Any]:
        return {"pad": tuple(self.padding), "value": float(self.value)}
