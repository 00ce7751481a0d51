"""CUDA graphs of what a call does."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def uncollected() -> Iterator[None]:
    """Garbage waits: a CUDA graph among it that is destroyed during another's capture invalidates that one."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def cuda_graph(
    run: Callable[[], Any], device: torch.device, pool: Any = None, calls: int = 1, grad: bool = False
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of so many calls of `run`, and what each replay writes. pool: of a graph that no replay of this one
    overlaps. grad: whether autograd records meanwhile."""
    with torch.cuda.device(device), torch.set_grad_enabled(grad):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up outside the capture
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile, such as one that uploads the next frames.
        with uncollected(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            for _ in range(calls):
                out = run()
    return graph, out
