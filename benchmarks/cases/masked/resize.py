"""sparse_resize2d_ on active blocks, against PyTorch's interpolation of the whole plane, channels_last."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch.nn.functional as F
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness.layers import Shape, facts
from sbnet.benchmarks.harness.masked_layer import Output, feature_map, wide
from sbnet.benchmarks.harness.registry import Case, Setting, Work


def cases(setting: Setting) -> Iterator[Case]:
    shapes: list[Shape] = setting.pick(
        [(1, 18, 22, 8)],
        [(1, 200, 352, 64)],
        [(1, 200, 352, 64), (2, 512, 512, 128), (2, 1024, 1024, 64)],
    )
    for mode in ("nearest", "bilinear", "bicubic"):
        for shape in shapes[: None if setting.cuda else 1]:
            for density in setting.pick((0.5,), (1.0, 0.1), (1.0, 0.25, 0.1)):
                described = facts(shape, setting.dtype, "random", 16, scale=2, mode=mode, sparsity=1 - density)
                yield Case("sparse_resize2d_", "ops", described, partial(resize, setting, shape, mode, density))


def resize(setting: Setting, shape: Shape, mode: str, density: float) -> Work:
    x = feature_map(setting, shape)
    out = Output(x, sbnet.resize_output_size(shape[1:3], 2), shape[3], density)

    def dense(x: Tensor = x) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode=mode)

    return out.work(
        "sparse_resize2d_",
        lambda: sbnet.sparse_resize2d_(x, out.active, out.memory, scale_factor=2, mode=mode, fringe=out.fringe),
        "F.interpolate",
        dense,
        None if mode == "nearest" else dense(x.to(wide(x.dtype))),
        # Blocks of the output lie over a quarter of their pixels of x; bilinear and bicubic ones read beside them, too.
        out.pixels * 1.25 * shape[3],
    )
