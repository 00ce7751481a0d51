"""`sbnet.Pipeline`: a source, a mask, a network and a sink, from the first frame to the last."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sbnet.apps.machine import cuda_obstacle, device_name
from sbnet.apps.pipeline.compute import Compute, Settings, is_memory
from sbnet.apps.pipeline.decode import decoded
from sbnet.apps.pipeline.frames import Frame, PipelineError, Result
from sbnet.apps.pipeline.hardware import Decoding
from sbnet.apps.pipeline.networks import Network, open_network
from sbnet.apps.pipeline.report import check_report, write_report
from sbnet.apps.pipeline.resume import frames_held
from sbnet.apps.pipeline.sinks import Sink, open_sink, writes_records
from sbnet.apps.pipeline.sources import Source, open_source
from sbnet.apps.pipeline.stages import Ahead, Behind, give_back_memory
from sbnet.apps.pipeline.summary import Shot, Summary
from sbnet.masks.base import Mask
from sbnet.masks.named import open_mask

MODES = ("masked", "exact", "cached", "dense")
TRIMMED = 250  # frames between two times that free memory goes back


class Pipeline:
    """Frames in, a network on what matters of each, results out. `run()` does it and tells what it measured.

    Reading and writing have threads of their own, a few frames ahead of the network and behind it: memory does not grow
    with the length of the source. Ctrl-C ends it; what was computed until then is a whole file.

    Args:
        source: a film, a stream's URL, a camera, a folder or glob of pictures, an array [N,H,W,C], or anything that
            yields arrays [H,W,C] or tensors [C,H,W].
        mask: which pixels matter: a Mask of `sbnet.masks`, what names one ("motion"), a function of frames, a tensor.
            None: the network's own, or motion.
        network: an nn.Module, a `Network`, a file (.onnx, .pt2), "module:name", or a name ("contours").
        sink: a film's path, a folder's (PNG files), a .jsonl's, a function of each `Result`, or a list of them.
        mode: "masked", "exact", "cached" (sparsify's), or "dense": no mask at all. None: the network's own.
        size: (height, width) that frames are scaled to.
        block: block size, as `sparsify` takes it.
        margin: pixels by which masks are grown; "halo": as far as the network sees. None: the network's own.
        device: "auto", or PyTorch's name of one.
        dtype: None: float32 on a CPU, and float16 on a GPU unless the network is an ONNX file (`Network.half`).
        limit: frames at most.
        skip_broken: go on after a frame that cannot be read; otherwise it ends the run, with what was before.
        compare: run the dense network as well on three of the first frames and on each so many; 0: never.
        report: an .html file to write: frame and result under a slider, density and ms as curves, the table.
        view: "picture", or "side": in films and pictures, the frame with its active blocks beside the result.
        check: share of the run's time in which results of networks that are checked (`Network.checked`) are held
            against the contract in float64, on windows of some frames and within 500 MB; 0: never.
        decoder: of films and streams: "host", FFmpeg; "nvdec", NVIDIA's hardware (extra nvdec), which leaves pictures
            on the device; "auto": the hardware on CUDA where it serves and frames are not scaled, else the host.
        decode: what outputs of a network without a `finish` mean (`sbnet.apps.pipeline.decode`): "yolo", "detr",
            "rtdetr" or "classes", after a colon the least score.
        audio: films get the sound of the film that they are made of.
        encoder: of films: "x264", or "nvenc", NVIDIA's hardware, on cards that have it (not H100 and H200).
        resume: go on after the frames that the sinks' files hold, as Ctrl-C leaves them: a film (.mp4, .mkv, .mov),
            JSON lines, a folder. Masks and networks with a memory begin anew there.

    Raises:
        PipelineError: a source, mask, network or sink that is none; one line says why.

    >>> summary = sbnet.Pipeline("street.mp4", "motion", "contours", "out.mp4").run()
    >>> print(summary)
    """

    def __init__(
        self,
        source: Any,
        mask: Any = None,
        network: Any = "contours",
        sink: Any = None,
        *,
        mode: str | None = None,
        size: tuple[int, int] | None = None,
        block: Any = "auto",
        margin: int | str | None = None,
        device: str | torch.device = "auto",
        dtype: torch.dtype | None = None,
        limit: int | None = None,
        skip_broken: bool = False,
        compare: int = 50,
        view: str = "picture",
        report: str | Path | None = None,
        check: float = 0.05,
        audio: bool = True,
        resume: bool = False,
        decode: str | None = None,
        decoder: str = "host",
        encoder: str = "x264",
    ) -> None:
        self.network: Network = open_network(network)
        if decode is not None:
            self.network = decoded(self.network, decode)
        self.mode = mode or self.network.mode
        if self.mode not in MODES:
            raise PipelineError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
        if view not in ("picture", "side"):
            raise PipelineError(f"view: expected 'picture' or 'side', got {view!r}")
        if not check >= 0:
            raise PipelineError(f"check: expected a share of the run's time, at least 0, got {check}")
        try:
            self.mask: Mask = open_mask(self.network.mask if mask is None else mask)
        except (ValueError, TypeError, OSError) as error:
            raise PipelineError(str(error).removeprefix("sbnet: ")) from None
        self.device = pick_device(device)
        self.decoding = Decoding(decoder, self.device, self.mask.reads_vectors)
        self.source: Source = open_source(source, size, self.network.read, decoding=self.decoding)
        if dtype is None:
            half = self.network.half or isinstance(self.network.model, torch.nn.Module)
            dtype = torch.float16 if self.device.type == "cuda" and half else torch.float32
        margin = self.network.margin if margin is None else margin
        if margin != "halo" and (not isinstance(margin, int) or margin < 0):
            raise PipelineError(f"margin: expected pixels or 'halo', got {margin!r}")
        self.dtype, self.limit, self.skip_broken = dtype, limit, skip_broken
        self.settings = Settings(self.mode, block, margin, self.device, dtype, compare, check)
        self._sink, self.side_by_side, self.audio = sink, view == "side", audio
        self.resume, self.encoder = resume, encoder
        self.report = None if report is None else Path(report)
        self.summary: Summary | None = None

    def run(self, told: Callable[[Summary, int], None] | None = None) -> Summary:
        """Runs it to the end of the source.

        Args:
            told: called after each frame with the summary so far and the number of frames that are expected, or 0.
        """
        if self.report is not None:
            check_report(self.report, self.files)
        held = frames_held(self._sink) if self.resume else 0
        if held and held >= min(self.source.length or math.inf, self.limit or math.inf):
            raise PipelineError(f"{self.source.name}: all {held} frames are done")
        sink = open_sink(self._sink, self.source, self.side_by_side, self.audio, self.files, held, self.encoder)
        summary = self.summary = Summary("", self.mode)
        self.mask.reset()
        self.network.notes.clear()  # of an earlier run
        compute = Compute(self.network, self.mask, self.settings, summary)
        expected = min(self.source.length, self.limit or self.source.length) or self.limit or 0
        ahead = Ahead(self._loaded(held))
        writing = behind = Behind(lambda result: _write(sink, result, summary))
        if self.device.type == "cuda":
            # Waiting for the device, and what the host makes of outputs, keep the encoder from nothing.
            behind = Behind(Result.land, writing)
        whole = closed = False
        # Of each stage the work while the dense network, or setting up, had its turn: no part of the run.
        aside: dict[Ahead | Behind, float] = {ahead: 0.0, behind: 0.0, writing: 0.0}
        try:
            begin = time.perf_counter()
            try:
                for frame, pinned in ahead:
                    if frame.fault:
                        if not self._goes_on(summary, frame):
                            break
                        continue
                    if not summary.title:
                        summary.title = self._title(frame)
                    apart, earlier = compute.aside, [stage.busy for stage in aside]
                    behind.put(compute(frame, pinned))
                    if compute.aside > apart:
                        for stage, busy in zip(aside, earlier, strict=True):
                            aside[stage] += stage.busy - busy
                    if frame.index % TRIMMED == TRIMMED - 1:
                        give_back_memory()
                    if told is not None:
                        told(summary, expected)
            except KeyboardInterrupt:
                summary.interrupted = True
            except (RuntimeError, MemoryError) as error:
                if not is_memory(error):
                    raise
                size = "x".join(map(str, frame.size))
                summary.fault = f"{self.source.name}: too little memory for frames of {size}; expected a smaller size"
            behind.close()
            whole = closed = summary.frames > 0
            if whole:
                ending = time.perf_counter()
                sink.close(whole)  # an encoder has frames under way
                writing.busy += time.perf_counter() - ending
            summary.seconds = time.perf_counter() - begin - compute.aside
            if whole and not summary.interrupted:
                compute.conclude(summary.seconds)
        finally:
            ahead.close()
            if not whole:
                with suppress(BaseException):  # what led here is what is raised
                    behind.close()
            if not closed:
                sink.close(whole)
            compute.release()
        if not whole and summary.interrupted:
            raise KeyboardInterrupt
        if not whole:
            raise PipelineError(summary.fault or "; ".join(summary.broken) or f"{self.source.name}: has no frames")
        worked = {stage: stage.busy - aside[stage] for stage in aside}
        device = {}
        if behind is not writing:
            device = {
                "device": 1e-3 * (summary.ms.total + (summary.first_ms or 0)),
                "finish": max(0.0, worked[behind] - summary.waited),
            }
        summary.busy = {"read": worked[ahead], "compute": compute.busy, **device, "write": worked[writing]}
        summary.decoder = self.source.decoder
        summary.notes += [*getattr(sink, "notes", ()), *dict.fromkeys(self.network.notes)]
        if not summary.records and self.network.finish is None and writes_records(self._sink):
            summary.notes.append(
                f"no records: no decoder is set for {self.network.name}; --decode (yolo, detr, rtdetr, classes) or "
                "the finish of a Network, by module:name, makes them"
            )
        if self.report is not None:
            write_report(summary, self.report)
        return summary

    @property
    def files(self) -> list[Any]:
        """What it reads: none of it is written."""
        model = self.network.model
        return [*self.source.files, *self.mask.files, *([model] if isinstance(model, (str, Path)) else [])]

    def _repr_html_(self) -> str:
        """In a notebook: what the last run measured."""
        return f"<p>{escape(self.source.name)}: not run</p>" if self.summary is None else self.summary._repr_html_()

    def _goes_on(self, summary: Summary, frame: Frame) -> bool:
        what = f"{frame.name}: cannot be read ({frame.fault})"
        if self.skip_broken:
            summary.broke(what)
            return True
        summary.fault = what
        return False

    def _loaded(self, held: int = 0) -> Iterator[tuple[Frame, Tensor | None]]:
        """Frames after those that are held, and for CUDA their pixels in pinned memory, put there by the thread that
        reads."""
        for frame in islice(iter(self.source), self.limit):
            if held and not frame.fault:
                held -= 1
                continue
            pinned = None
            if not frame.fault:
                frame.place(self.device)
                if self.device.type == "cuda":
                    pinned = frame.given()
                    pinned = pinned if pinned.is_cuda else pinned.pin_memory()
            yield frame, pinned

    def _title(self, frame: Frame) -> str:
        height, width = frame.size
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.source.name}, {height}x{width}: {self.network.name}, {kind} on {device_name(self.device)}"


def _write(sink: Sink, result: Result, summary: Summary) -> None:
    """In the thread behind: waits for the disk."""
    result.land()
    summary.waited += result.waited
    summary.add(result.ms, result.density)
    summary.records += len(result.records)
    if not summary.shots:
        summary.show(result.frame.index, Shot())
    if (shot := summary.shots.get(result.frame.index)) is not None:
        shot.result = result
    sink.write(result)


def pick_device(wanted: str | torch.device) -> torch.device:
    """ "auto" is a GPU where one works."""
    if isinstance(wanted, str) and wanted == "auto":
        return torch.device("cpu" if cuda_obstacle() else "cuda")
    device = torch.device(wanted)
    if device.type == "cuda" and (obstacle := cuda_obstacle()):
        raise PipelineError(f"device cuda: {obstacle}")
    return device
