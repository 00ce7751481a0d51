"""Layers of the contour net on a CPU, all blocks active, against every dense form: processor time of one thread, the
least of some rounds in turn, so that other processes hardly disturb it.

    OMP_NUM_THREADS=1 python benchmarks/floors/cpu_layers.py [rounds]
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import sbnet
from sbnet.benchmarks.harness import dense

SIZE, BLOCK = (400, 704), 16
LAYERS = [(3, 64, 3), (64, 64, 3), (64, 3, 1)]  # input channels, output channels, kernel


def times(channels: int, filters: int, kernel: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each dense form, and of ours."""
    conv = nn.Conv2d(channels, filters, kernel, padding=kernel // 2).eval().requires_grad_(False)
    x = torch.randn(1, channels, *SIZE)
    forms = dense.forms(nn.Sequential(conv, nn.ReLU(inplace=True)), x)
    sides: dict[str, Callable[[], object]] = {
        name: functools.partial(form.run, form.prepare(x)) for name, form in forms.items()
    }
    last = x.contiguous(memory_format=torch.channels_last)
    active = sbnet.reduce_mask(torch.ones(1, *SIZE, dtype=torch.bool), sbnet.BlockGrid.cover(SIZE, BLOCK))
    out = torch.empty(1, filters, *SIZE).contiguous(memory_format=torch.channels_last)
    sides["ours"] = functools.partial(
        sbnet.sparse_conv2d_, last, conv.weight, conv.bias, active, out,
        padding=kernel // 2, activation="relu", packed=sbnet.pack_conv_weight(conv.weight),
    )  # fmt: skip
    least = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, run in sides.items():
            begin = time.process_time()
            run()
            least[name] = min(least[name], 1e3 * (time.process_time() - begin))
    return least


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for channels, filters, kernel in LAYERS:
        with torch.no_grad():
            took = times(channels, filters, kernel, int(sys.argv[1]) if len(sys.argv) > 1 else 5)
        fastest = min(took[name] for name in took if name != "ours")
        print(
            f"{channels} to {filters}, {kernel}x{kernel}:",
            ", ".join(f"{name} {ms:.1f} ms" for name, ms in took.items()),
            f"{fastest / took['ours']:.2f}x the fastest dense form",
            flush=True,
        )


if __name__ == "__main__":
    main()
