"""What the nodes of one kind are. Each kind is a class, registered by its name when its file is imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.active import Fringe
from sbnet.geometry import Window
from sbnet.graph.ir import Node, Value

if TYPE_CHECKING:
    from sbnet.graph.constants import Constants

POINTWISE = Window.conv(1)  # of what reads the pixels that it writes
WHOLE = "whole"  # of what may read any pixel
ACTIVE = "active"  # of what reads every active pixel, and no other

Get = Callable[[Value], Tensor]


@dataclass
class Context:
    """What the steps of a plan share.

    Attributes:
        constants: of the graph.
        packed: weights as the CPU's kernels read them, by node.
        allow_tf32: float32 on CUDA may use tf32 tensor cores.
        keep: what is not active stays as it is (the cached contract).
        everywhere: a plane's statistics are those of all its pixels (the cached and the exact contract).
        bound: what ops take of a node that does not change from call to call.
    """

    constants: Constants
    packed: dict[Node, Tensor]
    allow_tf32: bool = False
    keep: bool = False
    everywhere: bool = False
    bound: dict[Node, Any] = field(default_factory=dict)

    def pack(self, nodes: list[Node]) -> None:
        """Packs the weights of nodes anew."""
        for node in nodes:
            kind_of(node).pack(node, self)

    def held(self, node: Node, name: str) -> Tensor | None:
        """A node's parameter, None where it has none of that name."""
        return self.constants[node.params[name]] if name in node.params else None


class Given(NamedTuple):
    """What a node is given, for its functional form.

    Attributes:
        args, kwargs, params: those of the node, with tensors for values.
        active: blocks of `Kind.listed`, None where that is None.
        everywhere: a plane's statistics are those of all its pixels (the cached and the exact contract).
    """

    args: Any
    kwargs: dict[str, Any]
    params: dict[str, Tensor]
    active: Any
    everywhere: bool = False


class Target(NamedTuple):
    """Where a node writes: the active blocks of `out`; and the pixels of `clear`, which it zeroes."""

    out: Tensor
    active: Any  # ActiveBlocks, of packed tokens TokenBlocks
    clear: Fringe | None


class Kind:
    """What all nodes of a kind have in common, and the base of the rest: a kind says what differs.

    Attributes:
        name: `Node.kind` of its nodes.
        written: its nodes write active blocks of memory that they are given, by `step`.
        planned: its nodes cost what the active blocks cost.
        recorded: a recording notes every op that `step` runs (and see `lasts`).
        sizeless: no option of its nodes depends on the plane's size.
        dense: its nodes give whole tensors, which are masked afterwards.
        filters: its nodes multiply by filters, one for each output channel, which other layers may become part of.
        casts: weights are made in the dtype of what a node gives.
    """

    name = ""
    written = False
    planned = False
    recorded = False
    sizeless = False
    dense = False
    filters = False
    casts = True

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            KINDS[cls.name] = cls()

    def reads(self, node: Node, value: Value) -> list[Window | str]:
        """What a node's active blocks read of a value: windows, WHOLE or ACTIVE."""
        found: list[Window | str] = [POINTWISE for v in node.params.values() if v is value]
        if any(v is value for v in pytree.tree_leaves((node.args, node.kwargs))):
            found.append(self.window(node, value))
        return found

    def window(self, node: Node, value: Value) -> Window | str:
        """What they read of a feature map among the node's args."""
        return WHOLE

    def demanded(self, node: Node, value: Value, window: Window | str) -> Window | str:
        """What the exact contract needs of it, where that is not what active blocks read."""
        return window

    def listed(self, node: Node, mode: str) -> Value | None:
        """The value whose active blocks a node takes; None where it takes none."""
        return node.output if node.output.size is not None else None

    def apply(self, node: Node, given: Given) -> Any:
        """What a node gives, by functional ops; planned ones are zero outside the active blocks."""
        raise NotImplementedError(f"sbnet: {self.name}: expected a kind that runs, got one that passes replace")

    def step(self, node: Node, get: Get, to: Target, context: Context) -> None:
        """Writes the active blocks of `to.out` and zeroes the pixels of `to.clear`."""
        raise NotImplementedError(f"sbnet: {self.name}: expected a kind that writes, got another")

    def lasts(self, node: Node, context: Context) -> bool:
        """Can a recording repeat the node's step?"""
        return self.recorded

    def pack(self, node: Node, context: Context) -> None:
        """Puts a node's weight into `context.packed`, as the CPU's kernels read it."""

    def pixels(self, value: Value, active: Any) -> Tensor:
        """Which of a value's pixels are active, as they lie in it."""
        assert value.axes is not None
        assert value.size is not None
        return value.axes.arrange(active.pixel_mask(value.size))

    def whole(self, node: Node, device: str) -> str:
        """Why a planned node computes what is not active too on a device of this kind; else nothing."""
        return ""

    def multiply_adds(self, node: Node) -> int:
        """Of a node with products of weights, computed dense."""
        return 0

    def form(self, node: Node) -> str:
        """Of a layer with such products: what kernels make of it (cost.FORMS)."""
        return "other"


KINDS: dict[str, Kind] = {}


def kind_of(node: Node) -> Kind:
    return KINDS[node.kind]


def reads(node: Node, value: Value) -> list[Window | str]:
    """What a node's active blocks read of a value: windows, WHOLE or ACTIVE."""
    return KINDS[node.kind].reads(node, value)


def edge(clear: Fringe | None) -> tuple[Tensor | None, Tensor | None]:
    """A fringe as ops take it."""
    return (None, None) if clear is None else (clear.pixels, clear.count)
