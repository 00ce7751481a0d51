"""Whole networks through the masked runner against the same networks dense, by density of 16x16 blocks.

python benchmarks/bench_run.py [--device cuda|cpu] [--dtype float32] [--size 400x704]

A masked call starts at a pixel mask and holds everything: reduce_mask, fringe, layers, clearing of the output. The
dense side is `DenseConvNet`: channels_last, ReLU in place on the CPU; fused cuDNN in a CUDA graph on a GPU.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from common import Timer, random_active, save
from rich.console import Console
from rich.table import Table
from torch import nn

import sbnet
from sbnet.engine import DenseConvNet, MaskedConvNet, compare
from sbnet.models import contour_net

DENSITIES = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0)


def four_layers() -> nn.Sequential:
    """Four 3x3 layers of 64 channels, 64 channels in."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers).eval()


def measure(
    name: str, net: nn.Sequential, channels: int, size: tuple[int, int], device: str, dtype: torch.dtype
) -> list[dict[str, Any]]:
    x = torch.rand(1, channels, *size, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
    masked = MaskedConvNet(net, size, 16, device=device, dtype=dtype)
    dense = DenseConvNet(net, size, device=device, dtype=dtype)
    grid = sbnet.BlockGrid.cover(size, 16)
    blocks = grid.bcount[0] * grid.bcount[1]
    rows = []
    for density in DENSITIES:
        mask = random_active((1, *size), grid, round(density * blocks), device).pixel_mask(size)[:, 0]
        agreement = compare(masked(x, mask), net, x, masked.active)
        if not agreement.holds:
            raise SystemExit(f"wrong result: {name}, density {density}: {agreement}")
        times = Timer(device, captured=False).interleaved(
            {"masked": lambda m=mask: masked(x, m), "dense": lambda: dense(x)}, repeat=1
        )
        rows.append(
            {
                "network": name,
                "size": list(size),
                "dtype": str(dtype).removeprefix("torch."),
                "density": density,
                "dense ms": times["dense"] / 1e3,
                "masked ms": times["masked"] / 1e3,
                "x dense": times["dense"] / times["masked"],
                "largest difference from the oracle": agreement.largest,
                "rms error, of PyTorch's own": agreement.error / agreement.torch_error,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--size", default="400x704")
    arguments = parser.parse_args()
    height, width = map(int, arguments.size.split("x"))
    dtype = getattr(torch, arguments.dtype)
    rows = []
    for name, net, channels in (("four 3x3, 64 to 64", four_layers(), 64), ("contour_net", contour_net(), 3)):
        rows += measure(name, net, channels, (height, width), arguments.device, dtype)
    table = Table(title=f"{arguments.size}, {arguments.dtype} on {arguments.device}", title_justify="left")
    for column in ("network", "density", "dense ms", "masked ms", "x dense"):
        table.add_column(column, justify="left" if column == "network" else "right")
    for row in rows:
        numbers = (f"{row[key]:.3g}" for key in ("density", "dense ms", "masked ms", "x dense"))
        table.add_row(row["network"], *numbers)
    console = Console()
    console.print(table)
    console.print(f"wrote {save('run', arguments.device, rows)}", soft_wrap=True)


if __name__ == "__main__":
    main()
