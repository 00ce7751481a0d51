"""Ops of ONNX that read windows, of one to three spatial axes, as ops of PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.graph.onnx_run import Arguments, Unsupported, op

CONV = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
MAXIMUM = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
SIDES = list[int]


class Geometry:
    """Of a window over x [N,C,...]: a number an axis each.

    Attributes:
        before, after: padding.
    """

    def __init__(self, a: Arguments, x: Tensor, kernel: Sequence[int]) -> None:
        rank = x.dim() - 2
        if not 1 <= rank <= 3:
            raise Unsupported(f"input X: expected [N,C] and one to three axes, got {x.dim()} dimensions")
        given = a.option("kernel_shape", None)
        a.expect(given is None or list(given) == list(kernel), "attribute kernel_shape", str(list(kernel)), given)
        self.rank, self.kernel = rank, list(kernel)
        self.stride = a.option("strides", None) or [1] * rank
        self.dilation = a.option("dilations", None) or [1] * rank
        self.reach = [d * (k - 1) + 1 for d, k in zip(self.dilation, kernel, strict=True)]
        how = a.option("auto_pad", "NOTSET")
        pads = list(a.option("pads", None) or [0] * (2 * rank)) if how == "NOTSET" else [0] * (2 * rank)
        a.expect(len(pads) == 2 * rank, "attribute pads", f"{2 * rank} numbers", pads)
        if how in ("SAME_UPPER", "SAME_LOWER"):
            total = [
                max((math.ceil(n / s) - 1) * s + r - n, 0)
                for n, s, r in zip(x.shape[2:], self.stride, self.reach, strict=True)
            ]
            small, large = [t // 2 for t in total], [t - t // 2 for t in total]
            pads = [*small, *large] if how == "SAME_UPPER" else [*large, *small]
        a.expect(min(pads, default=0) >= 0, "attribute pads", "at least 0", pads)
        self.before, self.after = pads[:rank], pads[rank:]

    def even(self, x: Tensor, fill: float = 0.0) -> tuple[Tensor, SIDES]:
        """x, padded where the sides differ, and the padding left to the op."""
        if self.before == self.after:
            return x, self.before
        return self.padded(x, self.before, self.after, fill), [0] * self.rank

    @staticmethod
    def padded(x: Tensor, before: SIDES, after: SIDES, fill: float = 0.0) -> Tensor:
        flat = [n for pair in reversed(list(zip(before, after, strict=True))) for n in pair]
        return F.pad(x, flat, value=fill) if any(flat) else x

    def written(self, x: Tensor, ceil: bool) -> SIDES:
        """The output's sides: with `ceil`, a last window may reach past the padding, but must not begin in it."""
        found = []
        for n, b, e, r, s in zip(x.shape[2:], self.before, self.after, self.reach, self.stride, strict=True):
            room = n + b + e - r
            out = (-(-room // s) if ceil else room // s) + 1
            found.append(out - 1 if ceil and (out - 1) * s >= n + b else out)
        return found

    def past(self, x: Tensor, ceil: bool) -> SIDES:
        """Pixels after x that the windows read."""
        return [
            max((o - 1) * s + r - n - b, 0)
            for o, s, r, n, b in zip(
                self.written(x, ceil), self.stride, self.reach, x.shape[2:], self.before, strict=True
            )
        ]


@op("Conv")
def conv(a: Arguments) -> Tensor:
    g = Geometry(a, a[0], a[1].shape[2:])
    x, padding = g.even(a[0])
    return CONV[g.rank - 1](x, a[1], a[2], g.stride, padding, g.dilation, a.option("group"))


@op("ConvTranspose")
def conv_transpose(a: Arguments) -> Tensor:
    x, weight, bias = a[0], a[1], a[2]
    g = Geometry(a, x, weight.shape[2:])
    more, groups, wanted = a.option("output_padding", None) or [0] * g.rank, a.option("group"), a.option("output_shape")
    how, before, after = a.option("auto_pad"), g.before, g.after
    full = [(n - 1) * s + r for n, s, r in zip(x.shape[2:], g.stride, g.reach, strict=True)]
    given = wanted is not None
    if not given and how in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [n * s for n, s in zip(x.shape[2:], g.stride, strict=True)]
    if wanted:
        wanted = wanted[-g.rank :]
        total = [max(f + m - w, 0) for f, m, w in zip(full, more, wanted, strict=True)]
        small, large = [t // 2 for t in total], [t - t // 2 for t in total]
        before, after = (small, large) if how == "SAME_UPPER" else (large, small)
        if given:  # may be more than there is: what no pixel reaches holds the bias
            after = [f + m - b - w for f, m, b, w in zip(full, more, before, wanted, strict=True)]
    extra = [m + b - e for m, b, e in zip(more, before, after, strict=True)]  # as PyTorch takes it
    fits = all(0 <= e < max(s, d) for e, s, d in zip(extra, g.stride, g.dilation, strict=True))
    call = TRANSPOSED[g.rank - 1]
    if fits:
        return call(x, weight, bias, g.stride, before, extra, groups, g.dilation)
    y = call(x, weight, None, g.stride, 0, 0, groups, g.dilation)
    y = Geometry.padded(y, [-b for b in before], [m - e for m, e in zip(more, after, strict=True)])
    return y if bias is None else y + bias.reshape(-1, *[1] * g.rank)


@op("MaxPool")
def max_pool(a: Arguments) -> Tensor:
    x, ceil = a[0], bool(a.option("ceil_mode", 0))
    g = _pool(a)
    fits = g.before == g.after and all(2 * p <= k for p, k in zip(g.before, g.kernel, strict=True))
    call = MAXIMUM[g.rank - 1]
    if fits:
        return call(x, g.kernel, g.stride, g.before, g.dilation, ceil)
    least = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    return call(Geometry.padded(x, g.before, g.past(x, ceil), least), g.kernel, g.stride, 0, g.dilation)


def _pool(a: Arguments) -> Geometry:
    """Of a pool, whose SAME with dilations ONNX Runtime pads as if there were none, other than the standard says."""
    g = Geometry(a, a[0], a.option("kernel_shape"))
    how = a.option("auto_pad", "NOTSET")
    a.expect(max(g.dilation) == 1 or "SAME" not in how, "attribute auto_pad", "pads beside dilations", how)
    return g


def _sums(x: Tensor, g: Geometry, ceil: bool) -> Tensor:
    """Of each window, zeros beyond x."""
    x = Geometry.padded(x, g.before, g.past(x, ceil))
    ones = x.new_ones(x.shape[1], 1, *g.kernel)
    return CONV[g.rank - 1](x, ones, None, g.stride, 0, g.dilation, x.shape[1])


@op("AveragePool")
def average_pool(a: Arguments) -> Tensor:
    x, ceil, counted = a[0], bool(a.option("ceil_mode", 0)), bool(a.option("count_include_pad", 0))
    g = _pool(a)
    even = g.rank == 2 and g.before == g.after and g.dilation == [1, 1]
    if even and all(2 * p <= k for p, k in zip(g.before, g.kernel, strict=True)):
        return F.avg_pool2d(x, g.kernel, g.stride, g.before, ceil, counted)
    inside = x.new_ones(1, 1, *x.shape[2:])
    return _sums(x, g, ceil) / (_counts(inside, g, ceil) if counted else _sums(inside, g, ceil))


def _counts(inside: Tensor, g: Geometry, ceil: bool) -> Tensor:
    """Pixels of each window, padding among them; what a window reads past it does not count."""
    past = [max(p - e, 0) for p, e in zip(g.past(inside, ceil), g.after, strict=True)]
    ones = Geometry.padded(Geometry.padded(inside, g.before, g.after, 1.0), [0] * g.rank, past)
    counts = CONV[g.rank - 1](ones, inside.new_ones(1, 1, *g.kernel), None, g.stride, 0, g.dilation)
    for axis, side in enumerate(g.written(inside, ceil)):
        counts = counts.narrow(2 + axis, 0, side)
    return counts


@op("LpPool")
def lp_pool(a: Arguments) -> Tensor:
    x, p = a[0], a.option("p")
    g = _pool(a)
    return _sums(x.abs().pow(p), g, bool(a.option("ceil_mode", 0))).pow(1 / p)


def _all_axes(x: Tensor) -> list[int]:
    return list(range(2, x.dim()))


@op("GlobalAveragePool")
def global_average(a: Arguments) -> Tensor:
    x = a[0]
    return F.adaptive_avg_pool2d(x, 1) if x.dim() == 4 else x.mean(_all_axes(x), keepdim=True)


@op("GlobalMaxPool")
def global_max(a: Arguments) -> Tensor:
    x = a[0]
    return F.adaptive_max_pool2d(x, 1) if x.dim() == 4 else x.amax(_all_axes(x), keepdim=True)


@op("GlobalLpPool")
def global_lp(a: Arguments) -> Tensor:
    return torch.linalg.vector_norm(a[0], a.option("p"), _all_axes(a[0]), keepdim=True)


@op("AffineGrid")
def affine_grid(a: Arguments) -> Tensor:
    return F.affine_grid(a[0], a.number(1), bool(a.option("align_corners")))


GRID_MODES = {"linear": "bilinear", "cubic": "bicubic"}  # from version 20 on


@op("GridSample")
def grid_sample(a: Arguments) -> Tensor:
    mode = a.option("mode")
    a.expect(
        a[0].dim() == 4 or "cubic" not in GRID_MODES.get(mode, mode), "attribute mode", "no cubic of volumes", mode
    )
    return F.grid_sample(
        a[0], a[1], GRID_MODES.get(mode, mode), a.option("padding_mode"), bool(a.option("align_corners"))
    )


@op("Col2Im")
def col2im(a: Arguments) -> Tensor:
    size, kernel, rank = a.number(1), a.number(2), len(a.number(1))
    a.expect(rank == 2, "input image_shape", "two axes", size)
    pads, stride = a.option("pads", None) or [0] * 4, tuple(a.option("strides", None) or (1, 1))
    whole = size[0] + pads[0] + pads[2], size[1] + pads[1] + pads[3]
    y = F.fold(a[0], whole, tuple(kernel), tuple(a.option("dilations", None) or (1, 1)), 0, stride)
    return y[:, :, pads[0] : pads[0] + size[0], pads[1] : pads[1] + size[1]]


@op("DepthToSpace")
def depth_to_space(a: Arguments) -> Tensor:
    x, factor = a[0], a.option("blocksize")
    if a.option("mode", "DCR") == "DCR":  # channels of one place lie together: brought into PyTorch's order
        n, c, h, w = x.shape
        x = x.reshape(n, factor**2, c // factor**2, h, w).transpose(1, 2).reshape(n, c, h, w)
    return F.pixel_shuffle(x, factor)


@op("SpaceToDepth")
def space_to_depth(a: Arguments) -> Tensor:
    x, factor = a[0], a.option("blocksize")
    n, c, _, _ = x.shape
    y = F.pixel_unshuffle(x, factor)
    if a.option("mode", "DCR") != "DCR":
        return y
    return y.reshape(n, c, factor**2, *y.shape[2:]).transpose(1, 2).reshape(n, -1, *y.shape[2:])


@op("Gemm")
def gemm(a: Arguments) -> Tensor:
    x, weight, alpha, beta = a[0], a[1], a.option("alpha"), a.option("beta")
    x, right = x.t() if a.option("transA") else x, weight.t() if a.option("transB") else weight
    c = a[2]
    if alpha == 1 and (c is None or (beta == 1 and c.dim() == 1 and c.numel() == right.shape[1])):
        return F.linear(x, right.t(), c)
    y = torch.matmul(x, right)
    y = y if alpha == 1 else y * alpha
    return y if c is None else y + (c if beta == 1 else c * beta)


@op("Einsum")
def einsum(a: Arguments) -> Any:
    return torch.einsum(a.option("equation"), *a.all())
