"""What a pipeline measured, in memory that does not grow with the film, and its closing table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from sbnet.apps.pipeline.drift import Likeness
from sbnet.engine.oracle import Agreement

POINTS = 1024  # of a curve
STAGES = {  # of Summary.busy, for people
    "read": "decoding frames, or reading files",
    "compute": "the network and its mask; on a GPU, what launches them",
    "device": "the network and its mask, on the GPU",
    "finish": "what the host makes of the network's outputs",
    "write": "drawing and encoding films and pictures, or what gets results",
}
DECODERS = {"NVDEC": "the GPU's hardware; pictures stay on the device", "host": "FFmpeg; pictures go to the device"}
LEAST = 3  # samples that a figure needs
MODES = {
    "masked": "zeros outside the mask, as after every layer",
    "exact": "the dense result on the mask, nothing outside",
    "cached": "outside the mask the last result stays",
    "dense": "the whole frame, no mask",
}
SHOTS = 6  # frames of a report
NAMED = 20  # faults that are kept by name


class Series:
    """Mean of numbers as they come, and a curve of at most POINTS of their means."""

    def __init__(self) -> None:
        self.count, self.total, self.step = 0, 0.0, 1
        self.curve: list[float] = []
        self._sum, self._in = 0.0, 0

    def add(self, value: float) -> None:
        self.count, self.total = self.count + 1, self.total + value
        self._sum, self._in = self._sum + value, self._in + 1
        if self._in < self.step:
            return
        self.curve.append(self._sum / self._in)
        self._sum, self._in = 0.0, 0
        if len(self.curve) == POINTS:
            self.curve = [(a + b) / 2 for a, b in zip(self.curve[::2], self.curve[1::2], strict=True)]
            self.step *= 2

    def points(self) -> list[float]:
        """The curve, and what is not yet on it."""
        return [*self.curve, self._sum / self._in] if self._in else list(self.curve)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan


@dataclass
class Shot:
    """A frame of a report: its Result, once it is on the host; of one that was compared the largest difference from the
    dense result, a map of differences, [H,W] uint8 with the largest as 255, and its seams (`Likeness.seams`)."""

    result: Any = None
    largest: float = 0.0
    differences: np.ndarray | None = None
    seam: float = math.nan


@dataclass
class Summary:
    """What `Pipeline.run` returns; print it.

    Attributes:
        title: source, size, network, device.
        mode: the pipeline's.
        densities, ms: of each frame: share of active blocks; time of mask and network. Not of a first frame that is
            computed whole, as a cached network's is: first_ms is its time.
        dense_ms: of the dense network on some frames. dense_form: what ran it.
        errors, largest: on those frames, rms and largest difference from the dense result, relative to its rms.
        place: where the largest one was, in words.
        likeness: of kept pictures on those frames; None where there are none.
        broken: "name: reason" of the first frames that could not be read. skipped: how many there were.
        plans: seconds that setting up took, of each size of frames. No part of what follows:
        seconds: from the first frame on until the last is written. busy: seconds that each stage worked; they overlap.
        waited: seconds that a thread waited for the device.
        interrupted: ended by Ctrl-C. fault: what ended it early.
        checks: samples whose result was held against the masked contract in float64. windows: their sizes.
        apart, ratio: the largest difference from it, and the largest rms error, of PyTorch's own.
        holds: none was out of tolerance. unchecked: why there were not enough of them.
        notes: what sinks could not keep, and what else is to be known of the results. records: of all frames.
        decoder: who decoded films for a GPU ("NVDEC" or "host"), and why the hardware did not; of cameras of each kind.
        stage: what is being done.
        shots: by their index, the frames that a report shows: the first, or those compared whose differences are the
            largest, the one of the worst seam, and the last of them.
    """

    title: str
    mode: str
    densities: Series = field(default_factory=Series)
    ms: Series = field(default_factory=Series)
    first_ms: float | None = None
    dense_ms: Series = field(default_factory=Series)
    dense_form: str = ""
    errors: Series = field(default_factory=Series)
    largest: float = 0.0
    place: str = ""
    likeness: Likeness | None = None
    broken: list[str] = field(default_factory=list)
    skipped: int = 0
    plans: Series = field(default_factory=Series)
    seconds: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    waited: float = 0.0
    interrupted: bool = False
    fault: str = ""
    checks: int = 0
    apart: float = 0.0
    ratio: float = 0.0
    holds: bool = True
    windows: list[tuple[int, int]] = field(default_factory=list)
    unchecked: str = ""
    notes: list[str] = field(default_factory=list)
    records: int = 0
    decoder: tuple[str, str] = ("", "")
    stage: str = "setting up"
    shots: dict[int, Shot] = field(default_factory=dict)

    @property
    def frames(self) -> int:
        return self.ms.count + (self.first_ms is not None)

    @property
    def density(self) -> float:
        """Mean share of active blocks; 1 where the one frame was computed whole."""
        return self.densities.mean if self.densities.count or self.first_ms is None else 1.0

    @property
    def fps(self) -> float:
        """Frames a second from end to end."""
        return self.frames / self.seconds if self.seconds else math.nan

    @property
    def speed_up(self) -> float:
        """Dense over masked time of the network, mask included; NaN of fewer than LEAST samples."""
        return self.dense_ms.mean / self.ms.mean if self.dense_ms.count >= LEAST else math.nan

    @property
    def bound(self) -> str:
        """The stage that worked longest: the run cannot be shorter."""
        return max(self.busy, key=lambda stage: self.busy[stage], default="")

    def add(self, ms: float, density: float) -> None:
        """A frame's, in the order of the source."""
        if self.mode == "cached" and not self.frames:
            self.first_ms = ms
            return
        self.ms.add(ms)
        self.densities.add(density)

    def show(self, index: int, shot: Shot) -> None:
        """Keeps it for the report; of many those with the largest differences, the worst seam, and the newest."""
        if shot.differences is not None:
            self.shots = {k: v for k, v in self.shots.items() if v.differences is not None}
        if len(self.shots) >= SHOTS:
            steps = {k: v.seam for k, v in self.shots.items() if not math.isnan(v.seam)}
            stepped = max(steps, key=lambda k: steps[k], default=None)
            del self.shots[min((k for k in self.shots if k != stepped), key=lambda k: self.shots[k].largest)]
        self.shots[index] = shot

    def broke(self, what: str) -> None:
        self.skipped += 1
        if len(self.broken) < NAMED:
            self.broken.append(what)

    def check(self, found: Agreement) -> None:
        self.checks += 1
        self.apart = larger(self.apart, found.largest)
        self.ratio = larger(self.ratio, found.error / found.torch_error if found.torch_error else 0.0)
        self.holds = self.holds and found.holds

    def rows(self) -> list[tuple[str, str, str]]:
        """(what, how much, of what) of the closing table."""
        found = [("frames", str(self.frames), "ended by Ctrl-C" if self.interrupted else "")]
        if self.skipped:
            found.append(("broken frames", str(self.skipped), "skipped: " + "; ".join(self.broken)))
        found.append(("mode", self.mode, MODES.get(self.mode, "")))
        if self.mode != "dense" and self.ms.count:
            found.append(("mean density", f"{self.densities.mean:.1%}", "active blocks"))
        found.append(("frames a second", f"{self.fps:.3g}", "from reading to writing"))
        enough = self.dense_ms.count >= LEAST
        if enough:
            what = f"mean of {self.dense_ms.count} frames, {self.dense_form}"
            found.append(("dense", duration(self.dense_ms.mean), what))
        if self.first_ms is not None:
            found.append(("first frame", duration(self.first_ms), "computed whole; no part of the means"))
        if self.ms.count:
            found.append((self.mode, duration(self.ms.mean), "mean of all frames, mask included"))
        if enough:
            found.append(("speed-up", f"{self.speed_up:.2f}x", "of the network"))
            where = "over the whole frame" if self.mode == "cached" else "on the mask"
            found.append(("rms error", f"{self.errors.mean:.2%}", f"of the dense result's rms, {where}"))
            place = f", {self.place}" if self.place else ""
            found.append(("largest error", f"{self.largest:.2g}", f"difference from the dense result{place}"))
            if self.likeness is not None:
                found.append(("PSNR", f"{self.likeness.psnr:.1f} dB", "of the picture, against the dense one"))
                found.append(("seams", *self.likeness.seams_in_words()))
        elif self.dense_ms.count:
            few = f"the dense network ran on {self.dense_ms.count} frames; at least {LEAST} are needed"
            found.append(("speed-up", "n/a", few))
        if self.checks >= LEAST:
            what = f"{self.checks} frames checked, windows of up to {'x'.join(map(str, max(self.windows)))}"
            found.append(("largest difference", f"{self.apart:.2g}", f"from the masked oracle; {what}"))
            found.append(("its rms", f"{self.ratio:.2f}x", "of PyTorch's own error, 2x is allowed"))
        elif self.unchecked:
            found.append(("its rms", "n/a", f"not checked against the masked oracle: {self.unchecked}"))
        if self.plans.count:
            what = f"plans for frames of {self.plans.count} sizes" if self.plans.count > 1 else "a plan of the network"
            found.append(("setting up", f"{self.plans.total:.2f} s", f"{what}; no part of the rest"))
        for stage, seconds in self.busy.items():
            # Setting up is no part of the run, and frames are read ahead meanwhile.
            share = f" {min(1, seconds / self.seconds):.0%} of the run" if self.seconds else ""
            found.append((f"  {stage}", f"{seconds:.2f} s", f"busy{share}; the stages overlap"))
        if self.decoder[0]:
            why = f"NVDEC did not serve: {self.decoder[1]}" if self.decoder[1] else DECODERS.get(self.decoder[0], "")
            found.append(("decoder", self.decoder[0], why))
        if self.bound:
            found.append(("bound by", self.bound, STAGES.get(self.bound, "")))
        found += [("note", "", note) for note in self.notes]
        if self.fault:
            found.append(("ended early", "", self.fault))
        return found

    def table(self) -> Table:
        table = Table(title=escape(self.title), title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right")
        table.add_column(style="dim", overflow="fold")
        for row in self.rows():
            table.add_row(*map(escape, row))
        return table

    def _repr_html_(self) -> str:
        from sbnet.apps.pipeline.report import STYLE, body

        return f"<style>{STYLE}</style>{body(self)}"

    def __str__(self) -> str:
        widths = [max(len(row[k]) for row in self.rows()) for k in (0, 1)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c}".rstrip() for a, b, c in self.rows()]
        return "\n".join([self.title, *lines])


def duration(ms: float) -> str:
    return f"{ms:.3g} ms" if not ms >= 999.5 else f"{1e-3 * ms:.3g} s"


def larger(a: float, b: float) -> float:
    """The larger one, NaN where either is: max() may lose it."""
    return a if a > b or math.isnan(a) else b
