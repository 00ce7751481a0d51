"""3x3 and 1x1 layers of a few tiles: those of ResNet-50, a YOLO, EfficientNetV2 and DenseNet at one image of 640x640.

float16, bias, ReLU and fringe; every result is checked. A layer's launches follow one another in a CUDA graph with
weights and lists settled, as in a network's. Beside each time is its floor: a short launch, and bytes at the rate of a
copy that stays in the cache or operations at that of a product.

    python benchmarks/floors/few_tiles.py
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
import torch.nn.functional as F

import sbnet
from sbnet._library import settle_inputs
from sbnet.benchmarks.cases.network.whole import MASKS, made
from sbnet.benchmarks.harness.layers import Layer
from sbnet.benchmarks.harness.registry import Setting, Side
from sbnet.benchmarks.harness.timing import Timer
from sbnet.engine.launches import SHORT_US, rates_of

SIDE = 640
# Input channels, output channels, side of the output, kernel, stride, block.
CASES = [
    *[(c, c, 10240 // c, 3, 1, 8) for c in (128, 256, 512)],  # ResNet-50's
    *[(c, c, 10240 // c, 3, 2, 8) for c in (128, 256, 512)],
    *[(4 * c, c, 10240 // c, 1, 1, 8) for c in (128, 256, 512)],
    *[(c, 4 * c, 10240 // c, 1, 1, 8) for c in (128, 256, 512)],
    *[(c, c, 5120 // c, 3, 1, 8) for c in (64, 128, 256)],  # the YOLO's
    *[(c // 2, c, 10240 // c, 3, 2, 8) for c in (128, 256, 512)],
    *[(3 * c, c, 10240 // c, 1, 1, 8) for c in (128, 256)],
    (768, 512, 20, 1, 1, 8),
    *[(128, 32, side, 3, 1, 16 if side > 80 else 8) for side in (160, 80, 40, 20)],  # DenseNet-121's
    *[(c, 128, side, 1, 1, 8) for c, side in ((256, 80), (480, 40), (992, 40), (992, 20))],
    (64, 256, 80, 3, 1, 8),  # EfficientNetV2-S'
    *[(c, k, side, 1, 1, 4) for c, k, side in ((160, 960, 40), (960, 160, 40), (256, 1536, 20), (1536, 256, 20))],
]


def times(case: tuple[int, ...], timer: Timer) -> dict[str, Any]:
    """{mask: (active blocks, us, floor)}."""
    channels, filters, side, kernel, stride, block = case
    shape = (1, side * stride, side * stride, channels)
    layer = Layer(shape, torch.float16, Setting("cuda", compiled=False), filters, kernel, stride)
    grid, size, rates = sbnet.BlockGrid.cover((side, side), block), (side, side), rates_of(layer.x.device, layer.dtype)
    sides, floors, counts = {}, {}, {}
    for kind in MASKS:
        pixels = F.adaptive_max_pool2d(made(kind, (1, SIDE, SIDE)).float()[None], size)[0] > 0
        active = sbnet.reduce_mask(pixels.cuda(), grid)
        fringe = sbnet.fringe(active, active, size, 3, 1, 1)
        layer.out.fill_(float("nan"))
        layer.check(layer.sparse(active, fringe), active.pixel_mask(size))
        counts[kind], computed = int(active.count), float(active.pixel_mask(size).sum())
        least = max(layer.bytes(active) / rates.cached, layer.flops(computed) / rates.product)
        floors[kind] = round(SHORT_US + least, 2)
        sides[kind] = Side(functools.partial(settled, layer, active, fringe), "ours")
    found = timer.medians(sides)
    return {kind: (counts[kind], round(found[kind][0], 2), floors[kind]) for kind in MASKS}


def settled(layer: Layer, active: sbnet.ActiveBlocks, fringe: sbnet.Fringe) -> None:
    settle_inputs(True)
    layer.sparse(active, fringe)
    settle_inputs(False)


def main() -> None:
    """Prints one line of JSON a layer."""
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, **sbnet.build_info()}))
    timer = Timer("cuda", rounds=5)
    with torch.no_grad():
        for case in CASES:
            names = ("channels", "filters", "side", "kernel", "stride", "block")
            print(json.dumps({**dict(zip(names, case, strict=True)), **times(case, timer)}), flush=True)


if __name__ == "__main__":
    main()
