"""Times of the layers that builds were compared by (docs/performance.md): run it with one build and the other, in turn.

float16, bias, ReLU and fringe; every result is checked. A layer's lists and its dense form run in turn in CUDA graphs,
warm.

    python benchmarks/floors/builds.py
"""

from __future__ import annotations

import functools
import json
from typing import NamedTuple

import torch

import sbnet
from sbnet.benchmarks import masks
from sbnet.benchmarks.layers import Layer, Shape
from sbnet.benchmarks.registry import Setting, Side
from sbnet.benchmarks.timing import Timer


class Case(NamedTuple):
    shape: Shape  # N, H, W, C of the input
    filters: int
    kernel: int = 1
    stride: int = 1
    residual: bool = False
    mask: str = "random"
    block: int = 16


BOTTLENECK = (8, 50, 88)  # SBNet's smallest, 384 / 96 channels, its rectangle in the corner
FEW_TILES = [
    ((1, 50, 88), 2048, 512),
    ((1, 70, 80), 2048, 512),
    ((1, 64, 72), 2048, 512),
    ((1, 32, 32), 2048, 512),
    ((8, 32, 32), 2048, 512),
    ((1, 100, 176), 1024, 256),
    ((1, 64, 64), 1024, 256),
    ((1, 128, 128), 512, 128),
    ((1, 100, 176), 512, 128),
    ((1, 128, 128), 384, 128),
    ((1, 128, 128), 64, 256),
    ((1, 64, 64), 256, 1024),
    ((1, 128, 128), 512, 256),
]
CASES = [
    Case((1, 1024, 1024, 64), 256),
    Case((1, 1024, 1024, 64), 512),
    Case((1, 1024, 1024, 128), 512),
    Case((1, 65536, 16, 128), 512),  # the same pixels, a tile one run of memory
    Case((1, 1024, 1024, 256), 1024),
    Case((1, 1024, 1024, 1024), 256),
    Case((1, 65536, 16, 64), 256),
    Case((1, 1024, 1024, 64), 128),
    Case((1, 1024, 1024, 128), 128),
    Case((1, 1024, 1024, 256), 128),
    Case((1, 1024, 1024, 512), 128),
    Case((1, 1024, 1024, 1024), 128),
    Case((1, 512, 512, 128), 512),
    Case((1, 512, 512, 384), 384),
    Case((1, 512, 512, 1024), 384),
    Case((1, 512, 512, 256), 384, residual=True),
    Case((1, 512, 512, 512), 128, residual=True),
    Case((1, 256, 256, 512), 128),
    Case((8, 100, 176, 512), 128),
    Case((4, 512, 512, 256), 384, stride=2),
    Case((4, 512, 512, 256), 512, stride=2),
    Case((16, 256, 256, 512), 1024, stride=2),
    Case((8, 400, 704, 64), 256, residual=True),
    Case((8, 200, 352, 128), 512, residual=True, mask="top-left", block=8),
    Case((8, 100, 176, 256), 1024, residual=True, mask="top-left", block=8),
    *(Case((*size, c), k, mask="top-left", block=8) for size, c, k in FEW_TILES),
    Case((1, 50, 88, 512), 2048, residual=True, mask="top-left", block=8),
    Case((8, 50, 88, 2048), 512, mask="top-left", block=8),
    Case((8, 50, 88, 512), 2048, residual=True, mask="top-left", block=8),
    Case((8, 50, 88, 512), 512, kernel=3, mask="top-left", block=8),
    Case((8, 100, 176, 1024), 256, mask="top-left", block=8),
    Case((*BOTTLENECK, 384), 96, mask="top-left", block=8),
    Case((*BOTTLENECK, 96), 96, kernel=3, mask="top-left", block=8),
    Case((*BOTTLENECK, 96), 384, residual=True, mask="top-left", block=8),
]


def times(case: Case, timer: Timer) -> dict[str, float]:
    """{"dense": us, "1.0": us with all blocks, "0.3", "0.1": us with a part}."""
    layer = Layer(case.shape, torch.float16, Setting("cuda", compiled=False), case.filters, case.kernel, case.stride)
    size = layer.size[1:]
    sides = {"dense": layer.dense(case.residual)["fused cuDNN"]}
    for density in (1.0, 0.3, 0.1):
        mask = masks.pixels(case.mask, layer.size, density, "cuda", case.block)
        active = sbnet.reduce_mask(mask, sbnet.BlockGrid.cover(size, case.block))
        fringe = sbnet.fringe(active, active, size, 3, 1, 1)
        layer.out.fill_(float("nan"))
        layer.check(layer.sparse(active, fringe, case.residual), active.pixel_mask(size), residual=case.residual)
        sides[str(density)] = Side(functools.partial(layer.sparse, active, fringe, case.residual), "ours")
    return {name: round(median, 2) for name, (median, _) in timer.medians(sides).items()}


def main() -> None:
    """Prints one line of JSON a layer."""
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}))
    timer = Timer("cuda", rounds=7, repeat=4)
    with torch.no_grad():
        for case in CASES:
            print(json.dumps({**case._asdict(), "us": times(case, timer)}), flush=True)


if __name__ == "__main__":
    main()
