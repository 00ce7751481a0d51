"""Constants of a graph: computed once, and again where a parameter was written since."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.graph.builder import PLANNED_DTYPES
from sbnet.graph.ir import Graph, Value
from sbnet.graph.kinds import kind_of
from sbnet.graph.writes import Writes


class Constants:
    """What the constants of a graph hold.

    Args:
        graph: optimised; nodes are not changed afterwards.
        device, dtype: of feature maps. Weights of planned nodes are made in the dtype of what the node gives, which a
            cast inside the network may have changed; those of quantised ones have dtypes of their own.
        counters: tensors that are written where others are without PyTorch counting it: num_batches_tracked, beside
            the statistics of a training forward.

    Attributes:
        made: how often they were.
    """

    def __init__(self, graph: Graph, device: torch.device, dtype: torch.dtype, counters: Sequence[Tensor] = ()) -> None:
        self.device, self.dtype, self._counters = device, dtype, list(counters)
        self.nodes = graph.constants()
        cast = [n for n in graph.nodes if kind_of(n).casts]
        self.weights = {
            id(v): n.output.dtype if n.output.dtype in PLANNED_DTYPES else dtype
            for n in cast for v in n.params.values() if v.constant
        }  # fmt: skip
        self.wanted = {id(v): v for n in graph.nodes for v in n.inputs() if v.constant}
        self.wanted |= {id(v): v for v in graph.outputs if isinstance(v, Value) and v.constant}
        leaves = {id(v): v for n in [*graph.nodes, *self.nodes] for v in n.inputs() if v.tensor is not None}
        self.owned = [v for v in leaves.values() if v.owner is not None]
        self._values = list(leaves.values())
        self._homes = [_home(*v.owner) for v in self.owned]  # type: ignore[misc]
        self._names = [v.owner[1] for v in self.owned]  # type: ignore[index]
        self._taken = 0
        self._take()
        self.made = 0
        self.held: dict[int, Tensor] = {}
        self._found = [v.tensor for v in self.owned]
        self._written: Any = None
        self.refresh()

    def __getitem__(self, value: Value) -> Tensor:
        return self.held[id(value)]

    def stale(self) -> bool:
        """Was a parameter written, as PyTorch counts, since they were made?"""
        return self._written != self._state()

    def _follow(self) -> None:
        """Takes tensors that their modules have instead of others now."""
        try:
            found = list(map(operator.getitem, self._homes, self._names))
        except KeyError:  # moved: a parametrization, a plain attribute
            found = [getattr(*value.owner) for value in self.owned]  # type: ignore[misc]
        if all(map(operator.is_, found, self._found)):
            return
        self._found = found
        for value, tensor in zip(self.owned, found, strict=True):
            value.tensor = tensor
        self._take()

    def _take(self) -> None:
        self._tensors: list[Tensor] = [value.tensor for value in self._values]  # type: ignore[misc]
        # What is made of tensors whose writes are not counted is made once.
        self._writes = Writes([*self._tensors, *self._counters])
        self._taken += 1

    def _state(self) -> Any:
        """How often parameters were written; where a call is no CUDA graph, which they are and where they lie, too."""
        if self.device.type == "cuda":
            return self._writes()
        self._follow()
        return self._taken, self._writes(), list(map(Tensor.data_ptr, self._tensors))

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes all of them; what a CUDA graph reads keeps its memory."""
        made: dict[int, Any] = {}

        def value(v: Any) -> Any:
            if not isinstance(v, Value):
                return v
            return made[id(v)] if id(v) in made else v.tensor.detach().to(self.device)  # type: ignore[union-attr]

        for node in self.nodes:
            args, kwargs = pytree.tree_map(value, (node.args, node.kwargs))
            found = node.target(*args, **kwargs)
            made[id(node.output)] = found.to(self.device) if isinstance(found, Tensor) else found
        for key, v in self.wanted.items():
            found = value(v)
            unseen = v.tensor is not None and v.tensor.is_inference()  # writes are not counted: read as it is
            if key in self.weights and found.is_floating_point() and not unseen:
                found = found.to(self.weights[key])
                if found.dim() == 4:
                    found = found.contiguous(memory_format=torch.channels_last)
            if key in self.held and self.device.type == "cuda":
                self.held[key].copy_(found)
            else:
                self.held[key] = found
        self._written = self._state()
        self.made += 1


def _home(module: torch.nn.Module, name: str) -> dict[str, Any]:
    """Where a module keeps a tensor: what its __getattr__ searches."""
    return module._parameters if name in module._parameters else module._buffers  # type: ignore[return-value]
