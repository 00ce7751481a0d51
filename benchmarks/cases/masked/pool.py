"""Max and average pools on active blocks, against PyTorch's of the whole plane, channels_last."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness.layers import Shape, facts
from sbnet.benchmarks.harness.masked_layer import Output, feature_map, wide
from sbnet.benchmarks.harness.registry import Case, Setting, Work

# kind, kernel, stride, padding: ResNet's, the two halvings, and a blur
WINDOWS = (("max", 3, 2, 1), ("max", 2, 2, 0), ("avg", 2, 2, 0), ("avg", 3, 1, 1))


def cases(setting: Setting) -> Iterator[Case]:
    shapes: list[Shape] = setting.pick(
        [(1, 36, 44, 8)],
        [(1, 400, 704, 64)],
        [(1, 112, 112, 64), (1, 400, 704, 64), (2, 2048, 2048, 64), (2, 1024, 1024, 256)],
    )
    if not setting.cuda:
        shapes = [s for s in shapes if s[0] * s[1] * s[2] < 500_000]
    for kind, kernel, stride, padding in WINDOWS:
        for shape in shapes:
            for density in setting.pick((0.5,), (1.0, 0.1), (1.0, 0.3, 0.1)):
                window = {"kernel": kernel, "stride": stride, "sparsity": 1 - density}
                described = facts(shape, setting.dtype, "random", 16 // stride, **window)
                make = partial(pool, setting, shape, kind, (kernel, stride, padding), density)
                yield Case(f"sparse_{kind}_pool2d_", "ops", described, make)


def pool(setting: Setting, shape: Shape, kind: str, window: tuple[int, int, int], density: float) -> Work:
    x, size = feature_map(setting, shape), shape[1:3]
    out = Output(x, sbnet.pool_output_size(size, *window), shape[3], density, 16 // window[1])
    dense, sparse_ = getattr(F, f"{kind}_pool2d"), getattr(sbnet, f"sparse_{kind}_pool2d_")
    return out.work(
        f"sparse_{kind}_pool2d_",
        lambda: sparse_(x, out.active, out.memory, *window, fringe=out.fringe),
        f"F.{kind}_pool2d",
        lambda: dense(x, *window),
        None if kind == "max" else dense(x.to(wide(x.dtype)), *window),
        (out.pixels + pixels_read(out.inside, size, *window)) * shape[3],
    )


def pixels_read(inside: Tensor, size: tuple[int, int], kernel: int, stride: int, padding: int) -> float:
    """Pixels of the input that some active output reads."""
    flags = inside.float()
    ones = torch.ones(1, 1, kernel, kernel, device=flags.device)
    extra = [size[d] + 2 * padding - kernel - (inside.shape[2 + d] - 1) * stride for d in range(2)]
    reads = F.conv_transpose2d(flags, ones, stride=stride, padding=padding, output_padding=extra)
    return float((reads > 0).sum())
