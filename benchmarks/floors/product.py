"""What a matrix product of a sparse convolution's active pixels takes by itself, by cuBLAS.

No gather, no halo, no bias, no fringe: rows of one matrix, side by side, times the weight. A convolution by products of
active pixels cannot be expected to beat it by much, so dense time over its time bounds the speed-up. The two sides run
in turn in CUDA graphs, warm.

    python benchmarks/floors/product.py
"""

from __future__ import annotations

import functools
import json
import math

import torch

from sbnet.benchmarks.cases.masked.conv import SHAPES
from sbnet.benchmarks.harness.layers import Layer, Shape
from sbnet.benchmarks.harness.registry import Setting, Side
from sbnet.benchmarks.harness.timing import Timer

POINTWISE: list[tuple[Shape, int]] = [((1, 1024, 1024, 128), 512), ((1, 50, 88, 2048), 512)]  # 1x1, all blocks


def bound(shape: Shape, density: float, timer: Timer, filters: int = 0, kernel: int = 3, stride: int = 1) -> dict:
    """One layer at one density in blocks of 16x16, random as the benchmark's: as many whole blocks."""
    layer = Layer(shape, torch.float16, Setting("cuda", compiled=False), filters, kernel, stride)
    n, h, w = layer.size
    blocks = n * math.ceil(h / 16) * math.ceil(w / 16)
    pixels = min(round(blocks * density) * 256, n * h * w)
    filters, channels = layer.weight.shape[:2]
    a = torch.randn(pixels, channels * kernel * kernel, device="cuda").half()
    b = torch.randn(channels * kernel * kernel, filters, device="cuda").half()
    y = torch.empty(pixels, filters, device="cuda", dtype=torch.float16)
    torch.testing.assert_close((a[:99] @ b).float(), a[:99].float() @ b.float(), rtol=1e-2, atol=0.5)
    sides = {"product": Side(functools.partial(torch.mm, a, b, out=y)), **layer.dense()}
    times = {name: median for name, (median, _) in timer.medians(sides).items()}
    product = times.pop("product")
    dense = min(times.values())
    return {
        "layer": "x".join(map(str, shape)) + f" to {filters}, {kernel}x{kernel}, stride {stride}",
        "density": density,
        "pixels": pixels,
        "product us": round(product, 2),
        "TFLOP/s": round(2e-6 * pixels * a.shape[1] * filters / product),
        "dense us": round(dense, 2),
        "dense / product": round(dense / product, 2),
    }


def main() -> None:
    """Prints one line of JSON a layer and density."""
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}))
    timer = Timer("cuda", rounds=7)
    with torch.no_grad():
        for shape in SHAPES:
            for density in (1.0, 0.1, 0.05):
                print(json.dumps(bound(shape, density, timer)), flush=True)
        for shape, filters in POINTWISE:
            print(json.dumps(bound(shape, 1.0, timer, filters, kernel=1)), flush=True)


if __name__ == "__main__":
    main()
