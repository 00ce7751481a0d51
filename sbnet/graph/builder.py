"""Makes nodes from calls of ops: a rule per op says what the planner knows of it (rules.py, pixelwise.py); an op
without a rule, or one its rule declines, stays a dense node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.graph.axes import REARRANGING, Axes, infer, op_name, reads_unseen_planes, role
from sbnet.graph.ir import Node, Value

if TYPE_CHECKING:
    from sbnet.graph.token_rules import TokenRules


@dataclass
class Call:
    """One op of the program, as a rule sees it."""

    target: Any
    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    made: Any  # a fake of what it returns
    label: str
    path: str
    line: str

    def argument(self, name: str, otherwise: Any = None) -> Any:
        """An argument by name, given or not."""
        for k, argument in enumerate(self.target._schema.arguments):
            if argument.name == name:
                if k < len(self.args):
                    return self.args[k]
                return self.kwargs.get(name, argument.default_value if argument.has_default_value() else otherwise)
        return otherwise


Rule = Callable[["Builder", Call], Any]
RULES: dict[str, Rule] = {}
# Why ops are dense that have a sparse form elsewhere.
UNMET = {
    "scaled_dot_product_attention": "attention that is not of all tokens or windows of one plane, to themselves",
    "softmax": "weights that are not recognised as those of attention of a plane to itself",
}
ANY: list[Rule] = []  # tried after an op's own rule


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for ops of these names. It returns a value, or None to decline."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


class Builder:
    """Makes nodes from calls of ops, in order. Both front ends, torch.export and ONNX, use it."""

    def __init__(self, tokens: TokenRules | None = None) -> None:
        self.nodes: list[Node] = []
        self.batch: int | None = None
        self.tokens = tokens
        self.planes: dict[Value, Value] = {}

    def input(self, name: str, made: Tensor) -> Value:
        """An input of the network. The first that is a feature map says how many images a call has."""
        planes = made.dim() == 4 and made.is_floating_point()
        if planes and self.batch is None:
            self.batch = int(made.shape[0])
        return _value(name, made, Axes.planes(made.shape) if planes and made.shape[0] == self.batch else None)

    def read(self, target: Any, args: Any, kwargs: dict[str, Any], made: Any, label: str, path: str, line: str) -> Any:
        """What a call gives: a Value, or a list of them and of Nones."""
        target = functional(target)
        call = Call(target, op_name(target), args, kwargs, made, label, path, line)
        values = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Value)]
        if all(v.constant for v in values):
            return self._constant(call)
        if reads_unseen_planes(target, args, _axes_of, self.batch or 1) and not args[0].constant:
            call.args = [self._as_planes(args[0], call), *args[1:]]
        count = len(self.nodes)
        found = self.tokens(self, call) if self.tokens is not None else None
        if found is None and call.name in RULES:
            found = RULES[call.name](self, call)
        if found is None and call.name in REARRANGING:
            found = self._rearranged(call)
        if found is None and ANY:
            found = ANY[0](self, call)
        if found is None or not _is_what_was_made(found, made):
            del self.nodes[count:]
            return self.dense(call)
        return found

    def _constant(self, call: Call) -> Any:
        if isinstance(call.made, (tuple, list)):
            if not all(isinstance(v, Tensor) for v in call.made):
                return self.dense(call)
            return [self._one_constant(call, made, k) for k, made in enumerate(call.made)]
        return self._one_constant(call, call.made) if isinstance(call.made, Tensor) else call.made

    def _one_constant(self, call: Call, made: Tensor, at: int | None = None) -> Value:
        """What an op of constants gives, or number `at` of what it gives."""

        def taken(*args: Any, **kwargs: Any) -> Tensor:
            return call.target(*args, **kwargs)[at]

        label = call.label if at is None else f"{call.label}_{at}"
        node = Node("const", call.args, [], call.kwargs, call.target if at is None else taken, path=call.path)
        node.outputs.append(_value(label, made, producer=node, constant=True))
        return node.output

    def _as_planes(self, x: Value, call: Call) -> Value:
        """What layers read as planes is one, though its pixels could not be followed there."""
        if x not in self.planes:
            made = torch.empty(x.shape, dtype=x.dtype, device="meta")
            copy = replace(call, target=as_planes, name="as_planes", args=[x], kwargs={}, made=made, label=x.name)
            self.planes[x] = self.dense(copy, "its pixels could not be followed; it is masked here")
        return self.planes[x]

    def dense(self, call: Call, reason: str = "") -> Any:
        """A node that runs on whole tensors."""
        many = isinstance(call.made, (tuple, list))
        if self.tokens is not None:
            self.tokens.windows.reads(call)
            call = self.tokens.whole(self, call)
        node = Node("aten", call.args, [], call.kwargs, call.target, path=call.path, line=call.line)
        node.reason = reason or UNMET.get(call.name, f"no rule for {call.name}")
        made = list(call.made) if many else [call.made]
        if not all(isinstance(v, Tensor) for v in made):
            made = [v if isinstance(v, Tensor) else torch.empty(0, device="meta") for v in made]
        for k, tensor in enumerate(made):
            axes = infer(call.target, call.args, call.kwargs, tensor, _axes_of, self.batch or 1)
            node.outputs.append(_value(f"{call.label}_{k}" if many else call.label, tensor, axes, producer=node))
        if many:
            node.options["many"] = True
        self.nodes.append(node)
        if many:
            return node.outputs
        return node.output if self.tokens is None else self.tokens.entered(self, call, node.output)

    def add(self, kind: str, call: Call, args: Sequence[Value], shape: Sequence[int], **more: Any) -> Value:
        """A planned node that gives a feature map [N,C,H,W]."""
        node = Node(kind, list(args), [], path=call.path, line=call.line, **more)
        node.outputs.append(_map(call.label, shape, args[0].dtype, node))
        if (tokens := args[0].tokens) is not None and node.output.shape[2] == tokens.length:
            node.output.tokens, node.output.axes = tokens, tokens.axes(*shape[:2])
        self.nodes.append(node)
        return node.output

    # ---- arrangements of a feature map

    def arranged(self, value: Value, axes: Axes, call: Call) -> Value:
        """A feature map in other axes: a permute and a view."""
        if value.axes == axes:
            return value
        assert value.axes is not None
        order = [[d[0] for d in value.axes.dims].index(atom) for dim in axes.dims for atom in dim]
        order += [k for k in range(len(value.shape)) if k not in order]
        lengths = [value.shape[k] for k in order]
        shape = [product(n for _, n in dim) for dim in axes.dims]
        moved = self.move(value, torch.ops.aten.permute.default, order, lengths, call)
        if shape != lengths:
            moved = self.move(moved, torch.ops.aten.reshape.default, shape, shape, call)
        moved.axes, moved.view_of = axes, value
        return moved

    def move(self, value: Value, target: Any, how: list[int], shape: list[int], call: Call) -> Value:
        """Another arrangement of a value, by a permute or a reshape."""
        node = Node("aten", [value, how], [], target=target, path=call.path, line=call.line, reason="arrangement")
        node.outputs.append(Value(f"{call.label}_{len(self.nodes)}", tuple(shape), value.dtype, producer=node))
        self.nodes.append(node)
        return node.output

    def _rearranged(self, call: Call) -> Value | None:
        """A view of a feature map that keeps its axes whole is the same feature map."""
        x = call.args[0]
        source = feature_map(x)
        if source is None or not isinstance(call.made, Tensor) or call.made.dtype != source.dtype:
            return None  # a cast: PyTorch's own
        axes = infer(call.target, call.args, call.kwargs, call.made, _axes_of, self.batch or 1)
        if axes is None or source.axes is None:
            return None
        whole = sorted(atom for dim in axes.dims for atom in dim if atom[1] != 1)
        if whole != sorted(dim[0] for dim in source.axes.dims if dim[0][1] != 1):
            return None
        if axes.is_planes and tuple(call.made.shape) == source.shape:
            return source
        own = {dim[0] for dim in source.axes.dims}
        if ("N", 1) in own and axes.dims[0] == (("?", 1),):  # a batch of one that had been squeezed away
            axes = Axes(((("N", 1),), *axes.dims[1:]))
        atoms = {atom for dim in axes.dims for atom in dim}
        if atoms not in (own, own - {("N", 1)}):
            return None
        return self.arranged(source, axes, call)


def _is_what_was_made(found: Any, made: Any) -> bool:
    """Has what a rule gave the shape and dtype of what PyTorch gives? A rule that does not know of a cast, or of an
    argument that changes a size, must not drop it."""
    values, tensors = pytree.tree_leaves(found), pytree.tree_leaves(made)
    return len(values) == len(tensors) and all(
        not isinstance(v, Value) or (isinstance(t, Tensor) and v.shape == tuple(t.shape) and v.dtype == t.dtype)
        for v, t in zip(values, tensors, strict=True)
    )


def as_planes(x: Tensor) -> Tensor:
    """x as it is, in memory of its own."""
    return x.clone(memory_format=torch.channels_last)


PLANNED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of the feature maps that ops on active blocks take


def feature_map(value: Any) -> Value | None:
    """The feature map [N,C,H,W] that a value is, or is an arrangement of."""
    if not isinstance(value, Value) or value.constant:
        return None
    if value.view_of is not None:
        return value.view_of
    return value if value.plane is not None and value.dtype in PLANNED_DTYPES else None


def functional(target: Any) -> Any:
    """The op that returns what `target` writes in place; of a view, which memory formats may forbid, a reshape."""
    if target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        return torch.ops.aten.reshape.default
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return target
    packet = getattr(torch.ops.aten, op_name(target), None)
    overload = getattr(packet, target._overloadname, None)
    if overload is None:
        raise ValueError(f"sbnet: {target} works in place and has no form that does not")
    return overload


def _axes_of(value: Any) -> Axes | None:
    return value.axes if isinstance(value, Value) else None


def product(lengths: Any) -> int:
    total = 1
    for n in lengths:
        total *= n
    return total


def _value(label: str, made: Tensor, axes: Axes | None = None, **more: Any) -> Value:
    return Value(label, tuple(int(n) for n in made.shape), made.dtype, axes, **more)


def _map(label: str, shape: Sequence[int], dtype: torch.dtype, node: Node) -> Value:
    return Value(label, tuple(shape), dtype, Axes.planes(shape), producer=node)


def is_map(made: Any) -> bool:
    return (
        isinstance(made, Tensor)
        and made.dim() == 4
        and made.shape[2] * made.shape[3] > 1
        and made.dtype in PLANNED_DTYPES
    )


def plain(value: Any) -> Value | None:
    """A feature map as it is, not one of its arrangements."""
    return value if isinstance(value, Value) and feature_map(value) is value else None


def single(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def order(value: Value) -> list[list[str]]:
    assert value.axes is not None
    return [[role(name) for name, _ in dim] for dim in value.axes.dims]


def back(b: Builder, call: Call, value: Value, like: Value) -> Value:
    """A new feature map, arranged as the argument was from which it was made."""
    if feature_map(like) is like:
        return value
    assert value.axes is not None
    assert like.axes is not None
    names = "NCHW" if value.tokens is None else "NCT?"
    atoms = dict(zip(names, (dim[0] for dim in value.axes.dims), strict=True))
    dims = tuple(tuple(atoms[role(name)] for name, _ in dim) for dim in like.axes.dims)
    return b.arranged(value, Axes(dims), call)


def is_channels(value: Value, axis: int) -> bool:
    dim = value.axes.dims[axis] if value.axes is not None else ()
    return len(dim) == 1 and role(dim[0][0]) == "C"


def weights(weight: Value, bias: Value | None) -> dict[str, Value]:
    return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
