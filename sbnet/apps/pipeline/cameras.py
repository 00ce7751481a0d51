"""Several cameras in one call of the network: a batch of their frames, a mask each."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from sbnet.apps.pipeline.batch import Batch, Tick
from sbnet.apps.pipeline.frames import Frame, PipelineError
from sbnet.apps.pipeline.hardware import reader_for
from sbnet.apps.pipeline.networks import open_network
from sbnet.apps.pipeline.pipeline import Pipeline
from sbnet.apps.pipeline.report import write_report
from sbnet.apps.pipeline.sinks import Sink, close_all, open_sink
from sbnet.apps.pipeline.stages import Ahead, Behind, Reader
from sbnet.apps.pipeline.summary import Shot, Summary
from sbnet.masks.base import Mask

WAITING = 1  # calls whose results wait between two stages: each holds a frame of every camera


class Cameras:
    """`Pipeline` for several sources of frames of one size. A call of the network takes one frame of each; one that has
    none in time, or has ended, costs nothing: its place in the batch has an empty mask.

    Args:
        sources: as `Pipeline` takes them.
        mask: one for all, each with a memory of its own, or a list of one a source.
        network: as `Pipeline` takes it; its batch is the number of sources.
        sinks: a list of one a source, or a function (source's index, Result).
        patience: seconds that a call waits for the slowest; who kept the others waiting is not waited for again until a
            frame of it comes.
        give_up: seconds that it may keep others waiting, or be left out; then it has ended.
        newest: of the frames of a source that wait, the last one counts: for cameras that are faster than the network.
        limit: frames of a source at most.
        options: mode, size, block, margin, device, dtype, skip_broken, compare, view, report, decoder, encoder, as of
            `Pipeline`; if nothing is said the decoder is "auto": many streams keep a CPU busy.

    >>> run = sbnet.Cameras(["rtsp://door", "rtsp://yard"], "motion", "faces", lambda k, result: print(k, result.ms))
    >>> print(run.run())
    """

    def __init__(
        self,
        sources: Sequence[Any],
        mask: Any = None,
        network: Any = "contours",
        sinks: Any = None,
        *,
        patience: float = 0.5,
        give_up: float = 30.0,
        newest: bool = False,
        limit: int | None = None,
        **options: Any,
    ) -> None:
        count = len(sources)
        if not count:
            raise PipelineError("sources: expected at least one, got none")
        for name, given in (("mask", mask), ("sinks", sinks)):
            if isinstance(given, (list, tuple)) and len(given) != count:
                raise PipelineError(f"{name}: expected one for each of {count} sources, got {len(given)}")
        if sinks is not None and not isinstance(sinks, (list, tuple)) and not callable(sinks):
            raise PipelineError(f"sinks: expected a list or a function, got {type(sinks).__name__}")
        network = open_network(network)
        options.setdefault("decoder", "auto")
        own = mask if isinstance(mask, (list, tuple)) else [network.mask if mask is None else mask] * count
        self.cameras = [  # each with what a pipeline of its own would have
            Pipeline(source, copy.deepcopy(own[k]) if isinstance(own[k], Mask) else own[k], network, **options)
            for k, source in enumerate(sources)
        ]
        if self.cameras[0].mode == "dense":
            raise PipelineError("mode: expected masked, exact or cached, got 'dense'")
        self._sinks, self.limit = sinks, limit
        self.patience, self.give_up, self.newest = patience, give_up, newest
        self.summary: Summary | None = None
        self.faults: list[str] = []

    def run(self, told: Callable[[Summary], None] | None = None) -> Summary:
        """Runs it until all sources have ended. What ended one of them early is in `faults`, by its index.

        Args:
            told: called after each call of the network with the summary so far.
        """
        first = self.cameras[0]
        summary = self.summary = Summary("", first.mode)
        self.faults = [""] * len(self.cameras)
        first.network.notes.clear()  # of an earlier run
        sinks = self._opened()
        compute = Batch(self.cameras, summary)
        reader = reader_for(first.device)
        feeds = [_Feed(camera, self.limit, reader) for camera in self.cameras]
        # All results of a call are one item: a queue shorter than a call would make the next one wait for the device.
        writing = behind = Behind(lambda tick: _write(sinks, tick, summary), depth=WAITING)
        if first.device.type == "cuda":  # waiting for the device keeps the sinks from nothing
            behind = Behind(lambda tick: _land(tick, summary), writing, depth=WAITING)
        whole = closed = False
        try:
            begin = time.perf_counter()
            try:
                while any(feed.fault is None for feed in feeds):
                    frames = self._tick(feeds, compute, summary)
                    if frames:
                        behind.put(compute.tick(frames))
                        if told is not None:
                            told(summary)
            except KeyboardInterrupt:
                summary.interrupted = True
            behind.close()
            whole = closed = summary.frames > 0
            if whole:
                ending = time.perf_counter()
                close_all(sinks, whole)
                writing.busy += time.perf_counter() - ending
            summary.seconds = time.perf_counter() - begin - compute.aside
            if whole and not summary.interrupted:
                compute.conclude(summary.seconds)
        finally:
            for feed in feeds:
                feed.ahead.close(0.1 if feed.stalled else 5)
            reader.close()
            if not whole:
                with suppress(BaseException):  # what led here is what is raised
                    behind.close()
            if not closed:
                close_all(sinks, whole)
            compute.release()
        self.faults = [feed.fault or "" for feed in feeds]
        named = [f"{c.source.name}: {fault}" for c, fault in zip(self.cameras, self.faults, strict=True) if fault]
        if not whole:
            raise PipelineError("; ".join(named) or "the sources have no frames")
        summary.fault = "; ".join(named)
        device = {}
        if behind is not writing:
            device = {"device": 1e-3 * summary.ms.total, "finish": max(0.0, behind.busy - summary.waited)}
        # Threads of sources work side by side; who goes on with some of them, after that.
        read = sum(feed.ahead.busy for feed in feeds) / len(feeds) + reader.busy
        summary.busy = {"read": read, "compute": compute.busy, **device, "write": writing.busy}
        summary.decoder = _decoders(self.cameras)
        summary.notes += dict.fromkeys(first.network.notes)
        summary.notes += [note for sink in sinks for note in getattr(sink, "notes", ())]
        if first.report is not None:
            write_report(summary, first.report)
        return summary

    def _opened(self) -> list[Sink]:
        if callable(self._sinks):
            return [open_sink(partial(self._sinks, k), c.source) for k, c in enumerate(self.cameras)]
        opened: list[Sink] = []
        try:
            for given, camera in zip(self._sinks or [None] * len(self.cameras), self.cameras, strict=True):
                opened.append(
                    open_sink(
                        given, camera.source, camera.side_by_side, camera.audio, camera.files, encoder=camera.encoder
                    )
                )
        except BaseException:
            with suppress(Exception):
                close_all(opened, False)
            raise
        return opened

    def _tick(self, feeds: Sequence[_Feed], compute: Batch, summary: Summary) -> dict[int, Frame]:
        """The next frame of each source that has one, by its index."""
        deadline = time.perf_counter() + self.patience
        frames: dict[int, Frame] = {}
        for k, feed in enumerate(feeds):
            if feed.fault is not None:
                continue
            frame = feed.take(0 if feed.stalled else max(0.0, deadline - time.perf_counter()), self.newest)
            if frame is None:
                if feed.fault is None and time.perf_counter() - feed.since > self.give_up:
                    feed.fault = f"no frame for {self.give_up:g} s"
            elif frame.fault:
                what = f"{frame.name}: cannot be read ({frame.fault})"
                if self.cameras[k].skip_broken:
                    summary.broke(what)
                else:
                    feed.fault = what
            elif differs := compute.differs(frame):
                feed.fault = differs
            else:
                frames[k] = frame
        if not frames and all(feed.stalled for feed in feeds if feed.fault is None):
            time.sleep(2e-3)
        return frames


class _Feed:
    """A source's thread.

    Attributes:
        stalled: it kept a call waiting, and has sent nothing since.
        since: when that began.
        fault: what ended it, "" at its end, None before.
    """

    def __init__(self, camera: Pipeline, limit: int | None, reader: Reader) -> None:
        self.ahead = Ahead(camera.source, reader=reader)
        self.stalled = False
        self.fault: str | None = None
        self.since = time.perf_counter()
        self._left = limit

    def take(self, timeout: float, newest: bool) -> Frame | None:
        frame = None
        try:
            frame = self.ahead.poll(timeout)
            while newest and frame is not None and (later := self.ahead.poll(0)) is not None:
                frame = later
        except StopIteration:
            self.fault = ""
        except Exception as error:  # of one camera: the others go on
            self.fault = str(error) or type(error).__name__
        if frame is None and not self.stalled:
            self.since = time.perf_counter() - timeout
        self.stalled = frame is None
        if frame is not None and self._left is not None:
            self._left -= 1
            if not self._left:
                self.fault = ""
        return frame


def _decoders(cameras: Sequence[Pipeline]) -> tuple[str, str]:
    """Who decoded the sources, and why the hardware did not decode some of them."""
    found = [camera.source.decoder for camera in cameras]
    names = list(dict.fromkeys(name for name, _ in found if name))
    counts = ", ".join(f"{[name for name, _ in found].count(name)} x {name}" for name in names)
    return names[0] if len(names) == 1 else counts, "; ".join(dict.fromkeys(why for _, why in found if why))


def _land(tick: Tick, summary: Summary) -> None:
    summary.waited += tick.land()


def _write(sinks: Sequence[Sink], tick: Tick, summary: Summary) -> None:
    _land(tick, summary)
    for camera, result in tick.results.items():
        result.ms /= len(tick.results)  # of the call that it shared with the others
        summary.ms.add(result.ms)
        summary.densities.add(result.density)
        if not summary.shots:
            summary.show(result.frame.index, Shot(result))
        sinks[camera].write(result)
