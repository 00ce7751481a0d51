"""OpenAI blocksparse's BlocksparseConv and BlocksparseDeconv on PyTorch tensors, their names kept, and edge biases."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.ops import ConvLayout, blocksparse_conv, blocksparse_deconv
from sbnet.ops.weights.conv import parts, to_geometry


class BlocksparseConv:
    """A block-sparse convolution of images of one size; owns no parameters.

    Args:
        BCK: of each block a list of input channels and a list of output channels; lists may overlap.
        TRS, DHW: sizes of filters and images, one to three numbers.
        MPQ: size of the output, if not what the convolution gives.
        strides, dilates: one number an axis; longer tuples lose their first ones.
        padding: "SAME", "VALID" or one number an axis.
        edge_bias: whether a call takes an edge bias.

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
        self.edges = EdgeBias(self.MPQ, self.DHW, self.geometry, self.deconv) if edge_bias else None

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

    def edge_bias_shape(self) -> tuple[int, int]:
        """(K, E): output channels, groups of positions near the edge."""
        if self.edges is None:
            raise ValueError(f"{type(self).__name__}: edge_bias: expected True for an edge bias, got False")
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
        if edge_bias is None and edge_gain is None:
            return y
        self.edge_bias_shape()
        assert self.edges is not None
        return self.edges(y, edge_bias, edge_gain)

    def l2_normalize(self, F: Tensor, gain: Tensor | None = None, epsilon: float = 1e-12) -> Tensor:
        """F gain / sqrt(max(sum of squares, epsilon)), sums over the filter of an output channel within a block.

        gain: one number for every output channel of every block, block after block, or None. Computed in float32.
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
        return torch.cat(made).view(F.shape).to(F.dtype)

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


class EdgeBias:
    """A bias, or a gain and a bias, for output positions whose filter reaches beyond the image.

    Positions are grouped by which taps of the filter fall outside; those of which none does have no bias. Groups are in
    the order of their first positions. A hole of a strided transposed convolution is not outside.

    Args:
        MPQ, DHW: sizes of output and image, one to three numbers.
        geometry: the numbers of `sbnet.ops.weights.conv.to_geometry`.
        deconv: of a transposed convolution.
    """

    def __init__(self, MPQ: Sequence[int], DHW: Sequence[int], geometry: Sequence[int], deconv: bool = False) -> None:
        axes = len(MPQ)
        sides = []  # of each axis: the state of each tap at each position
        for out, size, kernel, stride, padding, dilation in zip(
            MPQ, DHW, *(part[3 - axes :] for part in parts(geometry)), strict=True
        ):
            states = []
            for o in range(out):
                taps = []
                for s in range(kernel):
                    at = o + padding - s * dilation if deconv else o * stride - padding + s * dilation
                    hole = deconv and at % stride != 0
                    at = at // stride if deconv else at
                    taps.append(not hole and not 0 <= at < size)
                states.append(tuple(taps))
            sides.append(states)
        found: dict[tuple[tuple[int, ...], ...], int] = {}
        groups = []
        for position in itertools.product(*sides):
            # Taps are outside where any axis is: all that a set says is where none is.
            inside = tuple(tuple(i for i, out in enumerate(taps) if not out) for taps in position)
            whole = all(len(i) == len(taps) for i, taps in zip(inside, position, strict=True))
            key = inside if all(inside) else ()
            groups.append(-1 if whole else found.setdefault(key, len(found)))
        self.groups = len(found)
        index = torch.tensor(groups, dtype=torch.int64).view(list(MPQ))
        self.index = torch.where(index < 0, self.groups, index)  # [MPQ] group of each position, `groups` for none
        self._on: dict[torch.device, Tensor] = {}

    def __call__(self, y: Tensor, bias: Tensor | None = None, gain: Tensor | None = None) -> Tensor:
        """y gain + bias at the groups' positions of y [N,K,...]; bias, gain [K,groups]. Differentiable."""
        for name, t in (("bias", bias), ("gain", gain)):
            if t is not None and t.shape != (y.shape[1], self.groups):
                raise ValueError(f"EdgeBias: {name}: expected {[y.shape[1], self.groups]}, got {list(t.shape)}")
        if gain is not None:
            y = y * self._plane(y, gain, 1.0)
        if bias is not None:
            y = y + self._plane(y, bias, 0.0)
        return y

    def _plane(self, y: Tensor, values: Tensor, interior: float) -> Tensor:
        if y.device not in self._on:
            self._on[y.device] = self.index.to(y.device)
        padded = torch.nn.functional.pad(values, (0, 1), value=interior)
        return padded[:, self._on[y.device]].to(y.dtype)


def conv_edge_bias_init(
    y: Tensor,
    x: Tensor,
    w: Tensor,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = "SAME",
    dilation: int | Sequence[int] = 1,
) -> EdgeBias:
    """The edge bias of y = conv(x, w), w [K,C,...]."""
    return _edge_bias(y, x, w, (stride, padding, dilation), False)


def deconv_edge_bias_init(
    y: Tensor,
    x: Tensor,
    w: Tensor,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = "SAME",
    dilation: int | Sequence[int] = 1,
) -> EdgeBias:
    """The edge bias of y = conv_transpose(x, w), w [C,K,...]."""
    return _edge_bias(y, x, w, (stride, padding, dilation), True)


def _edge_bias(y: Tensor, x: Tensor, w: Tensor, window: Any, transposed: bool) -> EdgeBias:
    layout = ConvLayout([([0], [0])], tuple(w.shape[2:]))
    return EdgeBias(y.shape[2:], x.shape[2:], to_geometry("conv_edge_bias", layout, *window), transposed)
