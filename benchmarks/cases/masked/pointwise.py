"""sparse_pointwise_ on active blocks: a gate, a sum and an activation in one pass, against PyTorch's ops of the whole
plane, channels_last."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness import masks
from sbnet.benchmarks.harness.layers import Shape, facts, fringe_mask
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, WrongResult, close

# name: the program, whose a is a gate and b a feature map; the same in PyTorch
PROGRAMS = {
    "copy": ("", lambda x, a, b: x.clone(memory_format=torch.channels_last)),
    "gate": ("mul a; add b; hardswish", lambda x, a, b: F.hardswish(x * a + b)),
    "mish": ("mish", lambda x, a, b: F.mish(x)),
}


def cases(setting: Setting) -> Iterator[Case]:
    shapes: list[Shape] = setting.pick(
        [(1, 36, 44, 8)],
        [(1, 400, 704, 64)],
        [(1, 400, 704, 64), (2, 1024, 1024, 128)],
    )
    for name in PROGRAMS:
        for shape in shapes[: None if setting.cuda else 1]:
            for density in setting.pick((0.5,), (1.0, 0.1), (1.0, 0.25, 0.1)):
                described = facts(shape, setting.dtype, "random", 16, program=name, sparsity=1 - density)
                yield Case("sparse_pointwise_", "ops", described, partial(pointwise, setting, shape, name, density))


def pointwise(setting: Setting, shape: Shape, name: str, density: float) -> Work:
    n, h, w, c = shape
    program, function = PROGRAMS[name]
    x, b = (
        torch.randn(n, c, h, w, device=setting.device, dtype=setting.dtype).contiguous(
            memory_format=torch.channels_last
        )
        for _ in range(2)
    )
    a = torch.rand(n, c, 1, 1, device=setting.device, dtype=setting.dtype)
    grid = sbnet.BlockGrid.cover((h, w), 16)
    count = max(1, round(n * grid.bcount[0] * grid.bcount[1] * density))
    active = masks.random_active((n, h, w), grid, count, setting.device)
    inside = active.pixel_mask((h, w))
    fringe = sbnet.fringe(active, active, (h, w), 3, 1, 1)  # for a 3x3 layer that reads the output
    edge = fringe_mask(fringe, inside)
    out = torch.full_like(x, torch.nan)
    wide = torch.float64 if setting.dtype == torch.float32 else torch.float32

    def dense() -> Tensor:
        return function(x, a, b)

    torchs, exact = dense(), function(x.to(wide), a.to(wide), b.to(wide))

    def ours() -> Tensor:
        sbnet.sparse_pointwise_(x, active, program, a, b, out=out, fringe=fringe)
        return out

    def check(side: str, got: Tensor) -> float:
        if not side.startswith("sparse"):
            return close(got, torchs, exact, None)
        if not bool((got.isnan() | inside | edge).all()) or bool(torch.where(edge, got, 0).any()):
            raise WrongResult("pixels outside of the active blocks are not as they should be")
        return close(got, torchs, exact, inside)

    maps = 3 if name == "gate" else 2  # that are read and written
    return Work(
        {"sparse_pointwise_": Side(ours, "ours"), "PyTorch": Side(dense)},
        check,
        bytes=(maps * float(inside.sum()) + float(edge.sum())) * c * x.element_size(),
        dtype=setting.dtype,
        notes={"density": int(active.count) / active.capacity, "blocks": int(active.count)},
    )
