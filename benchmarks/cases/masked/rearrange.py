"""sparse_rearrange_ on active blocks, against PyTorch's shuffles and padding of the whole plane, channels_last."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness import masks
from sbnet.benchmarks.harness.layers import Shape, facts, fringe_mask
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, WrongResult, same
from sbnet.ops.masked.rearrange import rearrange_whole

MAPS: dict[str, dict[str, Any]] = {
    "pixel_shuffle": {"up": 2},
    "pixel_unshuffle": {"down": 2},
    "channel_shuffle": {"groups": 8},
    "pad": {"pad": (1, 1, 1, 1)},
}


def cases(setting: Setting) -> Iterator[Case]:
    shapes: list[Shape] = setting.pick(
        [(1, 36, 44, 8)],
        [(1, 200, 352, 64)],
        [(1, 200, 352, 64), (2, 512, 512, 128)],
    )
    for name in MAPS:
        for shape in shapes[: None if setting.cuda else 1]:
            for density in setting.pick((0.5,), (1.0, 0.1), (1.0, 0.25, 0.1)):
                described = facts(shape, setting.dtype, "random", 16, map=name, sparsity=1 - density)
                yield Case("sparse_rearrange_", "ops", described, partial(rearrange, setting, shape, name, density))


def rearrange(setting: Setting, shape: Shape, name: str, density: float) -> Work:
    n, h, w, c = shape
    x = torch.randn(n, c, h, w, device=setting.device, dtype=setting.dtype).contiguous(
        memory_format=torch.channels_last
    )

    def dense() -> Tensor:
        return rearrange_whole(x, **MAPS[name])

    want = dense()
    size = (want.shape[2], want.shape[3])
    grid = sbnet.BlockGrid.cover(size, 16)
    count = max(1, round(n * grid.bcount[0] * grid.bcount[1] * density))
    active = masks.random_active((n, *size), grid, count, setting.device)
    inside = active.pixel_mask(size)
    fringe = sbnet.fringe(active, active, size, 3, 1, 1)  # for a 3x3 layer that reads the output
    edge = fringe_mask(fringe, inside)
    out = x.new_empty(n, *size, want.shape[1]).permute(0, 3, 1, 2).fill_(torch.nan)

    def ours() -> Tensor:
        sbnet.sparse_rearrange_(x, active, out, **MAPS[name], fringe=fringe)
        return out

    def check(side: str, got: Tensor) -> float:
        if not side.startswith("sparse"):
            return same(got, want, None)
        if not bool((got.isnan() | inside | edge).all()) or bool(torch.where(edge, got, 0).any()):
            raise WrongResult("pixels outside of the active blocks are not as they should be")
        return same(got, want, inside)

    return Work(
        {"sparse_rearrange_": Side(ours, "ours"), "PyTorch": Side(dense)},
        check,
        bytes=(2 * float(inside.sum()) + float(edge.sum())) * want.shape[1] * x.element_size(),
        dtype=setting.dtype,
        notes={"density": int(active.count) / active.capacity, "blocks": int(active.count)},
    )
