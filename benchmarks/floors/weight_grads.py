"""Weight gradients of a network's convolutions on a GPU, one by one: microseconds and TFLOP/s of active pixels.

    python -m sbnet.benchmarks.floors.weight_grads resnet50 --shares 0.1 1

In bfloat16, gradients in float32, blocks as `sbnet bench training` has them. Sums are over all layers of a kind.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import sbnet
from sbnet.benchmarks.cases.training import steps
from sbnet.engine.capture import cuda_graph

CALLS, REPLAYS = 5, 5
Layer = tuple[Any, ...]  # of x, y: [N,C,H,W]; kernel, stride, padding, dilation, groups, bias


def layers_of(name: str, batch: int, side: int) -> Counter[Layer]:
    """How often a network has each convolution."""
    with torch.device("meta"):
        net = steps.built(name)
    found: Counter[Layer] = Counter()

    def note(conv: nn.Conv2d, given: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
        window = (conv.kernel_size, conv.stride, conv.padding, conv.dilation)
        found[(tuple(given[0].shape), tuple(y.shape), *window, conv.groups, conv.bias is not None)] += 1

    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(note)
    net(torch.empty(batch, 3, side, side, device="meta"))
    return found


def microseconds(run: Callable[[], Any]) -> float:
    graph, _ = cuda_graph(run, torch.device("cuda", torch.cuda.current_device()), calls=CALLS)
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("network", help="of `sbnet bench training`")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.1, 1.0], help="of rectangles")
    given = parser.parse_args()
    batch, side = steps.ON_CUDA[given.network]
    layers = layers_of(given.network, batch, side)
    for share in given.shares:
        mode = sbnet.masked(steps.pixels("a rectangle each", batch, side, share, "cuda"), block=steps.BLOCK)
        whole = 0.0
        for (x_shape, y_shape, kernel, stride, padding, dilation, groups, bias), times in layers.items():
            x, dy = (
                torch.randn(shape, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
                for shape in (x_shape, y_shape)
            )
            with mode:
                active = mode.active(tuple(y_shape[2:]))
            grid = active.grid
            numbers = [*grid.bsize, *grid.bstride, *grid.boffset, *grid.bcount]
            window = [list(pair) for pair in (kernel, stride, padding, dilation)]
            of = active.indices, active.count, numbers, *window, groups, False, True, bias, True
            run = partial(torch.ops.sbnet.sparse_conv2d_weight_grad, x, dy, *of)
            us = microseconds(run)
            pixels = int(active.count) * grid.bsize[0] * grid.bsize[1]
            products = 2 * pixels * y_shape[1] * (x_shape[1] // groups) * kernel[0] * kernel[1]
            whole += us * times
            taps, plane = (f"{a}x{b}" for a, b in (kernel, y_shape[2:]))
            layer = f"{x_shape[1]:5d} -> {y_shape[1]:4d} {taps} /{stride[0]} of {plane}"
            print(f"{share:4.0%} {times:3d} x {us:8.1f} us {products / us / 1e6:6.0f} TFLOP/s  {layer}")
        print(f"{share:4.0%}: {whole / 1e3:.3f} ms")


if __name__ == "__main__":
    main()
