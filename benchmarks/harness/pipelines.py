"""Finished pipelines from reading to writing, in their own mode and dense: a line of JSON each.

python -m sbnet.benchmarks.harness.pipelines contours --source vtest.avi --frames 100 --dense-frames 10 -o rows.jsonl

Both runs decode, compute and encode (unless --to is empty); the dense one is the fastest form at hand, on fewer frames
where that takes long.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import torch

import sbnet
from sbnet.benchmarks.harness.measure import made_by


def run(given: argparse.Namespace, dense: bool) -> Any:
    """The summary of one run into a film of its own, numbered pictures, or a function that drops results."""
    options = {"mode": "dense", "limit": given.dense_frames, "compare": 0}
    if not dense:
        options = {"mode": given.mode, "limit": given.frames, "compare": given.compare, "mask": given.mask}
    with tempfile.TemporaryDirectory() as folder:
        sink: Any = str(Path(folder) / given.to) if given.to else lambda result: None
        shared = {"network": given.network, "sink": sink, "device": given.device, "margin": given.margin}
        return sbnet.Pipeline(given.source, **shared, **options).run()


def row(given: argparse.Namespace) -> dict[str, Any]:
    load = os.getloadavg()[0]
    own = run(given, dense=False)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    facts = {
        "network": given.network, "source": Path(given.source).name, "mask": given.mask, "mode": own.mode,
        "to": given.to or None, "title": own.title, "frames": own.frames, "density": own.densities.mean,
        "ms": own.ms.mean, "fps": own.fps,
        "busy": own.busy, "peak MiB": peak, "dense ms": own.dense_ms.mean if own.dense_ms.count else None,
        "dense form": own.dense_form, "rms error": own.errors.mean if own.errors.count else None,
        "largest error": own.largest,
    }  # fmt: skip
    if own.frames >= 20:  # does the speed hold?
        tenth = max(1, len(own.ms.curve) // 10)
        facts["ms, first tenth"] = sum(own.ms.curve[:tenth]) / tenth
        facts["ms, last tenth"] = sum(own.ms.curve[-tenth:]) / tenth
    if given.dense_frames:
        whole = run(given, dense=True)
        facts |= {"dense fps": whole.fps, "dense frames": whole.frames, "end to end": own.fps / whole.fps}
        facts |= {"dense busy": whole.busy, "dense mode ms": whole.ms.mean}
    made = {"date": datetime.date.today().isoformat(), "threads": torch.get_num_threads(), "load before": load}
    return {**facts, **made_by(given.device == "cuda"), **made}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network")
    parser.add_argument("--source", required=True)
    parser.add_argument("--mask")
    parser.add_argument("--mode")
    parser.add_argument("--margin", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--frames", type=int)
    parser.add_argument("--compare", type=int, default=0)
    parser.add_argument("--dense-frames", type=int, default=0)
    parser.add_argument("--to", default="out.mp4", help="a name in a folder of its own; nothing: no encoding")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    line = json.dumps(row(given))
    print(line)
    if given.output:
        with given.output.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
