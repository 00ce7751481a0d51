"""What a pixel costs on a CPU in blocks of 1 to 16, by the form of the layer; networks under recorded motion with the
block sizes that "auto" takes from it, and with those of one rim for all layers and no block below 4.

SBNET_DATA=folder-of-vtest.avi python -m sbnet.benchmarks.floors.block_sizes [network or form of a layer ...]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from unittest import mock

import torch

import sbnet
from sbnet.benchmarks.harness import masks, nets
from sbnet.graph import blocks

SECONDS = 0.5  # that a row is timed
SHARE = 0.15  # of a plane's pixels, in full blocks
FORMS = {  # kernel, stride, depthwise
    "1x1": (1, 1, False), "depthwise": (3, 1, True), "3x3": (3, 1, False), "3x3 of stride 2": (3, 2, False),
    "5x5": (5, 1, False), "7x7": (7, 1, False), "2x2 transposed": (2, 2, False), "4x4 transposed": (4, 2, False),
}  # fmt: skip
PLANES = ((96, 160, 32), (48, 80, 64), (24, 40, 128))
SIZES = (1, 2, 4, 8, 16)
BEFORE = {"cpu": dict.fromkeys(blocks.PRICES["cpu"], blocks.Price(0.25))}


def main() -> None:
    torch.set_num_threads(2)
    names = sys.argv[1:]
    for name in (name for name in names if name not in FORMS):
        for kind in ("walkers", "top-left"):
            network(name, kind)
    for form in (name for name in names or FORMS if name in FORMS):
        for plane in PLANES:
            layer(form, plane)


def layer(form: str, plane: tuple[int, int, int]) -> None:
    height, width, channels = plane
    calls = {size: _call(form, plane, size) for size in SIZES}
    least = _interleaved({size: call for size, (call, _) in calls.items()})
    per = [f"{size}: {least[size] / pixels * 1e9:.1f}" for size, (_, pixels) in calls.items()]
    print(f"{form}, {channels} channels, {height}x{width}: ns a pixel in blocks of", ", ".join(per), flush=True)


def _call(form: str, plane: tuple[int, int, int], size: int) -> tuple[Callable[[], object], int]:
    height, width, channels = plane
    kernel, stride, depthwise = FORMS[form]
    grid = sbnet.BlockGrid.cover((height, width), size)
    count = round(height * width * SHARE / size**2)
    active = masks.random_active((1, height, width), grid, count, "cpu")
    groups = channels if depthwise else 1
    sides = (height // stride, width // stride) if "transposed" in form else (height * stride, width * stride)
    x = torch.randn(1, channels, *sides).contiguous(memory_format=torch.channels_last)
    out = torch.zeros(1, channels, height, width).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(channels, channels // groups, kernel, kernel)
    packed = sbnet.pack_conv_weight(weight, groups)

    def call() -> None:
        if "transposed" in form:
            sbnet.sparse_conv_transpose2d_(x, weight, None, active, out, stride=stride, padding=kernel // 2 - 1)
            return
        sbnet.sparse_conv2d_(
            x, weight, None, active, out, stride=stride, padding=kernel // 2, groups=groups, packed=packed
        )

    return call, count * size**2


def network(name: str, kind: str, size: tuple[int, int] = (384, 640)) -> None:
    net = nets.build(name)
    x = torch.rand(1, 3, *size).contiguous(memory_format=torch.channels_last)
    mask = masks.pixels(kind, (1, *size), 0.1, "cpu")
    runs = {"after": sbnet.sparsify(net, x, masks=[mask])}
    one_rim = mock.patch.multiple(blocks, PRICES=BEFORE, CANDIDATES={"cpu": (4, 8, 16, 32)}, CELL={"cpu": 0.0})
    with one_rim:
        runs["before"] = sbnet.sparsify(net, x, masks=[mask])
    least = _interleaved({key: lambda run=run: run(x, mask) for key, run in runs.items()})  # type: ignore[misc]
    for key, run in runs.items():
        print(
            f"{name}, {kind}, {key}: {least[key] * 1e3:.2f} ms, blocks {[b[0] for _, _, b in run.planes]}", flush=True
        )


def _interleaved(calls: dict) -> dict:
    """The least time of each, s: one after another until the time is up."""
    least = dict.fromkeys(calls, float("inf"))
    end = time.perf_counter() + SECONDS * len(calls)
    while time.perf_counter() < end:
        for key, call in calls.items():
            call()
            begin = time.perf_counter()
            call()
            least[key] = min(least[key], time.perf_counter() - begin)
    return least


if __name__ == "__main__":
    main()
