"""Milliseconds of each node of a plan."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.engine.compiled import Compiled
from sbnet.graph.axes import op_name
from sbnet.graph.ir import Node


def kind(node: Node) -> str:
    """What a node is called in tables."""
    return op_name(node.target) if node.kind == "aten" else node.kind


def profile(
    compiled: Compiled, inputs: Sequence[Any], mask: Tensor, margin: int, calls: int
) -> list[tuple[str, str, float]]:
    """(module path, kind, ms) of each node, each timed by itself, also those that a CPU's calls run as a chain: the
    median of `calls`."""
    executor = compiled.executor
    times: dict[Node, list[float]] = {node: [] for node in executor.nodes}
    plain = executor.step
    cuda = executor.device.type == "cuda"

    def now() -> float:
        if cuda:
            torch.cuda.synchronize(executor.device)
        return time.perf_counter()

    def timed(node: Node, *args: Any) -> None:
        begin = now()
        plain(node, *args)
        times[node].append((now() - begin) * 1e3)

    executor.step = timed  # type: ignore[method-assign, assignment]
    try:
        for _ in range(calls + 1):
            executor(inputs, mask, margin)
    finally:
        del executor.step
    return [(node.path, kind(node), statistics.median(found[1:])) for node, found in times.items()]
