"""Times of the layers that builds were compared by (docs/log/): run it with one build and the other, in turn.

float16, bias, ReLU and fringe; every result is checked. A layer's lists and its dense form run in turn in CUDA graphs,
warm; --settle and --rest (ms, see benchmarks/harness/timing.py) choose the clock. --only takes numbers of CASES.

    python benchmarks/floors/builds.py --settle 250 --only 5 30
    ncu --profile-from-start off --section SourceCounters python benchmarks/floors/builds.py --profile --only 5
"""

from __future__ import annotations

import argparse
import functools
import json
from typing import NamedTuple

import torch

import sbnet
from sbnet.benchmarks.harness import masks
from sbnet.benchmarks.harness.layers import Layer, Shape
from sbnet.benchmarks.harness.registry import Setting, Side
from sbnet.benchmarks.harness.timing import Timer


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


def sides_of(case: Case) -> dict[str, Side]:
    """ "dense", and "1.0" (all blocks), "0.3" and "0.1" (a part), whose results are checked."""
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
    return sides


def profile(sides: dict[str, Side]) -> None:
    """One call of dense and of ours with all blocks, each the second, for a profiler to look at."""
    for name in ("dense", "1.0"):
        sides[name].run()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        sides[name].run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def main() -> None:
    """Prints one line of JSON a layer, its times in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settle", type=float, default=0.0, help="ms")
    parser.add_argument("--rest", type=float, default=0.0, help="ms")
    parser.add_argument("--only", type=int, nargs="+", default=range(len(CASES)), help="numbers of cases")
    parser.add_argument("--profile", action="store_true", help="one call of dense and of ours, for a profiler")
    chosen = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}))
    timer = Timer("cuda", rounds=7, repeat=4, settle=chosen.settle / 1e3, rest=chosen.rest / 1e3)
    with torch.no_grad():
        for case in (CASES[i] for i in chosen.only):
            sides = sides_of(case)
            if chosen.profile:
                profile(sides)
                continue
            us = {name: round(median, 2) for name, (median, _) in timer.medians(sides).items()}
            print(json.dumps({**case._asdict(), "us": us}), flush=True)


if __name__ == "__main__":
    main()
