"""What a step of training under masks takes of a CPU, by processor time of one thread, beside the dense step.

    OMP_NUM_THREADS=1 python -m sbnet.benchmarks.floors.training_steps

`sbnet bench training` times steps by the clock; where other processes share the machine, this says more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import sbnet
from sbnet.benchmarks.cases.training import steps

NETWORKS = {"four 3x3": (1, 256), "resnet18": (4, 224), "U-Net, bilinear": (1, 256)}
ROUNDS = 7


def fastest(run: Callable[[], Any]) -> float:
    """Milliseconds."""
    times = []
    for _ in range(ROUNDS + 2):
        begin = time.process_time()
        run()
        times.append(time.process_time() - begin)
    return min(times[2:]) * 1e3


def main() -> None:
    torch.set_num_threads(1)
    for name, (batch, side) in NETWORKS.items():
        torch.manual_seed(0)
        net: nn.Module = steps.four() if name == "four 3x3" else steps.built(name)
        net = net.train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = torch.randn(batch, 3, side, side).contiguous(memory_format=torch.channels_last)

        def step(mode: Any, net: nn.Module = net, x: torch.Tensor = x) -> None:
            net.zero_grad()
            with mode:
                loss = steps.loss_of(net(x))
            loss.backward()

        dense = fastest(lambda: step(contextlib.nullcontext()))
        print(f"{name}: dense {dense:.1f} ms")
        for share in steps.RECTANGLES:
            mask = steps.pixels("a rectangle each", batch, side, share, "cpu")
            took = fastest(lambda: step(sbnet.masked(mask, block=steps.BLOCK)))  # noqa: B023
            print(f"{name}: {share:.0%} of the pixels: {took:.1f} ms, {dense / took:.2f} x dense", flush=True)


if __name__ == "__main__":
    main()
