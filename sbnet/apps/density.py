"""What share of a source's blocks a mask makes active, and what recorded runs of networks gained at such shares: no
network is run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from sbnet.active import BlockGrid
from sbnet.apps.pipeline.frames import Frame, PipelineError, mask_of
from sbnet.apps.pipeline.sources import open_source
from sbnet.apps.terminal import errors
from sbnet.masks import open_mask
from sbnet.masks.grow import grow
from sbnet.ops import reduce_mask

GAINS = Path(__file__).with_name("gains.json")  # made by `sbnet bench --docs`


@dataclass(frozen=True)
class Curve:
    """What one network gained, as recorded.

    Attributes:
        like: the kind of network.
        device, dtype, date: of the run.
        points: (share of active blocks, times faster than the fastest dense form) from few blocks to many.
    """

    like: str
    device: str
    dtype: str
    date: str
    points: Sequence[tuple[float, float]]

    def gain(self, shares: np.ndarray) -> float:
        """The dense over the masked time of frames with these shares of active blocks. The time lies on a line between
        two points, and below the first it is that of the first."""
        at, gains = np.array(self.points).T
        return float(1 / np.interp(shares, at, 1 / gains).mean())

    def is_bound(self, shares: np.ndarray) -> bool:
        """Are most frames below what was measured? Then the gain is at least what `gain` says."""
        return bool(np.median(shares) < 0.95 * self.points[0][0])


def curves() -> list[Curve]:
    """What was recorded: on CPUs, then on GPUs."""
    return [Curve(**entry) for entry in json.loads(GAINS.read_text())]


@dataclass(frozen=True)
class Density:
    """What `measure` found.

    Attributes:
        title: source, size, mask.
        shares: of each frame the share of active blocks; without the first frame, which masks with a memory take whole,
            unless there is no other.
        read_ms, mask_ms: of a frame, median: reading it, and finding its mask with its margin on `device`.
        broken: frames that could not be read.
    """

    title: str
    device: str
    shares: np.ndarray
    read_ms: float
    mask_ms: float
    broken: int

    def facts(self) -> dict[str, Any]:
        """What JSON holds of it."""
        least, half, most = np.quantile(self.shares, (0.1, 0.5, 0.9)).tolist()
        return {
            "source": self.title, "device": self.device, "frames": len(self.shares), "broken": self.broken,
            "density": float(self.shares.mean()), "density_p10": least, "density_p50": half,
            "density_p90": most, "whole_frames": float((self.shares == 1).mean()),
            "read_ms": self.read_ms, "mask_ms": self.mask_ms,
        }  # fmt: skip

    def gains(self) -> list[dict[str, Any]]:
        """What recorded networks gained at such frames."""
        return [
            {"like": one.like, "device": one.device, "dtype": one.dtype, "x_dense": one.gain(self.shares),
             "at_least": one.is_bound(self.shares)}
            for one in curves()
        ]  # fmt: skip

    def tables(self) -> tuple[Table, Table]:
        """What the frames are like; what to expect of networks."""
        facts = self.facts()
        found = Table(title=escape(self.title), title_justify="left", show_header=False)
        spread = "a tenth of the frames below {:.1%}, half below {:.1%}, nine tenths below {:.1%}".format(
            *(facts[f"density_{share}"] for share in ("p10", "p50", "p90"))
        )
        rows = [
            ("frames", str(facts["frames"]), f"{self.broken} could not be read" if self.broken else ""),
            ("active blocks", f"{facts['density']:.1%}", f"mean; {spread}"),
            ("whole frames", f"{facts['whole_frames']:.1%}", "all blocks active, as after a cut"),
            ("reading", f"{self.read_ms:.3g} ms", "a frame; no pipeline is faster"),
            ("finding the mask", f"{self.mask_ms:.3g} ms", f"a frame, on {self.device}"),
        ]
        found.add_column(style="bold")
        found.add_column(justify="right")
        found.add_column(style="dim")
        for row in rows:
            found.add_row(*map(escape, row))
        told = Table(title="what networks gained at such densities", title_justify="left")
        told.add_column("network like")
        told.add_column("x dense", justify="right")
        told.add_column("pays if dense takes", justify="right")
        told.add_column("measured on", style="dim")
        for one in self.gains():
            least = "≥ " if one["at_least"] else ""
            told.add_row(
                escape(one["like"]), f"{least}{one['x_dense']:.2g}", pays_from(self.mask_ms, one["x_dense"]),
                escape(f"{one['device']}, {one['dtype']}"),
            )  # fmt: skip
        return found, told


def pays_from(mask_ms: float, gain: float) -> str:
    """How long the dense network has to take, so that what the mask saves is more than finding it costs."""
    if gain < 1.005:
        return "never"
    least = mask_ms / (1 - 1 / gain)
    return f"> {least:.0f} ms" if least >= 10 else f"> {least:.2g} ms"


def measure(
    source: Any,
    mask: Any = "motion:20",
    *,
    margin: int = 0,
    size: tuple[int, int] | None = None,
    block: int = 16,
    limit: int | None = None,
    device: torch.device | str = "cpu",
    follow: Callable[[Iterable[Frame], int], Iterable[Frame]] = lambda frames, _: frames,
) -> Density:
    """Reads a source to its end and finds the mask of each frame, as a pipeline does.

    Args:
        source, mask, size, limit: as `Pipeline` takes them.
        margin: pixels by which masks are grown.
        block: side of the blocks in pixels.
        device: where masks are found.
        follow: wraps the frames, and is told how many are expected, or 0.

    Raises:
        PipelineError: a source or a mask that is none, a mask that needs a network, no frame that can be read.
    """
    try:
        chosen = open_mask(mask)
    except (ValueError, TypeError, OSError) as error:
        raise PipelineError(str(error).removeprefix("sbnet: ")) from None
    if chosen.reads_boxes:
        raise PipelineError(f"mask {mask}: follows what a network finds, and none is run: see `sbnet run`")
    place = torch.device(device)
    opened = open_source(source, size)
    shares, reading, finding = [], [], []
    broken, plane = 0, ""
    chosen.reset()
    begin = time.perf_counter()
    expected = min(opened.length, limit or opened.length) or limit or 0
    for frame in follow(islice(iter(opened), limit), expected):
        reading.append(time.perf_counter() - begin)
        if frame.fault:
            broken += 1
        else:
            chosen.see(frame)
            x = frame.tensor(place, torch.float32)
            plane = plane or "x".join(map(str, x.shape[2:]))
            begin = time.perf_counter()
            active = reduce_mask(grow(mask_of(chosen, x), margin), BlockGrid.cover(x.shape[2:], block))
            shares.append(float((active.block_map >= 0).float().mean()))
            finding.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    if not shares:
        raise PipelineError(f"{opened.name}: has no frames that can be read")
    first = int(len(shares) > 1)
    title = f"{opened.name}, {plane}: {mask if isinstance(mask, str) else type(chosen).__name__}"
    title += f" + {margin}" if margin else ""
    return Density(
        f"{title}, blocks of {block}", str(place), np.array(shares[first:]), _median(reading[first:]),
        _median(finding[first:]), broken,
    )  # fmt: skip


def followed(frames: Iterable[Frame], expected: int) -> Iterable[Frame]:
    """The frames, under a bar while they are read."""
    return track(frames, "", total=expected or None, console=errors, transient=True)


def _median(seconds: list[float]) -> float:
    return 1e3 * float(np.median(seconds)) if seconds else 0.0
