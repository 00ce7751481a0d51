"""A folder of films, a pipeline each: which there are and which are finished, running one, what came of all. What runs
them side by side is `sbnet.adapters.ray`."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sbnet import files
from sbnet.apps.machine import device_name
from sbnet.apps.pipeline.frames import PipelineError
from sbnet.apps.pipeline.pipeline import Pipeline
from sbnet.apps.pipeline.sources import URL, in_order

FILMS = (".mp4", ".mkv", ".mov", ".avi", ".webm", ".m4v", ".mpg", ".mpeg", ".ts", ".gif")
SINKS = (".mp4", ".jsonl")  # of each film, where only a folder was named


@dataclass
class Films:
    """What `run_films` did.

    Attributes:
        rows: of each film that was run {"film", "fault", "frames", "density", "fps", "seconds", "device"}; without a
            fault the film is finished.
        finished: films that an earlier run had finished.
        workers: how many ran them, and on what.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    workers: str = ""

    @property
    def broken(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["fault"]]

    def __str__(self) -> str:
        done = [row for row in self.rows if not row["fault"]]
        frames = sum(row["frames"] for row in done)
        lines = [f"{len(done)} films, {frames} frames on {self.workers}; {len(self.finished)} were finished before"]
        return "\n".join([*lines, *(f"{row['film']}: {row['fault']}" for row in self.broken)])


def run_films(
    source: str | os.PathLike[str],
    network: Any,
    out: str | os.PathLike[str],
    *,
    mask: Any = None,
    workers: int | None = None,
    device: str = "auto",
    told: Callable[[dict[str, Any], int], None] | None = None,
    **options: Any,
) -> Films:
    """A pipeline for each film of a folder or glob. Films that are finished are skipped when it is called again; one
    that cannot be run is named, and the others go on.

    Args:
        source: a folder of films, or a glob.
        network, mask, options: as `Pipeline` takes them; what names them travels to the workers.
        out: a folder: OUT/NAME.mp4, OUT/NAME.jsonl, and OUT/NAME.done.json once both are whole.
        workers: None: one a GPU, or of two CPU cores.
        device: "auto": a GPU each where there are any.
        told: called after each film with its row and how many films there are.

    Raises:
        PipelineError: there are no films, two of one name, or no Ray.
    """
    films = find_films(source)
    order = {"network": _named(network), "mask": _named(mask), **{k: str(v) for k, v in sorted(options.items())}}
    runner = FilmRunner(network, mask, device, Path(out).absolute(), order, options)
    todo = [film for film in films if not runner.is_done(film)]
    found = Films(finished=[film.name for film in films if film not in todo])
    if not todo:
        return found
    spread = _ray()(todo, workers, device)
    runner.device, found.workers = spread.device, str(spread)
    for row in spread.rows(runner):
        found.rows.append(row)
        if told is not None:
            told(row, len(todo))
    return found


@dataclass
class FilmRunner:
    """Runs one film after the other; what is wrong with one is its row's fault. Travels to the workers.

    Attributes:
        network, mask, device, options: as `Pipeline` takes them.
        target: the folder of the results.
        order: what was asked for, in words; another order finds no film finished.
        folder: what relative paths in the options are relative to.
    """

    network: Any
    mask: Any
    device: str
    target: Path
    order: dict[str, str]
    options: dict[str, Any]
    folder: Path = field(default_factory=Path.cwd)

    def __call__(self, film: Path) -> dict[str, Any]:
        self.target.mkdir(parents=True, exist_ok=True)
        try:
            summary = Pipeline(
                film, self.mask, self.network, self._sinks(film), device=self.device, **self.options
            ).run()
        except Exception as error:  # of whatever kind: the other films go on
            return row_of(film, " ".join(str(error).split()) or type(error).__name__)
        row = row_of(
            film, summary.fault, frames=summary.frames, density=round(summary.density, 6),
            fps=round(summary.fps, 3), seconds=round(summary.seconds, 3), device=_where(self.device),
        )  # fmt: skip
        if not summary.fault:
            mark = {"order": self.order, "size": film.stat().st_size, **row}
            files.write(self._done(film), (json.dumps(mark) + "\n").encode(), PipelineError)
        return row

    def is_done(self, film: Path) -> bool:
        """Did a run of the same order finish this film, and is what it wrote still there?"""
        try:
            found = json.loads(self._done(film).read_text())
        except (OSError, ValueError):
            return False
        here = all(sink.is_file() for sink in self._sinks(film))
        return here and found.get("order") == self.order and found.get("size") == film.stat().st_size

    def clear(self, film: Path, *kinds: str) -> None:
        """Removes what a run that was killed had begun of this film: hidden files of these kinds."""
        for kind in kinds:
            for left in self.target.glob(f".{glob.escape(film.stem)}.*.{kind}"):
                left.unlink(missing_ok=True)

    def _sinks(self, film: Path) -> list[Path]:
        return [self.target / f"{film.stem}{suffix}" for suffix in SINKS]

    def _done(self, film: Path) -> Path:
        return self.target / f"{film.stem}.done.json"


def find_films(source: str | os.PathLike[str]) -> list[Path]:
    """The films of a folder or glob, by name."""
    text = os.fspath(source)
    if URL.match(text):
        raise PipelineError(f"{text}: expected a folder or a glob of films, got a URL")
    listed = list(Path(text).iterdir()) if Path(text).is_dir() else [Path(p) for p in glob.glob(text, recursive=True)]
    films = in_order(path.absolute() for path in listed if path.suffix.lower() in FILMS and path.is_file())
    if not films:
        raise PipelineError(f"{text}: expected films ({', '.join(FILMS)}), found none")
    names: dict[str, Path] = {}
    for film in films:
        other = names.setdefault(film.stem, film)
        if other is not film:
            raise PipelineError(f"{text}: {other.name} and {film.name}: expected films of different names")
    return films


def _named(given: Any) -> str:
    """A network or mask in words that are the same in another process."""
    return given if isinstance(given, str) else str(getattr(given, "name", type(given).__name__))


def row_of(film: Path, fault: str, **measured: Any) -> dict[str, Any]:
    none = {"frames": 0, "density": 0.0, "fps": 0.0, "seconds": 0.0, "device": ""}
    return {"film": film.name, "fault": fault, **none, **measured}


def _where(device: str) -> str:
    """What ran a film: of several GPUs Ray shows each worker its own."""
    name = device_name(torch.device(device))
    return f"{name}, GPU {os.environ.get('CUDA_VISIBLE_DEVICES', '0')}" if device == "cuda" else name


def _ray() -> Any:
    try:
        from sbnet.adapters.ray import FilmsOnRay
    except ImportError:
        raise PipelineError("several films at once need Ray: pip install 'sbnet[distributed]'") from None
    return FilmsOnRay
