"""What the calls of a plan repeat on a CPU, as recordings: lists of blocks, and nodes between tensors that stay."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from sbnet.engine.lists import Lists
from sbnet.engine.recording import Recording
from sbnet.graph.ir import Node


class RecordedLists:
    """The lists of masks of one shape, dtype and margin, in memory that stays.

    Args:
        make: (mask) -> lists, by ops that recordings note.
        mask: [N,H,W], the first.
        margin: pixels by which `make` grows masks.

    Attributes:
        lists: of the last mask.
    """

    def __init__(self, make: Callable[[Tensor], Lists], mask: Tensor, margin: int) -> None:
        self._threads, self._recording, self._margin = torch.get_num_threads(), Recording(), margin
        with torch.inference_mode(False), torch.no_grad():  # later calls write there, in whatever mode
            self._mask = mask.clone(memory_format=torch.contiguous_format)
            with self._recording.noting():
                self.lists = make(self._mask)

    def fits(self, mask: Tensor, margin: int) -> bool:
        same = mask.shape == self._mask.shape and mask.dtype == self._mask.dtype and margin == self._margin
        return same and self._threads == torch.get_num_threads()

    def __call__(self, mask: Tensor) -> Lists:
        self._mask.copy_(mask)
        self._recording()
        return self.lists


class RecordedNodes:
    """Nodes of a plan that ran on lists in memory that stays, in order.

    Args:
        nodes: are run.
        step: runs one.
        lasting: those that read and write memory that stays, by ops that recordings note.
        lists: what they ran on.
        chains: how many nodes before and with one of them may run as one.

    Attributes:
        joined: of the chains, those that do.
    """

    def __init__(
        self, nodes: Iterable[Node], step: Callable[[Node], None], lasting: set[Node], lists: Lists,
        chains: Mapping[Node, int],
    ) -> None:  # fmt: skip
        self._lists, self._threads = lists, torch.get_num_threads()
        self._parts: list[Recording | Node] = []
        self.joined = 0
        for lasts, some in itertools.groupby(nodes, lambda node: node in lasting):
            if not lasts:
                for node in some:
                    step(node)
                    self._parts.append(node)
                continue
            recording = Recording()
            with recording.noting():
                for node in some:
                    step(node)
                    self.joined += node in chains and recording.join(chains[node])
            self._parts.append(recording)

    def fits(self, lists: Lists) -> bool:
        return lists is self._lists and self._threads == torch.get_num_threads()

    def __call__(self, step: Callable[[Node], None]) -> None:
        for part in self._parts:
            if isinstance(part, Recording):
                part()
            else:
                step(part)
