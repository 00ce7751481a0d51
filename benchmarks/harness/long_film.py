"""Does `sbnet run` hold its memory and speed over a film of 10,000 frames? A line of JSON.

python -m sbnet.benchmarks.harness.long_film -o rows.jsonl

Draws a film of small frames in which a square walks over noise, runs a pipeline from it into another film, and takes
resident memory, on a GPU the device's as well, and frames a second over its second and its last thousand frames (the
first sets up).
"""

from __future__ import annotations

import argparse
import datetime
import os
import tempfile
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sbnet
from sbnet.apps.pipeline.hardware import DECODERS
from sbnet.apps.writers import VideoWriter
from sbnet.benchmarks.harness.measure import keep_row, made_by

SIZE = (96, 128)
SPAN = 1000  # frames that speed is taken over


def draw(path: Path, count: int) -> None:
    still = np.random.default_rng(0).integers(0, 60, (*SIZE, 3), np.uint8)
    with VideoWriter(path, Fraction(25)) as writer:
        for k in range(count):
            picture = still.copy()
            left = k % (SIZE[1] - 16)
            picture[40:56, left : left + 16] = 230
            writer.write(picture)


def resident() -> float:
    """MiB that this process has in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def on_device() -> float:
    """MiB of the GPU that are taken, by whomever."""
    free, whole = torch.cuda.mem_get_info()
    return (whole - free) / 2**20


def row(given: argparse.Namespace) -> dict[str, Any]:
    marks: dict[int, tuple[float, float, float]] = {}
    load = os.getloadavg()[0]
    seen = 0

    def told(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen % SPAN == 0:
            marks[seen] = time.perf_counter(), resident(), on_device() if given.device == "cuda" else 0.0

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "film.mp4", Path(folder) / "out.mp4"
        draw(source, given.frames)
        pipeline = sbnet.Pipeline(
            source, network=given.network, sink=target, device=given.device, decoder=given.decoder, compare=0
        )
        summary = pipeline.run(told)
    ends = sorted(marks)
    if len(ends) < 3:
        raise SystemExit(f"--frames: expected at least {3 * SPAN}, got {given.frames}")
    speed = {end: SPAN / (marks[end][0] - marks[end - SPAN][0]) for end in ends[1:]}
    facts = {
        "network": given.network, "title": summary.title, "frames": summary.frames, "density": summary.densities.mean,
        "fps": summary.fps, "fps, second thousand": speed[ends[1]], "fps, last thousand": speed[ends[-1]],
        "MiB after the first thousand": marks[ends[0]][1], "MiB at the end": marks[ends[-1]][1],
        "fps of each thousand": [round(v, 1) for v in speed.values()],
        "MiB after each thousand": [round(marks[end][1], 1) for end in ends],
    }  # fmt: skip
    if given.device == "cuda":
        facts["decoder"] = summary.decoder[0]
        facts["MiB of the device after each thousand"] = [round(marks[end][2], 1) for end in ends]
    made = {"date": datetime.date.today().isoformat(), "threads": torch.get_num_threads(), "load before": load,
            "load after": os.getloadavg()[0]}  # fmt: skip
    return {**facts, **made_by(given.device == "cuda"), **made}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="contours")
    parser.add_argument("--frames", type=int, default=10_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--decoder", default="auto", choices=DECODERS)
    keep_row(row, parser)


if __name__ == "__main__":
    main()
