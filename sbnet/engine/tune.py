"""`sbnet.tune`: block sizes by measurement, as JSON that can be shipped."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.engine.arguments import planes_of
from sbnet.engine.compiled import Compiled
from sbnet.engine.sparsify import SparseRun
from sbnet.geometry import Pair
from sbnet.graph.blocks import CANDIDATES, FORMAT, tuning_key
from sbnet.graph.plan import Plan

GAIN = 0.98  # another block size must be faster by so much: less is noise


def tune(
    run: SparseRun,
    frames: Sequence[Any],
    masks: Sequence[Tensor],
    *,
    blocks: Sequence[int] | None = None,
    rounds: int = 3,
) -> dict[str, Any]:
    """Measures block sizes of each plane on real frames and masks; the fastest are what `sparsify` then takes.

    One plane after another, the largest first, is tried with each block size while the others keep theirs. A tuning
    holds for one device and these versions of sbnet and PyTorch; elsewhere `sparsify` falls back to "auto". Tunings of
    several devices are merged by `{**a["entries"], **b["entries"]}`. Kernels are chosen by rule, not measured: it costs
    the networks of the tables 2.8 % of a call at most (docs/log/2026-11-26-kernel-choices.md).

    Args:
        run: of `sparsify`.
        frames: inputs like its example: tensors, or tuples of them.
        masks: [N,H,W] of each frame.
        blocks: sizes to try; default: those that pay on the device.
        rounds: times that each frame is timed.

    Returns:
        A dict that json.dump writes; pass it, or the file's name, as `sparsify(..., block=)`.

    >>> json.dump(sbnet.tune(run, frames, masks), open("tuning.json", "w"))
    >>> run = sbnet.sparsify(model, example, block="tuning.json")
    """
    if len(frames) != len(masks) or not len(frames):
        raise ValueError(f"sbnet: tune: masks: expected {max(len(frames), 1)}, one a frame, got {len(masks)}")
    for name, least in {"rounds": rounds, "blocks": min(blocks or (1,))}.items():
        if least < 1:
            raise ValueError(f"sbnet: tune: {name}: expected at least 1, got {least}")
    calls = [run._inputs_of(frame, "tune: frames") for frame in frames]
    first = run._for(calls[0])
    plan, device = first.plan, first.constants.device
    sizes: dict[Pair, Pair] = {(h, w): b for h, w, b in plan.planes}
    candidates = tuple(blocks) if blocks is not None else CANDIDATES[device.type]
    make_mask = first.make_mask

    def measure(sizes: dict[Pair, Pair]) -> float:
        planes = [(h, w, sizes[h, w]) for h, w, _ in plan.planes]
        tried = Plan(plan.graph, planes, plan.mode)
        compiled = Compiled(tried, first.constants, make_mask, True, first.allow_tf32)
        times = []
        for turn in range(rounds + 1):
            for inputs, mask in zip(calls, masks, strict=True):
                wanted = planes_of(mask, inputs[0])
                begin = _now(device)
                compiled(inputs, wanted, run.margin)
                times += [_now(device) - begin] if turn else []
        return statistics.median(times) * 1e3

    begin = best = measure(sizes)
    for height, width, _ in plan.planes:
        for block in candidates:
            tried = {**sizes, (height, width): (block, block)}
            if tried != sizes and min(height, width) >= block // 2 and (ms := measure(tried)) < GAIN * best:
                sizes, best = tried, ms
    entry = {
        "planes": {f"{h}x{w}": list(block) for (h, w), block in sizes.items()},
        "mode": plan.mode, "dtype": str(calls[0][0].dtype).removeprefix("torch."), "ms": best, "ms before": begin,
    }  # fmt: skip
    return {"format": FORMAT, "entries": {tuning_key(device): entry}}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
