"""Every layer of `conv_kinds.OTHERS` in a minute: dense forms and ours at three densities in turn.

float16 (and tf32), CUDA graphs, warm, random blocks, bias, ReLU and fringe; every result is checked. `sbnet bench conv`
times the same layers longer.

    python benchmarks/floors/kinds.py [part of a table's name ...]
"""

from __future__ import annotations

import functools
import sys

import torch

import sbnet
from sbnet.benchmarks.cases.masked.conv_kinds import DENSITIES, OTHERS, Kind, kernel_of, layer_of
from sbnet.benchmarks.harness import masks
from sbnet.benchmarks.harness.layers import fringe_mask
from sbnet.benchmarks.harness.registry import Setting, Side
from sbnet.benchmarks.harness.timing import Timer


def line(kind: Kind, timer: Timer) -> str:
    """A row: us of the fastest dense form, us of ours, how often the latter goes into the former."""
    layer = layer_of(Setting("cuda", compiled=False), kind._replace(block=16))
    sides, grid = layer.dense(), sbnet.BlockGrid.cover(layer.size[1:], kind.block)
    dense = list(sides)
    for density in DENSITIES:
        active = sbnet.reduce_mask(masks.pixels("random", layer.size, density, "cuda", kind.block), grid)
        fringe = sbnet.fringe(active, active, layer.size[1:], 3, 1, 1)
        inside = active.pixel_mask(layer.size[1:])
        layer.out.fill_(float("nan"))
        layer.check(layer.sparse(active, fringe), inside, fringe_mask(fringe, inside))
        sides[str(density)] = Side(functools.partial(layer.sparse, active, fringe), "ours")
    took = {name: median for name, (median, _) in timer.medians(sides).items()}
    fastest, ours = min(took[name] for name in dense), [took[str(density)] for density in DENSITIES]
    n, h, w, c = kind.shape
    what = f"{n}x{h}x{w}, {c} to {kind.filters}, {layer.kernel[0]}x{layer.kernel[1]}"
    what += f", dilation {kind.dilation}" * (kind.dilation > 1) + f", {kind.groups} groups" * (kind.groups > 1)
    what += f", blocks of {kind.block}" * (kind.block != 16)
    return f"| {what} | {kernel_of(layer, kind)} | {fastest:.1f} | {' / '.join(f'{t:.1f}' for t in ours)} | " + (
        f"{' / '.join(f'{fastest / t:.2f}' for t in ours)} |"
    )


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| layer | kernel | dense, us | ours at density 1 / 0.25 / 0.1 | x dense |\n|---|---|---:|---:|---|")
    timer = Timer("cuda", rounds=4)
    with torch.no_grad():
        for name, kinds in OTHERS.items():
            if len(sys.argv) == 1 or any(part in name for part in sys.argv[1:]):
                for kind in kinds:
                    print(line(kind, timer), flush=True)


if __name__ == "__main__":
    main()
