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

from sbnet.graph.axes import REARRANGING, Axes, infer, is_tokens
from sbnet.graph.builder import Builder, Call, feature_map
from sbnet.graph.ir import Node, Value, computed
from sbnet.graph.tokens import Tokens

ATEN = torch.ops.aten


class TokenRules:
    """Tried before all others; `attentions` counts those that were recognised."""

    def __init__(self) -> None:
        self.attentions = 0
        self._spread: dict[int, Value] = {}

    def __call__(self, b: Builder, call: Call) -> Any:
        first = call.args[0] if call.args else None
        if call.name in ("cat", "concat", "concatenate"):
            return self._prefixed(b, call)
        if call.name == "scaled_dot_product_attention":
            return self._attention(b, call)
        if call.name in ("add", "sub", "mul", "rsub"):
            return self._with_table(b, call)
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
        if sorted("".join(n[0] for n in dim) for dim in names) == ["C", "N", "T"]:
            at = next(k for k, dim in enumerate(names) if dim[0] == "C")
            numbers = seen.movedim(at, -1).flatten(0, -2)[0]
            if torch.equal(numbers, torch.arange(root.shape[1], dtype=numbers.dtype)):
                return b.arranged(root, self._axes(root, axes), call)
        return None

    def _axes(self, root: Value, axes: Axes) -> Axes:
        """Those of a view of all channels, by the root's atoms."""
        n, c, token = (dim[0] for dim in root.axes.dims[:3])  # type: ignore[union-attr]
        atoms = {"N": n, "C": c, "T": token}
        return Axes(tuple((atoms[dim[0][0][0]],) for dim in axes.dims))

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
        """Rows of constants, or of each image, before packed tokens [N,T,C]."""
        parts = call.args[0]
        if not all(isinstance(v, Value) for v in parts) or not isinstance(call.made, Tensor):
            return None
        packed = feature_map(parts[-1])
        if packed is None or packed.tokens is None or parts[-1].axes is None or call.argument("dim", 0) not in (1, -2):
            return None
        first, rank = list(parts[:-1]), [len(v.shape) for v in parts]
        if set(rank) != {3} or [dim[0][0][0] for dim in parts[-1].axes.dims] != ["N", "T", "C"] or not first:
            return None
        if any(v.dtype != packed.dtype or (v.axes is not None and v.axes.size is not None) for v in first):
            return None
        count = sum(v.shape[1] for v in first)
        if all(v.constant for v in first):
            rows = computed(
                f"{call.label}.rows", first[0], lambda *t: torch.cat([v[:1] for v in t], 1), *first,
                shape=(1, count, packed.shape[1]),
            )  # fmt: skip
            if any(v.shape[0] != 1 and not expanded(v) for v in first):
                return None
        elif len(first) == 1:
            rows = first[0]
        else:
            return None
        tokens = dataclasses.replace(packed.tokens, prefix=packed.tokens.prefix + count)
        made = self._add(b, "prefix", call, [packed, rows], tokens, packed.shape[1], options={"start": count})
        n, c, token = (dim[0] for dim in made.axes.dims[:3])  # type: ignore[union-attr]
        return b.arranged(made, Axes(((n,), (token,), (c,))), call)

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
        where = {dim[0][0][0]: k for k, dim in enumerate(raw.axes.dims)}
        if len(raw.shape) != 3 or set(where) != {"N", "T", "C"} or shape[where["N"]] != 1:
            return None
        order = [where["N"], where["C"], where["T"]]

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
        q, k, v = call.args[:3]
        plain = call.argument("attn_mask") is None and not call.argument("is_causal") and not call.argument("dropout_p")
        if not plain or call.argument("enable_gqa"):
            return None
        starts, roots = [], []
        for value in (q, k, v):
            root = root_of(value)
            if root is None or tokens_at(value) != 2 or len(value.shape) != 4 or value.shape != q.shape:
                return None
            seen = channels(value)[0, :, 0]  # [heads,dim]
            start = int(seen[0, 0])
            if not torch.equal(seen.flatten(), torch.arange(start, start + seen.numel(), dtype=seen.dtype)):
                return None
            starts.append(start)
            roots.append(root)
        if len({root.tokens for root in roots}) != 1:
            return None
        n, heads, length, dim = q.shape
        scale = call.argument("scale")
        options = {"starts": tuple(starts), "heads": heads, "dim": dim, "scale": dim**-0.5 if scale is None else scale}
        made = self._add(b, "attention", call, roots, roots[0].tokens, heads * dim, options=options)  # type: ignore[arg-type]
        self.attentions += 1
        split = b.move(made, ATEN.reshape.default, [n, heads, dim, length], [n, heads, dim, length], call)
        shown = b.move(split, ATEN.permute.default, [0, 1, 3, 2], [n, heads, length, dim], call)
        named = made.axes.dims  # type: ignore[union-attr]
        split.axes = Axes((named[0], (("C0", heads),), (("C1", dim),), named[2]))
        shown.axes = Axes((named[0], (("C0", heads),), named[2], (("C1", dim),)))
        return shown

    # ---- out

    def _part(self, b: Builder, call: Call, raw: Value) -> Value | None:
        """Prefix rows alone, or all that is behind them."""
        root, at = feature_map(raw), tokens_at(raw)
        if root is None or root.tokens is None or at is None or len(raw.shape) != 3 or raw.axes is None:
            return None
        if int(call.args[1] if len(call.args) > 1 else 0) % 3 != at:
            return None
        total, prefix = root.tokens.length, root.tokens.prefix
        if call.name == "select":
            start = int(call.args[2]) % total
            end = start + 1
        else:
            start = int(call.args[2] or 0) if len(call.args) > 2 and call.args[2] is not None else 0
            start = start + total if start < 0 else start
            end = start + call.made.shape[at]
            if call.name == "slice" and call.argument("step") != 1:
                return None
        n, c = root.shape[:2]
        if (start, end) == (prefix, total) and prefix:
            tokens = dataclasses.replace(root.tokens, prefix=0)
            made = self._add(b, "prefix", call, [root], tokens, c, options={"start": -prefix})
            token = made.axes.dims[2]  # type: ignore[union-attr]
            return b.arranged(made, Axes(tuple(token if k == at else dim for k, dim in enumerate(raw.axes.dims))), call)
        if end > prefix or [dim[0][0][0] for dim in raw.axes.dims] != ["N", "T", "C"]:
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
        if root is None or root.tokens is None or root.tokens.prefix or root.axes is None:
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
                if not tokens.prefix:
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
                    self._spread[id(out)] = again
                made = node.outputs[before.outputs.index(value)]
            b.nodes.append(node)
            self._spread[id(value)] = made
        return self._spread[id(value)]


def _axes(value: Any) -> Axes | None:
    return value.axes if isinstance(value, Value) else None


def expanded(value: Value) -> bool:
    """Is it one row, or many of the same?"""
    return value.producer is not None and getattr(value.producer.target, "__name__", "").startswith("expand")


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
