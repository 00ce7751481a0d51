"""sparse_adaptive_avg_pool2d_ and sparse_adaptive_max_pool2d_ on active blocks, against PyTorch's of the whole plane,
channels_last."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness import masks
from sbnet.benchmarks.harness.layers import Shape, facts
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, close

KINDS = (("avg", 1), ("max", 1), ("avg", 7))


def cases(setting: Setting) -> Iterator[Case]:
    shapes: list[Shape] = setting.pick(
        [(1, 36, 44, 8)],
        [(1, 200, 352, 64)],
        [(1, 200, 352, 64), (8, 200, 352, 64)],
    )
    for kind, side in KINDS:
        for shape in shapes[: None if setting.cuda else 1]:
            for density in setting.pick((0.5,), (1.0, 0.1), (1.0, 0.25, 0.1)):
                described = facts(
                    shape, setting.dtype, "random", 16, pool=f"{kind} to {side}x{side}", sparsity=1 - density
                )
                yield Case(
                    "sparse_adaptive_pool2d_", "ops", described, partial(pool, setting, shape, kind, side, density)
                )


def pool(setting: Setting, shape: Shape, kind: str, side: int, density: float) -> Work:
    n, h, w, c = shape
    x = torch.randn(n, c, h, w, device=setting.device, dtype=setting.dtype).contiguous(
        memory_format=torch.channels_last
    )
    grid = sbnet.BlockGrid.cover((h, w), 16)
    count = max(1, round(n * grid.bcount[0] * grid.bcount[1] * density))
    active = masks.random_active((n, h, w), grid, count, setting.device)
    inside = active.pixel_mask((h, w))
    x = torch.where(inside, x, 0).contiguous(memory_format=torch.channels_last)  # as the masked contract has it
    op = getattr(sbnet, f"sparse_adaptive_{kind}_pool2d_")
    dense_pool = F.adaptive_avg_pool2d if kind == "avg" else F.adaptive_max_pool2d
    torchs, exact = dense_pool(x, side), dense_pool(x.double(), side)
    out = x.new_full((n, c, side, side), torch.nan)

    def ours() -> Tensor:
        op(x, active, out)
        return out

    return Work(
        {"sparse_adaptive_pool2d_": Side(ours, "ours"), "PyTorch": Side(lambda: dense_pool(x, side))},
        lambda _, got: close(got, torchs, exact),
        bytes=(float(inside.sum()) + n * side * side) * c * x.element_size(),
        dtype=setting.dtype,
        notes={"density": int(active.count) / active.capacity, "blocks": int(active.count)},
    )
