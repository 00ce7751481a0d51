"""A folder of films, a pipeline each, spread over the machine or a cluster by Ray Data (extra `distributed`)."""

from __future__ import annotations

import glob
import json
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sbnet.apps.machine import cuda_obstacle, device_name
from sbnet.apps.pipeline.frames import PipelineError
from sbnet.apps.pipeline.pipeline import Pipeline
from sbnet.apps.pipeline.sources import URL

FILMS = (".mp4", ".mkv", ".mov", ".avi", ".webm", ".m4v", ".mpg", ".mpeg", ".ts", ".gif")
SINKS = (".mp4", ".jsonl")  # of each film, where only a folder was named
RETRIES = 1  # of a film whose worker died


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
    target = Path(out)
    order = {"network": _named(network), "mask": _named(mask), **{k: str(v) for k, v in sorted(options.items())}}
    todo = [film for film in films if not _is_done(target, film, order)]
    found = Films(finished=[film.name for film in films if film not in todo])
    if not todo:
        return found
    ray = _ray()
    if not ray.is_initialized():
        ray.init(include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    resources = ray.cluster_resources()
    cores, gpus = int(resources.get("CPU", 1)), int(resources.get("GPU", 0))
    if device == "auto":
        device = "cuda" if gpus and not cuda_obstacle() else "cpu"
    if device == "cuda" and not gpus:
        raise PipelineError("device cuda: Ray has no GPU")
    workers = min(len(todo), workers or (gpus if device == "cuda" else max(1, cores // 2)))
    share = {"num_gpus": 1.0} if device == "cuda" else {"num_cpus": max(1, cores // workers)}
    found.workers = f"{workers} {'GPU' if device == 'cuda' else 'CPU'} workers"
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars, context.max_errored_blocks = False, -1  # a worker that dies loses its film alone
    rows = ray.data.from_items([{"film": str(film)} for film in todo], override_num_blocks=len(todo)).map(
        Worker, fn_constructor_args=(network, mask, device, str(target), order, options, uuid.uuid4().hex),
        compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1), **share,
    )  # fmt: skip
    for row in rows.iter_rows():
        found.rows.append(row)
        if told is not None:
            told(row, len(todo))
    came = {row["film"] for row in found.rows}
    for film in todo:
        if film.name not in came:
            found.rows.append(_row(film, "its worker died"))
            if told is not None:
                told(found.rows[-1], len(todo))
    return found


class Worker:
    """An actor: a film after the other. What is wrong with a film is its row's fault.

    Ray starts one that died anew and gives it its film again, without an end; a file beside the results counts."""

    def __init__(
        self, network: Any, mask: Any, device: str, target: str, order: dict[str, str], options: dict[str, Any],
        call: str = "",
    ) -> None:  # fmt: skip
        cores = os.environ.get("OMP_NUM_THREADS")  # Ray's: the actor's share
        if cores and cores.isdecimal():
            torch.set_num_threads(max(1, int(cores)))
        self.network, self.mask, self.device, self.options = network, mask, device, options
        self.target, self.order, self.call = Path(target), order, call

    def __call__(self, item: dict[str, str]) -> dict[str, Any]:
        film = Path(item["film"])
        sinks = [self.target / f"{film.stem}{suffix}" for suffix in SINKS]
        for left in self.target.glob(f".{glob.escape(film.stem)}.*.part"):  # by one that was killed
            left.unlink(missing_ok=True)
        tries = self.target / f".{film.stem}.{self.call}.tries"
        if tries.exists() and tries.stat().st_size > RETRIES:
            tries.unlink()
            return _row(film, "its worker died")
        self.target.mkdir(parents=True, exist_ok=True)
        with open(tries, "ab") as file:
            file.write(b".")
        try:
            return self._run(film, sinks)
        finally:
            tries.unlink()

    def _run(self, film: Path, sinks: list[Path]) -> dict[str, Any]:
        try:
            summary = Pipeline(film, self.mask, self.network, sinks, device=self.device, **self.options).run()
        except Exception as error:  # of whatever kind: the other films go on
            return _row(film, " ".join(str(error).split()) or type(error).__name__)
        row = _row(
            film, summary.fault, frames=summary.frames, density=round(summary.densities.mean, 6),
            fps=round(summary.fps, 3), seconds=round(summary.seconds, 3), device=_where(self.device),
        )  # fmt: skip
        if not summary.fault:
            done = _done(self.target, film)
            part = done.with_name(f".{done.name}.{os.getpid()}.part")
            part.write_text(json.dumps({"order": self.order, "size": film.stat().st_size, **row}) + "\n")
            part.replace(done)
        return row


def find_films(source: str | os.PathLike[str]) -> list[Path]:
    """The films of a folder or glob, by name."""
    text = os.fspath(source)
    if URL.match(text):
        raise PipelineError(f"{text}: expected a folder or a glob of films, got a URL")
    listed = list(Path(text).iterdir()) if Path(text).is_dir() else [Path(p) for p in glob.glob(text, recursive=True)]
    films = sorted(path.absolute() for path in listed if path.suffix.lower() in FILMS and path.is_file())
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


def _row(film: Path, fault: str, **measured: Any) -> dict[str, Any]:
    none = {"frames": 0, "density": 0.0, "fps": 0.0, "seconds": 0.0, "device": ""}
    return {"film": film.name, "fault": fault, **none, **measured}


def _where(device: str) -> str:
    """What ran a film: of several GPUs Ray shows each worker its own."""
    name = device_name(torch.device(device))
    return f"{name}, GPU {os.environ.get('CUDA_VISIBLE_DEVICES', '0')}" if device == "cuda" else name


def _done(target: Path, film: Path) -> Path:
    return target / f"{film.stem}.done.json"


def _is_done(target: Path, film: Path, order: dict[str, str]) -> bool:
    """Did a run of the same order finish this film, and is what it wrote still there?"""
    try:
        found = json.loads(_done(target, film).read_text())
    except (OSError, ValueError):
        return False
    here = all((target / f"{film.stem}{suffix}").is_file() for suffix in SINKS)
    return here and found.get("order") == order and found.get("size") == film.stat().st_size


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError:
        raise PipelineError("several films at once need Ray: pip install 'sbnet[distributed]'") from None
    return ray
