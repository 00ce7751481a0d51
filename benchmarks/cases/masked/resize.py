"""sparse_resize2d_ on active blocks, against PyTorch's interpolation of the whole plane, channels_last."""

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
    n, h, w, c = shape
    x = torch.randn(n, c, h, w, device=setting.device, dtype=setting.dtype).contiguous(
        memory_format=torch.channels_last
    )
    size = sbnet.resize_output_size((h, w), 2)
    grid = sbnet.BlockGrid.cover(size, 16)
    count = max(1, round(n * grid.bcount[0] * grid.bcount[1] * density))
    active = masks.random_active((n, *size), grid, count, setting.device)
    inside = active.pixel_mask(size)
    fringe = sbnet.fringe(active, active, size, 3, 1, 1)  # for a 3x3 layer that reads the output
    edge = fringe_mask(fringe, inside)
    out = x.new_empty(n, *size, c).permute(0, 3, 1, 2).fill_(torch.nan)

    def dense(x: Tensor = x) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode=mode)

    torchs, exact = dense(), dense(x.to(torch.float64 if setting.dtype == torch.float32 else torch.float32))

    def ours() -> Tensor:
        sbnet.sparse_resize2d_(x, active, out, scale_factor=2, mode=mode, fringe=fringe)
        return out

    def check(side: str, got: Tensor) -> float:
        where = None
        if side.startswith("sparse"):
            where = inside
            if not bool((got.isnan() | inside | edge).all()) or bool(torch.where(edge, got, 0).any()):
                raise WrongResult("pixels outside of the active blocks are not as they should be")
        return same(got, torchs, where) if mode == "nearest" else close(got, torchs, exact, where)

    # Blocks of the output lie over a quarter of their pixels of x; a bilinear or bicubic one reads beside them, too.
    moved = float(inside.sum()) * 1.25 + float(edge.sum())
    return Work(
        {"sparse_resize2d_": Side(ours, "ours"), "F.interpolate": Side(dense)},
        check,
        bytes=moved * c * x.element_size(),
        dtype=setting.dtype,
        notes={"density": int(active.count) / active.capacity, "blocks": int(active.count)},
    )
