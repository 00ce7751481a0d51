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

from sbnet.graph.axes import REARRANGING, Axes, infer, is_tokens, role
from sbnet.graph.builder import Builder, Call, back, feature_map
from sbnet.graph.dense_attention import WRITTEN, entered, with_active_keys
from sbnet.graph.ir import Node, Ref, Step, Value, computed
from sbnet.graph.token_attention import Attentions, evaluated
from sbnet.graph.token_views import axes_of, channels, expanded, in_order, letters, root_of, tokens_at, with_row
from sbnet.graph.token_windows import windows_with_rows
from sbnet.graph.tokens import Tokens
from sbnet.graph.tracing import rolled
from sbnet.graph.window_attention import WindowAttentions
from sbnet.graph.written_norms import rms_eps

ATEN = torch.ops.aten
EACH = ("rms_norm", "glu", "layer_norm")  # ops that look at each token by itself, where no layer of planes does them
ALIKE = {"new_zeros": 0, "zeros_like": 0, "new_ones": 1, "ones_like": 1}  # of a tensor take its kind alone


class TokenRules(Attentions):
    """Tried before all others; `attentions` counts those over all tokens that were recognised.

    pack: tokens of a plane are packed where the network makes a list of them; else they stay where they are, and only
    windows are met.
    """

    def __init__(self, pack: bool = True) -> None:
        self.pack = pack
        self.attentions, self.windows = 0, WindowAttentions()
        self._spread: dict[int, Value] = {}
        self._shown: dict[int, Value] = {}  # of what was spread, the view of packed tokens
        self._tables: dict[Any, tuple[Value, Value, bool]] = {}  # of turns that were met

    @property
    def met(self) -> int:
        """Attentions that were recognised."""
        return self.attentions + self.windows.attentions

    def __call__(self, b: Builder, call: Call) -> Any:
        found = self._tokens(b, call)
        return self.windows(b, call) if found is None else found

    def _tokens(self, b: Builder, call: Call) -> Any:
        first = call.args[0] if call.args else None
        if call.name in ALIKE and isinstance(call.made, Tensor):
            return self._constant(b, call)
        if call.name in ("cat", "concat", "concatenate"):
            found = self._prefixed(b, call) or with_row(self._add, b, call) or windows_with_rows(self, b, call)
            if found is None and (shift := rolled(call)) is not None:
                found = self.windows(b, shift)
                return b.dense(shift) if found is None else found
            return found
        if call.name == "scaled_dot_product_attention":
            return self._attention(b, call)
        if call.name in ("matmul", "bmm"):
            return self._weighted_sum(b, call)
        if call.name in WRITTEN and (product := WRITTEN[call.name](b, call)) is not None:
            return product
        if call.name in EACH:
            return self._of_each(b, call)
        if call.name in ("add", "sub", "mul", "rsub"):
            found = self._written_norm(b, call) if call.name == "mul" else None
            return self._with_table(b, call) if found is None else found
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

    def _constant(self, b: Builder, call: Call) -> Value:
        made, fill = call.made, ALIKE[call.name]
        node = Node("const", [tuple(made.shape), fill], [], {"dtype": made.dtype}, torch.full, path=call.path)
        value = Value(call.label, tuple(made.shape), made.dtype, producer=node, constant=True)
        node.outputs.append(value)
        return value

    # ---- in

    def _moved(self, b: Builder, call: Call, raw: Value) -> Value | None:
        axes = infer(call.target, call.args, call.kwargs, call.made, axes_of, b.batch or 1)
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
        if (
            not self.pack
            or source is None
            or source.given
            or source.tokens is not None
            or len(joined) != 1
            or len(names) != 3
        ):
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
            if any(v.shape[0] != 1 and not expanded(v) and not (self.fixed and repeats(v)) for v in others):
                return None
            rows = computed(
                f"{call.label}.rows", others[0], lambda *t: torch.cat([v[:1] for v in t], 1), *others,
                shape=(1, start + end, channels),
            )  # fmt: skip
        elif len(others) == 1:
            rows = self.dense(b, others[0], call)
        else:
            others = [self.dense(b, v, call) for v in others]
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
        found = self._packed_table(b, call)
        return self._table(b, call) if found is None and call.name == "add" else found

    def _table(self, b: Builder, call: Call) -> Value | None:
        """A constant with a number a pixel added to a feature map."""
        raws = [v for v in call.args[:2] if isinstance(v, Value)]
        raw = next((v for v in raws if not v.constant and v.shape == tuple(call.made.shape)), None)
        table, x = next((v for v in raws if v.constant), None), feature_map(raw)
        if raw is None or table is None or x is None or x.tokens is not None or x.given or len(raw.shape) not in (3, 4):
            return None
        names = letters(raw)
        shape = (1,) * (len(raw.shape) - len(table.shape)) + tuple(table.shape)
        if table.dtype != x.dtype or shape[1:] != raw.shape[1:] or call.argument("alpha") != 1 or names[0] != "N":
            return None
        order = [names.index(name) for name in "NCHW"] if len(names) == 4 else [0, names.index("C"), names.index("HW")]

        def as_plane(t: Tensor) -> Tensor:
            t = t.reshape(shape).expand(x.shape[0], *shape[1:]).permute(order).reshape(x.shape)
            return t.contiguous(memory_format=torch.channels_last)

        rows = computed(f"{table.name}.plane", table, as_plane, table, shape=x.shape)
        return back(b, call, b.add("table", call, [x, rows], x.shape), raw)

    def _packed_table(self, b: Builder, call: Call) -> Value | None:
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
        if sorted(names) != ["C", "N", "T"]:
            return None
        images = shape[names.index("N")]
        order = [names.index(name) for name in "NCT"]

        def as_plane(t: Tensor) -> Tensor:
            t = t.reshape(shape).permute(order)
            return t.expand(images, root.shape[1], -1)[..., None].contiguous(memory_format=torch.channels_last)

        rows = computed(
            f"{table.name}.rows", table, as_plane, table, shape=(images, root.shape[1], root.tokens.length, 1)
        )
        packed = self._add(b, "pack", call, [rows], root.tokens, root.shape[1])
        beside = b.arranged(packed, raw.axes, call)
        args = tuple(beside if v is table else v for v in call.args)
        return b.read(call.target, args, call.kwargs, call.made, call.label, call.path, call.line)

    # ---- on tokens

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

    def _written_norm(self, b: Builder, call: Call) -> Value | None:
        """x / sqrt(the mean of x x over channels + eps), as networks and exporters write RMSNorm out."""
        for x, other in (call.args[:2], call.args[1::-1]):
            eps = rms_eps(x, other, self._shown, self.fixed)
            if eps is not None:
                args = (x, [x.shape[-1]], None, eps)
                whole = dataclasses.replace(call, target=ATEN.rms_norm.default, name="rms_norm", args=args, kwargs={})
                return self._of_each(b, whole)
        return None

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

    def whole(self, b: Builder, call: Call) -> Call:
        """A call that runs dense, on whole tensors, whose keys are those that are active."""
        return self.spread(b, with_active_keys(b, call))

    def entered(self, b: Builder, call: Call, value: Value) -> Value:
        return entered(b, call, value)

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
                    again.axes = infer(before.target, node.args, node.kwargs, shown, axes_of, b.batch or 1)
                    node.outputs.append(again)
                    self._spread[id(out)], self._shown[id(again)] = again, out
                made = node.outputs[before.outputs.index(value)]
            b.nodes.append(node)
            self._spread[id(value)], self._shown[id(made)] = made, value
        return self._spread[id(value)]


def repeats(value: Value) -> bool:
    """Does a constant that is not written hold the same for each image?"""
    held = evaluated(value)
    return bool((held == held[:1]).all())
