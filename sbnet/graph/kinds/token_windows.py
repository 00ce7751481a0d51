"""Attention of packed tokens within windows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.graph.ir import Node
from sbnet.graph.kinds.kind import Context, Get, Given, Target
from sbnet.graph.kinds.tokens import Attention, planes_of, rows_of


class TokenWindows(Attention):
    """softmax(scale q k^T) v over the active tokens of each window: args: q, k, v and which token each row of a window
    is, [windows,rows], from 1 on, as the network counts them. Each window has a row that is always active.
    starts, heads, dim, scale, remembered: as of Attention."""

    name = "token_windows"

    def whole(self, node: Node, device: str) -> str:
        return "" if device != "cuda" else "windows of packed tokens: no kernel on CUDA; PyTorch computes all windows"

    def step(self, node: Node, get: Get, to: Target, context: Context) -> None:
        table = context.constants[node.args[3]]
        given = [get(a) for a in node.args[:3]]
        if to.out.device.type != "cpu":
            to.out.copy_(self.apply(node, Given([*given, table], {}, {}, to.active)))
            return
        out, (q, k, v), active = rows_of(to.out), self.parts(node, given), to.active
        for n in range(len(out)):
            for window in table - 1:
                rows = active.rows[n, window[active.mask[n, window]]]
                keys = window if node.options.get("remembered") else rows
                out[n, rows] = self.attend(node, q[n, rows], k[n, keys], v[n, keys], None)

    def attend(self, node: Node, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """[...,rows,C]."""
        q, k, v = (x.unflatten(-1, (node.options["heads"], -1)).transpose(-3, -2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, mask, scale=node.options["scale"])
        return y.transpose(-3, -2).flatten(-2)

    def apply(self, node: Node, given: Given) -> Any:
        (q, k, v), table, active = self.parts(node, given.args[:3]), given.args[3] - 1, given.active
        every = node.options.get("remembered")

        def as_counted(x: Tensor) -> Tensor:
            made = x.gather(1, active.rows[:, :, None].expand(-1, -1, x.shape[2]))
            return torch.where(active.mask[:, :, None], made, torch.zeros_like(made))

        parts = [as_counted(q), *((k, v) if every else (as_counted(k), as_counted(v)))]
        windows = [x[:, table].flatten(0, 1) for x in parts]
        mask = None if every else active.mask[:, table].flatten(0, 1)[:, None, None]
        made = self.attend(node, *windows, mask).unflatten(0, (len(q), -1)).flatten(1, 2)  # type: ignore[call-arg]
        made = torch.zeros_like(parts[0]).index_copy(1, table.flatten(), made)
        return planes_of(made.gather(1, active.order[:, :, None].expand(-1, -1, made.shape[2])), node)
