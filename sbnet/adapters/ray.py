"""Ray Data (pip install 'sbnet[distributed]'): films on several workers; one that dies loses its film alone."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import ray.data
import torch

from sbnet.apps.machine import cuda_obstacle
from sbnet.apps.pipeline.films import FilmRunner, row_of
from sbnet.apps.pipeline.frames import PipelineError

RETRIES = 1  # of a film whose worker died
DIED = "its worker died"


class FilmsOnRay:
    """Ray with its GPUs or cores, on this machine or the cluster that RAY_ADDRESS names; started where it is not.

    Args:
        films: what there is to run.
        workers: None: one a GPU, or of two CPU cores.
        device: "auto": a GPU each where there are any.
    """

    def __init__(self, films: list[Path], workers: int | None, device: str) -> None:
        if not ray.is_initialized():
            ray.init(include_dashboard=False, logging_level="ERROR", log_to_driver=False)
            logging.getLogger("ray.data").setLevel(logging.ERROR)  # the caller has rows, and Ray files of its own
        resources = ray.cluster_resources()
        cores, gpus = int(resources.get("CPU", 1)), int(resources.get("GPU", 0))
        if device == "auto":
            device = "cuda" if gpus and not cuda_obstacle() else "cpu"
        if device == "cuda" and not gpus:
            raise PipelineError("device cuda: Ray has no GPU")
        self.films, self.device = films, device
        most, usual = (gpus, gpus) if device == "cuda" else (cores, max(1, cores // 2))
        self.workers = min(len(films), workers or usual, most)
        self._share = {"num_gpus": 1.0} if device == "cuda" else {"num_cpus": max(1, cores // self.workers)}

    def __str__(self) -> str:
        return f"{self.workers} {'GPU' if self.device == 'cuda' else 'CPU'} workers"

    def rows(self, runner: FilmRunner) -> Iterator[dict[str, Any]]:
        """The row of each film, as they come; last, those that no worker survived."""
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars, context.max_errored_blocks = False, -1  # a worker that dies loses its film alone
        data = ray.data.from_items([{"film": str(film)} for film in self.films], override_num_blocks=len(self.films))
        rows = data.map(
            Worker, fn_constructor_args=(runner, uuid.uuid4().hex),
            compute=ray.data.ActorPoolStrategy(size=self.workers, max_tasks_in_flight_per_actor=1), **self._share,
        )  # fmt: skip
        left = {film.name: film for film in self.films}
        try:
            for batch in rows.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):  # at once
                for row in batch.to_pylist():
                    del left[row["film"]]
                    yield row
        finally:
            for film in left.values():
                runner.clear(film, "part", "tries")
        yield from (row_of(film, DIED) for film in left.values())


class Worker:
    """An actor: one film after the other.

    Ray starts one that died anew and gives it its film again, without an end; a file beside the results counts."""

    def __init__(self, runner: FilmRunner, call: str) -> None:
        cores = os.environ.get("OMP_NUM_THREADS")  # Ray's: the actor's share
        if cores and cores.isdecimal():
            torch.set_num_threads(max(1, int(cores)))
        if runner.folder.is_dir():  # a cluster that was started elsewhere: names are relative to where they were typed
            os.chdir(runner.folder)
            sys.path.insert(0, str(runner.folder))
        self.runner, self.call = runner, call

    def __call__(self, item: dict[str, str]) -> dict[str, Any]:
        film = Path(item["film"])
        self.runner.clear(film, "part")
        tries = self.runner.target / f".{film.stem}.{self.call}.tries"
        if tries.exists() and tries.stat().st_size > RETRIES:
            tries.unlink()
            return row_of(film, DIED)
        tries.parent.mkdir(parents=True, exist_ok=True)
        with open(tries, "ab") as file:
            file.write(b".")
        try:
            return self.runner(film)
        finally:
            tries.unlink()
