"""blocksparse.conv: block-sparse convolutions on PyTorch tensors [N, C, ...], and edge biases."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.compat.blocksparse.edge_bias import ConvEdgeBias as ConvEdgeBias
from sbnet.compat.blocksparse.edge_bias import EdgeBias
from sbnet.compat.blocksparse.edge_bias import conv_edge_bias_init as conv_edge_bias_init
from sbnet.compat.blocksparse.edge_bias import deconv_edge_bias_init as deconv_edge_bias_init
from sbnet.compat.blocksparse.ewops import cwise_linear as cwise_linear
from sbnet.ops import ConvLayout, blocksparse_conv, blocksparse_deconv
from sbnet.ops.weights.conv_geometry import parts, to_geometry


class BlocksparseConv:
    """A block-sparse convolution of images of one size; owns no parameters.

    Args:
        BCK: of each block a list of input channels and a list of output channels; lists may overlap.
        TRS, DHW: sizes of filters and images, one to three numbers.
        MPQ: size of the output, if not what the convolution gives.
        strides, dilates: one number an axis; longer tuples lose their first ones.
        padding: "SAME", "VALID" or one number an axis.
        edge_bias, debug: taken as the reference's versions have them; every object takes an edge bias.

    >>> conv = BlocksparseConv([[range(0, 32), range(0, 48)]], (3, 3), (28, 28))
    >>> y = conv(torch.randn(conv.f_shape()), torch.randn(conv.i_shape(8)))
    """

    deconv = False

    def __init__(
        self,
        BCK: Sequence[Any],
        TRS: Sequence[int],
        DHW: Sequence[int],
        MPQ: Sequence[int] | None = None,
        strides: Sequence[int] = (1, 1, 1),
        dilates: Sequence[int] = (1, 1, 1),
        padding: str | Sequence[int] = "SAME",
        edge_bias: bool = False,
        debug: bool = False,
    ) -> None:
        axes = len(TRS)
        self.layout = ConvLayout(BCK, TRS)
        self.BCK, self.TRS, self.DHW = self.layout.BCK, list(TRS), list(DHW)
        if len(self.DHW) != axes or (MPQ is not None and len(MPQ) != axes):
            raise ValueError(f"{type(self).__name__}: DHW, MPQ: expected {axes} numbers, as TRS has")
        self.C, self.K = self.layout.in_channels, self.layout.out_channels
        self.blocks = self.layout.blocks
        self.options: dict[str, Any] = {
            "stride": list(strides)[-axes:],
            "dilation": list(dilates)[-axes:],
            "padding": padding if isinstance(padding, str) else list(padding)[-axes:],
        }
        self.geometry = to_geometry("blocksparse_conv", self.layout, **self.options)
        self.MPQ = list(MPQ) if MPQ is not None else [self._side(d) for d in range(axes)]

    def _numbers(self, axis: int) -> list[int]:
        """Kernel size, stride, padding, dilation."""
        return [part[3 - len(self.TRS) + axis] for part in parts(self.geometry)]

    def _side(self, axis: int) -> int:
        kernel, stride, padding, dilation = self._numbers(axis)
        return -(-(self.DHW[axis] - (kernel - 1) * dilation + 2 * padding) // stride)

    def i_shape(self, N: int) -> list[int]:
        """Shape of N images."""
        return [N, self.C, *self.DHW]

    def o_shape(self, N: int) -> list[int]:
        """Shape of the output for N images."""
        return [N, self.K, *self.MPQ]

    def f_shape(self, block: int | None = None) -> list[int]:
        """Shape of the filters, [weights] where blocks differ in size; or of the filter of one block."""
        if block is not None:
            return self._filter(*self.layout.sizes[block])
        if len(self.layout.filter_shape) == 1:
            return [self.layout.weights]
        return [self.blocks, *self._filter(*self.layout.sizes[0])]

    def _filter(self, outputs: int, inputs: int) -> list[int]:
        return [inputs, outputs, *self.TRS] if self.deconv else [outputs, inputs, *self.TRS]

    @functools.cached_property
    def edges(self) -> EdgeBias:
        """The groups of output positions near the edge."""
        return EdgeBias(self.MPQ, self.DHW, self.geometry, self.deconv)

    def edge_bias_shape(self) -> tuple[int, int]:
        """(K, E): output channels, groups of positions near the edge."""
        return self.K, self.edges.groups

    def __call__(
        self,
        F: Tensor,
        I: Tensor,  # noqa: E741
        edge_bias: Tensor | None = None,
        edge_gain: Tensor | None = None,
    ) -> Tensor:
        """Filters F and images I [N,C,...] -> [N,K,...]; edge_bias, edge_gain [K,E]: see `EdgeBias`. Differentiable."""
        if list(I.shape[2:]) != self.DHW:
            raise ValueError(f"{type(self).__name__}: I: expected images of {self.DHW}, got {list(I.shape[2:])}")
        convolve = blocksparse_deconv if self.deconv else blocksparse_conv
        y = convolve(I, F, self.layout, output_size=self.MPQ, **self.options)
        return y if edge_bias is None and edge_gain is None else self.edges(y, edge_gain, edge_bias)

    def l2_normalize(
        self, F: Tensor, gain: Tensor | None = None, epsilon: float = 1e-12, dtype: torch.dtype | None = None
    ) -> Tensor:
        """F gain / sqrt(max(sum of squares, epsilon)), sums over the filter of an output channel within a block.

        gain: one number for every output channel of every block, block after block, or None. Computed in float32;
        the result is in `dtype`, by default F's.
        """
        outputs = [len(outputs) for _, outputs in self.BCK]
        if gain is not None and gain.shape != (sum(outputs),):
            raise ValueError(f"l2_normalize: gain: expected [{sum(outputs)}], got {list(gain.shape)}")
        start, first, made = 0, 0, []
        flat, wide = F.reshape(-1), math.prod(self.TRS)
        for size, run in itertools.groupby(self.layout.sizes):  # blocks of one size at once
            count = len(list(run))
            shape = [count, *(size[::-1] if self.deconv else size), wide]
            part = flat[start : start + math.prod(shape)].view(shape).float()
            dims = (1, 3) if self.deconv else (2, 3)
            scale = part.square().sum(dims, keepdim=True).clamp(min=epsilon).rsqrt()
            if gain is not None:
                scale = scale * gain[first : first + count * size[0]].float().view(scale.shape)
            made.append((part * scale).reshape(-1))
            start, first = start + math.prod(shape), first + count * size[0]
        return torch.cat(made).view(F.shape).to(dtype or F.dtype)

    def collapse_filter(self, F: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """One filter a block -> a vector."""
        return torch.cat([f.reshape(-1) for f in F]).to(dtype or F[0].dtype)


class BlocksparseDeconv(BlocksparseConv):
    """A block-sparse transposed convolution: the exact transpose of a `BlocksparseConv` with C and K exchanged.

    Filters of a block are [inputs, outputs, *TRS]. MPQ is by default W stride + S - 2 padding - (S mod 2).
    """

    deconv = True

    def _side(self, axis: int) -> int:
        kernel, stride, padding, _ = self._numbers(axis)
        return self.DHW[axis] * stride + kernel - 2 * padding - kernel % 2
