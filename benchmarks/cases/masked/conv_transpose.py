"""sparse_conv_transpose2d_, bias and ReLU, fringe zeroed: the forms that decoders are made of, against PyTorch's dense
one, channels_last.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness import masks
from sbnet.benchmarks.harness.layers import Shape, facts, fringe_mask
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, WrongResult, close

# kernel, stride, padding, output padding
WINDOWS = ((2, 2, 0, 0), (4, 2, 1, 0), (3, 2, 1, 1))
WANTED = {1.0: 3.0, 0.25: 8.0, 0.1: 15.0}  # on Hopper: so many times as fast as dense, by density


def cases(setting: Setting) -> Iterator[Case]:
    shapes: list[tuple[Shape, int]] = setting.pick(
        [((1, 18, 22, 8), 8)],
        [((1, 200, 352, 64), 64)],
        [((1, 200, 352, 64), 64), ((1, 100, 176, 128), 64), ((1, 512, 512, 128), 128), ((4, 256, 256, 256), 128)],
    )
    for kernel, stride, padding, extra in WINDOWS:
        for shape, filters in shapes[: None if setting.cuda else 2]:
            for density in setting.pick((0.5,), (1.0, 0.1), (1.0, 0.25, 0.1)):
                window = {"kernel": kernel, "stride": stride, "filters": filters, "sparsity": 1 - density}
                described = facts(shape, setting.dtype, "random", 16, **window)
                options: dict[str, Any] = {"stride": stride, "padding": padding, "output_padding": extra}
                make = partial(work, setting, shape, filters, kernel, options, density)
                yield Case("conv transposed", "conv", described, make)


def work(setting: Setting, shape: Shape, filters: int, kernel: int, options: dict[str, Any], density: float) -> Work:
    n, h, w, c = shape
    place: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype}
    x = torch.randn(n, c, h, w, **place).contiguous(memory_format=torch.channels_last)
    weight = (torch.randn(c, filters, kernel, kernel, **place) / (c * kernel) ** 0.5).contiguous(
        memory_format=torch.channels_last
    )
    bias = torch.randn(filters, **place)
    size = sbnet.conv_transpose_output_size((h, w), kernel, **options)
    grid = sbnet.BlockGrid.cover(size, 16)
    count = max(1, round(n * grid.bcount[0] * grid.bcount[1] * density))
    active = masks.random_active((n, *size), grid, count, setting.device)
    inside = active.pixel_mask(size)
    fringe = sbnet.fringe(active, active, size, 3, 1, 1)  # for a 3x3 layer that reads the output
    edge = fringe_mask(fringe, inside)
    out = x.new_empty(n, *size, filters).permute(0, 3, 1, 2).fill_(torch.nan)

    def dense(dtype: torch.dtype = setting.dtype) -> Tensor:
        return F.conv_transpose2d(x.to(dtype), weight.to(dtype), bias.to(dtype), **options).relu_()

    torchs, exact = dense(), dense(torch.float64 if setting.dtype == torch.float32 else torch.float32)

    def ours() -> Tensor:
        sbnet.sparse_conv_transpose2d_(x, weight, bias, active, out, activation="relu", fringe=fringe, **options)
        return out

    def check(side: str, got: Tensor) -> float:
        if not side.startswith("sparse"):
            return close(got, torchs, exact, None)
        if not bool((got.isnan() | inside | edge).all()) or bool(torch.where(edge, got, 0).any()):
            raise WrongResult("pixels outside of the active blocks are not as they should be")
        return close(got, torchs, exact, inside)

    pixels = float(inside.sum())
    taps = kernel * kernel / options["stride"] ** 2  # of an output, in the middle of the plane
    moved = pixels * filters + pixels / options["stride"] ** 2 * c + float(edge.sum()) * filters + weight.numel()
    notes = {"density": int(active.count) / active.capacity, "blocks": int(active.count)}
    if setting.cuda:
        notes["wanted"] = WANTED.get(density, 0.0)
    return Work(
        {"sparse_conv_transpose2d_": Side(ours, "ours"), "F.conv_transpose2d": Side(dense)},
        check,
        2 * pixels * filters * c * taps,
        moved * x.element_size(),
        setting.dtype,
        notes,
    )
