"""Layers by themselves on a CPU, all blocks active, against every dense form: processor time of one thread, the least
of some rounds in turn, so that other processes hardly disturb it.

    OMP_NUM_THREADS=1 python benchmarks/floors/cpu_layers.py [rounds] [words of a layer ...]
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

import sbnet
from sbnet.benchmarks.harness import dense

BLOCK = 16


class Kind(NamedTuple):
    """transposed: of stride 2."""

    channels: int
    filters: int
    kernel: int
    size: tuple[int, int] = (400, 704)
    transposed: bool = False

    def __str__(self) -> str:
        how = "transposed " if self.transposed else ""
        return f"{how}{self.kernel}x{self.kernel}, {self.channels} to {self.filters}, {self.size[0]}x{self.size[1]}"


LAYERS = [  # of the contour net, heads, large kernels, upsampling
    Kind(3, 64, 3), Kind(64, 64, 3), Kind(64, 3, 1),
    Kind(64, 3, 3), Kind(64, 1, 3), Kind(64, 8, 3), Kind(64, 1, 1),
    Kind(64, 64, 5), Kind(64, 64, 7),
    *(Kind(128, 64, kernel, (100, 176), transposed=True) for kernel in (2, 3, 4)),
]  # fmt: skip


def times(kind: Kind, rounds: int) -> dict[str, float]:
    """Milliseconds of each dense form, and of ours."""
    conv: nn.Conv2d | nn.ConvTranspose2d
    if kind.transposed:
        k = kind.kernel
        conv = nn.ConvTranspose2d(kind.channels, kind.filters, k, 2, (k - 1) // 2, output_padding=k % 2)
    else:
        conv = nn.Conv2d(kind.channels, kind.filters, kind.kernel, padding=kind.kernel // 2)
    conv = conv.eval().requires_grad_(False)
    x = torch.randn(1, kind.channels, *kind.size)
    forms = dense.forms(nn.Sequential(conv, nn.ReLU(inplace=True)), x)
    sides: dict[str, Callable[[], object]] = {
        name: functools.partial(form.run, form.prepare(x)) for name, form in forms.items()
    }
    last, wanted = x.contiguous(memory_format=torch.channels_last), conv(x).relu_()
    plane = wanted.shape[2:]
    active = sbnet.reduce_mask(torch.ones(1, *plane, dtype=torch.bool), sbnet.BlockGrid.cover(plane, BLOCK))
    out = torch.empty_like(wanted, memory_format=torch.channels_last)
    if isinstance(conv, nn.ConvTranspose2d):
        sides["ours"] = functools.partial(
            sbnet.sparse_conv_transpose2d_, last, conv.weight, conv.bias, active, out,
            stride=2, padding=(kind.kernel - 1) // 2, output_padding=kind.kernel % 2, activation="relu",
        )  # fmt: skip
    else:
        sides["ours"] = functools.partial(
            sbnet.sparse_conv2d_, last, conv.weight, conv.bias, active, out,
            padding=kind.kernel // 2, activation="relu", packed=sbnet.pack_conv_weight(conv.weight),
        )  # fmt: skip
    sides["ours"]()
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
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
    for kind in LAYERS:
        if sys.argv[2:] and not any(words in str(kind) for words in sys.argv[2:]):
            continue
        with torch.no_grad():
            took = times(kind, int(sys.argv[1]) if len(sys.argv) > 1 else 5)
        fastest = min(took[name] for name in took if name != "ours")
        print(
            f"{kind}:",
            ", ".join(f"{name} {ms:.1f} ms" for name, ms in took.items()),
            f"{fastest / took['ours']:.2f}x the fastest dense form",
            flush=True,
        )


if __name__ == "__main__":
    main()
