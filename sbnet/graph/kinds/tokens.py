"""What packs the active tokens of a plane, what runs on them beside the layers of planes, and what unpacks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.geometry import Window
from sbnet.graph.ir import Node, Value
from sbnet.graph.kinds.kind import ACTIVE, Context, Get, Given, Kind, Target
from sbnet.graph.kinds.pointwise import put, run_steps, zero
from sbnet.ops import AttentionLayout, block_attention
from sbnet.ops.attention.attention import block_attention_
from sbnet.ops.common import is_recorded
from sbnet.ops.masked.token_rows import move_rows, move_rows_, pack_patches, pack_patches_

FULL = AttentionLayout.dense()


def rows_of(x: Tensor) -> Tensor:
    """[N,C,H,W] as [N,rows,C]: a view of what is channels_last."""
    return x.flatten(2).transpose(1, 2)


def planes_of(rows: Tensor, like: Node) -> Tensor:
    """[N,rows,C] as the feature map that a node gives, with zeros behind what is there."""
    n, c, h, w = like.output.shape
    rows = F.pad(rows, (0, 0, 0, h * w - rows.shape[1])) if rows.shape[1] < h * w else rows[:, : h * w]
    return rows.transpose(1, 2).reshape(n, c, h, w)


def _beside(rows: Tensor) -> Tensor:
    """Rows whose channels lie beside each other, as kernels read them."""
    return rows if rows.stride(2) == 1 or rows.shape[2] == 1 else rows.contiguous()


def _count(node: Node) -> int:
    """Rows of the plane that a node gives."""
    return node.output.shape[2] * node.output.shape[3]


def _by_ops(*given: Tensor) -> bool:
    """May ops without a gradient do it? They are what export writes down."""
    return not is_recorded(*given) and given[0].dtype in (torch.float32, torch.float16, torch.bfloat16)


class TokenKind(Kind):
    """On a CPU rows are copied up to each image's length. On CUDA, where nothing waits for the lengths, `move` does so
    in one launch; kinds that have none compute all rows."""

    written = planned = True

    def window(self, node: Node, value: Value) -> Window | str:
        return ACTIVE

    def step(self, node: Node, get: Get, to: Target, context: Context) -> None:
        values = [context.constants[v] if v.constant else get(v) for v in node.args]
        if to.out.device.type == "cpu":
            out = rows_of(to.out)
            for n, length in enumerate(to.active.lengths.tolist()):
                self.image(node, [v[n if len(v) > 1 else 0] for v in values], out[n], to.active.order[n, :length])
        elif not self.move(node, values, rows_of(to.out), to.active):
            to.out.copy_(self.apply(node, Given(values, {}, {}, to.active)))

    def image(self, node: Node, values: list[Tensor], out: Tensor, order: Tensor) -> None:
        """Writes the rows [rows,C] of one image."""
        raise NotImplementedError

    def move(self, node: Node, values: list[Tensor], out: Tensor, active: Any) -> bool:
        """Writes the rows [N,rows,C] of all images up to their lengths, if a kernel does."""
        return False


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

    def window(self, node: Node, value: Value) -> Window | str:
        patch = node.options.get("patch")
        return ACTIVE if patch is None else Window.conv(patch, patch)

    def image(self, node: Node, values: list[Tensor], out: Tensor, order: Tensor) -> None:
        x, patch = values[0], node.options.get("patch")
        if patch is None:
            _copied(x.flatten(1).t(), order, out[: len(order)])
            return
        columns = x.shape[2] // patch[1]
        blocks = x.unflatten(2, (columns, patch[1])).unflatten(1, (-1, patch[0])).permute(1, 3, 0, 2, 4)
        out[: len(order)] = blocks[order // columns, order % columns].flatten(1)

    def move(self, node: Node, values: list[Tensor], out: Tensor, active: Any) -> bool:
        x, patch = values[0], node.options.get("patch")
        if x.dtype != out.dtype:
            return False
        if patch is None:
            move_rows_(_beside(rows_of(x)), out, index=active.order, lengths=active.lengths)
        else:
            pack_patches_(x, active.order, active.lengths, patch, out)
        return True

    def apply(self, node: Node, given: Given) -> Any:
        x, patch, blocks = given.args[0], node.options.get("patch"), given.active
        if _by_ops(x):
            order, lengths = blocks.order, blocks.lengths
            if patch is None:
                return planes_of(move_rows(_beside(rows_of(x)), order.shape[1], index=order, lengths=lengths), node)
            return planes_of(pack_patches(x, order, lengths, patch), node)
        if patch is not None:
            x = F.pixel_unshuffle(x, patch[0])
        rows, order = rows_of(x), given.active.order
        rows = rows.expand(len(order), -1, -1)
        return planes_of(rows.gather(1, order[:, :, None].expand(-1, -1, rows.shape[2])), node)


class Prefix(TokenKind):
    """start: rows before the tokens, the first of args[1] [N or 1,rows,C], whose others come behind them."""

    name = "prefix"

    def image(self, node: Node, values: list[Tensor], out: Tensor, order: Tensor) -> None:
        x, rows, start = values[0].flatten(1).t(), values[1], node.options["start"]
        end = len(order) - (len(rows) - start)
        out[:start], out[end : len(order)] = rows[:start], rows[start:]
        out[start:end] = x[: end - start]

    def move(self, node: Node, values: list[Tensor], out: Tensor, active: Any) -> bool:
        x, table = rows_of(values[0]), values[1].to(values[0].dtype)
        if x.dtype == out.dtype:
            move_rows_(_beside(x), out, table=_beside(table), lengths=active.lengths, start=node.options["start"])
        return x.dtype == out.dtype

    def apply(self, node: Node, given: Given) -> Any:
        x, start = rows_of(given.args[0]), node.options["start"]
        if _by_ops(x, given.args[1]):
            table, lengths = _beside(given.args[1].to(x.dtype)), given.active.lengths
            return planes_of(move_rows(_beside(x), _count(node), table=table, lengths=lengths, start=start), node)
        rows = given.args[1].to(x.dtype).expand(len(x), -1, -1)
        made = planes_of(torch.cat([rows[:, :start], x], 1), node)
        if start == rows.shape[1]:
            return made
        end = given.active.lengths.long()[:, None] - (rows.shape[1] - start)
        at = end + torch.arange(rows.shape[1] - start, device=x.device)
        whole = rows_of(made).scatter(1, at[:, :, None].expand(-1, -1, rows.shape[2]), rows[:, start:])
        return planes_of(whole, node)


class Bare(TokenKind):
    """start: that many rows before the tokens are dropped, and all behind them."""

    name = "bare"

    def image(self, node: Node, values: list[Tensor], out: Tensor, order: Tensor) -> None:
        start = node.options["start"]
        out[: len(order)] = values[0].flatten(1).t()[start : start + len(order)]

    def move(self, node: Node, values: list[Tensor], out: Tensor, active: Any) -> bool:
        if values[0].dtype == out.dtype:
            move_rows_(_beside(rows_of(values[0])), out, lengths=active.lengths, start=node.options["start"])
        return values[0].dtype == out.dtype

    def apply(self, node: Node, given: Given) -> Any:
        x, start = rows_of(given.args[0]), node.options["start"]
        if _by_ops(x):
            return planes_of(move_rows(_beside(x), _count(node), lengths=given.active.lengths, start=start), node)
        return planes_of(x[:, start:], node)


class Remember(TokenKind):
    """All tokens of an image, as the network counts them, those that are not active as the frame before left them:
    start: the first channel of what is remembered."""

    name = "remember"

    def image(self, node: Node, values: list[Tensor], out: Tensor, order: Tensor) -> None:
        start = node.options["start"]
        out.index_copy_(0, order, values[0].flatten(1).t()[: len(order), start : start + out.shape[1]])

    def move(self, node: Node, values: list[Tensor], out: Tensor, active: Any) -> bool:
        start, there = node.options["start"], active.mask.shape[1]
        x = rows_of(values[0])[:, :, start : start + out.shape[2]]
        move_rows_(_beside(x), out[:, :there], index=active.rows, mask=active.mask, keep=True)
        return True

    def pixels(self, value: Value, active: Any) -> Tensor:
        n, _, h, w = value.shape
        return F.pad(active.mask, (0, h * w - active.mask.shape[1])).view(n, 1, h, w)

    def apply(self, node: Node, given: Given) -> Any:
        start = node.options["start"]
        x = given.args[0][:, start : start + node.output.shape[1]]
        return planes_of(spread(x, given.active), node)


def all_rows(node: Node, at: int, x: Tensor) -> Tensor:
    """[N,tokens,C] of what `Remember` gives, arg `at` of a node."""
    return rows_of(x)[:, : node.args[at].tokens.length]


class Attention(TokenKind):
    """softmax(scale q k^T + bias) v over the tokens of an image: starts: the first channels of q, k and v in args;
    heads, dim, scale. The bias, in args too: [1,heads or 1,tokens,tokens], as the network counts tokens. remembered: k
    and v are what `Remember` gives, of all tokens, else packed as q is."""

    name = "attention"

    def whole(self, node: Node, device: str) -> str:
        if device != "cuda" or (len(node.args) == 3 and _is_taken(node.options["dim"])):
            return ""
        what = "a bias" if len(node.args) > 3 else f"heads of {node.options['dim']} channels"
        return f"{what}: no kernel on CUDA; PyTorch computes attention of all rows"

    def image(self, node: Node, values: list[Tensor], out: Tensor, order: Tensor) -> None:
        o, length = node.options, len(order)
        width = o["heads"] * o["dim"]
        if not length:
            return
        keys = node.args[1].tokens.length if o.get("remembered") else length
        q, k, v = (
            x.flatten(1).t()[None, :rows, start : start + width]
            for x, start, rows in zip(values[:3], o["starts"], (length, keys, keys), strict=True)
        )
        if len(values) == 3 and _is_taken(o["dim"]):
            out[:length] = block_attention(q, k, v, FULL, o["scale"], heads=o["heads"])[0]
            return
        bias = None
        if len(values) > 3:
            bias = values[3][:, order]
            bias = (bias if o.get("remembered") else bias[:, :, order])[None].to(q.dtype)
        q, k, v = (x.unflatten(2, (o["heads"], -1)).transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, bias, scale=o["scale"])
        out[:length] = y[0].transpose(0, 1).flatten(1)

    def step(self, node: Node, get: Get, to: Target, context: Context) -> None:
        o = node.options
        if to.out.device.type == "cpu" or len(node.args) > 3 or not _is_taken(o["dim"]):
            super().step(node, get, to, context)
            return
        q, k, v = self.parts(node, [get(a) for a in node.args])
        block_attention_(q, k, v, FULL, o["scale"], self.lengths(node, to.active), o["heads"], rows_of(to.out))

    def apply(self, node: Node, given: Given) -> Any:
        o = node.options
        q, k, v = self.parts(node, given.args[:3])
        if len(given.args) > 3 or not _is_taken(o["dim"]):
            bias = given.args[3] if len(given.args) > 3 else None
            return planes_of(_biased(q, k, v, bias, given.active, o), node)
        some, every = self.lengths(node, given.active)
        y = block_attention(q, k, v, FULL, o["scale"], heads=o["heads"], q_lengths=some, k_lengths=every)
        return planes_of(y, node)  # type: ignore[arg-type]

    def parts(self, node: Node, given: Sequence[Tensor]) -> list[Tensor]:
        """q, k and v, [N,rows,heads * dim]."""
        o, width = node.options, node.options["heads"] * node.options["dim"]
        rows = [all_rows(node, at, x) if at and o.get("remembered") else rows_of(x) for at, x in enumerate(given[:3])]
        return [x[:, :, start : start + width] for x, start in zip(rows, o["starts"], strict=True)]

    def lengths(self, node: Node, active: Any) -> tuple[Tensor, Tensor | None]:
        """Of queries and, unless all are there, of keys."""
        return active.lengths, None if node.options.get("remembered") else active.lengths


def _is_taken(dim: int) -> bool:
    """Does `block_attention` take heads of so many channels?"""
    return 16 <= dim <= 256 and dim % 8 == 0


def _biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, active: Any, options: dict[str, Any]) -> Tensor:
    """By PyTorch's attention of all rows, whose keys are those that are there."""
    order, heads, every = active.order, options["heads"], options.get("remembered")
    if bias is None:
        packed = q.new_zeros(order.shape[0], 1, order.shape[1], k.shape[1])
    else:
        packed = torch.stack([bias[0][:, at] if every else bias[0][:, at][:, :, at] for at in order])
    there = torch.arange(order.shape[1], device=order.device) < active.lengths[:, None]
    packed = (packed if every else packed.masked_fill(~there[:, None, None], -torch.inf)).to(q.dtype)
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, packed, scale=options["scale"])
    return torch.where(there[:, :, None], y.transpose(1, 2).flatten(2), 0)


class Rope(TokenKind):
    """x * args[1] + turned x * args[2], within heads of `dim`: start, heads, dim; halves: pairs are half a head apart,
    else neighbours. The tables [N,dim,tokens] are packed."""

    name = "rope"

    def turned(self, node: Node, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Of rows [...,rows,C], by tables [...,rows,dim]."""
        o = node.options
        x = x[..., o["start"] : o["start"] + o["heads"] * o["dim"]].unflatten(-1, (o["heads"], o["dim"]))
        turned = x.roll(o["dim"] // 2, -1) if o["halves"] else x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return torch.addcmul(x * a.unsqueeze(-2), turned, b.unsqueeze(-2)).flatten(-2)

    def image(self, node: Node, values: list[Tensor], out: Tensor, order: Tensor) -> None:
        out[: len(order)] = self.turned(node, *(v.flatten(1).t()[: len(order)] for v in values))

    def apply(self, node: Node, given: Given) -> Any:
        return planes_of(self.turned(node, *map(rows_of, given.args)), node)


class Each(TokenKind):
    """steps: ops of PyTorch that look at each token [...,rows,C] by itself, one after another (Step)."""

    name = "each"

    def step(self, node: Node, get: Get, to: Target, context: Context) -> None:
        first, *others = [context.constants[v] if v.constant else get(v) for v in node.args]
        if to.out.device.type != "cpu":
            to.out.copy_(self.apply(node, Given([first, *others], {}, {}, to.active)))
            return
        x, out = rows_of(first), rows_of(to.out)
        for n, length in enumerate(to.active.lengths.tolist()):
            out[n, :length] = run_steps(node.options["steps"], [x[n, :length], *others])

    def apply(self, node: Node, given: Given) -> Any:
        return planes_of(run_steps(node.options["steps"], [rows_of(given.args[0]), *given.args[1:]]), node)


class Beside(TokenKind):
    """Channels of each token beside those of a row of its image, args[1] [N,1,C]; first: the row's come first."""

    name = "beside"

    def joined(self, node: Node, x: Tensor, row: Tensor) -> Tensor:
        """Of [...,rows,C] and [...,1,C]."""
        parts = [x, row.to(x.dtype).expand(*x.shape[:-1], -1)]
        return torch.cat(parts[::-1] if node.options["first"] else parts, -1)

    def image(self, node: Node, values: list[Tensor], out: Tensor, order: Tensor) -> None:
        out[: len(order)] = self.joined(node, values[0].flatten(1).t()[: len(order)], values[1])

    def apply(self, node: Node, given: Given) -> Any:
        return planes_of(self.joined(node, rows_of(given.args[0]), given.args[1]), node)


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
            return
        x, out = _beside(rows_of(get(node.args[0]))), rows_of(to.out)
        if x.dtype == out.dtype and out.stride(2) == 1:
            move_rows_(x, out, index=to.active.rows, mask=to.active.mask, keep=context.keep)
        else:
            made = self.apply(node, Given([get(node.args[0])], {}, {}, to.active))
            put(made, to, to.active.mask.view(-1, 1, *made.shape[2:]), context)

    def apply(self, node: Node, given: Given) -> Any:
        n, c, h, w = node.output.shape
        return spread(given.args[0], given.active).transpose(1, 2).reshape(n, c, h, w)


def spread(x: Tensor, active: Any) -> Tensor:
    """[N,tokens,C] of packed ones, zero where they are not active."""
    rows = rows_of(x)
    if _by_ops(x):
        return move_rows(_beside(rows), active.rows.shape[1], index=active.rows, mask=active.mask)
    made = rows.gather(1, active.rows[:, :, None].expand(-1, -1, rows.shape[2]))
    return torch.where(active.mask[:, :, None], made, torch.zeros_like(made))
