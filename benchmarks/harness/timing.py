"""Clocks and ceilings.

Functions that are compared run in turn in one process, in another order each round. Figures are medians over rounds. On
CUDA a function is captured into one graph as often as takes a millisecond or two: a figure holds no launch gap. Warm:
operands stay in the caches where they fit. Cold: before each call a buffer of twice the cache is overwritten, outside
the time.

A GPU at its power limit takes some 100 ms to find the clock that a load allows. Turns of a few milliseconds are timed
at the clock that the mixture of all sides leads to; with `settle` a side runs alone for so long before each of its
turns, and is timed at its own clock.
"""

from __future__ import annotations

import functools
import mmap
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from sbnet.benchmarks.harness.registry import Side, short
from sbnet.engine.capture import cuda_graph

Run = Callable[[], Any]

TURN_US, MOST_CALLS = 1500, 500  # of a captured function in a round
LONG_US = 200_000  # a round of slow functions on CUDA has fewer calls


class Timer:
    """Times sides of a case on one device.

    Args:
        device: "cpu" or "cuda".
        rounds: in each, every side runs once after the other.
        repeat: calls a round; fewer for slow functions, more in a graph of fast ones.
        eager: on CUDA, without graphs.
        cold: flush the caches before each call.
        settle: seconds that a side runs alone before each turn that is timed (CUDA, warm).
        rest: seconds of nothing before each turn, whose clock is then at its highest (the same).
    """

    def __init__(
        self,
        device: str,
        rounds: int = 9,
        repeat: int = 20,
        eager: bool = False,
        cold: bool = False,
        settle: float = 0.0,
        rest: float = 0.0,
    ):
        self.cuda, self.rounds, self.repeat = device == "cuda", rounds, repeat
        self.eager, self.cold = eager, cold
        self.settle, self.rest = (settle, rest) if self.cuda and not cold else (0.0, 0.0)
        self._flushed = torch.empty(2 * cache_bytes(device) if cold else 0, dtype=torch.uint8, device=device)

    def medians(self, sides: dict[str, Side]) -> dict[str, list[float]]:
        """name -> [median, spread] in microseconds; the spread is half the distance of the quartiles."""
        return {name: _median_and_spread(values) for name, values in self._times(sides).items()}

    def least(self, sides: dict[str, Side]) -> dict[str, float]:
        """name -> the least of all rounds, in microseconds: where others use the machine, too."""
        return {name: min(values) for name, values in self._times(sides).items()}

    def _times(self, sides: dict[str, Side]) -> dict[str, list[float]]:
        prepared = {name: self._prepare(side) for name, side in sides.items()}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(self.rounds):
            for name in _order(list(prepared), turn):
                times[name].append(prepared[name]())
        return times

    def best(self, run: Run) -> float:
        """The least time of all rounds, in microseconds: for what is to be a ceiling."""
        timed = self._prepare(Side(run))
        return min(timed() for _ in range(self.rounds))

    def _prepare(self, side: Side) -> Callable[[], float]:
        side.run()
        if not self.cuda or side.clock == "wall":
            return self._wall(side.run)
        repeat = 1 if self.cold else self.repeat
        if side.clock in ("own", "eager") or self.eager:
            repeat = min(repeat, max(1, round(LONG_US / self._events(side.run, 1)())))
            run: Run = functools.partial(_several, side.run, repeat)
        else:
            run = _graph(side.run, repeat)
            once = self._events(run, repeat)()
            if once * repeat > 2 * LONG_US:
                repeat = max(1, round(LONG_US / once))
                run = _graph(side.run, repeat)
            if not self.cold and once * repeat < TURN_US:
                repeat = min(MOST_CALLS, round(TURN_US / once))
                run = _graph(side.run, repeat)
        run()
        return self._events(run, repeat)

    def _wall(self, run: Run) -> Callable[[], float]:
        start = time.perf_counter()
        run()
        once = time.perf_counter() - start
        repeat = max(1, min(self.repeat, round(0.005 / max(once, 1e-7))))  # rounds of 5 ms at most

        def timed() -> float:
            if not self.cold:
                run()  # evicts what the side before left in the caches, and wakes its own threads
            if self.cuda:
                torch.cuda.synchronize()
            total = 0.0
            for _ in range(repeat if self.cold else 1):
                if self.cold:
                    self._flushed.fill_(1)
                    if self.cuda:
                        torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(1 if self.cold else repeat):
                    run()
                total += time.perf_counter() - start
            return total * 1e6 / repeat

        return timed

    def _events(self, run: Run, calls: int) -> Callable[[], float]:
        turns = max(1, self.repeat // 4) if self.cold else 1

        def timed() -> float:
            settled = time.perf_counter() + self.settle
            while time.perf_counter() < settled:
                run()
                torch.cuda.synchronize()
            time.sleep(self.rest)
            pairs = []
            for _ in range(turns):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                if self.cold:
                    self._flushed.fill_(1)
                start.record()
                run()
                end.record()
                pairs.append((start, end))
            torch.cuda.synchronize()
            return statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e3 / calls

        return timed


def _order(names: list[str], turn: int) -> list[str]:
    """Rotated, forwards and backwards by turns: each comes first as often as the others, none always after the same."""
    at = turn // 2 % max(len(names), 1)
    rotated = names[at:] + names[:at]
    return rotated[::-1] if turn % 2 else rotated


def _several(run: Run, repeat: int) -> None:
    for _ in range(repeat):
        run()


def _graph(run: Run, repeat: int) -> Run:
    device = torch.device("cuda", torch.cuda.current_device())
    graph, _ = cuda_graph(run, device, calls=repeat, grad=torch.is_grad_enabled())
    graph.replay()
    return graph.replay


@torch.no_grad()
def milliseconds(sides: dict[str, Run], rounds: int = 15) -> dict[str, float]:
    """Medians of what ends when it returns; the sides run in turn."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        run()
    for _ in range(rounds):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def page_faults(run: Run) -> int:
    """Pages of memory that the system hands out during a call."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def host_time(call: Callable[[], Any], in_a_row: int) -> float:
    """Microseconds that a call keeps the host: the median of 200, the device idle before so many calls in a row.

    With one in a row it is a call after a wait, which costs a processor that has slept several times as much.
    """
    times = []
    for k in range(200):
        if k % in_a_row == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


@functools.cache
def fault_us() -> float:
    """Microseconds of a page fault: what a walk over fresh memory takes longer than the next, each the least of ten."""
    size, walks = 2**24, [float("inf")] * 2
    for _ in range(10):
        with mmap.mmap(-1, size) as fresh:
            for number in range(2):
                start = time.perf_counter()
                for at in range(0, size, mmap.PAGESIZE):
                    fresh[at] = 1
                walks[number] = min(walks[number], time.perf_counter() - start)
    return max(walks[0] - walks[1], 0.0) * 1e6 * mmap.PAGESIZE / size


def _median_and_spread(values: list[float]) -> list[float]:
    if len(values) < 4:
        return [statistics.median(values), (max(values) - min(values)) / 2]
    low, middle, high = statistics.quantiles(values, n=4)
    return [middle, (high - low) / 2]


def cache_bytes(device: str) -> int:
    """What counts as cache: a GPU's L2; 32 MB on a CPU, whose last level is shared with who knows whom."""
    return torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 2**25


def ceilings(device: str, dtypes: list[torch.dtype], small: bool = False) -> dict[str, Any]:
    """What bounds any kernel, measured in this run: GB/s of a large copy and of one that stays in the cache, TFLOP/s of
    a large matrix product by dtype (of float32 also by products of tf32), microseconds of a launch that does next to
    nothing."""
    cuda = device == "cuda"
    timer = Timer(device, rounds=3 if small else 5, repeat=5)
    large = 2**16 if small else 2**29 if cuda else 2**26
    rate = _copy_rate(timer, device, large)
    side = 64 if small else 8192 if cuda else 1536
    matrix = {}
    for dtype in dtypes:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        product = functools.partial(torch.mm, a, b, out=torch.empty_like(a))
        matrix[short(dtype)] = 2e-6 * side**3 / timer.best(product)
        if cuda and dtype == torch.float32:
            torch.backends.cuda.matmul.allow_tf32 = True
            matrix["tf32"] = 2e-6 * side**3 / timer.best(product)
            torch.backends.cuda.matmul.allow_tf32 = False
    one = torch.zeros(1, device=device)
    return {
        "copy GB/s": rate,
        "cached copy GB/s": max(rate, _copy_rate(timer, device, large if small else 2**22 if cuda else 2**21)),
        "matrix TFLOP/s": matrix,
        "launch us": timer.best(functools.partial(torch.neg, one, out=torch.zeros_like(one))),
        "cache MB": cache_bytes(device) / 1e6,
    }


def _copy_rate(timer: Timer, device: str, size: int) -> float:
    """Bytes read plus bytes written, GB/s, of a copy of `size` float32."""
    a = torch.randn(size, device=device)
    b = torch.empty_like(a)
    # a copy_ in a CUDA graph would use the slower copy engine
    run = functools.partial(torch.neg, a, out=b) if device == "cuda" else functools.partial(b.copy_, a)
    return 8e-3 * size / timer.best(run)


def floor_us(flops: float, bytes: float, dtype: str, limits: dict[str, Any], cold: bool) -> float:
    """The least time: the larger of operations over the matrix rate and bytes over bandwidth, plus a launch."""
    fits = not cold and bytes < limits["cache MB"] * 1e6 / 2
    bandwidth = limits["cached copy GB/s" if fits else "copy GB/s"]
    rate = limits["matrix TFLOP/s"].get(dtype)
    compute = flops / rate / 1e6 if rate else 0.0
    return max(compute, bytes / bandwidth / 1e3) + limits["launch us"]
