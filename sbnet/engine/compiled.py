"""A network planned for inputs of one shape: an executor, and on CUDA a graph of all that a call does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sbnet._library import reading_through
from sbnet.active import ActiveBlocks
from sbnet.engine.capture import cuda_graph
from sbnet.engine.executor import Executor, without_grad
from sbnet.engine.inputs import Inputs
from sbnet.graph.constants import Constants
from sbnet.graph.ir import Value
from sbnet.graph.plan import Plan

MOST_MARGINS = 8  # CUDA graphs of one network, a margin each


@dataclass
class Captured:
    """A call as a CUDA graph, and what each replay writes."""

    graph: torch.cuda.CUDAGraph
    outputs: list[Any]
    active: tuple[ActiveBlocks, ...]


class Compiled:
    """`__call__(inputs, mask, margin)` gives the flat outputs; the next call overwrites them.

    Feature maps are there once, whatever the margins of calls: on CUDA each margin has a graph over the same memory,
    captured when `prepare` is first asked for it.

    Args:
        plan, constants: of the network.
        make_mask: (inputs, mask or None) -> mask [N,H,W]: sources of masks.
        masked_calls: calls are given a mask.
        allow_tf32: float32 on CUDA may use tf32 tensor cores.
    """

    def __init__(
        self,
        plan: Plan,
        constants: Constants,
        make_mask: Callable[[Sequence[Any], Tensor | None], Tensor],
        masked_calls: bool,
        allow_tf32: bool = False,
    ) -> None:
        self.plan, self.constants, self.make_mask, self.allow_tf32 = plan, constants, make_mask, allow_tf32
        self.masked_calls = masked_calls
        self.executor = Executor(plan, constants, allow_tf32)
        self._captured: dict[int, Captured] = {}

    @cached_property
    def inputs(self) -> list[Tensor | None]:
        """Where CUDA graphs read the inputs."""
        return [None if v is None else static(v, self.constants.device) for v in self.plan.graph.inputs]

    @cached_property
    def mask(self) -> Tensor | None:
        """Where CUDA graphs read the mask, if calls have one."""
        n, _, h, w = self.executor.shape
        return torch.zeros(n, h, w, dtype=torch.bool, device=self.constants.device) if self.masked_calls else None

    @cached_property
    def own(self) -> list[Tensor | None]:
        """Inputs and, if calls have one, mask."""
        return self.inputs if self.mask is None else [*self.inputs, self.mask]

    @cached_property
    def addresses(self) -> Tensor:
        """Where CUDA graphs find those of a call that they read where they lie."""
        places = [0 if t is None else t.data_ptr() for t in self.own]
        return torch.tensor(places, dtype=torch.int64, device=self.constants.device)

    @cached_property
    def fill(self) -> Inputs:
        """Copies what a call was given there, or tells where it is."""
        return Inputs(self.own, self.constants.device, self.addresses, self.through)

    @cached_property
    def through(self) -> list[bool]:
        """Which of a call's tensors all launches can read where they lie, found by running it."""
        read = [launches_that_read(self.plan, value) for value in self.plan.graph.inputs]
        if self.mask is None:
            return [False] * len(read)  # what makes the mask reads x
        read.append(1)  # what makes the lists
        self.run(self.inputs, self.mask, 0)  # a first frame is another
        with reading_through(self._said([count > 0 for count in read])) as reads:
            self.run(self.inputs, self.mask, 0)
            return [
                count > 0 and t is not None and reads(t.data_ptr()) == count
                for count, t in zip(read, self.own, strict=True)
            ]

    def _said(self, through: Sequence[bool]) -> dict[int, int]:
        return {
            t.data_ptr(): self.addresses.data_ptr() + k * self.addresses.element_size()
            for k, (t, which) in enumerate(zip(self.own, through, strict=True))
            if which and t is not None
        }

    def prepare(self, margin: int) -> Captured | None:
        """On CUDA, the graph of calls of this margin. Capturing it runs the network a few times on what the
        last call read, at first zeros; of the network's own memory that leaves no trace."""
        if self.constants.device.type != "cuda":
            return None
        found = self._captured.get(margin)
        if found is None:
            while len(self._captured) >= MOST_MARGINS:
                del self._captured[next(iter(self._captured))]
            pool = next((c.graph.pool() for c in self._captured.values()), None)
            executor = self.executor
            goes_on = executor.plan.mode == "cached" and not executor.whole_frame  # with what the frame before left
            held = executor.held() if goes_on else []
            run = lambda: self.run(self.inputs, self.mask, margin)  # noqa: E731
            with reading_through(self._said(self.through)):
                graph, outputs = cuda_graph(run, self.constants.device, pool)
            found = self._captured[margin] = Captured(graph, outputs, executor.active)
            executor.forget()
            if goes_on:
                executor.resume(held)
        return found

    def __call__(self, inputs: Sequence[Any], mask: Tensor | None, margin: int) -> list[Any]:
        executor = self.executor
        executor.inspect()
        captured = self.prepare(margin)
        executor.refresh()
        if captured is None or executor.whole_frame:  # what a graph holds computes the mask's pixels alone
            return self.run(inputs, mask, margin)
        self.fill(inputs if self.mask is None else [*inputs, mask])
        captured.graph.replay()
        executor.active = captured.active  # lists that this graph writes
        return captured.outputs

    @without_grad
    def run(self, inputs: Sequence[Any], mask: Tensor | None, margin: int) -> list[Any]:
        """A call, step by step; may be captured."""
        return self.executor(inputs, self.make_mask(inputs, mask), margin)


def launches_that_read(plan: Plan, value: Value | None) -> int:
    """How many launches read an input, where they alone do: those of convolutions; else 0."""
    if value is None or plan.graph.is_output(value):
        return 0
    convs = [node for node in value.users if node.kind == "conv" and node.inputs().count(value) == 1]
    return len(convs) if all(node.args[0] is value for node in convs) and len(convs) == len(value.users) else 0


def static(value: Any, device: torch.device) -> Tensor:
    if len(value.shape) != 4:
        return torch.zeros(value.shape, dtype=value.dtype, device=device)
    n, c, h, w = value.shape
    return torch.zeros(n, h, w, c, dtype=value.dtype, device=device).permute(0, 3, 1, 2)
