"""The one intermediate representation: a network as nodes and values, from capture to the engine and to ONNX.

What kinds of nodes there are, and what they take beside `args` (the feature maps that they read, in order), stands in
kinds/.

Constants are values too: parameters, and what is made of them alone (`Graph.constants`), once and again after a write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.geometry import Pair
from sbnet.graph.axes import Axes, moves, op_name

if TYPE_CHECKING:
    from sbnet.graph.tokens import Tokens


@dataclass(eq=False)
class Value:
    """A tensor of the network.

    Attributes:
        axes: which dimensions are the plane's, or None.
        view_of: the feature map [N,C,H,W] of which this is another arrangement.
        tensor: of a parameter or buffer.
        tokens: what packed tokens it holds, [N,C,length,1] (tokens.py).
        owner: the module and the name that the tensor has there, where another may come in its place.
        producer: the node that gives it; None of inputs, parameters and buffers.
        users: nodes that read it (`Graph.link`).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: Axes | None = None
    view_of: Value | None = None
    tensor: Tensor | None = None
    tokens: Tokens | None = None
    owner: tuple[torch.nn.Module, str] | None = None
    producer: Node | None = None
    constant: bool = False
    users: list[Node] = field(default_factory=list)

    @property
    def plane(self) -> Pair | None:
        """(height, width) of a feature map [N,C,H,W]; None of anything else."""
        return self.axes.size if self.axes is not None and self.axes.is_planes else None

    @property
    def size(self) -> Pair | None:
        """(height, width) of whatever holds a plane, in any arrangement."""
        return None if self.axes is None or self.constant else self.axes.size

    @property
    def given(self) -> bool:
        """Is it an input of the network, which is read unmasked, or a part of one?"""
        value = self
        while value.producer is not None and (value.producer.kind == "slice" or value.producer.moves):
            value = value.producer.args[0]
        return value.producer is None

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class Ref:
    """Of a Step's arguments: argument `at` of the node, or, where `step`, what step `at` gave."""

    at: int
    step: bool = False


@dataclass
class Step:
    """One op of a pointwise node on [N,C,H,W] tensors of any N, H and W: args and kwargs hold Refs."""

    target: Any
    args: Any
    kwargs: dict[str, Any]


@dataclass(eq=False)
class Node:
    """One op. `options` are numbers and names; `params` are weights by name, constants or, rarely, computed.

    Attributes:
        path: of the module that called it.
        line: where in the source.
        reason: why it is dense.
    """

    kind: str
    args: Any
    outputs: list[Value]
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Value] = field(default_factory=dict)
    path: str = ""
    line: str = ""
    reason: str = ""

    @property
    def output(self) -> Value:
        return self.outputs[0]

    def inputs(self) -> list[Value]:
        """Every value that it reads, constants too."""
        return [v for v in pytree.tree_leaves((self.args, self.kwargs, self.params)) if isinstance(v, Value)]

    def replace(self, old: Value, new: Value) -> None:
        """Reads `new` where it read `old`."""

        def swap(v: Any) -> Any:
            return new if v is old else v

        self.args, self.kwargs, self.params = pytree.tree_map(swap, (self.args, self.kwargs, self.params))

    @property
    def moves(self) -> bool:
        """A dense op that computes nothing, so that its result is not masked anew."""
        if self.kind != "aten" or not moves(self.target, self.args, self.output.dtype):
            return False
        return self.output.size is None or not _was_no_plane(self.args[0])

    def __repr__(self) -> str:
        name = op_name(self.target) if self.kind == "aten" else self.kind
        shown = {k: v for k, v in self.options.items() if v not in (None, 1, (1, 1), (0, 0))}
        return f"{', '.join(map(repr, self.outputs))} = {name}({self.inputs()}) {shown or ''} # {self.path}"


@dataclass
class Graph:
    """A network.

    Attributes:
        inputs: what a call takes, flat: a Value each, or None for what is no tensor.
        outputs: what it returns, flat: Values and anything else, as `out_spec` says.
        nodes: in order.
        module: where parameters come from.
    """

    inputs: list[Value | None]
    outputs: list[Any]
    out_spec: Any
    nodes: list[Node]

    def link(self) -> Graph:
        """Drops values without a consumer, and notes the consumers of the rest."""
        wanted = {id(v) for v in self.outputs if isinstance(v, Value)}
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if any(id(out) in wanted for out in node.outputs):
                kept.append(node)
                wanted |= {id(v) for v in node.inputs()}
        self.nodes = kept[::-1]
        self.find_users()
        return self

    def find_users(self) -> None:
        """Notes who reads what."""
        for value in self.values():
            value.users = []
        for node in self.nodes:
            for value in {id(v): v for v in node.inputs()}.values():
                value.users.append(node)

    def swap(self, old: Node, new: Node | None, *gone: Node) -> None:
        """Puts `new` where `old` is, or nothing, without `gone`, and keeps the users of what they read true."""
        at = self.nodes.index(old)
        self.nodes[at : at + 1] = [] if new is None else [new]
        for node in (old, *gone):
            if node is not old:
                self.nodes.remove(node)
            for value in node.inputs():
                value.users = [user for user in value.users if user is not node]
        if new is not None:
            for value in {id(v): v for v in new.inputs()}.values():
                value.users.append(new)
            for value in new.outputs:
                value.producer = new

    def values(self) -> Iterator[Value]:
        """All values that are no constants, and the constants that nodes read."""
        seen: set[int] = set()
        for value in [*self.inputs, *(v for n in self.nodes for v in (*n.outputs, *n.inputs()))]:
            if isinstance(value, Value) and id(value) not in seen:
                seen.add(id(value))
                yield value

    def is_output(self, value: Value) -> bool:
        return any(v is value for v in self.outputs)

    def constants(self) -> list[Node]:
        """Nodes that make constants from constants, in order."""
        done: dict[int, Node] = {}

        def visit(value: Value) -> None:
            node = value.producer
            if value.constant and node is not None and id(node) not in done:
                for v in node.inputs():
                    visit(v)
                done[id(node)] = node

        for node in self.nodes:
            for value in node.inputs():
                visit(value)
        for value in self.outputs:
            if isinstance(value, Value):
                visit(value)
        return list(done.values())

    def __str__(self) -> str:
        return "\n".join(map(repr, self.nodes))


def computed(name: str, like: Value, function: Callable[..., Tensor], *args: Any, shape: Any = None) -> Value:
    """A constant made from constants."""
    node = Node("const", list(args), [], target=function)
    value = Value(name, tuple(shape if shape is not None else like.shape), like.dtype, producer=node, constant=True)
    node.outputs.append(value)
    return value


def _was_no_plane(value: Any) -> bool:
    """Was it, or what it is a view of, computed where no plane was seen, as in windows? Then nothing has masked it."""
    while isinstance(value, Value) and value.size is None and not value.constant and value.producer is not None:
        node = value.producer
        if node.kind != "aten" or not moves(node.target, node.args, value.dtype):
            return True
        value = node.args[0]
    return False


def only_user(value: Value, graph: Graph) -> Node | None:
    """The node that alone reads a value which is no output."""
    return value.users[0] if len(value.users) == 1 and not graph.is_output(value) else None
