"""Rules of attention in windows of a plane (Swin): parted, shifted, padded, in whatever way the network writes that.

A value that is such an arrangement of a feature map is traced: the same ops on the pixels' numbers say which pixel each
of its rows is. Layers over channels then run on the feature map itself, and attention reads windows by their numbers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.geometry import to_pair
from sbnet.graph.axes import Axes, moves
from sbnet.graph.builder import RULES, Builder, Call, feature_map, functional
from sbnet.graph.ir import Node, Value, computed
from sbnet.graph.pixelwise import PIXELWISE, pixelwise
from sbnet.graph.rules import single
from sbnet.graph.token_views import in_order
from sbnet.graph.token_windows import plane_of_tokens
from sbnet.graph.tracing import MOVING, pick, plane_root, rows_of, take, traced

ATEN = torch.ops.aten


def of_a_row(call: Call, raw: Value, fills: list[Value | None]) -> Value | None:
    """What an op over channels makes of one row [C] of constants in each feature map's place (None: zeros)."""
    values = [v for v in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(v, Value)]
    if any(v.constant and len(v.shape) > 1 and call.name not in ("linear", "matmul") for v in values):
        return None  # of unlike rows
    consts = [v for v in values if v.constant]
    given = [v for v in fills if v is not None]
    width, dtype = raw.shape[-1], raw.dtype

    def made(*tensors: Tensor) -> Tensor:
        rest, found = list(tensors[: len(given)]), dict(zip(map(id, consts), tensors[len(given) :], strict=True))
        like = tensors[0]
        rows = [like.new_zeros(1, width) if v is None else rest.pop(0)[None].to(like.dtype) for v in fills]
        args, kwargs = pytree.tree_map(
            lambda v: v if not isinstance(v, Value) else found[id(v)] if v.constant else rows.pop(0),
            (list(call.args), call.kwargs),
        )
        return functional(call.target)(*args, **kwargs)[0]

    if not given and not consts:
        like = Value("row", (width,), dtype, constant=True)
        zeros = computed(f"{call.label}.zeros", like, lambda: torch.zeros(width, dtype=dtype), shape=(width,))
        return computed(f"{call.label}.row", zeros, lambda t: made(t), zeros, shape=(call.made.shape[-1],))
    return computed(f"{call.label}.row", (given + consts)[0], made, *given, *consts, shape=(call.made.shape[-1],))


def pooled(b: Builder, call: Call, raw: Value) -> Any:
    """The largest of each square of pixels, whatever order they are in."""
    made = call.made if isinstance(call.made, Tensor) else call.made[0]
    found = traced(raw)
    if found is None or not made.numel() or (found.undefined and not bool((found.pixels > 0).all())):
        return None
    root, channels, real = found.root, found.channels.long(), found.pixels > 0
    if not bool(real.any()):
        return None
    (n, _, h, w), start = root.shape, int(channels.min())
    c = int(channels.max()) + 1 - start
    channels = channels - start
    factor = math.isqrt(found.pixels.numel() // made.numel())
    if factor < 2 or found.pixels.numel() != made.numel() * factor**2 or h % factor or w % factor:
        return None
    if call.name == "max_pool2d":
        sizes = {to_pair(single(call.argument(name) or call.args[1]), name) for name in ("kernel_size", "stride")}
        plain = [to_pair(single(call.argument(name)), name) for name in ("padding", "dilation")]
        if len(sizes) != 1 or plain != [(0, 0), (1, 1)] or call.argument("ceil_mode"):
            return None
    each, (rows, columns) = found.pixels.long() - 1, (h // factor, w // factor)
    seen = torch.zeros(n * h * w * c, dtype=torch.bool)
    seen[(each * c + channels)[real]] = True
    if not bool(seen.all()) or int(real.sum()) != len(seen):  # each once
        return None
    row, column = each % (h * w) // w, each % w
    spots = ((each // (h * w) * c + channels) * rows + row // factor) * columns + column // factor
    spots = torch.where(real, spots + c, channels)

    def largest(t: Tensor) -> Tensor:
        y = call.target(t.double() if call.name == "max_pool2d" else t, *call.args[1:], **call.kwargs)
        return (y if isinstance(y, Tensor) else y[0]).long()

    index = largest(spots)
    if not torch.equal(index, -largest(-spots)):
        return None
    fill = found.fill
    if c != root.shape[1]:
        root = some_channels(b, call, root, torch.arange(start, start + c))  # type: ignore[assignment]
        fill = None if fill is None else chosen(f"{call.label}.row", fill, torch.arange(start, start + c))
    options = {"kernel_size": (factor, factor), "stride": (factor, factor), "padding": (0, 0), "ceil_mode": False}
    x = b.add("max_pool", call, [root], (n, c, rows, columns), options={**options, "dilation": (1, 1)})
    numbers = Value(f"{call.label}_numbers", tuple(index.shape), index.dtype, tensor=index, constant=True)
    node = Node("aten", [x, numbers, fill], [], target=pick, path=call.path, line=call.line, reason="windows")
    node.outputs.append(Value(f"{call.label}_{len(b.nodes)}", tuple(made.shape), x.dtype, producer=node))
    b.nodes.append(node)
    return node.output if isinstance(call.made, Tensor) else [node.output, b.dense(call)[1]]


def chosen(name: str, value: Value, order: Tensor) -> Value:
    """Numbers of a constant."""
    shape = (len(order), *value.shape[1:])
    return computed(name, value, lambda t: t[order.to(t.device)], value, shape=shape)


def reordered(b: Builder, call: Call, value: Value, order: Tensor) -> Value | None:
    """Channels of what a convolution gives, with what scales them behind it, in another order."""
    node = value.producer
    if node is None or node.kind not in ("conv", "affine") or node.options.get("groups", 1) != 1 or len(node.args) != 1:
        return None
    x = node.args[0] if node.kind == "conv" else reordered(b, call, node.args[0], order)
    if x is None:
        return None
    params = {name: chosen(f"{v.name}.heads", v, order) for name, v in node.params.items()}
    shape = (value.shape[0], len(order), *value.shape[2:])
    return b.add(node.kind, call, [x], shape, options=dict(node.options), params=params)


def some_channels(b: Builder, call: Call, value: Value, numbers: Tensor) -> Value | None:
    """Channels of a feature map: itself, a part of it, or what a convolution gives in that order."""
    n, c, h, w = value.shape
    start, count = int(numbers[0]), len(numbers)
    if not torch.equal(numbers, torch.arange(start, start + count)):
        return reordered(b, call, value, numbers)
    return value if count == c else b.add("slice", call, [value], (n, count, h, w), options={"start": start})


class WindowRules:
    """Tried where attention over all tokens is not met; `attentions` counts those that were recognised.

    spoilt: an op that runs dense reads rows that hold anything: the graph is not the network's.
    """

    def __init__(self) -> None:
        self.attentions, self.spoilt = 0, False

    def __call__(self, b: Builder, call: Call) -> Any:
        first = call.args[0] if call.args else None
        if not isinstance(call.made, Tensor) and call.name != "max":
            return None
        if call.name in ("cat", "concat", "concatenate"):
            return self._merged(b, call, list(first))  # type: ignore[arg-type]
        of_rows = call.name in ("linear", "layer_norm", *PIXELWISE)
        by_weight = call.name == "matmul" and isinstance(call.args[1], Value) and call.args[1].constant
        raw = next((v for v in call.args if isinstance(v, Value) and not v.constant), None)
        if raw is not None and feature_map(raw) is None and (of_rows or by_weight):
            return self._of_rows(b, call, raw)
        if not isinstance(first, Value) or first.constant:
            return None
        if call.name in ("amax", "max", "max_pool2d") and feature_map(first) is None:
            return pooled(b, call, first)
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
            if root.tokens is not None:
                return b.arranged(root, in_order(root, "NTC"), call)
            return b.arranged(root, Axes(((("N", n),), (("H", h), ("W", w)), (("C", root.shape[1]),))), call)

        args, fills, undefined = list[Any](), list[Value | None](), False
        for value in call.args:
            if isinstance(value, Value) and not value.constant:  # the same rows of this feature map or another
                other = found if value is raw else traced(value) if value.shape == raw.shape else None
                rows = None if other is None else rows_of(other)
                if other is None or rows is None or not torch.equal(rows, index) or other.root.shape[2:] != (h, w):
                    return None
                if other.root.tokens != found.root.tokens:
                    return None
                value = as_rows(other.root)
                fills.append(other.fill)
                undefined |= other.undefined
            args.append(value)
        like = torch.empty(n, h * w, call.made.shape[-1], dtype=call.made.dtype, device="meta")
        own = Call(call.target, call.name, args, call.kwargs, like, call.label, call.path, call.line)
        rule = RULES.get(call.name, pixelwise)
        made = feature_map(rule(b, own))
        if made is None:
            return None
        fill = None
        if bool((index == 0).any()) and not undefined:
            fill = of_a_row(call, raw, fills)
            undefined = fill is None
        return self.taken(b, call, made, index, fill, undefined)

    def reads(self, call: Call) -> None:
        """Notes what an op reads that runs dense, and is none that arranges."""
        if call.name not in MOVING and not moves(call.target, call.args, getattr(call.made, "dtype", torch.float32)):
            for value in pytree.tree_leaves((call.args, call.kwargs)):
                self.leaves(value)

    def leaves(self, value: Any) -> None:
        """Notes a value that is read as a whole tensor."""
        if isinstance(value, Value) and not value.constant and feature_map(value) is None:
            found = traced(value)
            self.spoilt |= found is not None and found.undefined and bool((found.pixels == 0).any())

    def taken(
        self, b: Builder, call: Call, root: Value, index: Tensor, fill: Value | None = None, undefined: bool = False
    ) -> Value:
        n, c, h, w = root.shape
        shapes: dict[tuple[int, ...], tuple[Any, ...]] = {
            (n, h, w): ((("H", h),), (("W", w),)), (n, h * w): ((("H", h), ("W", w)),)
        }  # fmt: skip
        pixels = shapes.get(tuple(index.shape))
        as_they_lie = torch.arange(1, n * h * w + 1, dtype=index.dtype)
        if pixels and root.tokens is None and torch.equal(index.flatten(), as_they_lie):
            return b.arranged(root, Axes(((("N", n),), *pixels, (("C", c),))), call)
        numbers = Value(
            f"{call.label}_rows", tuple(index.shape), torch.int64, tensor=index.long().contiguous(), constant=True
        )
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
        n, (h, w), tokens = found[0].shape[0], found[0].shape[2:], found[0].tokens
        if tokens is not None:
            h, w = tokens.size
        c = call.made.numel() // (n * h * w)
        orders = {"NHWC": (n, h, w, c), "NCHW": (n, c, h, w), "N(HW)C": (n, h * w, c), "NC(HW)": (n, c, h * w)}
        fitting = [order for order, shape in orders.items() if shape == tuple(call.made.shape)]
        shown = traced(raw, call) if fitting else None
        if shown is None:
            return None
        whole = torch.arange(1, n * h * w + 1, dtype=torch.int32).view(n, 1, h, w).expand(n, c, h, w)
        if tokens is not None:
            own = torch.arange(n, dtype=torch.int32).view(n, 1, 1, 1) * (tokens.prefix + tokens.suffix)
            whole = whole + own + tokens.prefix
        for order in fitting:
            pixels, channels = (
                t.movedim(-1, 1).reshape(n, c, h, w) if order.endswith("C") else t.reshape(n, c, h, w)
                for t in (shown.pixels, shown.channels)
            )
            numbers = channels[0, :, 0, 0].long()
            if not torch.equal(pixels, whole) or not torch.equal(
                channels, numbers.view(1, c, 1, 1).expand_as(channels)
            ):
                continue
            root = some_channels(b, call, plane_of_tokens(b, call, shown.root) if tokens else shown.root, numbers)
            if root is None or order == "NCHW":
                return root
            atoms = {"N": ("N", n), "C": ("C", c), "H": ("H", h), "W": ("W", w)}
            parts = ["N", "HW", "C"] if order == "N(HW)C" else ["N", "C", "HW"] if order == "NC(HW)" else list(order)
            return b.arranged(root, Axes(tuple(tuple(atoms[name] for name in dim) for dim in parts)), call)
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
