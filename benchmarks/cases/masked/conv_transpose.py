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
from sbnet.benchmarks.harness.layers import Shape, facts
from sbnet.benchmarks.harness.masked_layer import Output, channels_last, feature_map, wide
from sbnet.benchmarks.harness.registry import Case, Setting, Work
from sbnet.select import conv_transpose2d_kernel

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
    x, c = feature_map(setting, shape), shape[3]
    weight = channels_last(setting, c, filters, kernel, kernel) / (c * kernel) ** 0.5
    bias = torch.randn(filters, device=setting.device, dtype=setting.dtype)
    out = Output(x, sbnet.conv_transpose_output_size(shape[1:3], kernel, **options), filters, density)

    def dense(dtype: torch.dtype = setting.dtype) -> Tensor:
        return F.conv_transpose2d(x.to(dtype), weight.to(dtype), bias.to(dtype), **options).relu_()

    def ours() -> None:
        sbnet.sparse_conv_transpose2d_(
            x, weight, bias, out.active, out.memory, activation="relu", fringe=out.fringe, **options
        )

    notes: dict[str, Any] = {}
    if setting.cuda:
        notes["served by"] = conv_transpose2d_kernel(
            tuple(x.shape), filters, kernel, 16, dtype=setting.dtype, **options
        ).kernel
        notes["wanted"] = WANTED.get(density, 0.0)
    phases = options["stride"] ** 2
    taps = kernel * kernel / phases  # of an output, in the middle of the plane
    return out.work(
        "sparse_conv_transpose2d_",
        ours,
        "F.conv_transpose2d",
        dense,
        dense(wide(x.dtype)),
        out.pixels * filters + out.pixels / phases * c + weight.numel(),
        2 * out.pixels * filters * c * taps,
        **notes,
    )
