"""sparse_conv2d_ of the other kinds that residual networks are made of: 1x1, stride 2, the 7x7 stem; and what SBNet's
narrow bottlenecks consist of. Bias and ReLU, fringe zeroed, against the fastest dense form of the same layer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness import masks
from sbnet.benchmarks.harness.layers import Layer, Shape, facts, fringe_mask
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work

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


def cases(setting: Setting) -> Iterator[Case]:
    for name, (kernel, stride, layers) in KINDS.items():
        tiny = ((1, 32, 48, layers[0][0][3]), 24)
        for shape, filters in setting.pick([tiny], layers[:1] if setting.cuda else [], layers if setting.cuda else []):
            for density in setting.pick((0.2,), (0.1,), (1.0, 0.1)):
                yield case(setting, name, shape, filters, kernel, stride, density)
    for (h, w), channels in setting.pick([], STAGES[:1], STAGES):
        width = channels // 4
        for shape, filters, kernel in (
            ((1, h, w, channels), width, 1),
            ((1, h, w, width), width, 3),
            ((1, h, w, width), channels, 1),
        ):
            for density in setting.pick((), (0.1,), (1.0, 0.1)):
                yield case(
                    setting, "conv of SBNet's bottlenecks", shape, filters, kernel, 1, density, filters == channels
                )


def case(
    setting: Setting, name: str, shape: Shape, filters: int, kernel: int, stride: int, density: float,
    residual: bool = False,
) -> Case:  # fmt: skip
    more = {"filters": filters, "kernel": kernel, "residual": residual, "sparsity": round(1 - density, 4)}
    described = facts(shape, setting.dtype, "random", 16, **more)
    return Case(name, "conv", described, partial(work, setting, shape, filters, kernel, stride, density, residual))


@functools.lru_cache(maxsize=1)
def layer_of(setting: Setting, shape: Shape, filters: int, kernel: int, stride: int) -> Layer:
    """Cases that follow each other share a layer, and its exact result."""
    return Layer(shape, setting.dtype, setting, filters, kernel, stride)


def work(
    setting: Setting, shape: Shape, filters: int, kernel: int, stride: int, density: float, residual: bool
) -> Work:
    layer = layer_of(setting, shape, filters, kernel, stride)
    grid = sbnet.BlockGrid.cover(layer.size[1:], 16)
    active = sbnet.reduce_mask(masks.pixels("random", layer.size, density, setting.device, 16), grid)
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
    notes = {"blocks": blocks, "density": blocks / active.capacity, "fringe": int(fringe.count)}
    return Work(sides, check, layer.flops(area), layer.bytes(active, residual), layer.dtype, notes)
