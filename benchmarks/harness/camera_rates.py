"""Cameras from decoding to results, in frames a second of all: masked, and with the dense network. A line of JSON.

python -m sbnet.benchmarks.harness.camera_rates yolo --source street1080.mp4 --cameras 16 -o rows.jsonl

Each camera is the same film, --repeat times in a row. The masked side is `sbnet.Cameras` into a function that drops
results. The dense one reads by the same threads and decoder, and calls the fastest dense form of the network, its batch
the number of cameras, on a GPU in one graph as well, with the same work on its outputs. Opening the sources counts,
setting up the network does not. Both run --rounds times in turn, after a short run that is not counted; the fastest of
each is kept. `cpu` is the processor's seconds a thousand frames, of all threads, from the tenth call on.

yolo is the benchmark's YOLOv8s-like detector with random weights, whose scores are moved so that some 50 boxes of the
first frame count.
"""

from __future__ import annotations

import argparse
import datetime
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sbnet
from sbnet.apps.pipeline import Network, Pipeline, open_network
from sbnet.apps.pipeline.clock import Clock, Landed
from sbnet.apps.pipeline.compute import placed
from sbnet.apps.pipeline.decode import decoded
from sbnet.apps.pipeline.dense_side import form_on_cuda
from sbnet.apps.pipeline.frame_graph import landing_of
from sbnet.apps.pipeline.hardware import reader_for
from sbnet.apps.pipeline.stages import Ahead, Behind
from sbnet.apps.pipeline.tick_graph import TickGraph, row_of
from sbnet.benchmarks.harness import nets
from sbnet.benchmarks.harness.measure import film_facts, film_parser, keep_row, made_by

BINS = 16  # of each side of a box, of which YOLOv8 takes the mean
BOXES = 50  # of the first frame that count
LEAST = 0.25
WARM = 20  # frames of a camera in the run that is not counted


def boxes_of(output: Tensor, size: tuple[int, int], shift: float) -> Tensor:
    """[N,4+K,A], centre and size in pixels and scores, of YOLOv8's outputs [N,4*BINS+K,A] of frames of this size."""
    sides = output[:, : 4 * BINS].unflatten(1, (4, BINS)).float().softmax(2)
    bins = torch.arange(BINS, device=output.device, dtype=torch.float32)
    far = (sides * bins[:, None]).sum(2)
    steps, centres = [], []
    for step in (8, 16, 32):
        rows, columns = (torch.arange(n // step, device=output.device) + 0.5 for n in size)
        centres.append(torch.stack([columns.expand(len(rows), -1), rows[:, None].expand(-1, len(columns))]).flatten(1))
        steps.append(torch.full((centres[-1].shape[1],), float(step), device=output.device))
    centre, scale = torch.cat(centres, 1), torch.cat(steps)
    low, high = (centre - far[:, :2]) * scale, (centre + far[:, 2:]) * scale
    scores = (output[:, 4 * BINS :].float() + shift).sigmoid()
    return torch.cat([(low + high) / 2, high - low, scores], 1)


@torch.no_grad()
def detector(source: Any, device: str) -> Network:
    """The YOLOv8s-like detector, its boxes decoded as those of a user's file."""
    torch.manual_seed(0)
    model = nets.build("YOLOv8s-like").eval()
    network = decoded(Network(model, "YOLOv8s-like"), f"yolo:{LEAST}")
    (frame, *_) = sbnet.Pipeline(source, device=device, limit=1).source
    x = network.widened(frame.tensor(torch.device(device), torch.float32))
    size = int(x.shape[2]), int(x.shape[3])
    best = model.to(device)(x)[0, 4 * BINS :].amax(0)
    shift = float(torch.logit(torch.tensor(LEAST)) - best.topk(BOXES).values[-1])
    landing = network.landing
    assert landing is not None
    return replace(network, landing=lambda output, frame: landing(boxes_of(output, size, shift), frame))


def masked(given: argparse.Namespace, network: Network) -> tuple[float, dict[str, Any]]:
    """(frames a second, what the run measured)"""
    used = Used(given.cameras)
    run = sbnet.Cameras(
        [given.source] * given.cameras, given.mask, network, lambda k, result: result.records, device=given.device,
        mode=given.mode, decoder=given.decoder, compare=0, check=0.0, limit=given.frames, patience=5.0,
    )  # fmt: skip
    summary = run.run(used.told)
    facts = {"cpu": used.a_thousand(), "density": summary.densities.mean, "ms": summary.ms.mean,
             "busy": summary.busy, "bound": summary.bound,
             "decoder": summary.decoder[0] or "host", "decoder why": summary.decoder[1], "faults": run.faults,
             "frames": summary.frames, "title": summary.title}  # fmt: skip
    return summary.fps, facts


@torch.no_grad()
def dense(given: argparse.Namespace, network: Network) -> tuple[float, dict[str, Any]]:
    """The same of the dense network on a batch of a frame of each camera: on a GPU one graph, as the masked side's.
    As there, sources being opened count, setting up the network does not."""
    cameras = [
        Pipeline(given.source, network=network, mode="dense", device=given.device, decoder=given.decoder,
                 limit=given.frames)
        for _ in range(given.cameras)
    ]  # fmt: skip
    reader = reader_for(cameras[0].device)
    feeds = [Ahead(camera.source, reader=reader) for camera in cameras]
    behind = Behind(lambda conclude: conclude())
    frames, begin, aside, call, used = 0, time.perf_counter(), 0.0, None, Used(given.cameras)
    try:
        while True:
            batch: list[Any] = [next(feed, None) for feed in feeds]
            if any(frame is None for frame in batch) or (given.frames and frames >= given.frames * len(feeds)):
                break
            if call is None:
                setting_up = time.perf_counter()
                call = _Dense(cameras[0], network, batch)
                aside = time.perf_counter() - setting_up
            behind.put(call(batch))
            frames += len(batch)
            used.told()
        behind.close()
        seconds = time.perf_counter() - begin - aside
    finally:
        for feed in feeds:
            feed.close()
        reader.close()
    facts = {"form": call.name, "ms": call.ms / frames} if call else {}
    return frames / seconds, {**facts, "frames": frames, "cpu": used.a_thousand()}


def repeated(path: str, times: int, folder: str) -> str:
    """A film that is another so many times in a row, its packets as they are."""
    import av

    if times == 1:
        return path
    found = f"{folder}/{Path(path).name}"
    with av.open(found, "w") as out:
        to: Any = None
        shift = 0
        for _ in range(times):
            given: Any = av.open(path)
            with given:
                (stream, *_) = given.streams.video
                to = to or out.add_stream_from_template(stream)
                end = 0
                for packet in given.demux(stream):
                    if packet.size:
                        end = max(end, packet.pts + packet.duration)
                        packet.pts, packet.dts, packet.stream = packet.pts + shift, packet.dts + shift, to
                        out.mux(packet)
                shift += end
    return found


class Used:
    """The processor's time from the tenth call on: before it, things are set up."""

    FIRST = 10

    def __init__(self, cameras: int) -> None:
        self._cameras, self._calls, self._begin = cameras, 0, 0.0

    def told(self, *_: Any) -> None:
        self._calls += 1
        if self._calls == self.FIRST:
            self._begin = cpu()

    def a_thousand(self) -> float | None:
        """Seconds of all threads a thousand frames; None: too few calls."""
        frames = (self._calls - self.FIRST) * self._cameras
        return 1e3 * (cpu() - self._begin) / frames if frames > 0 else None


class _Dense:
    """`dense(batch)` gives what waits for the results and makes pictures and records of them.

    ms: of all calls, on the device.
    """

    def __init__(self, camera: Pipeline, network: Network, batch: list[Any]) -> None:
        self._network, self._device, dtype = network, camera.device, camera.dtype
        device = self._device
        model = network.model
        model = placed(model, device, dtype) if isinstance(model, torch.nn.Module) else model
        self._tensor = lambda frame: frame.tensor(device, dtype)
        self._graph: TickGraph | None = None
        self.ms = 0.0
        if device.type != "cuda":
            self.name, self._model = "PyTorch", model
            return
        x = torch.cat([self._tensor(frame) for frame in batch]).contiguous(memory_format=torch.channels_last)
        self.name, self._model = form_on_cuda(model, network.input(x))
        nothing = torch.zeros(len(batch), 1, 1, dtype=torch.bool, device=device)

        def body(x: Tensor, wide: Tensor) -> tuple[Any, Tensor, Tensor, None]:
            return self._model(network.prepared(wide)), nothing, nothing, None

        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
            self._graph = TickGraph(network, body, batch, device, dtype)

    def __call__(self, batch: list[Any]) -> Callable[[], None]:
        network = self._network
        if self._graph is None:
            clock = Clock(self._device)
            output = self._model(network.input(torch.cat([self._tensor(frame) for frame in batch])))
            found: Any = [
                landing_of(network, row_of(output, k, len(batch)), frame, None)[0] for k, frame in enumerate(batch)
            ]
            return partial(self._concluded, found, batch, clock.landed(None), False)
        self._graph.upload(batch)
        clock = Clock(self._device)
        self._graph.replay()
        clock.end()
        found, _, here = self._graph.download()
        return partial(self._concluded, found, batch, clock.landed(here), self._graph.stacked)

    def _concluded(self, found: Any, batch: list[Any], landed: Landed, stacked: bool) -> None:
        self.ms += landed.wait()[0]
        if stacked:
            self._network.concluded_all(found, batch)
        elif self._network.landing is not None:
            for own, frame in zip(found, batch, strict=True):
                self._network.concluded(own, frame)


def row(given: argparse.Namespace) -> dict[str, Any]:
    facts = film_facts(given)
    with tempfile.TemporaryDirectory() as folder:
        given.source = repeated(given.source, given.repeat, folder)
        return {**facts, "repeat": given.repeat, **both(given)}


def both(given: argparse.Namespace) -> dict[str, Any]:
    network = detector(given.source, given.device) if given.network == "yolo" else open_network(given.network)
    sides = {"masked": masked, "dense": dense} if not given.no_dense else {"masked": masked}
    found: dict[str, Any] = {name: {"fps": 0.0, "rounds": []} for name in sides}
    first = argparse.Namespace(**{**vars(given), "frames": min(given.frames or WARM, WARM)})
    for k in range(given.rounds + 1):
        for name, side in sides.items():
            fps, facts = side(given if k else first, network)
            if not k:
                continue
            rounds = [*found[name]["rounds"], fps]
            if fps > found[name]["fps"]:
                found[name] = {"fps": fps, **facts}
            found[name]["rounds"] = rounds
    ratio = {"x dense": found["masked"]["fps"] / found["dense"]["fps"]} if "dense" in found else {}
    return {"cameras": given.cameras, "asked decoder": given.decoder, **found, **ratio,
            **made_by(given.device == "cuda"), "date": datetime.date.today().isoformat()}  # fmt: skip


def cpu() -> float:
    """Seconds of the processor that this process took."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = film_parser(__doc__)
    parser.add_argument("--cameras", type=int, default=16)
    parser.add_argument("--frames", type=int, help="of a camera")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--decoder", default="auto", choices=("auto", "host", "nvdec"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-dense", action="store_true")
    keep_row(row, parser)


if __name__ == "__main__":
    main()
