"""Finished pipelines from reading to writing, in their own mode and dense: a line of JSON each.

python -m sbnet.benchmarks.harness.pipelines contours --source vtest.avi --frames 100 --dense-frames 10 -o rows.jsonl

Both runs decode, compute and encode (unless --to is empty), and write pictures of the same view into the same kind of
file; the dense one is the fastest form at hand, on fewer frames where that takes long. On a CPU the row says how much
of a frame's time the mask takes: finding it, widening it to the network's frame, and the lists of active blocks, its
margin among them. With --rounds both run that often, in turn, after a masked run that is not timed (and compares, where
--compare says so); the fastest of each is kept.

--source pages draws pages with some lines of text; `recognise` without a file takes random weights: they cost the same.
"""

from __future__ import annotations

import argparse
import datetime
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import sbnet
import sbnet.models
from sbnet import _library
from sbnet.apps.pipeline import Network, Result
from sbnet.apps.pipeline.hardware import DECODERS
from sbnet.benchmarks.harness.measure import film_parser, keep_row, made_by
from sbnet.engine import executor
from sbnet.masks import Mask


class MaskTime:
    """Seconds that a pipeline spends on its masks on a CPU, from its second frame on (the first sets up).

    Attributes:
        seconds: of finding the mask, of widening it to the network's frame, of the lists of active blocks; they do not
            overlap.
        ms: of each frame, the mask included.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.ms: list[float] = []
        self._frames = 0

    @contextmanager
    def of(self, pipeline: sbnet.Pipeline) -> Iterator[None]:
        """What the pipeline's run spends while this is entered."""
        places = (Network, "widened_mask", "border"), (executor.Executor, "_listed", "lists")
        pipeline.mask = _Timed(pipeline.mask, self._timed("mask", pipeline.mask))
        with ExitStack() as patches:
            for at, name, part in places:
                patches.enter_context(mock.patch.object(at, name, self._timed(part, getattr(at, name))))
            yield

    def told(self, *_: Any) -> None:
        self._frames += 1
        if self._frames == 1:
            self.seconds.clear()

    def see(self, result: Result) -> None:
        self.ms.append(result.ms)

    def share(self) -> dict[str, float]:
        """Of the time of a frame, the mask included; in all, and of each part."""
        whole = sum(self.ms[1:]) / 1e3
        parts = {name: seconds / whole for name, seconds in self.seconds.items()} if whole else {}
        return {"all": sum(parts.values()), **parts}

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            found = call(*args, **options)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
            return found

        return timed


class _Timed(Mask):
    """A mask whose calls go another way."""

    def __init__(self, mask: Mask, call: Callable[..., Any]) -> None:
        self.parts, self._call = (mask,), call

    @property
    def captured(self) -> bool:
        return self.parts[0].captured

    def __call__(self, x: Tensor) -> Tensor:
        return self._call(x)


def run(given: argparse.Namespace, dense: bool, masks: MaskTime | None = None, compare: int = 0) -> Any:
    """The summary of one run into a film of its own, numbered pictures, or a function that drops results."""
    options: dict[str, Any] = {"mode": "dense", "limit": given.dense_frames}
    if not dense:
        options = {"mode": given.mode, "limit": given.frames, "mask": given.mask}
    with tempfile.TemporaryDirectory() as folder:
        sinks: list[Any] = [str(Path(folder) / given.to)] if given.to else []
        network, source = given.network, given.source
        if network == "recognise":
            network = f"recognise:{folder}/resnet50.pth"
            torch.save(sbnet.models.resnet50(weights=0).state_dict(), f"{folder}/resnet50.pth")
        if source == "pages":
            source = [page(k) for k in range(options["limit"] or 8)]
        options |= {"network": network, "device": given.device, "margin": given.margin, "view": given.view}
        options |= {"compare": compare, "decoder": given.decoder}
        if masks is None:
            return sbnet.Pipeline(source, sink=sinks or _drop, **options).run()
        pipeline = sbnet.Pipeline(source, sink=[*sinks, masks.see], **options)
        with masks.of(pipeline):
            return pipeline.run(masks.told)


def page(number: int, size: tuple[int, int] = (1120, 800)) -> np.ndarray:
    """[H,W,3] uint8: a page of which a third holds lines of text."""
    from PIL import Image, ImageDraw, ImageFont

    paper = Image.new("RGB", size[::-1], (250, 248, 240))
    pen, font = ImageDraw.Draw(paper), ImageFont.load_default(20)
    for k in range(12):
        pen.text(
            (60, 60 + 32 * k), f"{number}.{k}: most of a page is paper, and a mask of its ink knows it", (30,) * 3, font
        )
    return np.array(paper)


def _drop(result: Result) -> None:
    """Nothing is made of it."""


def row(given: argparse.Namespace) -> dict[str, Any]:
    load = os.getloadavg()[0]
    warm = run(given, False, compare=given.compare) if given.compare or given.rounds > 1 else None
    runs: list[tuple[Any, MaskTime | None]] = []
    whole: list[Any] = []
    for _ in range(given.rounds):
        masks = MaskTime() if given.device == "cpu" else None
        runs.append((run(given, False, masks), masks))
        if given.dense_frames:
            whole.append(run(given, True))
    own, masks = max(runs, key=lambda one: one[0].fps)
    compared = warm or own
    facts = {
        "network": given.network, "source": Path(given.source).name, "mask": given.mask, "mode": own.mode,
        "to": given.to or None, "view": given.view, "title": own.title, "frames": own.frames,
        "density": own.densities.mean, "ms": own.ms.mean, "fps": own.fps, "rounds": [one.fps for one, _ in runs],
        "busy": own.busy, "bound": own.bound, "decoder": own.decoder[0] or "host",
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "dense ms": compared.dense_ms.mean if compared.dense_ms.count else None, "dense form": compared.dense_form,
        "rms error": compared.errors.mean if compared.errors.count else None, "largest error": compared.largest,
    }  # fmt: skip
    if masks is not None and own.mode != "dense":
        facts["mask share"] = masks.share()
    if own.frames >= 20:  # does the speed hold?
        tenth = max(1, len(own.ms.curve) // 10)
        facts["ms, first tenth"] = sum(own.ms.curve[:tenth]) / tenth
        facts["ms, last tenth"] = sum(own.ms.curve[-tenth:]) / tenth
    if whole:
        best = max(whole, key=lambda one: one.fps)
        facts |= {"dense fps": best.fps, "dense frames": best.frames, "dense rounds": [one.fps for one in whole]}
        facts |= {"end to end": own.fps / best.fps, "dense busy": best.busy, "dense bound": best.bound}
        facts["dense mode ms"] = best.ms.mean
    made: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "threads": torch.get_num_threads(),
        "load before": load,
    }
    if given.device == "cpu":
        made["instructions"] = _library.cpu_isa()  # several generations share a name
    return {**facts, **made_by(given.device == "cuda"), **made}


def main() -> None:
    parser = film_parser(__doc__)
    parser.add_argument("--margin", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--frames", type=int)
    parser.add_argument("--compare", type=int, default=0)
    parser.add_argument("--dense-frames", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--view", default="picture", help="of both runs: picture, or side")
    parser.add_argument("--decoder", default="auto", choices=DECODERS)
    parser.add_argument("--to", default="out.mp4", help="a name in a folder of its own; nothing: no encoding")
    keep_row(row, parser)


if __name__ == "__main__":
    main()
