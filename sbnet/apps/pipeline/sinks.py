"""Where results go: films, pictures, JSON lines, functions."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sbnet import files
from sbnet.active import BlockGrid
from sbnet.apps import video, writers
from sbnet.apps.pipeline.frames import PipelineError, Result


class Sink(Protocol):
    """write(result) for every frame, in order; close(whole=False) after an error, True after the last frame."""

    def write(self, result: Result) -> None: ...

    def close(self, whole: bool) -> None: ...


class Pictures:
    """A film (.mp4, .mkv, .mov, .avi, .gif) or a folder of PNG files. An interrupted film holds the frames until then.

    Args:
        side_by_side: the frame with its active blocks outlined beside the result.
        like: the film that the frames are of: films keep its colours, the shape of its pixels and its times.
        sound: films get its sound, too.
        held: go on after so many frames that the path holds.
        encoder: as of `VideoWriter`.

    Attributes:
        notes: what could not be kept.
    """

    def __init__(
        self, path: Path, rate: Fraction, side_by_side: bool = False, like: video.VideoInfo | None = None,
        sound: bool = False, reads: Sequence[Any] = (), held: int = 0, encoder: str = "x264",
    ) -> None:  # fmt: skip
        self._writer = writers.open_writer(path, rate, like, sound, reads, held, encoder)
        self._side_by_side = side_by_side
        self._shape: tuple[int, ...] | None = None
        self._path = path

    def write(self, result: Result) -> None:
        picture = result.frame.picture() if result.picture is None else result.picture
        size = picture.shape[0], picture.shape[1]
        if self._side_by_side:
            picture = beside(result, picture)
        self._shape = self._shape or picture.shape
        if isinstance(self._writer, writers.VideoWriter) and picture.shape != self._shape:
            first, now = ("x".join(map(str, shape[:2])) for shape in (self._shape, picture.shape))
            raise PipelineError(
                f"{self._path}: {result.frame.name}: expected a frame of {first}, got {now}; size= (--size) scales"
            )
        if isinstance(self._writer, writers.VideoWriter):
            self._writer.write(picture, result.frame.time, size)
        else:
            self._writer.write(picture if self._side_by_side else with_alpha(picture, result))

    @property
    def notes(self) -> list[str]:
        return self._writer.notes if isinstance(self._writer, writers.VideoWriter) else []

    def close(self, whole: bool) -> None:
        error = None if whole else PipelineError("not whole")
        self._writer.__exit__(type(error) if error else None, error, None)


def with_alpha(picture: np.ndarray, result: Result) -> np.ndarray:
    """[H,W,4] where the frame has an opacity, which is made as large as the picture; else the picture."""
    pixels = result.frame.pixels
    opaque = not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 4
    if opaque or picture.shape[2] != 3:
        return picture
    from PIL import Image

    alpha = Image.fromarray(np.ascontiguousarray(pixels[..., 3]))
    height, width = picture.shape[:2]
    if alpha.size != (width, height):
        alpha = alpha.resize((width, height), Image.Resampling.BILINEAR)
    return np.dstack([picture, np.asarray(alpha)])


def beside(result: Result, picture: np.ndarray) -> np.ndarray:
    """The frame with its active blocks and, as high as it, the result."""
    both, shown, other = video.joined(picture)
    if picture.shape == result.frame.picture().shape:
        blocks_on(result, shown)
    else:
        shown[:] = nearest(blocks_on(result), picture.shape[:2])
    other[:] = picture
    return both


def blocks_on(result: Result, shown: np.ndarray | None = None) -> np.ndarray:
    """The frame, active blocks outlined and the rest dimmed. shown: where to draw it."""
    frame = result.frame.picture()
    if result.active is not None:
        return video.outlined(frame, result.active, BlockGrid.cover(frame.shape[:2], result.block), shown)
    if shown is None:
        return frame
    shown[:] = frame
    return shown


def nearest(picture: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Enlarged or made smaller to (height, width), pixels as they are."""
    rows, columns = (np.arange(n) * m // n for n, m in zip(size, picture.shape[:2], strict=True))
    return picture[rows][:, columns]


class JsonLines:
    """One JSON object a line and frame: frame, name, time, density, ms, records."""

    def __init__(self, path: Path, sources: Sequence[Any] = (), held: int = 0) -> None:
        self._part = files.Part(path, sources, PipelineError)
        if held:
            self._part.write(b"".join(path.read_bytes().splitlines(keepends=True)[:held]))

    def write(self, result: Result) -> None:
        frame = result.frame
        line = {"frame": frame.index, "name": frame.name, "time": frame.time, "density": round(result.density, 6),
                "ms": round(result.ms, 3), "records": result.records}  # fmt: skip
        self._part.write((json.dumps(line) + "\n").encode())

    def close(self, whole: bool) -> None:
        if whole:
            self._part.keep()
        else:
            self._part.drop()


class Calls:
    """A function of each Result."""

    def __init__(self, function: Callable[[Result], Any]) -> None:
        self._function = function

    def write(self, result: Result) -> None:
        self._function(result)

    def close(self, whole: bool) -> None:
        """A function holds nothing open."""


class Many:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    def write(self, result: Result) -> None:
        for sink in self._sinks:
            sink.write(result)

    def close(self, whole: bool) -> None:
        close_all(self._sinks, whole)

    @property
    def notes(self) -> list[str]:
        return [note for sink in self._sinks for note in getattr(sink, "notes", ())]


def close_all(sinks: Sequence[Sink], whole: bool) -> None:
    """Closes every one, and raises the first error of them."""
    errors = []
    for sink in sinks:
        try:
            sink.close(whole)
        except Exception as error:  # the others have to be closed as well
            errors.append(error)
    if errors:
        raise errors[0]


LINES = (".jsonl", ".ndjson")


def writes_records(given: Any) -> bool:
    """Does a sink, as `open_sink` takes it, write JSON lines?"""
    if isinstance(given, (list, tuple)):
        return any(map(writes_records, given))
    return isinstance(given, (str, os.PathLike)) and Path(given).suffix.lower() in LINES


def open_sink(
    given: Any, source: Any, side_by_side: bool = False, sound: bool = False, reads: Sequence[Any] = (),
    held: int = 0, encoder: str = "x264",
) -> Sink:  # fmt: skip
    """The sink that `given` names or holds: a path (.jsonl: JSON lines), a function, a list of sinks, None.

    Args:
        source: the Source of the frames, or their rate.
        side_by_side, sound, encoder: as of `Pictures`.
        reads: files that are read meanwhile: none of them is written.
        held: go on after so many frames that files hold.
    """
    if given is None:
        return Many([])
    if isinstance(given, (list, tuple)):
        named = [Path(one).absolute() for one in given if isinstance(one, (str, os.PathLike))]
        for path in named:
            if named.count(path) > 1:
                raise PipelineError(f"{path}: expected sinks of different names, got it twice")
        opened: list[Sink] = []
        try:
            for one in given:
                opened.append(open_sink(one, source, side_by_side, sound, reads, held, encoder))
        except BaseException:
            Many(opened).close(False)
            raise
        return Many(opened)
    if isinstance(given, (str, os.PathLike)):
        path = Path(given)
        rate = source if isinstance(source, Fraction) else source.rate or Fraction(25)
        if writes_records(path):
            return JsonLines(path, reads, held)
        return Pictures(path, rate, side_by_side, getattr(source, "film", None), sound, reads, held, encoder)
    if hasattr(given, "write") and hasattr(given, "close"):
        return given
    if callable(given):
        return Calls(given)
    raise PipelineError(f"sink: expected a path, a function or a list of them, got {type(given).__name__}")
