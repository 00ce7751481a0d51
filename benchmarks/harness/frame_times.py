"""What a GPU takes for one frame of a pipeline whose frame is one CUDA graph: its replay, the mask path alone (mask,
margin and lists of active blocks), and the replay of the dense network. A line of JSON.

python -m sbnet.benchmarks.harness.frame_times contours --source vtest.avi -o times.jsonl

Each is timed once a frame, behind a kernel that keeps the device busy until all of it is launched: no time of the host
is in it, and masks see the frames in their order. --kernels: so many more frames tell, of each kernel, how often a part
launches it and for how long, by PyTorch's profiler.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import sbnet
from sbnet.apps.pipeline.compute import Compute
from sbnet.apps.pipeline.frame_graph import FrameGraph, seen
from sbnet.apps.pipeline.summary import Summary
from sbnet.benchmarks.harness.measure import film_facts, film_parser, keep_row, made_by
from sbnet.engine import capture

FIRST = 20  # frames that are not timed: clocks and caches settle
BUSY_CYCLES = 400_000  # 0.2 ms


def lapse(run: Callable[[], Any]) -> float:
    """Microseconds that the device takes for what `run` launches."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


class Kernels:
    """What runs on the device in several calls of one function: of each kernel its launches and microseconds a call."""

    def __init__(self) -> None:
        self._calls = 0
        self._seen: dict[str, list[float]] = {}

    def trace(self, run: Callable[[], Any]) -> None:
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            run()
            torch.cuda.synchronize()
        self._calls += 1
        for event in trace.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                self._seen.setdefault(event.name, []).append(event.time_range.elapsed_us())

    def told(self) -> list[tuple[str, float, float]]:
        """(name, launches, microseconds), the dearest first."""
        found = [(name, len(us) / self._calls, sum(us) / self._calls) for name, us in self._seen.items()]
        return sorted(found, key=lambda one: -one[2])


class MaskPath:
    """What layers wait for, alone: the frame's mask and the lists that follow from it, margin included, of `compute`,
    which has seen a frame. It has a mask of its own.
    """

    def __init__(self, compute: Compute, graph: FrameGraph) -> None:
        self._mask, network = copy.deepcopy(compute.mask), compute.network
        self._x, self._graphed = seen(graph.pixels, graph.look, graph.dtype, graph.network)[0], graph
        lists, margin = compute.run.executor.lists, compute.margin

        def body() -> tuple[Any, Any]:
            return lists(network.widened_mask(self._mask(self._x)), margin)

        self._graph, self._made = capture.cuda_graph(body, graph.pixels.device)
        self._mask.reset()

    def upload(self, pixels: Tensor) -> None:
        graph = self._graphed
        self._x.copy_(seen(pixels.to(self._x.device), graph.look, graph.dtype, graph.network)[0])

    def replay(self) -> None:
        self._graph.replay()


@torch.no_grad()
def times(source: Any, network: Any, frames: int, traced: int = 0, **options: Any) -> dict[str, Any]:
    """Medians in microseconds of the parts, over `frames` frames, and the mean density of these; of `traced` frames
    more, their kernels.

    Raises:
        ValueError: frames are not one graph, or there are too few.
    """
    options = {"device": "cuda", "decoder": "host", "compare": 0, "limit": 1 + FIRST + frames + traced, **options}
    pipeline = sbnet.Pipeline(source, network=network, sink=lambda result: None, **options)
    pipeline.mask.reset()
    compute = Compute(pipeline.network, pipeline.mask, pipeline.settings, Summary("", pipeline.mode))
    found: dict[str, list[float]] = {"replay": [], "mask path": [], "dense replay": []}
    kernels = {name: Kernels() for name in found}
    densities: list[float] = []
    parts: tuple[Any, ...] | None = None
    for frame, pinned in pipeline._loaded():
        if parts is None:  # the first frame, of which cached networks compute all
            result = compute(frame, pinned)
            if compute._graph is None:
                raise ValueError(f"frame_times: {pipeline.network.name}: expected a pipeline whose frame is one graph")
            result.land()
            parts = compute._graph, MaskPath(compute, compute._graph), compute._whole_graph(frame)
            parts[1].upload(pinned)
            parts[1].replay()
            continue
        for name, part in zip(found, parts, strict=True):
            part.upload(pinned)
            if len(densities) >= FIRST + frames:
                kernels[name].trace(part.replay)
            else:
                found[name].append(lapse(part.replay))
        if len(densities) >= FIRST + frames:
            continue
        _, active, _ = parts[0].download()
        torch.cuda.synchronize()
        densities.append(float(active.float().mean()))
    if len(densities) <= FIRST:
        raise ValueError(f"frame_times: source: expected more than {FIRST + 1} frames, got {len(densities) + 1}")
    medians = {name: statistics.median(v[FIRST:]) for name, v in found.items()}
    made = {"density": statistics.mean(densities[FIRST:]), "frames": len(densities) - FIRST, "us": medians,
            "x dense": medians["dense replay"] / medians["replay"]}  # fmt: skip
    return made | ({"kernels": {name: one.told() for name, one in kernels.items()}} if traced else {})


def row(given: argparse.Namespace) -> dict[str, Any]:
    taken = times(given.source, given.network, given.frames, given.kernels, mode=given.mode, mask=given.mask)
    return {**film_facts(given), **taken, **made_by(True), "date": datetime.date.today().isoformat()}


def main() -> None:
    parser = film_parser(__doc__)
    parser.add_argument("--frames", type=int, default=200)
    parser.add_argument("--kernels", type=int, default=0)
    keep_row(row, parser)


if __name__ == "__main__":
    main()
