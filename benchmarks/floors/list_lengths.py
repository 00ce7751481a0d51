"""A 3x3 layer's time by the number of active blocks: what it costs that tiles come in whole numbers.

float16, blocks of 16x16, random, bias, ReLU and fringe; every list's result is checked. All lists of a layer and its
dense form run in turn in CUDA graphs, warm.

    python benchmarks/floors/list_lengths.py
"""

from __future__ import annotations

import functools
import json

import torch

import sbnet
from sbnet.benchmarks.harness.layers import Layer, Shape
from sbnet.benchmarks.harness.masks import random_active
from sbnet.benchmarks.harness.registry import Setting, Side
from sbnet.benchmarks.harness.timing import Timer

# On 66 pairs of CTAs: lists around whole and half numbers of tiles for each.
LENGTHS: dict[Shape, tuple[int, ...]] = {
    (8, 256, 256, 128): (102, 198, 205, 231, 264, 280, 614),
    (8, 128, 128, 256): (26, 33, 40, 49, 51, 66, 70, 154),
    (1, 200, 352, 128): (14, 29, 70, 86),
    (1, 100, 176, 256): (4, 8, 23, 40),
    (1, 50, 88, 512): (2, 8, 12),
}


def times(shape: Shape, lengths: tuple[int, ...], timer: Timer) -> dict[str, float]:
    """{"dense": us, "LENGTH blocks": us, ...}."""
    layer = Layer(shape, torch.float16, Setting("cuda", compiled=False))
    grid = sbnet.BlockGrid.cover(shape[1:3], 16)
    sides = {"dense": layer.dense()["fused cuDNN"]}
    for length in lengths:
        active = random_active(layer.size, grid, length, "cuda")
        fringe = sbnet.fringe(active, active, shape[1:3], 3, 1, 1)
        layer.out.fill_(float("nan"))
        layer.check(layer.sparse(active, fringe), active.pixel_mask(shape[1:3]))
        sides[f"{length} blocks"] = Side(functools.partial(layer.sparse, active, fringe), "ours")
    return {name: round(median, 2) for name, (median, _) in timer.medians(sides).items()}


def main() -> None:
    """Prints one line of JSON a layer."""
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}))
    timer = Timer("cuda", rounds=5)
    with torch.no_grad():
        for shape, lengths in LENGTHS.items():
            print(json.dumps({"layer": "x".join(map(str, shape)), "us": times(shape, lengths, timer)}), flush=True)


if __name__ == "__main__":
    main()
