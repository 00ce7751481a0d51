"""reduce_mask, sparse_gather and sparse_scatter_ against the copy bandwidth of the same run.

python benchmarks/bench_blocks.py [--device cuda|cpu] [--quick]
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch
import torch.nn.functional as F
from common import Timer, copy_bandwidth, random_active, save
from rich.console import Console
from rich.table import Table

import sbnet


def expected_gather(x: torch.Tensor, active: sbnet.ActiveBlocks) -> torch.Tensor:
    """The stack by plain indexing of padded windows."""
    g = active.grid
    pad = [max(0, -g.boffset[a]) for a in range(2)]
    after = [max(0, g.boffset[a] + (g.bcount[a] - 1) * g.bstride[a] + g.bsize[a] - x.shape[2 + a]) for a in range(2)]
    padded = F.pad(x, (pad[1], after[1], pad[0], after[0]))
    first = [g.boffset[a] + pad[a] for a in range(2)]
    windows = (
        padded[:, :, first[0] :, first[1] :].unfold(2, g.bsize[0], g.bstride[0]).unfold(3, g.bsize[1], g.bstride[1])
    )
    n, i, j = active.indices[: int(active.count)].long().unbind(1)
    return windows[n, :, i, j]


def copy_case(timer: Timer, device: str, case: tuple, transpose: bool, repeat: int) -> list[dict[str, Any]]:
    (n, h, w), block, channels, dtype, channels_last, count = case
    memory = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(n, channels, h, w, device=device, dtype=dtype).contiguous(memory_format=memory)
    tiling = sbnet.BlockGrid.cover((h, w), block)
    halo = sbnet.BlockGrid.cover((h, w), 16).conv_input(3, 1, 1) if block == 18 else tiling
    read = random_active((n, h, w), halo, count, device).trim()
    written = random_active((n, h, w), tiling, min(count, n * tiling.bcount[0] * tiling.bcount[1]), device).trim()

    stack = sbnet.sparse_gather(x, read, transpose, tail="undefined")
    if not torch.equal(stack, expected_gather(x, read)):
        raise SystemExit(f"wrong result: sparse_gather {case} transpose={transpose}")
    source = sbnet.sparse_gather(x, written, transpose, tail="undefined")
    base = torch.full_like(x, float("nan"))
    sbnet.sparse_scatter_(source, written, base, transpose=transpose)
    where = written.pixel_mask((h, w))
    if not torch.equal(torch.where(where, base, 0), torch.where(where, x, 0)) or not (base.isnan() | where).all():
        raise SystemExit(f"wrong result: sparse_scatter_ {case} transpose={transpose}")

    runs = {
        "sparse_gather": lambda: sbnet.sparse_gather(x, read, transpose, tail="undefined"),
        "gather's copy": lambda: stack.clone(),  # allocates, as the gather does: on a CPU that is most of the time
        "sparse_scatter_": lambda: sbnet.sparse_scatter_(source, written, base, transpose=transpose),
        "scatter's copy": lambda: spare.copy_(source),
    }
    spare = torch.empty_like(source)
    times = timer.interleaved(runs, repeat)
    rows = []
    for op, copied, moved in (("sparse_gather", "gather's copy", stack), ("sparse_scatter_", "scatter's copy", source)):
        size = 2 * moved.numel() * moved.element_size()
        rows.append(
            {
                "op": op,
                "size": [n, h, w],
                "block": block,
                "channels": channels,
                "dtype": str(dtype).removeprefix("torch."),
                "layout": "channels_last" if channels_last else "contiguous",
                "transpose": transpose,
                "blocks": len(moved),
                "MB": size / 1e6,
                "us": times[op],
                "GB/s": size / times[op] / 1e3,
                "of a copy of its size": times[copied] / times[op],
            }
        )
    return rows


def in_torch(mask: torch.Tensor) -> torch.Tensor:
    """What one writes without the op."""
    return (F.max_pool2d(mask[:, None].float(), 16, 16, ceil_mode=True) > 0.001).nonzero()


def masks(device: str, timer: Timer, cases: list[tuple]) -> list[dict[str, Any]]:
    rows = []
    for size, dtype, avgpool in cases:
        mask = (torch.rand(size, device=device) > 0.999).to(dtype)
        grid = sbnet.BlockGrid.cover(size[1:], 16)
        active = sbnet.reduce_mask(mask, grid, 0.001, avgpool)
        wanted = sbnet.reference.reduce_mask(mask, grid, 0.001, avgpool)
        if not (torch.equal(active.indices, wanted.indices) and torch.equal(active.block_map, wanted.block_map)):
            raise SystemExit(f"wrong result: reduce_mask {size} {dtype} avgpool={avgpool}")
        us = timer.one(functools.partial(sbnet.reduce_mask, mask, grid, 0.001, avgpool))
        moved = mask.numel() * mask.element_size()
        plain = Timer("cpu").one(functools.partial(in_torch, mask))  # its nonzero synchronises: wall time
        rows.append(
            {
                "op": "reduce_mask",
                "size": list(size),
                "dtype": str(dtype).removeprefix("torch."),
                "avgpool": avgpool,
                "MB": moved / 1e6,
                "us": us,
                "GB/s": moved / us / 1e3,
                "torch max_pool2d + nonzero us": plain,
            }
        )
    return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    for key in rows[0]:
        table.add_column(key, justify="right")
    for row in rows:
        table.add_row(
            *(
                f"{v:.2f}" if isinstance(v, float) else "x".join(map(str, v)) if isinstance(v, list) else str(v)
                for v in row.values()
            )
        )
    Console(width=180).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="a few small cases")
    options = parser.parse_args()
    device, timer = options.device, Timer(options.device)
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(device)
    half, single = torch.float16, torch.float32
    mask_cases = [((1, 400, 704), single, False), ((1, 400, 704), torch.bool, False), ((1, 800, 704), single, False)]
    if options.quick:
        copy_cases, repeat = [((1, 400, 704), 16, 64, single, True, 110)], 3
    elif device == "cpu":
        copy_cases = [
            ((1, 800, 704), b, c, single, cl, 10**6) for b in (16, 18) for c in (64, 256) for cl in (True, False)
        ]
        repeat = 3
        mask_cases.append(((1, 800, 704), single, True))
    else:
        copy_cases = [
            ((4, 1024, 1024), b, c, d, cl, 10_000)
            for cl in (True, False) for b in (16, 18) for c in (64, 256) for d in (half, single)
        ]  # fmt: skip
        copy_cases += [((1, 400, 704), b, 64, half, True, 50) for b in (16, 18)]
        repeat = 10
        mask_cases += [
            ((8, 1024, 1024), single, False),
            ((8, 1024, 1024), torch.bool, False),
            ((8, 1024, 1024), single, True),
        ]
    mask_rows = masks(device, timer, mask_cases)
    copy_rows = [
        {**row, "of copy bandwidth": row["GB/s"] * 1e9 / bandwidth}
        for case in copy_cases
        for transpose in (False, True)
        for row in copy_case(timer, device, case, transpose, repeat)
    ]
    show("reduce_mask", mask_rows)
    show(f"block copies (copy bandwidth of this run: {bandwidth / 1e9:.0f} GB/s)", copy_rows)
    if not options.quick:
        print(save("blocks", device, mask_rows + copy_rows, {"copy_bandwidth_GB/s": bandwidth / 1e9}))


if __name__ == "__main__":
    main()
