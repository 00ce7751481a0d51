"""Residual blocks on active blocks: basic and bottleneck, post- and pre-activation (He et al., arXiv 1512.03385 and
1603.05027). Parameter names are torchvision's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbnet.active import ActiveBlocks, BlockGrid
from sbnet.nn.fold import Folded
from sbnet.nn.layers import SparseBatchNorm2d, SparseConv2d
from sbnet.ops import sparse_fill, sparse_gather, sparse_scatter


def convolve(
    conv: nn.Module,
    norm: nn.Module,
    x: Tensor,
    active: ActiveBlocks | None,
    activation: str | None = None,
    residual: Tensor | None = None,
    x_active: ActiveBlocks | None = None,
) -> Tensor:
    """activation(norm(conv(x)) + residual), in one op where the normalisation was folded away. x_active: the list that
    x was written on."""
    if torch.compiler.is_compiling() or (
        x_active and x_active.grid != BlockGrid.cover(x.shape[2:], x_active.grid.bsize)
    ):
        x_active = None  # its blocks are not those of x's plane alone
    if isinstance(norm, nn.Identity):
        return conv(x, active, activation=activation, residual=residual, x_active=x_active)
    y = norm(conv(x, active, x_active=x_active), active)
    if residual is not None:
        y = y + residual if active is None else sparse_fill(y + residual, active)
    return F.relu(y) if activation == "relu" else y


def rectify(norm: Any, x: Tensor, active: ActiveBlocks | None) -> Tensor:
    """relu(norm(x)); a folded normalisation is a depthwise convolution."""
    return norm(x, active, activation="relu") if isinstance(norm, SparseConv2d) else F.relu(norm(x, active))


class SparseProjection(nn.Sequential):
    """The shortcut of a block that changes width or resolution: a 1x1 convolution, normalised or not.

    >>> sbnet.nn.SparseProjection(16, 32)(x, active).shape
    torch.Size([1, 32, 48, 80])
    """

    folds = (("0", "1"),)

    def __init__(self, inputs: int, outputs: int, stride: int = 1, norm: bool = True) -> None:
        normalise = SparseBatchNorm2d(outputs) if norm else nn.Identity()
        super().__init__(SparseConv2d(inputs, outputs, 1, stride, bias=False), normalise)

    def forward(self, x: Tensor, active: ActiveBlocks | None = None) -> Tensor:  # type: ignore[override]
        """x [N,C,H,W], active blocks of the plane it writes."""
        return convolve(self[0], self[1], x, active)


class _ResidualBlock(nn.Module):
    """conv1, bn1, conv2, ... and downsample; what basic and bottleneck share.

    Post-activation: relu(bn(conv(...)) + shortcut(x)), normalisation after each convolution. Pre-activation:
    normalisation and ReLU before each; the sum is returned as it is, and a projection reads relu(bn1(x)).
    """

    folds: tuple[tuple[str, str], ...]
    expansion: int

    def __init__(
        self, convolutions: list[SparseConv2d], inputs: int, stride: int, preactivation: bool, stacked: bool
    ) -> None:
        super().__init__()
        outputs = convolutions[-1].out_channels
        self.preactivation, self.stacked, self.depth = preactivation, stacked, len(convolutions)
        for k, conv in enumerate(convolutions, 1):
            self.add_module(f"conv{k}", conv)
            self.add_module(f"bn{k}", SparseBatchNorm2d(conv.in_channels if preactivation else conv.out_channels))
        project = stride != 1 or inputs != outputs
        self.downsample = SparseProjection(inputs, outputs, stride, norm=not preactivation) if project else None
        # a normalisation is folded into the convolution before it
        self.folds = tuple((f"conv{k}", f"bn{k + preactivation}") for k in range(1, self.depth + 1 - preactivation))

    def forward(self, x: Tensor, active: ActiveBlocks | None = None, out_active: ActiveBlocks | None = None) -> Tensor:
        """The block on active blocks.

        Args:
            x: [N,C,H,W].
            active: active blocks of the plane of x, or None for the dense block.
            out_active: those of the output plane, where the block has a stride.

        Returns:
            [N,K,H_out,W_out]: zeros outside the active blocks, or the shortcut there if the block is `stacked`.
        """
        if out_active is None:
            if active is not None and self.downsample is not None and self.downsample[0].stride != (1, 1):
                raise ValueError(
                    f"sbnet.nn.{type(self).__name__}: out_active: expected the active "
                    f"blocks of the output plane where a block has a stride, got None"
                )
            out_active = active
        if self.stacked and out_active is not None:
            return self._on_the_stack(x, out_active)
        y = rectify(self.bn1, x, active) if self.preactivation else x
        shortcut = x if self.downsample is None else self.downsample(y, out_active)
        written = active if self.preactivation else None
        for conv, norm, last in self._steps():
            active = out_active if conv.stride != (1, 1) else active
            activation = None if last and self.preactivation else "relu"
            y = convolve(conv, norm, y, active, activation, shortcut if last else None, written)
            written = active
        return y

    def _steps(self) -> Iterator[tuple[Any, nn.Module, bool]]:
        """(convolution, the normalisation after it, is it the last)."""
        for k in range(1, self.depth + 1):
            last = k == self.depth
            norm = Folded() if last and self.preactivation else self.get_submodule(f"bn{k + self.preactivation}")
            yield self.get_submodule(f"conv{k}"), norm, last

    def _on_the_stack(self, x: Tensor, active: ActiveBlocks) -> Tensor:
        """SBNet's own form: blocks and halo gathered once, convolutions without padding on the stack, the sum scattered
        back onto the shortcut of the whole x. What is read is x, masked or not. Rows past the count are computed too:
        `active.trim()` saves that. In training, batches are the stack's active rows with their halos, as there."""
        steps = list(self._steps())
        grids = [active.grid]  # of what each convolution reads, then of what the last one writes
        for conv, _, _ in reversed(steps):
            grids.insert(0, grids[0].conv_input(conv.kernel_size, conv.stride, conv.padding, conv.dilation))
        blocks = sparse_gather(x, active, grid=grids[0])
        y = rectify(self.bn1, blocks, self._rows(blocks, active)) if self.preactivation else blocks
        plane = x.new_ones((x.shape[0], 1, *x.shape[2:]))
        for at, (conv, norm, last) in enumerate(steps):
            if conv.kernel_size != (1, 1) and (at or self.preactivation):
                # Beyond the image there are zeros, not normalised zeros.
                y = y * sparse_gather(plane, active, grid=grids[at])
            if conv.stride != (1, 1):
                plane = plane.new_ones(
                    (len(plane), 1, *(-(-n // s) for n, s in zip(plane.shape[2:], conv.stride, strict=True)))
                )
            y = F.conv2d(y, conv.weight, conv.bias, conv.stride, 0, conv.dilation, conv.groups)
            y = norm(y, self._rows(y, active))
            y = y if last else F.relu(y)
        base = x
        if self.downsample is not None:
            base = self.downsample(rectify(self.bn1, x, None) if self.preactivation else x)
        if self.preactivation:
            return sparse_scatter(y, active, base, add=True)
        return sparse_scatter(F.relu(y + sparse_gather(base, active)), active, base)

    def _rows(self, stack: Tensor, active: ActiveBlocks) -> ActiveBlocks | None:
        """In training, the rows of a stack that hold blocks, as active blocks of the stack itself."""
        if not self.training:
            return None
        rows = torch.arange(len(stack), dtype=torch.int32, device=stack.device)
        there = rows < active.count
        size = (stack.shape[2], stack.shape[3])
        indices = torch.where(there[:, None], torch.stack([rows, rows * 0, rows * 0], 1), -1)
        block_map = torch.where(there, rows, -1)[:, None, None]
        return ActiveBlocks(indices, active.count, active.count, block_map, BlockGrid.cover(size, size))


class SparseBasicBlock(_ResidualBlock):
    """Two 3x3 convolutions and a shortcut.

    Args:
        inputs: channels of x.
        planes: channels of both convolutions.
        stride: of the first one.
        preactivation: normalise and rectify before each convolution instead of after it.
        stacked: compute as the SBNet paper does, on a gathered stack; equals where(M, dense block(x), shortcut(x)), the
            shortcut being x or its projection.

    Parameters: conv1, bn1, conv2, bn2, and downsample.0, downsample.1 where stride or channels change.

    >>> sbnet.nn.SparseBasicBlock(16, 16)(x, active).shape
    torch.Size([1, 16, 48, 80])
    """

    expansion = 1

    def __init__(
        self, inputs: int, planes: int, stride: int = 1, *, preactivation: bool = False, stacked: bool = False
    ) -> None:
        convolutions = [_conv3x3(inputs, planes, stride), _conv3x3(planes, planes)]
        super().__init__(convolutions, inputs, stride, preactivation, stacked)


class SparseBottleneck(_ResidualBlock):
    """1x1, 3x3, 1x1 convolutions and a shortcut; four times as many channels come out as lie between.

    Args:
        inputs: channels of x.
        planes: channels of the first two convolutions; 4 * planes come out.
        stride: of the 3x3 convolution.
        preactivation, stacked: as for `SparseBasicBlock`.

    Parameters: conv1, bn1, ... conv3, bn3, and downsample.0, downsample.1 where stride or channels change.

    >>> sbnet.nn.SparseBottleneck(16, 4)(x, active).shape
    torch.Size([1, 16, 48, 80])
    """

    expansion = 4

    def __init__(
        self, inputs: int, planes: int, stride: int = 1, *, preactivation: bool = False, stacked: bool = False
    ) -> None:
        outputs = planes * self.expansion
        narrow, wide = SparseConv2d(inputs, planes, 1, bias=False), SparseConv2d(planes, outputs, 1, bias=False)
        super().__init__([narrow, _conv3x3(planes, planes, stride), wide], inputs, stride, preactivation, stacked)


def _conv3x3(inputs: int, outputs: int, stride: int = 1) -> SparseConv2d:
    return SparseConv2d(inputs, outputs, 3, stride, padding=1, bias=False)
