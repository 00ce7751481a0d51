"""sparse_conv2d_ (3x3, bias + ReLU, fringe zeroed) against the fastest dense form of the same layer and other ways.

"SBNet's grid" is the paper's table: its sizes and channels, its mask; the paper's own figure (GTX 1080 Ti, float32,
index building left out, arXiv 1801.02108) stands beside ours.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness import masks, peers
from sbnet.benchmarks.harness.layers import Layer, Shape, facts, fringe_mask
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work

# (N, H, W, C): SBNet's four stages as today's networks have them, then three larger maps.
SHAPES: list[Shape] = [
    (1, 400, 704, 64),
    (1, 200, 352, 128),
    (1, 100, 176, 256),
    (1, 50, 88, 512),
    (1, 1024, 1024, 64),
    (8, 256, 256, 128),
    (8, 128, 128, 256),
]
# The paper's single convolution: sizes, and its speed-up at 90 % sparsity, top-left mask.
PAPER: dict[Shape, float] = {
    (1, 400, 704, 24): 3.39,
    (1, 200, 352, 48): 2.47,
    (1, 100, 176, 64): 1.34,
    (1, 50, 88, 96): 0.88,
}
SPARSITIES = {"top-left": (0.0, 0.3, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99), "random": (0.6, 0.8, 0.9, 0.95)}
TINY: Shape = (1, 40, 56, 16)


def cases(setting: Setting) -> Iterator[Case]:
    yield from paper_grid(setting)
    yield from common_layers(setting)
    yield from block_sizes(setting)
    yield from real_masks(setting)


def case(
    setting: Setting, name: str, shape: Shape, mask: str, density: float, block: Any = 16,
    dtype: torch.dtype | None = None, residual: bool = False, paper: float | None = None,
) -> Case:  # fmt: skip
    dtype = dtype or setting.dtype
    more = {"sparsity": round(1 - density, 4)} if mask in ("random", "top-left") else {}
    described = facts(shape, dtype, mask, block, **more, **({"residual": True} if residual else {}))
    return Case(name, "conv", described, partial(work, setting, shape, dtype, mask, density, block, residual), paper)


def paper_grid(setting: Setting) -> Iterator[Case]:
    shapes = setting.pick({TINY: 1.0}, dict(list(PAPER.items())[:2]), PAPER)
    for dtype in (torch.float32, torch.float16) if setting.cuda else (torch.float32,):
        for shape, figure in shapes.items():
            for mask in setting.pick(("top-left",), ("top-left",), ("top-left", "random")):
                for sparsity in setting.pick((0.9,), (0.9,), SPARSITIES[mask]):
                    paper = figure if (mask, sparsity) == ("top-left", 0.9) else None
                    yield case(setting, "conv 3x3, SBNet's grid", shape, mask, 1 - sparsity, 16, dtype, paper=paper)


def common_layers(setting: Setting) -> Iterator[Case]:
    name = "conv 3x3"
    for shape in setting.pick([TINY], SHAPES[:1], SHAPES if setting.cuda else SHAPES[:4]):
        for density in setting.pick((0.2,), (0.1, 1.0), (1.0, 0.5, 0.3, 0.1, 0.05)):
            yield case(setting, name, shape, "random", density)
        if setting.level != "quick":
            yield case(setting, name, shape, "random", 0.1, residual=True)
        if setting.level == "full":
            others = (torch.bfloat16, torch.float32) if setting.cuda else (torch.float16, torch.bfloat16)
            for dtype in others:
                for density in (1.0, 0.1):
                    yield case(setting, name, shape, "random", density, dtype=dtype)


def block_sizes(setting: Setting) -> Iterator[Case]:
    """One density in blocks of many sizes: small ones follow a mask more closely, large ones have less halo."""
    sides: list[Any] = setting.pick([8], [8, 32], [(4, 8), 8, (8, 16), 16, (16, 32), 32, 64])
    for mask in setting.pick(("top-left",), ("random",), ("random", "top-left", "motion", "LiDAR")):
        for block in sides:
            yield case(setting, "conv 3x3, block sizes", setting.pick(TINY, SHAPES[0], SHAPES[0]), mask, 0.1, block)


def real_masks(setting: Setting) -> Iterator[Case]:
    for mask in ("motion", "LiDAR"):
        for shape in setting.pick([TINY], [], SHAPES[:2]):
            yield case(setting, "conv 3x3, real masks", shape, mask, 0.0)


@functools.lru_cache(maxsize=1)
def layer_of(setting: Setting, shape: Shape, dtype: torch.dtype) -> Layer:
    """Cases that follow each other share a layer, and its exact result."""
    return Layer(shape, dtype, setting)


def work(
    setting: Setting, shape: Shape, dtype: torch.dtype, mask: str, density: float, block: Any, residual: bool
) -> Work:
    layer = layer_of(setting, shape, dtype)
    pixels = masks.pixels(mask, layer.size, density, setting.device, block)
    grid = sbnet.BlockGrid.cover(shape[1:3], block)

    def index() -> tuple[sbnet.ActiveBlocks, sbnet.Fringe]:
        active = sbnet.reduce_mask(pixels, grid)
        return active, sbnet.fringe(active, active, layer.size[1:], 3, 1, 1)

    active, fringe = index()
    trimmed = active.trim()
    inside = active.pixel_mask(layer.size[1:])
    zero = fringe_mask(fringe, inside)
    scattered = torch.full_like(layer.out, float("nan"))
    layer.out.fill_(float("nan"))

    sides = {
        "sparse": Side(lambda: layer.sparse(active, fringe, residual), "ours"),
        "indexed": Side(lambda: layer.sparse(*index(), residual), "indexed"),
        **layer.dense(residual),
    }
    if not residual:
        sides["gather-conv-scatter"] = Side(lambda: layer.gather_conv_scatter(trimmed, scattered), "peer")

        if density < 1:
            sides |= peers.spconv_sides(layer, inside)

    def check(side: str, got: Tensor) -> float:
        if side.startswith("spconv"):
            return peers.check_spconv(layer, inside, got)
        if sides[side].kind == "dense":
            return layer.check(got, residual=residual)
        return layer.check(got, inside, zero if sides[side].kind != "peer" else torch.zeros_like(zero), residual)

    blocks = int(active.count)
    area = blocks * grid.bsize[0] * grid.bsize[1]
    notes = {"blocks": blocks, "density": blocks / active.capacity, "fringe": int(fringe.count)}
    return Work(sides, check, layer.flops(area), layer.bytes(active, residual), dtype, notes)
