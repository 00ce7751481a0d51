"""A masked op on random active blocks, its fringe zeroed, against the same of the whole plane: what their benchmarks
share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness import masks
from sbnet.benchmarks.harness.layers import Shape, facts, fringe_mask
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, WrongResult, close, same


def channels_last(setting: Setting, *size: int) -> Tensor:
    """A random [N,C,H,W]."""
    x = torch.randn(*size, device=setting.device, dtype=setting.dtype)
    return x.contiguous(memory_format=torch.channels_last)


def feature_map(setting: Setting, shape: Shape) -> Tensor:
    """A random [N,C,H,W], of a shape written N, H, W, C."""
    n, h, w, c = shape
    return channels_last(setting, n, c, h, w)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Of the exact result: float64 for float32, float32 for the halves."""
    return torch.float64 if dtype == torch.float32 else torch.float32


class Output:
    """Of a masked op: its active blocks, so many of all, the fringe of a 3x3 layer that reads it, its memory."""

    def __init__(self, x: Tensor, size: tuple[int, int], channels: int, density: float, block: int = 16):
        n = x.shape[0]
        grid = sbnet.BlockGrid.cover(size, block)
        count = max(1, round(n * grid.bcount[0] * grid.bcount[1] * density))
        self.active = masks.random_active((n, *size), grid, count, x.device.type)
        self.fringe = sbnet.fringe(self.active, self.active, size, 3, 1, 1)
        self.inside = self.active.pixel_mask(size)
        self.edge = fringe_mask(self.fringe, self.inside)
        self.pixels, self.fringe_pixels = float(self.inside.sum()), float(self.edge.sum())
        self.memory = x.new_empty(n, *size, channels).permute(0, 3, 1, 2).fill_(torch.nan)

    def work(
        self, name: str, ours: Callable[[], None], peer: str, dense: Callable[[], Tensor], exact: Tensor | None,
        moved: float, flops: float = 0.0, **notes: Any,
    ) -> Work:  # fmt: skip
        """ours() writes `memory`; without `exact` results are compared bit for bit. moved: elements read and written
        but for the fringe's."""
        torchs = dense()

        def run() -> Tensor:
            ours()
            return self.memory

        def check(side: str, got: Tensor) -> float:
            where = None
            if side == name:
                where = self.inside
                kept = got.isnan() | self.inside | self.edge
                if not bool(kept.all()) or bool(torch.where(self.edge, got, 0).any()):
                    raise WrongResult("pixels outside of the active blocks are not as they should be")
            return same(got, torchs, where) if exact is None else close(got, torchs, exact, where)

        elements = moved + self.fringe_pixels * self.memory.shape[1]
        notes = {"density": int(self.active.count) / self.active.capacity, "blocks": int(self.active.count), **notes}
        sides = {name: Side(run, "ours"), peer: Side(dense)}
        return Work(sides, check, flops, elements * torchs.element_size(), torchs.dtype, notes)


def moving_cases(
    setting: Setting, op: str, whole: Callable[..., Tensor], named: Mapping[str, Mapping[str, Any]],
    shapes: Sequence[Shape],
) -> Iterator[Case]:  # fmt: skip
    """Of an op in place that only moves elements: whole(x, **numbers), of each of the `named` numbers."""

    def make(shape: Shape, numbers: Mapping[str, Any], density: float) -> Work:
        x = feature_map(setting, shape)
        _, channels, *size = whole(x, **numbers).shape
        out = Output(x, (size[0], size[1]), channels, density)
        call = partial(getattr(sbnet, op), x, out.active, out.memory, **numbers, fringe=out.fringe)
        return out.work(op, call, "PyTorch", lambda: whole(x, **numbers), None, 2 * out.pixels * channels)

    for name, numbers in named.items():
        for shape in shapes[: None if setting.cuda else 1]:
            for density in setting.pick((0.5,), (1.0, 0.1), (1.0, 0.25, 0.1)):
                described = facts(shape, setting.dtype, "random", 16, map=name, sparsity=1 - density)
                yield Case(op, "ops", described, partial(make, shape, numbers, density))
