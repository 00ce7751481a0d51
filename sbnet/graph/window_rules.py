"""Rules of attention in windows of a plane (Swin): parted, shifted, padded, in whatever way the network writes that.

A value that is such an arrangement of a feature map is traced: the same ops on the pixels' numbers say which pixel each
of its rows is. Layers over channels then run on the feature map itself, and attention reads windows by their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sbnet.graph.axes import Axes, op_name
from sbnet.graph.builder import RULES, Builder, Call, feature_map
from sbnet.graph.ir import Node, Value, computed
from sbnet.graph.pixelwise import PIXELWISE, pixelwise

ATEN = torch.ops.aten
MOVING = {"roll", "constant_pad_nd", "pad"}


def take(x: Tensor, index: Tensor, fill: Tensor | None = None) -> Tensor:
    """Rows [...,C] of a feature map [N,C,H,W] by their numbers from 1 on; 0: `fill` [C], or zeros."""
    rows = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
    first = rows.new_zeros(1, rows.shape[1]) if fill is None else fill.to(rows.dtype)[None]
    return torch.cat([first, rows])[index]


@dataclass
class Traced:
    """Rows of a feature map.

    Attributes:
        root: the feature map.
        pixels: of each number of the value its pixel, from 1 on, of all images; 0: none.
        channels: and its channel.
        fill: what stands where there is none: zeros, or a constant [C].
        undefined: it is anything.
    """

    root: Value
    pixels: Tensor
    channels: Tensor
    fill: Value | None = None
    undefined: bool = False


def plane_root(value: Value) -> tuple[Value, list[tuple[Node, int]]] | None:
    """The feature map of which a value is an arrangement, and what arranges it, from the last op on."""
    chain = []
    while feature_map(value) is not value:
        node = value.producer
        if value.constant or node is None or node.kind != "aten" or value.tokens is not None:
            return None
        if not (node.moves or op_name(node.target) in MOVING or node.target is take):
            return None
        chain.append((node, node.outputs.index(value)))
        value = node.args[0]
        if not isinstance(value, Value):
            return None
    return None if value.tokens is not None or value.given else (value, chain)


def traced(value: Value, call: Call | None = None) -> Traced | None:
    """What a value, or what a call makes of it, shows of a feature map."""
    found = plane_root(value)
    if found is None:
        return None
    root, chain = found
    n, c, h, w = root.shape
    pixels: Any = torch.arange(1, n * h * w + 1, dtype=torch.int32).view(n, 1, h, w).expand(n, c, h, w)
    channels: Any = torch.arange(c, dtype=torch.int32).view(1, c, 1, 1).expand(n, c, h, w)
    result = Traced(root, pixels, channels)
    steps: list[Any] = [(node.target, node.args[1:], node.kwargs, at, node) for node, at in chain[::-1]]
    if call is not None:
        steps.append((call.target, call.args[1:], call.kwargs, 0, None))
    for target, args, kwargs, at, node in steps:
        if op_name(target) in ("constant_pad_nd", "pad") and any(v not in (None, 0, "constant") for v in args[1:]):
            return None
        if target is take:
            assert node is not None
            result.fill, result.undefined = args[1], bool(node.options.get("undefined"))
            args = (args[0].tensor, None)
        pixels, channels = target(pixels, *args, **kwargs), target(channels, *args, **kwargs)
        if node is not None and node.options.get("many"):
            pixels, channels = pixels[at], channels[at]
    result.pixels, result.channels = pixels, channels
    return result


def rows_of(found: Traced) -> Tensor | None:
    """The pixel of each row of what is [...,C] with all channels in order."""
    pixels, c = found.pixels, found.root.shape[1]
    if pixels.shape[-1] != c or not torch.equal(pixels, pixels[..., :1].expand_as(pixels)):
        return None
    numbers = torch.arange(c, dtype=torch.int32)
    return pixels[..., 0] if bool(((found.channels == numbers) | (pixels == 0)).all()) else None


class WindowRules:
    """Tried where attention over all tokens is not met; `attentions` counts those that were recognised."""

    def __init__(self) -> None:
        self.attentions = 0

    def __call__(self, b: Builder, call: Call) -> Any:
        first = call.args[0] if call.args else None
        if not isinstance(call.made, Tensor):
            return None
        if call.name in ("cat", "concat", "concatenate"):
            return self._merged(b, call, list(first))  # type: ignore[arg-type]
        if not isinstance(first, Value) or first.constant:
            return None
        if call.name in ("linear", "layer_norm", *PIXELWISE) and feature_map(first) is None:
            return self._of_rows(b, call, first)
        rearranges = call.name in MOVING or call.name in ("view", "reshape", "flatten", "slice", "permute", "transpose")
        if rearranges and feature_map(first) is None and len(call.made.shape) in (3, 4):
            found = self._back(b, call, first)
            return self._merged(b, call, [first]) if found is None and len(first.shape) == 6 else found
        return None

    def _of_rows(self, b: Builder, call: Call, raw: Value) -> Value | None:
        """A layer over channels, or an op of single numbers, on the feature map itself."""
        found = traced(raw)
        index = None if found is None else rows_of(found)
        if found is None or index is None or call.made.shape[:-1] != index.shape:
            return None
        n, _c, h, w = found.root.shape

        def as_rows(root: Value) -> Value:
            return b.arranged(root, Axes(((("N", n),), (("H", h), ("W", w)), (("C", root.shape[1]),))), call)

        args = [as_rows(found.root)]
        for value in call.args[1:]:
            if isinstance(value, Value) and not value.constant:  # the same rows of another feature map
                other = traced(value) if value.shape == raw.shape else None
                rows = None if other is None else rows_of(other)
                if other is None or rows is None or not torch.equal(rows, index) or other.root.shape[2:] != (h, w):
                    return None
                value = as_rows(other.root)
            args.append(value)
        like = torch.empty(n, h * w, call.made.shape[-1], dtype=call.made.dtype, device="meta")
        own = Call(call.target, call.name, args, call.kwargs, like, call.label, call.path, call.line)
        rule = RULES.get(call.name, pixelwise)
        made = feature_map(rule(b, own))
        if made is None:
            return None
        pads = bool((index == 0).any())
        fill, undefined = None, pads and (found.fill is not None or found.undefined or call.name != "linear")
        if pads and not undefined:
            fill = call.argument("bias")
        return self._taken(b, call, made, index, fill, undefined)

    def _taken(
        self, b: Builder, call: Call, root: Value, index: Tensor, fill: Value | None = None, undefined: bool = False
    ) -> Value:
        numbers = Value(f"{call.label}_rows", tuple(index.shape), index.dtype, tensor=index, constant=True)
        node = Node("aten", [root, numbers, fill], [], target=take, path=call.path, line=call.line, reason="windows")
        node.options["undefined"] = undefined
        value = Value(f"{call.label}_{len(b.nodes)}", (*index.shape, root.shape[1]), root.dtype, producer=node)
        node.outputs.append(value)
        b.nodes.append(node)
        return value

    def _back(self, b: Builder, call: Call, raw: Value) -> Value | None:
        """Windows put together again are the feature map."""
        found = plane_root(raw)
        if found is None:
            return None
        n, c, h, w = found[0].shape
        orders = {"NHWC": (n, h, w, c), "NCHW": (n, c, h, w), "N(HW)C": (n, h * w, c), "NC(HW)": (n, c, h * w)}
        fitting = [order for order, shape in orders.items() if shape == tuple(call.made.shape)]
        shown = traced(raw, call) if fitting else None
        if shown is None:
            return None
        pixels = torch.arange(1, n * h * w + 1, dtype=torch.int32).view(n, 1, h, w).expand(n, c, h, w)
        channels = torch.arange(c, dtype=torch.int32).view(1, c, 1, 1).expand(n, c, h, w)
        for order in fitting:
            plain = [t.permute(0, 2, 3, 1) if order.endswith("C") else t for t in (pixels, channels)]
            if not all(
                torch.equal(s, t.reshape(s.shape)) for s, t in zip((shown.pixels, shown.channels), plain, strict=False)
            ):
                continue
            if order == "NCHW":
                return shown.root
            atoms = {"N": ("N", n), "C": ("C", c), "H": ("H", h), "W": ("W", w)}
            parts = ["N", "HW", "C"] if order == "N(HW)C" else ["N", "C", "HW"] if order == "NC(HW)" else list(order)
            return b.arranged(shown.root, Axes(tuple(tuple(atoms[name] for name in dim) for dim in parts)), call)
        return None

    def _merged(self, b: Builder, call: Call, parts: list[Any]) -> Value | None:
        """Pixels of each square of a plane, side by side in channels (patch merging): [N,H/f,W/f,f*f*C]."""
        if not parts or not all(isinstance(v, Value) and not v.constant for v in parts) or len(call.made.shape) != 4:
            return None
        found = [plane_root(v) for v in parts]
        root = found[0][0] if found[0] is not None else None
        if root is None or any(one is None or one[0] is not root for one in found):
            return None
        n, c, h, w = root.shape
        _, high, wide, deep = call.made.shape
        if not high or h % high or h // high != w // max(wide, 1) or deep != c * (h // high) ** 2 or h == high:
            return None
        shown = [traced(parts[0], call)] if len(parts) == 1 else [traced(v) for v in parts]
        if len(parts) > 1 and call.argument("dim", 0) not in (-1, 3):
            return None
        pixels, channels = (torch.cat([getattr(s, name) for s in shown], -1) for name in ("pixels", "channels"))
        factor = h // high
        first = pixels[0, 0, 0].view(-1, c)[:, 0].long() - 1
        offsets = [(int(p) // w, int(p) % w) for p in first]
        if any(a >= factor or e >= factor for a, e in offsets):
            return None
        numbers = torch.arange(1, n * h * w + 1, dtype=torch.int32).view(n, h, w)
        wanted = torch.stack([numbers[:, a::factor, e::factor] for a, e in offsets], -1).repeat_interleave(c, -1)
        if not torch.equal(pixels, wanted) or not torch.equal(
            channels, torch.arange(c, dtype=torch.int32).repeat(factor**2).expand_as(channels)
        ):
            return None
        made = b.add("merge", call, [root], (n, deep, high, wide), options={"factor": factor, "offsets": offsets})
        atoms = (("N", n), ("H", high), ("W", wide), ("C", deep))
        return b.arranged(made, Axes(tuple((atom,) for atom in atoms)), call)

    def attend(
        self, b: Builder, call: Call, parts: Sequence[Value], at: Sequence[int], scale: float, biases: list[Value]
    ) -> Value | None:
        """Of q, k and v [windows,heads,tokens,dim], or with tokens in another dimension; biases: of the scores'
        shape, or broadcast to it."""
        found = []
        for value, dim in zip(parts, at, strict=True):
            shown = traced(value) if len(value.shape) in (3, 4) else None
            if shown is None or shown.undefined:
                return None
            # [windows,heads,tokens,dim], of which the first two may be one
            pixels, channels = (t.movedim(dim, t.dim() - 2) for t in (shown.pixels, shown.channels))
            if pixels.dim() == 3:
                firsts = channels[:, 0, 0]
                again = (firsts[1:] <= firsts[0]).nonzero()
                heads = int(again[0, 0]) + 1 if len(again) else len(firsts)
                if len(firsts) % heads:
                    return None
                pixels, channels = (t.unflatten(0, (-1, heads)) for t in (pixels, channels))
            index = pixels[:, 0, :, 0]
            there = index > 0
            start = int(channels[there.nonzero()[0, 0], 0, there.nonzero()[0, 1], 0])
            heads, width = pixels.shape[1], pixels.shape[3]
            numbers = torch.arange(start, start + heads * width, dtype=torch.int32).view(1, heads, 1, width)
            if not torch.equal(pixels, index[:, None, :, None].expand_as(pixels)):
                return None
            if not bool(((channels == numbers) | (pixels == 0)).all()):
                return None
            found.append((shown, index, start, heads, width))
        (q, index, _, heads, width), *_ = found
        n, _, h, w = q.root.shape
        if any(not torch.equal(one[1], index) or one[3:] != (heads, width) for one in found) or len(index) % n:
            return None
        windows = len(index) // n
        each = index.view(n, windows, -1) - torch.arange(n, dtype=torch.int32).view(n, 1, 1) * (h * w)
        own = each[0]
        if not torch.equal(torch.where(index.view_as(each) > 0, each, 0), torch.where(own > 0, own, 0).expand_as(each)):
            return None
        if not torch.equal(own[own > 0].sort().values, torch.arange(1, h * w + 1, dtype=torch.int32)):
            return None
        tokens = own.shape[1]
        total, options, tables = None, dict[str, Any](), list[Value]()
        if len(biases) == 1 and not biases[0].constant:
            tables = relative(biases[0], parts[0])
            if math.prod(t.shape[0] for t in tables) != tokens:
                return None
            biases, options["relative"] = [], True
        elif not all(bias.constant for bias in biases):
            return None
        if biases:
            for bias in biases:  # of all windows, of one, or [images,windows,heads,rows,rows]
                lead = bias.shape[1] if len(bias.shape) == 5 else bias.shape[0] if len(bias.shape) == 4 else 1
                fits = (1, windows) if len(bias.shape) == 5 else (1, len(index))
                if lead not in fits or bias.shape[-2:] != (tokens, tokens):
                    return None

            def added(*terms: Tensor) -> Tensor:
                return sum((each_window(t, windows) for t in terms[1:]), each_window(terms[0], windows))

            shape = (windows, heads, tokens, tokens)
            total = computed(f"{call.label}.bias", biases[0], added, *biases, shape=shape)
        params = {}
        for name, (shown, _, start, *_) in zip("kv", found[1:], strict=True):
            if bool((own == 0).any()) and shown.fill is not None:
                params[f"{name}_fill"] = computed(
                    f"{call.label}.{name}", shown.fill, lambda t, a=start: t[a : a + heads * width], shown.fill,
                    shape=(heads * width,),
                )  # fmt: skip
        args = [one[0].root for one in found] + [table_of(f"{call.label}.windows", q.root, own.long())]
        args += [*tables] if total is None else [total]
        options |= {"starts": tuple(one[2] for one in found), "heads": heads, "dim": width, "scale": scale}
        made = b.add("window_attention", call, args, (n, heads * width, h, w), options=options, params=params)
        self.attentions += 1
        rows = self._taken(b, call, made, index, None, bool((own == 0).any()))
        parted = [len(index), tokens, heads, width]
        split = b.move(rows, ATEN.reshape.default, parted, parted, call)
        heads_first = b.move(split, ATEN.permute.default, [0, 2, 1, 3], [len(index), heads, tokens, width], call)
        made_shape = list(call.made.shape)
        return (
            heads_first
            if len(made_shape) == 4
            else b.move(heads_first, ATEN.reshape.default, made_shape, made_shape, call)
        )


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
    """A constant of numbers."""
    made = computed(name, like, lambda: table, shape=table.shape)
    made.dtype = table.dtype
    return made
