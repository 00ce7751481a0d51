"""What a pipeline asks of the GPU for one frame: copies, launches, replays and waits, counted by PyTorch's profiler.

python -m sbnet.benchmarks.harness.frame_calls contours --source vtest.avi -o calls.jsonl

Counted over frames in the middle of a run whose results go to a function: neither setting up nor encoding is in it.
"""

from __future__ import annotations

import argparse
import collections
import datetime
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import sbnet
from sbnet.benchmarks.harness.measure import film_facts, film_parser, keep_row, made_by

FIRST, FRAMES = 20, 80  # where counting begins, and over how many frames
CALLS = {  # of the CUDA runtime and driver, by what they ask for
    "launches": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
    "replays": ("cudaGraphLaunch",),
    "waits": ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"),
    "fills": ("cudaMemsetAsync",),
}
COPIES = {"uploads": "HtoD", "downloads": "DtoH", "copies on the device": "DtoD"}


def counted(events: Any, frames: int) -> dict[str, float]:
    """Of each kind of call how many a frame."""
    found: collections.Counter[str] = collections.Counter()
    for event in events:
        for kind, names in CALLS.items():
            found[kind] += event.name in names
        for kind, way in COPIES.items():
            found[kind] += event.name.startswith("Memcpy") and way in event.name
    return {kind: found[kind] / frames for kind in (*COPIES, *CALLS)}


def count(source: Any, network: Any, **options: Any) -> dict[str, float]:
    """The calls of one frame in the middle of a pipeline on CUDA, over frames FIRST to FIRST + FRAMES."""
    trace = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    seen = 0

    def told(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == FIRST:
            torch.cuda.synchronize()
            trace.start()
        elif seen == FIRST + FRAMES:
            torch.cuda.synchronize()
            trace.stop()

    limit = FIRST + FRAMES + 10
    options = {"device": "cuda", "limit": limit, "compare": 0, **options}
    sbnet.Pipeline(source, network=network, sink=lambda result: None, **options).run(told)
    if seen < FIRST + FRAMES:
        raise ValueError(f"frame_calls: source: expected {limit} frames, got {seen}")
    return counted(trace.events(), FRAMES)


def row(given: argparse.Namespace) -> dict[str, Any]:
    calls = count(given.source, given.network, mode=given.mode, mask=given.mask)
    return {**film_facts(given), "a frame": calls, **made_by(True), "date": datetime.date.today().isoformat()}


def main() -> None:
    keep_row(row, film_parser(__doc__))


if __name__ == "__main__":
    main()
