"""Rules of transformers: what packs a plane's tokens, what runs on them, and where they leave.

Between, a value may be any view of packed tokens: heads, or q, k and v side by side. Which channels a view shows is
found by making the same view of their numbers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.graph.axes import REARRANGING, Axes, infer, is_tokens, op_name, role
from sbnet.graph.builder import Builder, Call, feature_map
from sbnet.graph.ir import Node, Ref, Step, Value, computed
from sbnet.graph.tokens import Tokens
from sbnet.graph.turns import constants_of, turns

ATEN = torch.ops.aten
EACH = ("rms_norm", "glu", "layer_norm")  # ops that look at each token by itself, where no layer of planes does them
MOST_STEPS = 64  # ops that turn heads


class TokenRules:
    """Tried before all others; `attentions` counts those that were recognised."""

    def __init__(self) -> None:
        self.attentions = 0
        self._spread: dict[int, Value] = {}
        self._shown: dict[int, Value] = {}  # of what was spread, the view of packed tokens
        self._tables: dict[Any, tuple[Value, Value, bool]] = {}  # of turns that were met

    def __call__(self, b: Builder, call: Call) -> Any:
        first = call.args[0] if call.args else None
        if call.name in ("cat", "concat", "concatenate"):
            return self._prefixed(b, call)
        if call.name == "scaled_dot_product_attention":
            return self._attention(b, call)
        if call.name in ("matmul", "bmm"):
            return self._weighted_sum(b, call)
        if call.name in EACH:
            return self._of_each(b, call)
        if call.name in ("add", "sub", "mul", "rsub"):
            return self._with_table(b, call)
        if call.name in ("type_as", "to") and isinstance(first, Value) and first.dtype == call.made.dtype:
            return first
        if isinstance(first, Value) and isinstance(call.made, Tensor):
            if call.name in ("select", "slice", "narrow") and (found := self._part(b, call, first)) is not None:
                return found
            if call.name == "mean" and tokens_at(first) is not None:
                return self._mean(b, call, first)
            if call.name in REARRANGING:
                return self._moved(b, call, first)
        return None

    # ---- in

    def _moved(self, b: Builder, call: Call, raw: Value) -> Value | None:
        axes = infer(call.target, call.args, call.kwargs, call.made, lambda v: getattr(v, "axes", None), b.batch or 1)
        if axes is None or call.made.dtype != raw.dtype:
            return None
        root = root_of(raw)
        if root is None:
            return self._packed(b, call, raw, axes)
        names = [[name for name, _ in dim] for dim in axes.dims]
        if any(name[0] == "T" and not is_tokens(name) for dim in names for name in dim):
            return self._unpacked(b, call, raw, axes)
        seen = channels(raw, call)
        order = ["".join(role(name) for name in dim) for dim in names]
        if sorted(order) == ["C", "N", "T"]:
            numbers = seen.movedim(order.index("C"), -1).flatten(0, -2)[0]
            if torch.equal(numbers, torch.arange(root.shape[1], dtype=numbers.dtype)):
                return b.arranged(root, in_order(root, "".join(order)), call)
        return None

    def _packed(self, b: Builder, call: Call, raw: Value, axes: Axes) -> Value | None:
        """A feature map whose rows and columns become one dimension: [N,H*W,C] or [N,C,H*W]."""
        source = feature_map(raw)
        names = [[name for name, _ in dim] for dim in axes.dims]
        joined = [k for k, dim in enumerate(names) if dim == ["H", "W"]]
        if source is None or source.given or source.tokens is not None or len(joined) != 1 or len(names) != 3:
            return None
        if sorted(map("".join, names)) not in (["C", "HW", "N"],) or source.plane is None:
            return None
        tokens = Tokens(source.plane)
        n, c = source.shape[:2]
        packed = self._add(b, "pack", call, [source], tokens, c)
        atoms = {"N": ("N", n), "C": ("C", c)}
        dims = tuple((packed.axes.dims[2][0],) if dim == ["H", "W"] else (atoms[dim[0]],) for dim in names)  # type: ignore[union-attr]
        return b.arranged(packed, Axes(dims), call)

    def _add(
        self, b: Builder, kind: str, call: Call, args: list[Value], tokens: Tokens, channels: int, **more: Any
    ) -> Value:
        like = next(v for v in args if not v.constant) if any(not v.constant for v in args) else args[0]
        node = Node(kind, args, [], path=call.path, line=call.line, **more)
        batch = b.batch or 1
        made = Value(
            f"{call.label}_{len(b.nodes)}", (batch, channels, tokens.length, 1), like.dtype,
            tokens.axes(batch, channels), producer=node, tokens=tokens,
        )  # fmt: skip
        node.outputs.append(made)
        b.nodes.append(node)
        return made

    def _prefixed(self, b: Builder, call: Call) -> Value | None:
        """Rows of constants, or of each image, before or behind packed tokens [N,T,C]."""
        parts = call.args[0]
        if not all(isinstance(v, Value) and len(v.shape) == 3 for v in parts) or call.argument("dim", 0) not in (1, -2):
            return None
        at = next((k for k, v in enumerate(parts) if getattr(feature_map(v), "tokens", None) is not None), None)
        if at is None or not isinstance(call.made, Tensor) or len(parts) < 2:
            return None
        packed, others = feature_map(parts[at]), [*parts[:at], *parts[at + 1 :]]
        assert packed is not None
        assert packed.tokens is not None
        if letters(parts[at]) != ["N", "T", "C"] or any(v.dtype != packed.dtype or v.size is not None for v in others):
            return None
        lengths = [v.shape[1] for v in parts]
        start, end, channels = sum(lengths[:at]), sum(lengths[at + 1 :]), packed.shape[1]
        if all(v.constant for v in others):
            if any(v.shape[0] != 1 and not expanded(v) for v in others):
                return None
            rows = computed(
                f"{call.label}.rows", others[0], lambda *t: torch.cat([v[:1] for v in t], 1), *others,
                shape=(1, start + end, channels),
            )  # fmt: skip
        elif len(others) == 1:
            rows = others[0]
        else:
            node = Node("aten", [others, 1], [], target=ATEN.cat.default, path=call.path, line=call.line)
            shape = (call.made.shape[0], start + end, channels)
            rows = Value(f"{call.label}_rows", tuple(shape), packed.dtype, producer=node)
            node.outputs.append(rows)
            b.nodes.append(node)
        tokens = packed.tokens
        tokens = dataclasses.replace(tokens, prefix=tokens.prefix + start, suffix=tokens.suffix + end)
        made = self._add(b, "prefix", call, [packed, rows], tokens, channels, options={"start": start})
        return b.arranged(made, in_order(made, "NTC"), call)

    def _with_table(self, b: Builder, call: Call) -> Value | None:
        """A constant with a row a token, as an embedding of positions, is packed as the tokens are."""
        raws = [v for v in call.args[:2] if isinstance(v, Value)]
        raw = next((v for v in raws if tokens_at(v) is not None and v.shape == tuple(call.made.shape)), None)
        table = next((v for v in raws if v.constant), None)
        if raw is None or table is None or feature_map(raw) is None or table.dtype != raw.dtype:
            return None
        root, at = feature_map(raw), tokens_at(raw)
        shape = (1,) * (len(raw.shape) - len(table.shape)) + tuple(table.shape)
        assert root is not None
        assert root.tokens is not None
        assert at is not None
        assert raw.axes is not None
        if len(shape) != len(raw.shape) or shape[at] != root.tokens.length:
            return None
        names = letters(raw)
        if sorted(names) != ["C", "N", "T"] or shape[names.index("N")] != 1:
            return None
        order = [names.index(name) for name in "NCT"]

        def as_plane(t: Tensor) -> Tensor:
            t = t.reshape(shape).permute(order)
            return t.expand(1, root.shape[1], -1)[..., None].contiguous(memory_format=torch.channels_last)

        rows = computed(f"{table.name}.rows", table, as_plane, table, shape=(1, root.shape[1], root.tokens.length, 1))
        packed = self._add(b, "pack", call, [rows], root.tokens, root.shape[1])
        beside = b.arranged(packed, raw.axes, call)
        args = tuple(beside if v is table else v for v in call.args)
        return b.read(call.target, args, call.kwargs, call.made, call.label, call.path, call.line)

    # ---- on tokens

    def _attention(self, b: Builder, call: Call) -> Value | None:
        """Of heads [N,heads,T,dim] that are views of packed tokens, each of which sees all."""
        if call.argument("is_causal") or call.argument("dropout_p") or call.argument("enable_gqa"):
            return None
        q, k, v = call.args[:3]
        scale = call.argument("scale")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return self._attend(b, call, (q, k, v), (2, 2, 2), float(scale), call.argument("attn_mask"))

    def _weighted_sum(self, b: Builder, call: Call) -> Value | None:
        """softmax(q k^T, scaled, and with a bias) v, written out."""
        weights, v = call.args[:2]
        node = weights.producer if isinstance(weights, Value) else None
        if node is None or node.kind != "aten" or op_name(node.target) != "softmax" or len(weights.shape) != 4:
            return None
        if node.args[1] not in (-1, 3) or weights.dtype != node.args[0].dtype:
            return None
        scores, bias = node.args[0], None
        added = scores.producer
        if added is not None and added.kind == "aten" and op_name(added.target) == "add" and not added.kwargs:
            bias = next((a for a in added.args if isinstance(a, Value) and a.constant), None)
            if bias is None:
                return None
            scores = next(a for a in added.args if a is not bias)
        scores, scale = scaled(scores)
        product = scores.producer
        if product is None or product.kind != "aten" or op_name(product.target) not in ("matmul", "bmm"):
            return None
        (q, first), (k, second) = scaled(product.args[0]), scaled(product.args[1])
        return self._attend(b, call, (q, k, v), (2, 3, 2), scale * first * second, bias)

    def _attend(
        self, b: Builder, call: Call, parts: tuple[Value, ...], at: tuple[int, ...], scale: float, bias: Value | None
    ) -> Value | None:
        """at: which dimension of q, k and v is that of tokens."""
        found = [one for v, k in zip(parts, at, strict=True) if (one := self._heads(b, call, v, k)) is not None]
        if len(found) < 3 or len({one[2:] for one in found}) != 1:
            return None
        args, starts, (heads, dim, tokens) = [one[0] for one in found], tuple(one[1] for one in found), found[0][2:]
        length = tokens.length
        if bias is not None:
            shape = (1,) * (4 - len(bias.shape)) + tuple(bias.shape)
            if not bias.constant or len(shape) > 4:
                return None
            if bias.dtype == torch.bool:
                if not bool(evaluated(bias).all()):
                    return None
            elif shape[0] != 1 or shape[1] not in (1, heads) or shape[2:] != (length, length):
                return None
            else:
                args.append(computed(f"{call.label}.bias", bias, lambda t: t.reshape(shape), bias, shape=shape))
        options = {"starts": starts, "heads": heads, "dim": dim, "scale": scale}
        made = self._add(b, "attention", call, args, tokens, heads * dim, options=options)
        self.attentions += 1
        n = made.shape[0]
        split = b.move(made, ATEN.reshape.default, [n, heads, dim, length], [n, heads, dim, length], call)
        shown = b.move(split, ATEN.permute.default, [0, 1, 3, 2], [n, heads, length, dim], call)
        named = made.axes.dims  # type: ignore[union-attr]
        split.axes = Axes((named[0], (("C0", heads),), (("C1", dim),), named[2]))
        shown.axes = Axes((named[0], (("C0", heads),), named[2], (("C1", dim),)))
        return shown

    def _heads(self, b: Builder, call: Call, value: Value, at: int) -> tuple[Value, int, int, int, Tokens] | None:
        """(packed tokens, first channel, heads, dim, tokens) of what is [N,heads,T,dim], or has T at another place."""
        value = self._shown.get(id(value), value)
        root = root_of(value)
        if root is None:
            return self._turned(b, call, value) if at == 2 else None
        if tokens_at(value) != at or len(value.shape) != 4 or root.tokens is None:
            return None
        seen = channels(value)[0].select(at - 1, 0)  # [heads,dim]
        start = int(seen[0, 0])
        if not torch.equal(seen.flatten(), torch.arange(start, start + seen.numel(), dtype=seen.dtype)):
            return None
        return root, start, seen.shape[0], seen.shape[1], root.tokens

    def _turned(self, b: Builder, call: Call, value: Value) -> tuple[Value, int, int, int, Tokens] | None:
        """Heads turned by tables (rotary embeddings), whatever the ops: what they make of a few vectors says how."""
        shown = self._turned_view(value)
        if shown is None or len(value.shape) != 4 or value.shape != shown.shape:
            return None
        found = self._heads(b, call, shown, 2)
        if found is None:
            return None
        root, start, heads, dim, tokens = found
        key = (dim, tokens, *(id(v) for v in constants_of(value)))
        if key not in self._tables:
            tables = turns(value, self._spread[id(shown)], dim)
            if tables is None:
                return None
            packed = []
            for name, table in (("cos", tables[0]), ("sin", tables[1])):
                like = Value("turn", (1, dim, tokens.length, 1), root.dtype, constant=True)
                plane = table.t()[None, :, :, None].to(root.dtype).contiguous(memory_format=torch.channels_last)
                rows = computed(f"{call.label}.{name}", like, lambda plane=plane: plane, shape=like.shape)
                packed.append(self._add(b, "pack", call, [rows], tokens, dim))
            self._tables[key] = packed[0], packed[1], tables[2]
        cos, sin, halves = self._tables[key]
        options = {"start": start, "heads": heads, "dim": dim, "halves": halves}
        return self._add(b, "rope", call, [root, cos, sin], tokens, heads * dim, options=options), 0, heads, dim, tokens

    def _turned_view(self, value: Value) -> Value | None:
        """The one view of packed tokens, of heads, that a dense computation starts from."""
        seen, found, todo = set[int](), dict[int, Value](), [value]
        while todo:
            one = todo.pop()
            if id(one) in seen or one.constant:
                continue
            seen.add(id(one))
            shown = self._shown.get(id(one))
            if shown is not None and len(shown.shape) == 4 and tokens_at(shown) == 2:
                found[id(shown)] = shown
                continue
            if one.producer is None or one.producer.kind != "aten" or len(seen) > MOST_STEPS:
                return None
            todo += one.producer.inputs()
        return next(iter(found.values())) if len(found) == 1 else None

    def _of_each(self, b: Builder, call: Call) -> Value | None:
        """An op of PyTorch over the channels of each token."""
        raw, root = call.args[0], feature_map(call.args[0])
        if root is None or root.tokens is None or letters(raw) != ["N", "T", "C"] or not isinstance(call.made, Tensor):
            return None
        if call.name == "layer_norm":
            weights = (call.argument("weight"), call.argument("bias"))
            if all(v is None or v.dtype == raw.dtype for v in weights):
                return None
        over = call.argument("normalized_shape", call.argument("dim", -1))
        if over not in ([root.shape[1]], -1, 2) or call.made.dtype != raw.dtype:
            return None
        values = [v for v in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(v, Value)]
        if any(not v.constant for v in values[1:]):
            return None
        args, kwargs = pytree.tree_map(
            lambda v: Ref(next(k for k, w in enumerate(values) if w is v)) if isinstance(v, Value) else v,
            (tuple(call.args), dict(call.kwargs)),
        )
        options = {"steps": [Step(call.target, args, kwargs)]}
        made = self._add(b, "each", call, [root, *values[1:]], root.tokens, call.made.shape[2], options=options)
        return b.arranged(made, in_order(made, "NTC"), call)

    # ---- out

    def _part(self, b: Builder, call: Call, raw: Value) -> Value | None:
        """Prefix rows alone, or all that is behind them."""
        root, at = feature_map(raw), tokens_at(raw)
        if root is None or root.tokens is None or at is None or len(raw.shape) != 3 or raw.axes is None:
            return None
        if int(call.args[1] if len(call.args) > 1 else 0) % 3 != at:
            return None
        total, prefix, suffix = root.tokens.length, root.tokens.prefix, root.tokens.suffix
        if call.name == "select":
            start = int(call.args[2]) % total
            end = start + 1
        else:
            start = int(call.args[2] or 0) if len(call.args) > 2 else 0
            start = start + total if start < 0 else start
            end = start + call.made.shape[at]
            if call.name == "slice" and call.argument("step") != 1:
                return None
        n, c = root.shape[:2]
        if (start, end) == (0, total):
            return raw
        if (start, end) == (prefix, total - suffix):
            tokens = Tokens(root.tokens.size)
            made = self._add(b, "bare", call, [root], tokens, c, options={"start": prefix})
            return b.arranged(made, in_order(made, "".join(letters(raw))), call)
        if not (end <= prefix or start >= total - suffix) or letters(raw) != ["N", "T", "C"]:
            return None
        node = Node("rows", [root], [], path=call.path, line=call.line, options={"start": start, "length": end - start})
        node.outputs.append(Value(f"{call.label}_rows", (n, end - start, c), root.dtype, producer=node))
        b.nodes.append(node)
        if call.name != "select":
            return node.output
        return b.move(node.output, ATEN.reshape.default, [n, c], [n, c], call)

    def _mean(self, b: Builder, call: Call, raw: Value) -> Value | None:
        root, at, dims = feature_map(raw), tokens_at(raw), call.argument("dim")
        gone = [int(k) % len(raw.shape) for k in (dims if isinstance(dims, (list, tuple)) else [dims])] if dims else []
        if root is None or gone != [at] or len(raw.shape) != 3 or call.argument("dtype") is not None:
            return None
        n, c = root.shape[:2]
        node = Node("token_mean", [root], [], path=call.path, line=call.line)
        node.outputs.append(Value(f"{call.label}_mean", (n, c), root.dtype, producer=node))
        b.nodes.append(node)
        shape = list(call.made.shape)
        return node.output if shape == [n, c] else b.move(node.output, ATEN.reshape.default, shape, shape, call)

    def _unpacked(self, b: Builder, call: Call, raw: Value, axes: Axes) -> Value | None:
        """Tokens without a prefix whose dimension is parted into rows and columns are a feature map again."""
        root = feature_map(raw)
        if root is None or root.tokens is None or root.tokens.prefix or root.tokens.suffix or root.axes is None:
            return None
        (h, w), (name, _) = root.tokens.size, root.axes.dims[2][0]
        named = {(name + "0", h): ("H", h), (name + "1", w): ("W", w)}
        if sum(atom in named for dim in axes.dims for atom in dim) != 2:
            return None
        n, c = root.shape[:2]
        made = b.add("unpack", call, [root], (n, c, h, w))
        dims = tuple(tuple(named.get(atom, atom) for atom in dim) for dim in axes.dims)
        whole = {("N", n), ("C", c), ("H", h), ("W", w)}
        if {atom for dim in dims for atom in dim} != whole:
            return None
        return b.arranged(made, Axes(dims), call)

    def spread(self, b: Builder, call: Call) -> Call:
        """A call whose packed tokens lie where the network has them, zero where they are not active; views of packed
        tokens stay views."""
        if call.name in REARRANGING and isinstance(call.args[0], Value) and root_of(call.args[0]) is not None:
            return call
        args, kwargs = pytree.tree_map(
            lambda v: self.dense(b, v, call) if isinstance(v, Value) else v, (call.args, call.kwargs)
        )
        return dataclasses.replace(call, args=args, kwargs=kwargs)

    def dense(self, b: Builder, value: Value, call: Call | None = None) -> Value:
        """A value, or what stands for a view of packed tokens where whole tensors are read."""
        root = root_of(value)
        if root is None:
            return value
        if id(value) not in self._spread:
            path, line = (call.path, call.line) if call is not None else ("", "")
            if value is root:
                node = Node("spread", [root], [], path=path, line=line)
                made = Value(f"{root.name}_spread", root.shape, root.dtype, producer=node)
                tokens = root.tokens
                assert tokens is not None
                if not (tokens.prefix or tokens.suffix):
                    plane = (("H", tokens.size[0]), ("W", tokens.size[1]))
                    made.axes = Axes(((("N", root.shape[0]),), (("C", root.shape[1]),), plane, (("?", 1),)))
                node.outputs.append(made)
            else:
                before = value.producer
                assert before is not None
                source = self.dense(b, before.args[0], call)
                node = Node(
                    "aten", [source, *before.args[1:]], [], before.kwargs, before.target, dict(before.options),
                    path=before.path, line=before.line, reason="arrangement",
                )  # fmt: skip
                for _k, out in enumerate(before.outputs):
                    again = Value(f"{out.name}_spread", out.shape, out.dtype, producer=node)
                    shown = torch.empty(out.shape, device="meta")
                    again.axes = infer(before.target, node.args, node.kwargs, shown, _axes, b.batch or 1)
                    node.outputs.append(again)
                    self._spread[id(out)], self._shown[id(again)] = again, out
                made = node.outputs[before.outputs.index(value)]
            b.nodes.append(node)
            self._spread[id(value)], self._shown[id(made)] = made, value
        return self._spread[id(value)]


def _axes(value: Any) -> Axes | None:
    return value.axes if isinstance(value, Value) else None


def expanded(value: Value) -> bool:
    """Is it one row, or many of the same?"""
    return value.producer is not None and getattr(value.producer.target, "__name__", "").startswith("expand")


def scaled(value: Value) -> tuple[Value, float]:
    """A value, or of one that was scaled by a number that value and the number."""
    node, scale = value.producer, 1.0
    while node is not None and node.kind == "aten" and op_name(node.target) in ("mul", "div") and len(node.args) == 2:
        number = next((a for a in node.args if isinstance(a, (int, float))), None)
        if number is None or not isinstance(node.args[0], Value):
            break
        scale *= number if op_name(node.target) == "mul" else 1 / number
        value, node = node.args[0], node.args[0].producer
    return value, scale


def evaluated(value: Value) -> Any:
    """What a constant is now."""
    if value.tensor is not None:
        return value.tensor
    assert value.producer is not None
    args, kwargs = pytree.tree_map(
        lambda v: evaluated(v) if isinstance(v, Value) else v, (value.producer.args, value.producer.kwargs)
    )
    return value.producer.target(*args, **kwargs)


def letters(value: Value) -> list[str]:
    """The roles of a view's dimensions: N, T, C."""
    return [] if value.axes is None else ["".join(role(name) for name, _ in dim) for dim in value.axes.dims]


def in_order(root: Value, names: str) -> Axes:
    """Axes of a view of packed tokens: "NTC" or "NCT"."""
    assert root.axes is not None
    return Axes(tuple(root.axes.dims["NCT".index(name)] for name in names))


def tokens_at(value: Value) -> int | None:
    """The dimension of packed tokens of a view of them."""
    dims = () if value.axes is None or value.constant else value.axes.dims
    found = [k for k, dim in enumerate(dims) if len(dim) == 1 and is_tokens(dim[0][0])]
    return found[0] if len(found) == 1 else None


def root_of(value: Value) -> Value | None:
    """The packed tokens [N,C,T,1] of which a value is a view."""
    while value.tokens is None:
        node = value.producer
        if value.constant or node is None or node.kind != "aten" or not node.moves or value.dtype != node.args[0].dtype:
            return None
        value = node.args[0]
    return value


def channels(value: Value, call: Call | None = None) -> Tensor:
    """Which channel of the packed tokens each number of a view is; of a call, of what it makes of the view."""
    chain, root = [], value
    while root.tokens is None:
        assert root.producer is not None
        chain.append((root.producer, root.producer.outputs.index(root)))
        root = root.producer.args[0]
    n, c, t, _ = root.shape
    seen: Any = torch.arange(c, dtype=torch.int32).view(1, c, 1, 1).expand(n, c, t, 1)
    for node, at in chain[::-1]:
        seen = node.target(seen, *node.args[1:], **node.kwargs)
        seen = seen[at] if node.options.get("many") else seen
    return seen if call is None else call.target(seen, *call.args[1:], **call.kwargs)
