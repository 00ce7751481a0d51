"""Edge biases of convolutions: numbers for the output positions whose filter reaches beyond the image."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.compat.blocksparse.constants import Constants
from sbnet.ops.weights.conv_geometry import parts


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
        self._constants = Constants(self.index)

    def __call__(self, y: Tensor, gain: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """y gain + bias at the groups' positions of y [N,K,...]; gain, bias [K,groups]. Differentiable."""
        for name, t in (("gain", gain), ("bias", bias)):
            if t is not None and t.shape != (y.shape[1], self.groups):
                raise ValueError(f"EdgeBias: {name}: expected {[y.shape[1], self.groups]}, got {list(t.shape)}")
        if gain is not None:
            y = y * self._plane(y, gain, 1.0)
        if bias is not None:
            y = y + self._plane(y, bias, 0.0)
        return y

    def _plane(self, y: Tensor, values: Tensor, interior: float) -> Tensor:
        (index,) = self._constants.on(y.device)
        padded = torch.nn.functional.pad(values, (0, 1), value=interior)
        return padded[:, index].to(y.dtype)


class ConvEdgeBias:
    """The edge bias of a convolution of TensorFlow's shapes and paddings: blocksparse's class of this name.

    Args:
        y_shape, x_shape: of output and input of the convolution, [N, ..., C], or [N, C, ...] with data_format "NCW",
            "NCHW" or "NCDHW".
        w_shape: of the filter, [*window, channels of x, channels of y] for every data_format, as TensorFlow has it.
        strides, dilations: one number for each axis of x, in its order, or None for ones.
        padding: "SAME" or "VALID", as TensorFlow pads.
        deconv: the bias is of the transposed convolution, from y's shape to x's.

    Attributes:
        shape: of gain and bias: [E, K] or, with channels first, [K, E]; E groups of positions.

    >>> bias = ConvEdgeBias((8, 32, 32, 64), (8, 32, 32, 48), (3, 3, 48, 64))
    >>> y = bias(y, torch.ones(bias.shape), torch.zeros(bias.shape))
    """

    def __init__(
        self,
        y_shape: Sequence[int],
        x_shape: Sequence[int],
        w_shape: Sequence[int],
        strides: Sequence[int] | None = None,
        padding: str = "SAME",
        data_format: str = "NHWC",
        dilations: Sequence[int] | None = None,
        deconv: bool = False,
    ) -> None:
        axes = len(x_shape) - 2
        first = data_format in ("NCW", "NCHW", "NCDHW")
        if not first and data_format not in ("NWC", "NHWC", "NDHWC"):
            raise ValueError(f"ConvEdgeBias: data_format: expected NHWC, NCHW or their kin, got {data_format!r}")
        if not len(y_shape) == len(w_shape) == axes + 2 or not 1 <= axes <= 3:
            raise ValueError(
                f"ConvEdgeBias: expected y, x and w of as many dimensions, 3 to 5, got {len(y_shape)}, {len(x_shape)} "
                f"and {len(w_shape)}"
            )
        if padding.upper() not in ("SAME", "VALID"):
            raise ValueError(f"ConvEdgeBias: padding: expected SAME or VALID, got {padding!r}")
        channel, spatial = (1, slice(2, None)) if first else (-1, slice(1, -1))
        if tuple(w_shape[-2:]) != (x_shape[channel], y_shape[channel]):
            raise ValueError(
                f"ConvEdgeBias: w_shape: expected [*window, {x_shape[channel]}, {y_shape[channel]}], channels "
                f"last as in TensorFlow, got {list(w_shape)}"
            )
        numbers = []
        for values in (strides, dilations):
            given = [1] * len(x_shape) if values is None else list(values)
            if len(given) == axes:  # of the image alone, as blocksparse's own tests give them
                numbers.append(given)
            elif len(given) == len(x_shape):
                numbers.append(given[spatial])
            else:
                raise ValueError(
                    f"ConvEdgeBias: strides, dilations: expected {axes} or {len(x_shape)} numbers, got {len(given)}"
                )
        stride, dilation = numbers
        window = w_shape[:-2]
        pads = [
            max((q - 1) * s + r - w, 0) // 2 if padding.upper() == "SAME" else 0
            for r, q, w, s in zip(window, y_shape[spatial], x_shape[spatial], stride, strict=True)
        ]
        lead = [1] * (3 - axes)
        geometry = [*lead, *window, *lead, *stride, *[0] * (3 - axes), *pads, *lead, *dilation]
        out, read = (x_shape, y_shape) if deconv else (y_shape, x_shape)
        self.edges = EdgeBias(out[spatial], read[spatial], geometry, deconv)
        self.first = first
        self.edgeBiasDim = self.edges.groups
        self.shape = (out[channel], self.edgeBiasDim) if first else (self.edgeBiasDim, out[channel])

    def __call__(
        self, x: Tensor, g: Tensor, b: Tensor, inference: bool = False, bench: int = 0, name: str | None = None
    ) -> Tensor:
        """x g + b at the positions near the edge; gain and bias of `self.shape`. Differentiable."""
        if not self.edgeBiasDim:
            return x
        if self.first:
            return self.edges(x, g, b)
        return self.edges(x.movedim(-1, 1), g.t(), b.t()).movedim(1, -1)


def conv_edge_bias_init(
    y: Tensor,
    x: Tensor,
    w: Any,
    strides: Sequence[int] | None = None,
    padding: str = "SAME",
    data_format: str = "NHWC",
    dilations: Sequence[int] | None = None,
) -> ConvEdgeBias:
    """The edge bias of y = conv(x, w); w [*window, C, K]."""
    return ConvEdgeBias(y.shape, x.shape, w.shape, strides, padding, data_format, dilations)


def deconv_edge_bias_init(
    y: Tensor,
    x: Tensor,
    w: Any,
    strides: Sequence[int] | None = None,
    padding: str = "SAME",
    data_format: str = "NHWC",
    dilations: Sequence[int] | None = None,
) -> ConvEdgeBias:
    """The edge bias of y = conv_transpose(x, w); w [*window, channels of y, channels of x], as TensorFlow has it."""
    return ConvEdgeBias(x.shape, y.shape, w.shape, strides, padding, data_format, dilations, deconv=True)
