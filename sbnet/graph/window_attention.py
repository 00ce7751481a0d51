"""Rules of attention whose queries and keys are arrangements of feature maps: in windows, or of all pixels of a plane
to those of another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sbnet.graph.axes import op_name
from sbnet.graph.builder import Builder, Call
from sbnet.graph.ir import Node, Value, computed
from sbnet.graph.token_windows import attended_tokens
from sbnet.graph.tracing import Traced, traced
from sbnet.graph.window_rules import WindowRules, chosen, reordered

ATEN = torch.ops.aten


@dataclass
class Scores:
    """How the weights of attention are made of q k^T: scale (q k^T) x scales + biases.

    Attributes:
        scale: a number.
        scales: constants with a number a head.
        biases: of the scores' shape, or broadcast to it.
        normalize: queries and keys are divided by their length, or by this where that is more; 0: they are not.
    """

    scale: float
    scales: Sequence[Value] = ()
    biases: Sequence[Value] = ()
    normalize: float = 0.0


@dataclass
class Part:
    """Heads [windows,heads,rows,width] of a feature map.

    Attributes:
        index: which pixel each row is, [windows,rows], from 1 on; 0: none.
        own: the same of the windows of an image alone, in its own pixels; None: images differ.
        channels: of what is shown, [heads,width].
        start: the first of them in `root`.
    """

    shown: Traced
    root: Value
    index: Tensor
    own: Tensor | None
    channels: Tensor
    start: int

    @classmethod
    def of(cls, value: Value, dim: int) -> Part | None:
        """dim: which dimension of the value is that of rows."""
        shown = traced(value) if len(value.shape) in (3, 4, 5) else None
        if shown is None or shown.undefined:
            return None
        # [windows,heads,rows,width], of which the first two may be one; or [images,heads,windows,rows,width], or with
        # windows before heads
        pixels, channels = (t.movedim(dim, t.dim() - 2) for t in (shown.pixels, shown.channels))
        if pixels.dim() == 5:
            heads_first = _heads_first(pixels)
            pixels, channels = ((t.transpose(1, 2) if heads_first else t).flatten(0, 1) for t in (pixels, channels))
        if pixels.dim() == 3:
            firsts = channels[:, 0, 0]
            again = (firsts[1:] <= firsts[0]).nonzero()
            heads = int(again[0, 0]) + 1 if len(again) else len(firsts)
            if len(firsts) % heads:
                return None
            pixels, channels = (t.unflatten(0, (-1, heads)) for t in (pixels, channels))
        index = pixels[:, 0, :, 0]
        if not torch.equal(pixels, index[:, None, :, None].expand_as(pixels)) or not bool(index.any()):
            return None
        window, row = (int(at) for at in (index > 0).nonzero()[0])
        numbers = channels[window, :, row]
        if not bool(((channels == numbers[None, :, None]) | (pixels == 0)).all()):
            return None
        own = _of_an_image(index, shown.root.shape)
        return cls(shown, shown.root, index, own, numbers.long(), int(numbers[0, 0]))

    @property
    def contiguous(self) -> bool:
        return torch.equal(self.channels.flatten(), self.start + torch.arange(self.channels.numel()))


def _heads_first(pixels: Tensor) -> bool:
    """Of [images,heads,windows,rows,width], not [images,windows,heads,rows,width]: heads show the same pixels."""
    if pixels.shape[1] == 1 and pixels.shape[2] > 1:  # one window, or one head
        return not torch.equal(pixels, pixels[:, :, :1].expand_as(pixels))
    return torch.equal(pixels, pixels[:, :1].expand_as(pixels))


def active_pixels(b: Builder, call: Call, root: Value, made: dict[Any, Node]) -> list[Value]:
    """What ActivePixels gives of a plane, made once for all that ask."""
    key = root.shape[2:], root.tokens
    if not any(node is made.get(key) for node in b.nodes):  # what came to nothing was taken out again
        n, pixels = root.shape[0], root.tokens.length if root.tokens else math.prod(root.shape[2:])
        rows = math.prod(root.tokens.plane[:2]) if root.tokens else pixels
        node = made[key] = Node("active_pixels", [root], [], options={"many": True}, path=call.path, line=call.line)
        listed = ((n, rows), torch.int64), ((n,), torch.int32)
        for at, (shape, dtype) in enumerate((((n, pixels), torch.bool), *listed, *listed)):
            node.outputs.append(Value(f"{call.label}_{len(b.nodes)}_active{at}", shape, dtype, producer=node))
        b.nodes.append(node)
    return made[key].outputs


def _is_whole(part: Part) -> bool:
    own = part.own
    return own is not None and len(own) == 1 and torch.equal(own[0].long(), 1 + torch.arange(own.shape[1]))


def _of_an_image(index: Tensor, shape: Sequence[int]) -> Tensor | None:
    n, _, h, w = shape
    if len(index) % n:
        return None
    each = index.view(n, len(index) // n, -1)
    each = torch.where(each > 0, each - torch.arange(n, dtype=torch.int32).view(n, 1, 1) * (h * w), 0)
    return each[0] if torch.equal(each, each[:1].expand_as(each)) else None


class WindowAttentions(WindowRules):
    """`attentions` counts those that were recognised."""

    def __init__(self) -> None:
        super().__init__()
        self._active: dict[Any, Node] = {}

    def attend(self, b: Builder, call: Call, parts: Sequence[Value], at: Sequence[int], scores: Scores) -> Value | None:
        """Of q, k and v [windows,heads,rows,dim], or with rows in another dimension."""
        q, k, v = (Part.of(value, dim) for value, dim in zip(parts, at, strict=True))
        if q is None or k is None or v is None:
            return None
        heads, width = q.channels.shape
        n, _, h, w = q.root.shape
        if (
            q.own is None
            or k.own is None
            or not torch.equal(k.index, v.index)
            or k.root.shape[2:] != v.root.shape[2:]
            or len(k.own) != len(q.own)
        ):
            return None
        if k.channels.shape != q.channels.shape or len(v.channels) != heads or k.root.shape[0] != n:
            return None
        if not torch.equal(q.own[q.own > 0].sort().values, torch.arange(1, h * w + 1, dtype=torch.int32)):
            return None
        own, same = q.own, torch.equal(q.own, k.own) and k.root.shape[2:] == (h, w)
        extras, options = self._scored(call, q, k, parts[0], scores)
        if options is None or not self._by_heads(b, call, (q, k, v)):
            return None
        if not same:
            keys = table_of(f"{call.label}.keys", k.root, k.own.long())
            extras |= {"key_index": keys, "active_keys": active_pixels(b, call, k.root, self._active)[0]}
        for name, part, at_ in (("row", q, 3), ("key", k, 1)):  # one window of all pixels: as they are packed
            if _is_whole(part) and part.root.tokens is None:
                order, lengths = active_pixels(b, call, part.root, self._active)[at_ : at_ + 2]
                extras |= {f"{name}_order": order, f"{name}_lengths": lengths}
        if any(part.root.tokens is not None for part in (q, k, v)):
            table = table_of(f"{call.label}.windows", q.root, q.own.long())
            found = attended_tokens(b, call, (q, k, v), table, options) if same and not extras else None
            return None if found is None else self._as_shown(b, call, found, q, at[0])
        params, deep = {}, v.channels.shape[1]
        for name, part in (("k", k), ("v", v)):
            if bool((part.index == 0).any()) and part.shown.fill is not None:
                params[f"{name}_fill"] = chosen(f"{call.label}.{name}", part.shown.fill, part.channels.flatten())
        args = [q.root, k.root, v.root, table_of(f"{call.label}.windows", q.root, own.long()), *extras.values()]
        options |= {
            "starts": tuple(part.start for part in (q, k, v)), "heads": heads, "dim": width, "value_dim": deep,
            "extras": tuple(extras),
        }  # fmt: skip
        made = b.add("window_attention", call, args, (n, heads * deep, h, w), options=options, params=params)
        return self._as_shown(b, call, made, q, at[0])

    def _as_shown(self, b: Builder, call: Call, made: Value, q: Part, at: int) -> Value:
        """What attention gave of a feature map, as the queries lie."""
        assert q.own is not None
        self.attentions += 1
        heads, deep = len(q.channels), made.shape[1] // len(q.channels)
        rows, count = self.taken(b, call, made, q.index, None, bool((q.own == 0).any())), q.index.shape[1]
        parted = [len(q.index), count, heads, deep]
        shape = list(call.made.shape)
        if len(shape) == 5:
            before = _heads_first(q.shown.pixels.movedim(at, 3))
            parted = [shape[0], shape[2 if before else 1], count, heads, deep]
            split = b.move(rows, ATEN.reshape.default, parted, parted, call)
            return b.move(split, ATEN.permute.default, [0, 3, 1, 2, 4] if before else [0, 1, 3, 2, 4], shape, call)
        split = b.move(rows, ATEN.reshape.default, parted, parted, call)
        heads_first = b.move(split, ATEN.permute.default, [0, 2, 1, 3], [len(q.index), heads, count, deep], call)
        return heads_first if len(shape) == 4 else b.move(heads_first, ATEN.reshape.default, shape, shape, call)

    def _scored(
        self, call: Call, q: Part, k: Part, heads_of_q: Value, scores: Scores
    ) -> tuple[dict[str, Value], dict[str, Any] | None]:
        """What the scores read besides queries and keys, by name, and options; no options: they are not understood."""
        assert q.own is not None
        assert k.own is not None
        (windows, rows), keys, heads = q.own.shape, k.own.shape[1], len(q.channels)
        options: dict[str, Any] = {"scale": scores.scale}
        extras = dict[str, Value]()
        if scores.normalize:
            options["normalize"] = scores.normalize
        if scores.scales:
            if any(math.prod(t.shape) not in (1, heads) or math.prod(t.shape[-2:]) != 1 for t in scores.scales):
                return {}, None

            def multiplied(*terms: Tensor) -> Tensor:
                ones = terms[0].new_ones(heads, 1, 1)
                return math.prod((t.reshape(-1, 1, 1) for t in terms), start=ones)

            extras["scales"] = computed(
                f"{call.label}.scales", scores.scales[0], multiplied, *scores.scales, shape=(heads, 1, 1)
            )
        biases = list(scores.biases)
        if len(biases) == 1 and not biases[0].constant:
            tables = relative(biases[0], heads_of_q)
            if q.own is not k.own and not torch.equal(q.own, k.own):
                return {}, None
            if math.prod(t.shape[0] for t in tables) != rows or len(tables) != 2:
                return {}, None
            extras |= dict(zip(("row_table", "column_table"), tables, strict=True))
        elif not all(bias.constant for bias in biases):
            return {}, None
        elif biases:
            for bias in biases:  # of all windows, of one, or [images,windows,heads,rows,keys]
                lead = bias.shape[1] if len(bias.shape) == 5 else bias.shape[0] if len(bias.shape) == 4 else 1
                fits = (1, windows) if len(bias.shape) == 5 else (1, len(q.index))
                joined = len(bias.shape) == 3 and bias.shape[0] not in (1, heads)  # heads and images, in one dimension
                if joined or lead not in fits or tuple(bias.shape[-2:]) != (rows, keys):
                    return {}, None

            def added(*terms: Tensor) -> Tensor:
                made = sum((each_window(t, windows) for t in terms[1:]), each_window(terms[0], windows))
                return made.expand(-1, heads, -1, -1).contiguous()  # as the kernel reads it

            shape = (windows, heads, rows, keys)
            extras["bias"] = computed(f"{call.label}.bias", biases[0], added, *biases, shape=shape)
        return extras, options

    def _by_heads(self, b: Builder, call: Call, parts: Sequence[Part]) -> bool:
        """Where the channels of heads do not follow one another, the convolution that makes them gives them so."""
        for root in {id(part.root): part.root for part in parts}.values():
            of_root = [part for part in parts if part.root is root]
            if all(part.contiguous for part in of_root):
                continue
            made = reordered(b, call, root, torch.cat([part.channels.flatten() for part in of_root]))
            if made is None:
                return False
            start = 0
            for part in of_root:
                part.root, part.start = made, start
                start += part.channels.numel()
        return True


def relative(bias: Value, q: Value) -> list[Value]:
    """The tables [rows,rows,dim] and [columns,columns,dim] of a bias q . (table of rows + table of columns), as SAM and
    MViT have it; none of another bias."""

    def before(value: Value, *names: str) -> Node | None:
        node = value.producer
        while node is not None and node.kind == "aten" and op_name(node.target) in names:
            node = node.args[0].producer
        return node

    total = before(bias, "reshape", "view")
    if total is None or op_name(total.target) != "add" or len(total.args) != 2 or total.kwargs:
        return []
    shown, tables = traced(q), list[Value]()
    for term, (equation, last) in zip(total.args, (("bhwc,hkc->bhwk", -1), ("bhwc,wkc->bhwk", -2)), strict=True):
        node = before(term, "unsqueeze", "slice")
        if node is None or op_name(node.target) != "einsum" or node.args[0] != equation or term.shape[last] != 1:
            return []
        given, table = node.args[1]
        seen = traced(given)
        if seen is None or shown is None or not table.constant or seen.root is not shown.root:
            return []
        for ours, theirs in ((seen.pixels, shown.pixels), (seen.channels, shown.channels)):
            if ours.numel() != theirs.numel() or not torch.equal(ours.flatten(), theirs.flatten()):
                return []
        tables.append(table)
    return tables


def each_window(bias: Tensor, windows: int) -> Tensor:
    """A bias as [windows or 1,heads or 1,rows,rows]."""
    bias = bias[0] if bias.dim() == 5 else bias
    return (bias if bias.dim() == 4 else bias.reshape(1, -1, *bias.shape[-2:]))[:windows]


def table_of(name: str, like: Value, table: Tensor) -> Value:
    """A constant of numbers, which lie in order."""
    table = table.contiguous()
    made = computed(name, like, lambda: table, shape=table.shape)
    made.dtype = table.dtype
    return made
