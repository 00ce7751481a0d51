"""Networks on a GPU with and without what saves launches: branches on streams of their own, gates as one op.

    python -P -m sbnet.benchmarks.beside YOLOv8n-like mobilenet_v3_large
    python -P -m sbnet.benchmarks.beside --host YOLOv8n-like
    python -P -m sbnet.benchmarks.beside --kernels FPN-ResNet-50

A line a network and mask: microseconds a frame of each form (replays of its CUDA graph, the median of five times
sixty), the largest difference of results from those of the plain form, and what the host's part of a call takes
(--host: that alone, beside a loop of Python, by which the host's own speed shows). --kernels: of a frame as it is,
its launches and, of each kernel, how many and for how long.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import sbnet
from sbnet.benchmarks.harness import masks, nets
from sbnet.benchmarks.harness.frame_times import Kernels
from sbnet.benchmarks.harness.timing import host_time
from sbnet.engine.arguments import planes_of
from sbnet.graph import plan
from sbnet.graph.passes import lanes, storage
from sbnet.graph.writes import VERSION

MASKS = {"10 %": 0.1, "a block": 0.0001, "all": 1.0}
FORMS = {"plain": (1, False), "gates": (1, True), "streams": (lanes.MOST, False)}


def form(most: int, gates: bool) -> None:
    storage.lanes = functools.partial(lanes.lanes, most=most)  # type: ignore[attr-defined]
    plan.join_gates = JOIN if gates else (lambda given: given)  # type: ignore[attr-defined, assignment]


JOIN = plan.join_gates


def replays_us(run: Any, count: int = 60) -> float:
    replay = run.compiled.prepare(run.margin).graph.replay
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin.record()
        for _ in range(count):
            replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / count * 1e3)
    return round(statistics.median(found), 1)


def sample(name: str, density: float) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """A network, a frame and a mask."""
    size = (736, 1280) if name == "YOLOv8n-like" else (720, 1280)
    x = torch.rand(1, 3, *size, device="cuda").half().contiguous(memory_format=torch.channels_last)
    return nets.build(name).half().cuda(), x, masks.pixels("top-left", (1, *size), density, "cuda")


def compare(name: str, wanted: list[str]) -> None:
    for label, density in MASKS.items():
        net, x, mask = sample(name, density)
        row: dict[str, Any] = {}
        first: list[Tensor] = []
        for kind in wanted:
            form(*FORMS[kind])
            run = sbnet.sparsify(net, x, masks=[mask])
            for turned in (mask, mask.flip(1), mask.flip(2), mask):  # blocks that the frame before did not have
                result = run(x, mask=turned)
            row[kind] = replays_us(run)
            found = [v.float() for v in tree_leaves(run(x, mask, copy=True))]
            first = first or found
            apart = max(float((a - b).abs().max()) for a, b in zip(found, first, strict=True))
            row[f"{kind} differs"] = apart / max(float(v.abs().max()) for v in first)
        print(name, label, json.dumps(row), flush=True)
    form(lanes.MOST, True)
    del result


def host(name: str) -> None:
    """Microseconds of the host: the least of fifteen times ten calls after a wait, also of what PyTorch would do in the
    place of two parts."""
    net, x, mask = sample(name, 0.1)
    run = sbnet.sparsify(net, x, masks=[mask])
    run(x, mask)

    def least(call: Callable[[], Any]) -> float:
        found = []
        for _ in range(15):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(10):
                call()
            found.append((time.perf_counter() - begin) * 1e5)
        return round(min(found), 2)

    made, parameters = run.compiled, list(run.compiled.constants._tensors)
    parts: dict[str, Callable[[], Any]] = {
        "call": lambda: run(x, mask), "plan": lambda: run.prepare(x), "mask": lambda: planes_of(mask, x),
        "writes": made.constants.stale, "inspect": made.executor.inspect, "inputs": lambda: made.fill([x, mask]),
        "replay": made.prepare(run.margin).graph.replay,
        "call, frame and mask in place": lambda: run(made.inputs[0], made.mask),
        "PyTorch: writes": lambda: sum(map(VERSION, parameters)),
        "PyTorch: inputs": lambda: (made.inputs[0].copy_(x), made.mask.copy_(mask)),
        "100 calls of abs": lambda: [abs(1) for _ in range(100)],
    }  # fmt: skip
    row = {part: least(call) for part, call in parts.items()}
    row |= {f"call, median, {calls} in a row": round(host_time(parts["call"], calls), 2) for calls in (1, 20)}
    print(name, f"host, {len(parameters)} parameters", json.dumps(row), flush=True)


def kernels(name: str) -> None:
    for label, density in MASKS.items():
        net, x, mask = sample(name, density)
        run = sbnet.sparsify(net, x, masks=[mask])
        run(x, mask)
        us, seen = replays_us(run), Kernels()
        for _ in range(5):
            seen.trace(run.compiled.prepare(run.margin).graph.replay)
        told = [(kernel, launches, round(spent, 2)) for kernel, launches, spent in seen.told()]
        blocks = [int(active.count) for active in run.active]
        row = {"us": us, "launches": sum(n for _, n, _ in told), "active blocks": blocks, "kernels": told}
        print(name, label, json.dumps(row), flush=True)


if __name__ == "__main__":
    wanted = {"--host": [host], "--kernels": [kernels]}.get("".join(sys.argv[1:2]))
    for given in sys.argv[1 if wanted is None else 2 :]:
        if wanted is None:
            compare(given, ["plain", "gates"] if given == "mobilenet_v3_large" else ["plain", "streams"])
        for tell in wanted or [host]:
            tell(given)
