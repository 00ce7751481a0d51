"""Max and average pools on active blocks, against PyTorch's of the whole plane, channels_last."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness import masks
from sbnet.benchmarks.harness.layers import Shape, facts, fringe_mask
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, WrongResult, close, same

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
    n, h, w, c = shape
    x = torch.randn(n, c, h, w, device=setting.device, dtype=setting.dtype).contiguous(
        memory_format=torch.channels_last
    )
    size = sbnet.pool_output_size((h, w), *window)
    grid = sbnet.BlockGrid.cover(size, 16 // window[1])
    count = max(1, round(n * grid.bcount[0] * grid.bcount[1] * density))
    active = masks.random_active((n, *size), grid, count, setting.device)
    inside = active.pixel_mask(size)
    fringe = sbnet.fringe(active, active, size, 3, 1, 1)
    edge = fringe_mask(fringe, inside)
    out = x.new_empty(n, *size, c).permute(0, 3, 1, 2).fill_(torch.nan)
    dense, sparse_ = getattr(F, f"{kind}_pool2d"), getattr(sbnet, f"sparse_{kind}_pool2d_")
    torchs = dense(x, *window)
    exact = dense(x.to(torch.float64 if setting.dtype == torch.float32 else torch.float32), *window)

    def ours() -> Tensor:
        sparse_(x, active, out, *window, fringe=fringe)
        return out

    def check(side: str, got: Tensor) -> float:
        where = None
        if side.startswith("sparse"):
            where = inside
            if not bool((got.isnan() | inside | edge).all()) or bool(torch.where(edge, got, 0).any()):
                raise WrongResult("pixels outside of the active blocks are not as they should be")
        return same(got, exact.to(got.dtype), where) if kind == "max" else close(got, torchs, exact, where)

    return Work(
        {f"sparse_{kind}_pool2d_": Side(ours, "ours"), f"F.{kind}_pool2d": Side(lambda: dense(x, *window))},
        check,
        bytes=(float(inside.sum() + edge.sum()) + pixels_read(inside, (h, w), *window)) * c * x.element_size(),
        dtype=setting.dtype,
        notes={"density": int(active.count) / active.capacity, "blocks": int(active.count)},
    )


def pixels_read(inside: Tensor, size: tuple[int, int], kernel: int, stride: int, padding: int) -> float:
    """Pixels of the input that some active output reads."""
    flags = inside.float()
    ones = torch.ones(1, 1, kernel, kernel, device=flags.device)
    extra = [size[d] + 2 * padding - kernel - (inside.shape[2 + d] - 1) * stride for d in range(2)]
    reads = F.conv_transpose2d(flags, ones, stride=stride, padding=padding, output_padding=extra)
    return float((reads > 0).sum())
