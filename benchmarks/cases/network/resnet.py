"""SparseResNet-50 without its head, on CUDA ResNet-18 too: one rectangle of a large frame, and the whole frame; on CUDA
also random blocks and what moved in a recording.

A masked call is what `capture` gives: frame and mask copied in, active blocks and fringes of all planes, every layer,
one CUDA graph. "in place": frame and mask are where the graph reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sbnet.benchmarks.harness import dense, masks, planned
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, short
from sbnet.benchmarks.harness.timing import host_time
from sbnet.models import resnet18, resnet50
from sbnet.nn import fold_batch_norm

# Blocks that follow the mask more closely in the coarse planes, where one of 8x8 covers a sixteenth or a quarter of the
# frame. A CPU computes them nearly as fast; Hopper's kernels need multiples of 8.
SMALL = (16, 8, 4, 4, 4)
NETS = {"18": resnet18, "50": resnet50}


def cases(setting: Setting) -> Iterator[Case]:
    large = [(1, 1024, 1024), (8, 1024, 1024), (1, 2048, 2048), (8, 2048, 2048)]
    sizes = large if setting.cuda else [(1, 512, 512)]
    every = [("top-left", 0.1), ("centre", 0.1), ("all", 1.0)]
    wanted: list[tuple[str, tuple[int, int, int], list[tuple[str, float]]]]
    wanted = [
        ("50", size, setting.pick(every[:1], every[:1], every))
        for size in setting.pick([(1, 64, 64)], sizes[:1], sizes)
    ]
    if setting.cuda and setting.level == "full":  # few blocks: one launch's latency after the other
        wanted += [("50", (1, 1024, 1024), [("top-left", 0.02), ("random", 0.1), ("walkers", 0.0)])]
        wanted += [("18", (1, 544, 960), [("top-left", 0.05)])]
    for depth, size, kinds in wanted:
        for kind, density in kinds:
            facts: dict[str, object] = {
                "of": f"SparseResNet-{depth}, no head",
                "size": list(size),
                "dtype": short(setting.dtype),
            }
            facts |= {"mask": kind} | ({"wanted density": density} if density else {})
            for blocks in (None,) if setting.cuda or kind == "all" else (None, SMALL):
                more = {} if blocks is None else {"block": "-".join(map(str, blocks))}
                run = partial(work, setting, depth, size, kind, density, blocks)
                yield Case("residual network", "network", facts | more, run)


def pixel_mask(kind: str, size: tuple[int, int, int], density: float, device: str) -> Tensor:
    """[N,H,W] bool: one rectangle of this share of the frame, in the corner or in the middle, or as `masks.pixels`."""
    mask = masks.pixels("top-left" if kind in ("centre", "all") else kind, size, density, device)
    if kind != "centre":
        return mask
    return mask.roll([(s - round(s * density**0.5)) // 2 for s in size[1:]], (1, 2))


def work(
    setting: Setting,
    depth: str,
    size: tuple[int, int, int],
    kind: str,
    density: float,
    blocks: tuple[int, ...] | None,
) -> Work:
    device, dtype = setting.device, setting.dtype
    net = NETS[depth](weights=0, classes=0, **({} if blocks is None else {"blocks": blocks})).eval().to(device)
    x = torch.rand(size[0], 3, *size[1:], device=device).to(dtype).contiguous(memory_format=torch.channels_last)
    mask = pixel_mask(kind, size, density, device)
    run = net.capture(x)
    run.frame.copy_(x)  # where "in place" reads them
    run.mask.copy_(mask)
    lists = run.lists(mask)
    flops, size_bytes = planned.flops_and_bytes(run, lists)
    compiled = size[0] == 1
    notes: dict[str, Any] = {"densities": planned.densities(lists), "buffers MB": _megabytes(run.executor.buffers)}
    if setting.cuda:
        notes["host us"] = host_time(lambda: run(x, mask), in_a_row=20)
        notes["host us after a wait"] = host_time(lambda: run(x, mask), in_a_row=1)
    sides = {
        "masked": Side(lambda: run(x, mask), "ours", "own"),
        "masked, in place": Side(lambda: run(run.frame, run.mask), "peer", "own"),
        "layers": Side(lambda: run.layers(x, lists=lists), "peer"),
        **planned.dense_sides(run, x, setting, compiled),
    }
    if not setting.cuda and setting.level != "tiny":  # exporting it takes longer than the test
        sides |= {k: Side(partial(f.run, f.prepare(x))) for k, f in dense_forms(setting, size).items()}
    return Work(sides, planned.contract(net, x, mask, run.planes), flops, size_bytes, dtype, notes)


@functools.lru_cache(maxsize=1)
def dense_forms(setting: Setting, size: tuple[int, int, int]) -> dict[str, dense.Form]:
    """Cases that follow each other share them."""
    net = fold_batch_norm(resnet50(weights=0, classes=0).eval()).requires_grad_(False)
    example = torch.rand(size[0], 3, *size[1:])
    return dense.forms(net, example, setting.compiled and setting.level == "full")


def _megabytes(buffers: list[Tensor]) -> float:
    return sum(buffer.nbytes for buffer in buffers) / 1e6
