"""Timing, ceilings and result files shared by all benchmarks.

A case is timed only after its result was checked. On CUDA a case is captured `repeat` times into one graph, so that a
figure holds no launch gap; operands larger than L2 make it a cold-cache figure, smaller ones a warm one (the table says
which). Cases that are compared run interleaved in one process; figures are medians.
"""

from __future__ import annotations

import datetime
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import sbnet

RESULTS = Path(__file__).parent / "results"
Run = Callable[[], Any]


class Timer:
    """Times functions on one device: `Timer(device).interleaved({"name": fn, ...})` -> {"name": microseconds}.

    captured: on CUDA, time a graph of the function; False for functions that replay graphs of their own.
    """

    def __init__(self, device: str, rounds: int = 9, captured: bool = True):
        self.cuda, self.rounds, self.captured = device == "cuda", rounds, captured

    def interleaved(self, runs: dict[str, Run], repeat: int = 20) -> dict[str, float]:
        """Medians over `rounds` rounds in which every function runs once after the other."""
        prepared = {name: self._prepare(run, repeat) for name, run in runs.items()}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self.rounds):
            for name, timed in prepared.items():
                times[name].append(timed())
        return {name: statistics.median(values) for name, values in times.items()}

    def one(self, run: Run, repeat: int = 20) -> float:
        return self.interleaved({"it": run}, repeat)["it"]

    def _prepare(self, run: Run, repeat: int) -> Callable[[], float]:
        if not self.cuda:
            return self._wall(run, repeat)
        return self._events(self._graph(run, repeat) if self.captured else self._eager(run, repeat), repeat)

    @staticmethod
    def _wall(run: Run, repeat: int) -> Callable[[], float]:
        run()

        def timed() -> float:
            start = time.perf_counter()
            for _ in range(repeat):
                run()
            return (time.perf_counter() - start) * 1e6 / repeat

        return timed

    @staticmethod
    def _eager(run: Run, repeat: int) -> Run:
        def calls() -> None:
            for _ in range(repeat):
                run()

        calls()
        return calls

    @staticmethod
    def _graph(run: Run, repeat: int) -> Run:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeat):
                run()
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
        return graph.replay

    @staticmethod
    def _events(run: Run, repeat: int) -> Callable[[], float]:
        def timed() -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e3 / repeat

        return timed


def copy_bandwidth(device: str) -> float:
    """Bytes read plus bytes written a second by a large copy kernel: the ceiling of memory-bound ops, from this run."""
    size = 2**29 if device == "cuda" else 2**26  # elements; a copy_ in a CUDA graph would use the slower copy engine
    a = torch.randn(size, device=device)
    b = torch.empty_like(a)
    run = functools.partial(torch.neg, a, out=b) if device == "cuda" else functools.partial(b.copy_, a)
    return 8 * size / Timer(device).one(run, repeat=3) * 1e6


def environment(device: str) -> dict[str, Any]:
    """What a figure depends on."""
    facts: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "sbnet": sbnet.__version__,
        "python": platform.python_version(),
        "device": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
    }
    if device == "cuda":
        facts["device"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda
        facts["cudnn"] = torch.backends.cudnn.version()
        facts["driver"] = _driver()
    else:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                facts["device"] = line.split(":", 1)[1].strip()
                break
    return facts


def _driver() -> str:
    import subprocess

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]


def save(name: str, device: str, rows: Sequence[dict[str, Any]], extra: dict[str, Any] | None = None) -> Path:
    """Writes results/<name>_<device>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}_{device}.json"
    path.write_text(
        json.dumps({"environment": environment(device), **(extra or {}), "rows": list(rows)}, indent=1) + "\n"
    )
    return path


def random_active(
    size: tuple[int, int, int], grid: sbnet.BlockGrid, count: int, device: str, seed: int = 0
) -> sbnet.ActiveBlocks:
    """ActiveBlocks with exactly `count` random blocks of an [N,H,W] batch."""
    generator = torch.Generator().manual_seed(seed)
    batch, (ch, cw) = size[0], grid.bcount
    chosen = torch.randperm(batch * ch * cw, generator=generator)[:count]
    flags = torch.zeros(batch * ch * cw, dtype=torch.bool)
    flags[chosen] = True
    blocks = sbnet.BlockGrid((1, 1), (1, 1), (0, 0), (ch, cw))
    active = sbnet.reduce_mask(flags.view(batch, ch, cw).to(device), blocks)
    return sbnet.ActiveBlocks(active.indices, active.count, active.total, active.block_map, grid)
