"""sparse_conv2d_ of the other kinds that residual networks are made of: 1x1, stride 2, the 7x7 stem; what SBNet's
narrow bottlenecks consist of; and any other kernel, dilation, group, channel and block. Bias and ReLU, fringe zeroed,
against the fastest dense form of the same layer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness import masks
from sbnet.benchmarks.harness.layers import Layer, Shape, facts, fringe_mask
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work
from sbnet.select import conv2d_kernel

# name -> kernel, stride, [(N, H, W, C of the input), filters]
KINDS: dict[str, tuple[int, int, list[tuple[Shape, int]]]] = {
    "conv 1x1": (
        1,
        1,
        [
            ((1, 1024, 1024, 64), 256),
            ((1, 1024, 1024, 256), 64),
            ((1, 1024, 1024, 128), 512),
            ((1, 1024, 1024, 512), 128),
            ((1, 1024, 1024, 256), 1024),
            ((1, 1024, 1024, 1024), 256),
            ((1, 1008, 1024, 512), 2048),  # of 2^31 elements the dense form did not end in 40 s
            ((1, 1008, 1024, 2048), 512),
        ],
    ),
    "conv 1x1 stride 2": (1, 2, [((4, 512, 512, 256), 512), ((16, 256, 256, 512), 1024)]),
    "conv 3x3 stride 2": (
        3,
        2,
        [
            ((1, 1024, 1024, 64), 64),
            ((1, 1024, 1024, 64), 128),
            ((4, 512, 512, 128), 128),
            ((4, 512, 512, 128), 256),
            ((16, 256, 256, 256), 256),
            ((16, 256, 256, 256), 512),
        ],
    ),
    "conv 7x7 stem": (7, 2, [((1, 1024, 1024, 3), 64), ((1, 2048, 2048, 3), 64), ((8, 1024, 1024, 3), 64)]),
}
# SBNet's bottlenecks: (H, W), channels; width a quarter of them.
STAGES = [((400, 704), 96), ((200, 352), 192), ((100, 176), 256), ((50, 88), 384)]


class Kind(NamedTuple):
    """A layer. shape: (N, H, W, C) of its input."""

    shape: Shape
    filters: int
    kernel: int | tuple[int, int] = 3
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    block: int | tuple[int, int] = 16
    residual: bool = False
    tf32: bool = False


LARGE, MIDDLE, SMALL = (1, 400, 704), (1, 200, 352), (1, 100, 176)
# What Hopper's special kernels do not serve, or not well: channels, kernels, dilation, groups, blocks.
OTHERS: dict[str, list[Kind]] = {
    "conv 3x3, channels": [
        *(Kind((*LARGE, c), c) for c in (24, 40, 56, 72, 88)),
        Kind((2, 384, 640, 96), 96),
        Kind((1, 320, 320, 80), 80),
        Kind((*MIDDLE, 160), 160),
        Kind((1, 160, 160, 320), 320),
    ],
    "conv 3x3, channels no multiple of 8": [
        Kind((*LARGE, 60), 60),
        Kind((1, 720, 1280, 64), 3),
        Kind((1, 720, 1280, 1), 64),
    ],
    "conv 3x3, first layers": [Kind((1, 720, 1280, 3), filters) for filters in (32, 64)],
    "conv 3x3 stride 2, first layers": [Kind((1, 720, 1280, 3), filters, stride=2) for filters in (16, 32, 64)],
    "conv, kernels": [Kind((*LARGE, 64), 64, kernel) for kernel in (5, 7, (1, 3), (3, 1))],
    "conv 3x3, dilation": [
        Kind((*LARGE, 64), 64, dilation=2),
        *(Kind((*SMALL, 256), 256, dilation=d) for d in (2, 4, 6, 12)),
        *(Kind((n, 80, 80, 512), 512, dilation=4, block=8) for n in (1, 16)),  # DeepLab
        *(Kind((n, 80, 80, 2048), 256, dilation=12, block=8) for n in (1, 16)),
    ],
    "conv 3x3, groups": [
        Kind((*MIDDLE, 128), 128, groups=32),
        Kind((*SMALL, 256), 256, groups=32),
        Kind((1, 50, 88, 512), 512, groups=32),
        Kind((*MIDDLE, 168), 168, groups=7),  # RegNetX-1.6GF
        Kind((*SMALL, 448), 448, groups=8),  # RegNetY-8GF
    ],
    "conv 3x3, blocks": [Kind((*LARGE, 64), 64, block=b) for b in (10, 12, 20, 24, 32, (8, 16))],
    "conv 3x3, tf32": [Kind((*LARGE, 64), 64, tf32=True), Kind((*SMALL, 256), 256, tf32=True)],
}
DENSITIES = 1.0, 0.25, 0.1
# What is wanted of them on Hopper: so many times as fast as the fastest dense form, at these densities.
WANTED: dict[str, tuple[float, float, float]] = {
    "conv 3x3, channels": (1.0, 3.2, 6.0),
    "conv 3x3, channels no multiple of 8": (1.0, 3.0, 5.0),
    "conv 3x3, first layers": (1.0, 3.0, 5.0),
    "conv 3x3 stride 2, first layers": (1.0, 3.0, 5.0),
    "conv, kernels": (1.0, 3.0, 6.0),
    "conv 3x3, dilation": (1.0, 3.0, 5.0),
    "conv 3x3, groups": (1.0, 2.5, 4.0),
    "conv 3x3, blocks": (1.0, 3.0, 6.0),
    "conv 3x3, tf32": (1.0, 3.0, 5.0),
}


def cases(setting: Setting) -> Iterator[Case]:
    for name, (kernel, stride, layers) in KINDS.items():
        tiny = ((1, 32, 48, layers[0][0][3]), 24)
        for shape, filters in setting.pick([tiny], layers[:1] if setting.cuda else [], layers if setting.cuda else []):
            for density in setting.pick((0.2,), (0.1,), (1.0, 0.1)):
                yield case(setting, name, Kind(shape, filters, kernel, stride), density)
    for (h, w), channels in setting.pick([], STAGES[:1], STAGES):
        width = channels // 4
        for kind in (
            Kind((1, h, w, channels), width, 1),
            Kind((1, h, w, width), width, 3),
            Kind((1, h, w, width), channels, 1, residual=True),
        ):
            for density in setting.pick((), (0.1,), (1.0, 0.1)):
                yield case(setting, "conv of SBNet's bottlenecks", kind, density)
    for name, kinds in OTHERS.items():
        if not setting.cuda and kinds[0].tf32:
            continue
        small = [kinds[0]._replace(shape=(1, 32, 48, kinds[0].shape[3]))]
        for kind in setting.pick(small, kinds[:1], kinds):
            for density in setting.pick((0.2,), (0.1,), DENSITIES):
                wanted = dict(zip(DENSITIES, WANTED[name], strict=True)).get(density) if setting.cuda else None
                yield case(setting, name, kind, density, wanted)


def case(setting: Setting, name: str, kind: Kind, density: float, wanted: float | None = None) -> Case:
    more = {name: value for name, value in kind._asdict().items() if name in ("filters", "kernel", "residual")}
    more |= {name: value for name, value in (("dilation", kind.dilation), ("groups", kind.groups)) if value > 1}
    more |= {"tf32": True} if kind.tf32 else {}
    described = facts(kind.shape, dtype_of(setting, kind), "random", kind.block, **more, sparsity=round(1 - density, 4))
    return Case(name, "conv", described, partial(work, setting, kind, density, wanted))


def dtype_of(setting: Setting, kind: Kind) -> torch.dtype:
    return torch.float32 if kind.tf32 else setting.dtype


def kernel_of(layer: Layer, kind: Kind) -> str:
    """The kernel that serves a layer on Hopper."""
    n, h, w, c = kind.shape
    return conv2d_kernel(
        (n, c, h, w), kind.filters, kind.kernel, kind.block, stride=kind.stride, padding=layer.padding,
        dilation=kind.dilation, groups=kind.groups, dtype=layer.dtype, residual=kind.residual, allow_tf32=kind.tf32,
    ).kernel  # fmt: skip


@functools.lru_cache(maxsize=1)
def layer_of(setting: Setting, kind: Kind) -> Layer:
    """Cases that follow each other share a layer, and its exact result."""
    return Layer(
        kind.shape, dtype_of(setting, kind), setting, kind.filters, kind.kernel, kind.stride, kind.dilation,
        kind.groups, kind.tf32,
    )  # fmt: skip


def work(setting: Setting, kind: Kind, density: float, wanted: float | None = None) -> Work:
    layer, residual = layer_of(setting, kind._replace(block=16, residual=False)), kind.residual
    grid = sbnet.BlockGrid.cover(layer.size[1:], kind.block)
    pixels = masks.pixels("random", layer.size, density, setting.device, kind.block)
    active = sbnet.reduce_mask(pixels, grid)
    fringe = sbnet.fringe(active, active, layer.size[1:], 3, 1, 1)  # for a 3x3 layer that reads the output
    inside = active.pixel_mask(layer.size[1:])
    zero = fringe_mask(fringe, inside)
    layer.out.fill_(float("nan"))
    sides = {"sparse": Side(lambda: layer.sparse(active, fringe, residual), "ours"), **layer.dense(residual)}

    def check(side: str, got: Tensor) -> float:
        if sides[side].kind == "dense":
            return layer.check(got, residual=residual)
        return layer.check(got, inside, zero, residual)

    blocks = int(active.count)
    area = float(torch.count_nonzero(inside))
    notes: dict[str, Any] = {"blocks": blocks, "density": blocks / active.capacity, "fringe": int(fringe.count)}
    if setting.cuda:
        notes["served by"] = kernel_of(layer, kind)
    if wanted is not None:
        notes["wanted"] = wanted
    products = "tf32" if kind.tf32 else layer.dtype
    return Work(sides, check, layer.flops(area), layer.bytes(active, residual), products, notes)
