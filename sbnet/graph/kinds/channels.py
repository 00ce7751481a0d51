"""What joins and parts channels. Where they can, both only say where something lies (passes/storage.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks, Fringe
from sbnet.geometry import Window
from sbnet.graph.ir import Node, Value
from sbnet.graph.kinds.kind import POINTWISE, Given, Kind
from sbnet.ops import sparse_fill, sparse_pointwise_


class Cat(Kind):
    """Channels of several feature maps."""

    name = "cat"
    planned = recorded = sizeless = True

    def window(self, node: Node, value: Value) -> Window | str:
        return POINTWISE

    def apply(self, node: Node, given: Given) -> Any:
        return sparse_fill(torch.cat(list(given.args), 1), given.active)


class Slice(Cat):
    """start: channels from there on."""

    name = "slice"

    def apply(self, node: Node, given: Given) -> Any:
        start = node.options["start"]
        return given.args[0][:, start : start + node.output.shape[1]]


def copy(x: Tensor, out: Tensor, active: ActiveBlocks, clear: Fringe | None) -> None:
    """out = x on the active blocks: a program without steps."""
    sparse_pointwise_(x, active, "", out=out, fringe=clear)
