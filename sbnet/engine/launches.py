"""What a CUDA call launches, node by node, beside what each launch takes at least."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function

from sbnet.engine.compiled import Compiled
from sbnet.engine.executor import Executor
from sbnet.engine.profile import kind
from sbnet.graph.cost import multiply_adds
from sbnet.graph.ir import Node, Value

MARK = "sbnet part "
FRAME, LISTS = "frame", "lists"
LARGE, CACHED, SIDE = 2**28, 2**22, 4096  # bytes of copies, rows of the matrices of a product
SHORT_US = 1.0  # a launch that does next to nothing takes about so long in a CUDA graph


class Launches(NamedTuple):
    """One node's part of a call, or that of the frame's copy or of the lists of blocks.

    Attributes:
        path: of the module; empty of frame and lists.
        kind: of the node, "frame" or "lists".
        kernels: names of what is launched, in order.
        us: what they take together, each by itself.
        floor_us: the larger of the bytes of the active part over the rate of a copy and its operations over the rate
            of a product, both measured on this device; at least a short launch.
    """

    path: str
    kind: str
    kernels: tuple[str, ...]
    us: float
    floor_us: float


class Rates(NamedTuple):
    """Bytes a microsecond of a large copy and of one that stays in the cache; operations a microsecond of a product."""

    copy: float
    cached: float
    product: float
    cache: int


def launches(compiled: Compiled, inputs: Sequence[Any], mask: Tensor, margin: int, calls: int) -> list[Launches]:
    """Runs a call outside of its CUDA graph, waiting after every node, `calls` times: medians.

    Raises:
        ValueError: the run is not on CUDA.
    """
    executor = compiled.executor
    if executor.device.type != "cuda":
        raise ValueError(f"sbnet: profile: fused: expected a run on CUDA, got {executor.device}")
    fill = functools.partial(compiled.fill, inputs if compiled.mask is None else [*inputs, mask])
    at = {node: str(k) for k, node in enumerate(executor.nodes)}
    plain, streams, aside = executor.step, executor._streams, executor._aside

    def part(name: str, run: Callable[[], Any]) -> None:
        with record_function(MARK + name):
            run()
        torch.cuda.synchronize(executor.device)

    def marked(node: Node, *args: Any) -> None:
        part(at[node], lambda: plain(node, *args))

    executor.step = marked  # type: ignore[method-assign, assignment]
    executor._streams = executor._aside = None  # launches that run beside others would seem long
    found: dict[str, list[list[tuple[str, float]]]] = {}
    try:
        for turn in range(calls + 1):
            if turn == 0:
                executor(inputs, mask, margin)
                continue
            with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
                part(FRAME, fill)
                executor(inputs, mask, margin)
            for name, kernels in _by_part(trace.events()).items():
                found.setdefault(name, []).append(kernels)
    finally:
        del executor.step
        executor._streams, executor._aside = streams, aside
        executor.forget()
    rates = rates_of(executor.device, next(v.dtype for v in executor.plan.graph.inputs if v is not None))
    shares = [float((a.block_map >= 0).float().mean()) for a in executor.active]
    copied = sum(_size(x) for x, through in zip(inputs, compiled.through, strict=False) if not through)
    rows = [_row("", FRAME, found.get(FRAME, []), _floor(2 * copied, 0, rates))]
    rows.append(_row("", LISTS, found.get(LISTS, []), SHORT_US))
    for node, name in at.items():
        if name in found:
            rows.append(_row(node.path, kind(node), found[name], _floor(*_needs(executor, node, shares), rates)))
    return rows


def _row(path: str, kind: str, runs: list[list[tuple[str, float]]], floor: float) -> Launches:
    if not runs:
        return Launches(path, kind, (), 0.0, 0.0)
    names = tuple(name for name, _ in runs[-1])
    return Launches(path, kind, names, statistics.median(sum(us for _, us in run) for run in runs), floor)


def _by_part(events: Any) -> dict[str, list[tuple[str, float]]]:
    """{part: (kernel, microseconds) of each launch}: those of no part are the lists'."""
    found: dict[str, list[tuple[str, float]]] = {LISTS: []}

    def add(event: Any, name: str) -> None:
        found[name] += [(kernel.name, kernel.duration) for kernel in event.kernels]
        for child in event.cpu_children:
            add(child, name)

    for event in events:
        if event.name.startswith(MARK) and event.device_type == torch.autograd.DeviceType.CPU:
            name = event.name.removeprefix(MARK)
            found[name] = []
            add(event, name)
        elif event.cpu_parent is None and event.device_type == torch.autograd.DeviceType.CPU:
            add(event, LISTS)
    return {name: kernels for name, kernels in found.items() if kernels}


def _needs(executor: Executor, node: Node, shares: Sequence[float]) -> tuple[float, float]:
    """Bytes and operations of the active part of a node."""

    def share(value: Value) -> float:
        if value.size is None or (value.given and value.producer is None):
            return 1.0
        return shares[executor.lists.of(value)]

    written = share(node.outputs[0])
    total = 0.0
    for value in (*node.inputs(), *node.outputs):
        size = value.dtype.itemsize * torch.Size(value.shape).numel()
        total += size * min(written if node.kind in ("conv", "conv_quantized") else 1.0, share(value))
    return total, 2.0 * multiply_adds(node) * written


def _floor(bytes: float, operations: float, rates: Rates) -> float:
    rate = rates.cached if bytes < rates.cache / 2 else rates.copy
    return max(bytes / rate, operations / rates.product, SHORT_US)


def _size(x: Any) -> int:
    return x.numel() * x.element_size() if isinstance(x, Tensor) else 0


@functools.cache
def rates_of(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measured once a process."""

    def least(run: Callable[[], Any]) -> float:
        times = []
        for _ in range(8):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(8):
                run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / 8)
        return min(times)

    def copy(bytes: int) -> float:
        x = torch.randn(bytes // 4, device=device)
        y = torch.empty_like(x)
        return 2 * bytes / least(functools.partial(torch.neg, x, out=y))

    with torch.cuda.device(device), torch.no_grad():
        a, b = (torch.randn(SIDE, SIDE, device=device).to(dtype) for _ in range(2))
        product = 2.0 * SIDE**3 / least(functools.partial(torch.mm, a, b, out=torch.empty_like(a)))
        large = copy(LARGE)
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        return Rates(large, max(large, copy(CACHED)), product, cache)
