"""What networks see of packed tokens where they do not run on them: all of them, a few rows, or their mean."""

from __future__ import annotations

from typing import Any

import torch

from sbnet.geometry import Window
from sbnet.graph.ir import Node, Value
from sbnet.graph.kinds.kind import ACTIVE, Given, Kind
from sbnet.graph.kinds.tokens import all_rows, rows_of, spread


class Spread(Kind):
    """[N,C,tokens,1] of packed tokens and their prefix, zero where they are not active: for what runs dense.
    remembered: of what `Remember` gives."""

    name = "spread"
    planned = dense = True

    def window(self, node: Node, value: Value) -> Window | str:
        return ACTIVE

    def listed(self, node: Node, mode: str) -> Value | None:
        return node.args[0]

    def apply(self, node: Node, given: Given) -> Any:
        every = node.options.get("remembered")
        rows = all_rows(node, 0, given.args[0]) if every else spread(given.args[0], given.active)
        return rows.transpose(1, 2)[..., None]


class Rows(Spread):
    """start, length: rows of a prefix or suffix, as the network counts tokens: [N,length,C]."""

    name = "rows"

    def apply(self, node: Node, given: Given) -> Any:
        start, length, rows = node.options["start"], node.options["length"], rows_of(given.args[0])
        at = given.active.rows[:, start : start + length, None]
        return rows.gather(1, at.expand(-1, -1, rows.shape[2]))


class TokenMean(Spread):
    """[N,C]: the mean of an image's tokens, prefix and active ones; 0 where there are none. remembered: of all."""

    name = "token_mean"

    def apply(self, node: Node, given: Given) -> Any:
        if node.options.get("remembered"):
            rows = all_rows(node, 0, given.args[0])
            return rows.float().mean(1).to(rows.dtype)
        rows, lengths = rows_of(given.args[0]), given.active.lengths[:, None]
        there = torch.arange(rows.shape[1], device=rows.device) < lengths
        total = torch.where(there[..., None], rows, torch.zeros_like(rows)).float().sum(1)
        return (total / lengths.clamp(min=1)).to(rows.dtype)
