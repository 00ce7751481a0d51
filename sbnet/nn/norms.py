"""Normalisations and elementwise programs on active blocks."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from sbnet.active import ActiveBlocks, Fringe
from sbnet.nn.layers import Active, given
from sbnet.ops import (
    sparse_group_norm,
    sparse_group_norm_,
    sparse_layer_norm2d,
    sparse_layer_norm2d_,
    sparse_pointwise,
    sparse_pointwise_,
    sparse_softmax2d,
    sparse_softmax2d_,
)
from sbnet.ops.masked.pointwise import run_program


class SparseGroupNorm(nn.GroupNorm):
    """nn.GroupNorm whose mean and variance are those of an image's active pixels. Arguments and parameters of
    nn.GroupNorm.

    >>> y = sbnet.nn.SparseGroupNorm(4, 16)(x, active)
    """

    def forward(self, x: Tensor, active: Active = ...) -> Tensor:  # type: ignore[override]
        """x [N,C,H,W], its active blocks -> the same shape, zeros outside of them."""
        blocks = given(active, self)
        if blocks is None:
            return super().forward(x)
        return sparse_group_norm(x, blocks, self.num_groups, self.weight, self.bias, self.eps)

    def run_(self, x: Tensor, active: ActiveBlocks, out: Tensor, fringe: Fringe | None) -> None:
        """Writes the active blocks of `out` and zeroes the pixels of `fringe`."""
        sparse_group_norm_(x, active, out, self.num_groups, self.weight, self.bias, self.eps, fringe=fringe)


class SparseInstanceNorm2d(nn.InstanceNorm2d):
    """nn.InstanceNorm2d whose mean and variance are those of an image's active pixels. Arguments and parameters of
    nn.InstanceNorm2d, without running statistics.

    >>> y = sbnet.nn.SparseInstanceNorm2d(16)(x, active)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.track_running_stats:
            raise ValueError("sbnet.nn.SparseInstanceNorm2d: track_running_stats: expected False, got True")

    def forward(self, x: Tensor, active: Active = ...) -> Tensor:  # type: ignore[override]
        """x [N,C,H,W], its active blocks -> the same shape, zeros outside of them."""
        blocks = given(active, self)
        if blocks is None:
            return super().forward(x)
        return sparse_group_norm(x, blocks, self.num_features, self.weight, self.bias, self.eps)

    def run_(self, x: Tensor, active: ActiveBlocks, out: Tensor, fringe: Fringe | None) -> None:
        """Writes the active blocks of `out` and zeroes the pixels of `fringe`."""
        sparse_group_norm_(x, active, out, self.num_features, self.weight, self.bias, self.eps, fringe=fringe)


class SparseLayerNorm2d(nn.LayerNorm):
    """nn.LayerNorm over the channels of each pixel of [N,C,H,W], as ConvNeXt has it. `normalized_shape` is C.

    >>> y = sbnet.nn.SparseLayerNorm2d(16)(x, active)
    """

    def __init__(self, num_channels: int, **kwargs: Any) -> None:
        super().__init__(num_channels, **kwargs)

    def forward(self, x: Tensor, active: Active = ...) -> Tensor:  # type: ignore[override]
        """x [N,C,H,W], its active blocks -> the same shape, zeros outside of them."""
        blocks = given(active, self)
        if blocks is None:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return sparse_layer_norm2d(x, blocks, self.weight, self.bias, self.eps)

    def run_(self, x: Tensor, active: ActiveBlocks, out: Tensor, fringe: Fringe | None) -> None:
        """Writes the active blocks of `out` and zeroes the pixels of `fringe`."""
        sparse_layer_norm2d_(x, active, out, self.weight, self.bias, self.eps, fringe=fringe)


class SparseSoftmax2d(nn.Module):
    """Softmax, or its logarithm, over the channels of each pixel.

    Args:
        log: F.log_softmax instead of F.softmax.

    >>> classes = sbnet.nn.SparseSoftmax2d()(x, active)
    """

    def __init__(self, log: bool = False) -> None:
        super().__init__()
        self.log = log

    def forward(self, x: Tensor, active: Active = ...) -> Tensor:
        """x [N,C,H,W], its active blocks -> the same shape, zeros outside of them."""
        blocks = given(active, self)
        if blocks is None:
            return F.log_softmax(x, 1) if self.log else F.softmax(x, 1)
        return sparse_softmax2d(x, blocks, log=self.log)

    def run_(self, x: Tensor, active: ActiveBlocks, out: Tensor, fringe: Fringe | None) -> None:
        """Writes the active blocks of `out` and zeroes the pixels of `fringe`."""
        sparse_softmax2d_(x, active, out, log=self.log, fringe=fringe)


class SparsePointwise(nn.Module):
    """A program of steps on each element, as `sbnet.sparse_pointwise` runs it.

    Args:
        program: "mul a; add b; hardswish".

    >>> gate = sbnet.nn.SparsePointwise("sigmoid; mul a")
    >>> y = gate(x, active, torch.rand_like(x))  # zeros outside the active blocks
    """

    def __init__(self, program: str) -> None:
        super().__init__()
        self.program = program

    def forward(self, x: Tensor, active: Active, *others: Tensor) -> Tensor:
        """x [N,C,H,W], active blocks of its plane or None, operands a, b, c, d."""
        blocks = given(active, self)
        if blocks is None:
            return run_program(self.program, x, *others)
        return sparse_pointwise(x, blocks, self.program, *others)

    def run_(self, x: Tensor, active: ActiveBlocks, out: Tensor, fringe: Fringe | None, *others: Tensor) -> None:
        """Writes the active blocks of `out` and zeroes the pixels of `fringe`."""
        sparse_pointwise_(x, active, self.program, *others, out=out, fringe=fringe)

    def extra_repr(self) -> str:
        return repr(self.program)


class SparsePReLU(nn.PReLU):
    """nn.PReLU on active blocks, with one slope or one a channel. Arguments and parameters of nn.PReLU.

    >>> y = sbnet.nn.SparsePReLU(16)(x, active)
    """

    def forward(self, x: Tensor, active: Active = ...) -> Tensor:  # type: ignore[override]
        """x [N,C,H,W], its active blocks -> the same shape, zeros outside of them."""
        blocks = given(active, self)
        return super().forward(x) if blocks is None else sparse_pointwise(x, blocks, "prelu a", self._slopes())

    def run_(self, x: Tensor, active: ActiveBlocks, out: Tensor, fringe: Fringe | None) -> None:
        """Writes the active blocks of `out` and zeroes the pixels of `fringe`."""
        sparse_pointwise_(x, active, "prelu a", self._slopes(), out=out, fringe=fringe)

    def _slopes(self) -> Tensor:
        return self.weight[None, :, None, None]
