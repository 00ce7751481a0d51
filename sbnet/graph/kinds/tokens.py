"""What packs the active tokens of a plane, what runs on them beside the layers of planes, and what unpacks them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.geometry import Window
from sbnet.graph.ir import Node, Value
from sbnet.graph.kinds.kind import ACTIVE, Context, Get, Given, Kind, Target
from sbnet.graph.kinds.pixel import zero
from sbnet.ops import AttentionLayout, block_attention

FULL = AttentionLayout.dense()


def rows_of(x: Tensor) -> Tensor:
    """[N,C,H,W] as [N,rows,C]: a view of what is channels_last."""
    return x.flatten(2).transpose(1, 2)


def planes_of(rows: Tensor, like: Node) -> Tensor:
    """[N,rows,C] as the feature map that a node gives, with zeros behind what is there."""
    n, c, h, w = like.output.shape
    rows = F.pad(rows, (0, 0, 0, h * w - rows.shape[1])) if rows.shape[1] < h * w else rows[:, : h * w]
    return rows.transpose(1, 2).reshape(n, c, h, w)


class TokenKind(Kind):
    """On a CPU rows are copied up to each image's length, elsewhere all of them, as nothing waits for the lengths."""

    written = planned = True

    def window(self, node: Node, value: Value) -> Window | str:
        return ACTIVE

    def step(self, node: Node, get: Get, to: Target, context: Context) -> None:
        values = [context.constants[v] if v.constant else get(v) for v in node.args]
        if to.out.device.type == "cpu":
            out = rows_of(to.out)
            for n, length in enumerate(to.active.lengths.tolist()):
                self.image(node, [v[n if len(v) > 1 else 0] for v in values], out[n], to.active.order[n, :length])
        else:
            to.out.copy_(self.apply(node, Given(values, {}, {}, to.active)))

    def image(self, node: Node, values: list[Tensor], out: Tensor, order: Tensor) -> None:
        """Writes the rows [rows,C] of one image."""
        raise NotImplementedError


def _copied(rows: Tensor, at: Tensor, out: Tensor) -> None:
    """Rows of a [rows,C] tensor at places."""
    if rows.is_contiguous() and out.is_contiguous():
        torch.index_select(rows, 0, at, out=out)
    else:
        out.copy_(rows[at])


class Pack(TokenKind):
    """Active tokens of a feature map, or of a table with a row a token; patch: (height, width) of the pixels that are a
    token, whose numbers follow one another as a convolution's weight has them."""

    name = "pack"

    def image(self, node: Node, values: list[Tensor], out: Tensor, order: Tensor) -> None:
        x, patch = values[0], node.options.get("patch")
        if patch is None:
            _copied(x.flatten(1).t(), order, out[: len(order)])
            return
        columns = x.shape[2] // patch[1]
        blocks = x.unflatten(2, (columns, patch[1])).unflatten(1, (-1, patch[0])).permute(1, 3, 0, 2, 4)
        out[: len(order)] = blocks[order // columns, order % columns].flatten(1)

    def apply(self, node: Node, given: Given) -> Any:
        x, patch = given.args[0], node.options.get("patch")
        if patch is not None:
            x = F.pixel_unshuffle(x, patch[0])
        rows, order = rows_of(x), given.active.order
        rows = rows.expand(len(order), -1, -1)
        return planes_of(rows.gather(1, order[:, :, None].expand(-1, -1, rows.shape[2])), node)


class Prefix(TokenKind):
    """start: rows before the tokens, of args[1] [N or 1,rows,C]; negative: as many rows of args[0] are dropped."""

    name = "prefix"

    def image(self, node: Node, values: list[Tensor], out: Tensor, order: Tensor) -> None:
        x, start = values[0].flatten(1).t(), node.options["start"]
        if start > 0:
            out[:start] = values[1]
            out[start : len(order)] = x[: len(order) - start]
        else:
            out[: len(order)] = x[-start : len(order) - start]

    def apply(self, node: Node, given: Given) -> Any:
        x, start = rows_of(given.args[0]), node.options["start"]
        if start > 0:
            first = given.args[1].to(x.dtype).expand(len(x), -1, -1)
            return planes_of(torch.cat([first, x], 1), node)
        return planes_of(x[:, -start:], node)


class Attention(TokenKind):
    """softmax(scale q k^T) v over the tokens of an image: starts: the first channels of q, k and v in args; heads, dim,
    scale."""

    name = "attention"

    def image(self, node: Node, values: list[Tensor], out: Tensor, order: Tensor) -> None:
        o, length = node.options, len(order)
        heads, dim = o["heads"], o["dim"]

        def part(x: Tensor, start: int) -> Tensor:  # [1,heads,length,dim]
            rows = x.flatten(1).t()[:length, start : start + heads * dim]
            return rows.unflatten(1, (heads, dim)).transpose(0, 1)[None]

        if length:
            q, k, v = (part(x, start) for x, start in zip(values, o["starts"], strict=True))
            y = F.scaled_dot_product_attention(q, k, v, scale=o["scale"])
            out[:length] = y[0].transpose(0, 1).flatten(1)

    def apply(self, node: Node, given: Given) -> Any:
        o, width = node.options, node.options["heads"] * node.options["dim"]
        q, k, v = (rows_of(x)[:, :, start : start + width] for x, start in zip(given.args, o["starts"], strict=True))
        lengths = given.active.lengths
        y = block_attention(q, k, v, FULL, o["scale"], heads=o["heads"], q_lengths=lengths, k_lengths=lengths)
        return planes_of(y, node)  # type: ignore[arg-type]


class Unpack(TokenKind):
    """A feature map of packed tokens, zero where they are not active."""

    name = "unpack"

    def listed(self, node: Node, mode: str) -> Value | None:
        return node.args[0]

    def step(self, node: Node, get: Get, to: Target, context: Context) -> None:
        if to.out.device.type == "cpu":
            x, out = rows_of(get(node.args[0])), rows_of(to.out)
            for n, length in enumerate(to.active.lengths.tolist()):
                out[n].index_copy_(0, to.active.order[n, :length], x[n, :length])
            if to.clear is not None:
                zero(to.out, to.clear)
        else:
            to.out.copy_(self.apply(node, Given([get(node.args[0])], {}, {}, to.active)))

    def apply(self, node: Node, given: Given) -> Any:
        n, c, h, w = node.output.shape
        return _spread(given.args[0], given.active).transpose(1, 2).reshape(n, c, h, w)


def _spread(x: Tensor, active: Any) -> Tensor:
    """[N,tokens,C] of packed ones, zero where they are not active."""
    rows = rows_of(x)
    spread = rows.gather(1, active.rows[:, :, None].expand(-1, -1, rows.shape[2]))
    return torch.where(active.mask[:, :, None], spread, torch.zeros_like(spread))


class Spread(Kind):
    """[N,C,tokens,1] of packed tokens and their prefix, zero where they are not active: for what runs dense."""

    name = "spread"
    planned = dense = True

    def window(self, node: Node, value: Value) -> Window | str:
        return ACTIVE

    def listed(self, node: Node, mode: str) -> Value | None:
        return node.args[0]

    def apply(self, node: Node, given: Given) -> Any:
        return _spread(given.args[0], given.active).transpose(1, 2)[..., None]


class Rows(Spread):
    """start, length: prefix rows, [N,length,C]."""

    name = "rows"

    def apply(self, node: Node, given: Given) -> Any:
        start, length = node.options["start"], node.options["length"]
        return rows_of(given.args[0])[:, start : start + length]


class TokenMean(Spread):
    """[N,C]: the mean of an image's tokens, prefix and active ones; 0 where there are none."""

    name = "token_mean"

    def apply(self, node: Node, given: Given) -> Any:
        rows, lengths = rows_of(given.args[0]), given.active.lengths[:, None]
        there = torch.arange(rows.shape[1], device=rows.device) < lengths
        total = torch.where(there[..., None], rows, torch.zeros_like(rows)).float().sum(1)
        return (total / lengths.clamp(min=1)).to(rows.dtype)
