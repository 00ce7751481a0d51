"""A network planned for inputs of one shape: an executor, and on CUDA one graph of all that a call does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.engine.capture import cuda_graph
from sbnet.engine.executor import Executor, without_grad
from sbnet.engine.inputs import Inputs
from sbnet.graph.constants import Constants
from sbnet.graph.plan import Plan


class Compiled:
    """`__call__(inputs, mask)` gives the flat outputs; the next call overwrites them.

    Args:
        plan, constants: of the network.
        make_mask: (inputs, mask or None) -> mask [N,H,W]: sources of masks.
        allow_tf32: float32 on CUDA may use tf32 tensor cores.
        finish: what else is done to the outputs, in the CUDA graph.
        margin: pixels by which masks are grown.
    """

    def __init__(
        self,
        plan: Plan,
        constants: Constants,
        make_mask: Callable[[Sequence[Any], Tensor | None], Tensor],
        masked_calls: bool,
        allow_tf32: bool = False,
        finish: Callable[[list[Any]], Any] = list,
        margin: int = 0,
    ) -> None:
        self.finish = finish
        self.plan, self.constants, self.make_mask, self.allow_tf32 = plan, constants, make_mask, allow_tf32
        self.executor = Executor(plan, constants, allow_tf32, margin)
        self.graph: torch.cuda.CUDAGraph | None = None
        if constants.device.type != "cuda":
            return
        self.inputs = [None if v is None else static(v, constants.device) for v in plan.graph.inputs]
        n, _, h, w = self.executor.shape
        self.mask = torch.zeros(n, h, w, dtype=torch.bool, device=constants.device) if masked_calls else None
        self.graph, self.outputs = cuda_graph(lambda: self._run(self.inputs, self.mask), constants.device)
        self.fill = Inputs(self.inputs if self.mask is None else [*self.inputs, self.mask], constants.device)
        self.replay = self.graph.replay
        self.active = self.executor.active  # lists that a replay writes
        self.executor.forget()

    def __call__(self, inputs: Sequence[Any], mask: Tensor | None) -> Any:
        executor = self.executor
        executor.inspect()
        executor.refresh()
        if self.graph is None or executor.whole_frame:  # what a graph holds computes the mask's pixels alone
            return self._run(inputs, mask)
        self.fill(inputs if self.mask is None else [*inputs, mask])
        self.replay()
        executor.active = self.active  # a whole frame had lists of its own
        return self.outputs

    @without_grad
    def _run(self, inputs: Sequence[Any], mask: Tensor | None) -> Any:
        return self.finish(self.executor(inputs, self.make_mask(inputs, mask)))


def static(value: Any, device: torch.device) -> Tensor:
    if len(value.shape) != 4:
        return torch.zeros(value.shape, dtype=value.dtype, device=device)
    n, c, h, w = value.shape
    return torch.zeros(n, h, w, c, dtype=value.dtype, device=device).permute(0, 3, 1, 2)
