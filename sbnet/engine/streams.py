"""Launches of one call on several streams of a GPU: branches of its CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from sbnet._library import settle_inputs
from sbnet.graph.ir import Node
from sbnet.graph.kinds import kind_of
from sbnet.graph.passes.lanes import Lanes


class Streams:
    """Runs nodes, each on the stream that `lanes` says.

    Launches of nodes that write memory they are given wait for weights and lists, and release the next one then: those
    behind them need not wait for these.
    """

    def __init__(self, lanes: Lanes, nodes: list[Node], device: torch.device) -> None:
        self._lanes, self._nodes, self._device = lanes, nodes, device
        self._others = [torch.cuda.Stream(device) for _ in range(1, lanes.count)]
        self._awaited = {node for waited in lanes.waits.values() for node in waited}
        self._settling = sum(1 << k for k, node in enumerate(nodes) if kind_of(node).written)

    def __call__(self, step: Callable[[Node], None], aside: torch.cuda.Stream | None, wait: Iterable[Node]) -> None:
        """Runs all nodes. Those of `wait` wait for `aside`; the caller's stream waits for everything."""
        lanes, main = self._lanes, torch.cuda.current_stream(self._device)
        streams, begun = [main, *self._others], main.record_event()
        ended: dict[Node, torch.cuda.Event] = {}
        opened = {0}
        try:
            for node, before in zip(self._nodes, lanes.before, strict=True):
                lane = lanes.of.get(node, 0)
                waits = lanes.waits.get(node, ())
                if lane not in opened and not waits:
                    streams[lane].wait_event(begun)
                opened.add(lane)
                for other in waits:
                    streams[lane].wait_event(ended[other])
                if aside is not None and node in wait:
                    streams[lane].wait_stream(aside)
                settle_inputs(bool(before & self._settling))
                with torch.cuda.stream(streams[lane]):
                    step(node)
                if node in self._awaited:
                    ended[node] = streams[lane].record_event()
        finally:
            settle_inputs(False)
        for stream in [streams[lane] for lane in opened - {0}] + ([] if aside is None else [aside]):
            main.wait_stream(stream)
