"""What layers of `sbnet.masked` share in a backward pass: whether a map's gradient goes through its own node, and which
of its readers adds up what all of them give.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sbnet.ops.common import is_channels_last

if TYPE_CHECKING:
    from sbnet.active import ActiveBlocks, Fringe

_ops = torch.ops.sbnet


def like(x: Tensor, shape: Any) -> Tensor:
    """Unwritten, in x's memory format: no view: autograd refuses to write to one in place."""
    form = torch.channels_last if is_channels_last(x) else torch.contiguous_format
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=form)


@dataclass
class Plane:
    """The list that a layer writes: its blocks, and rings around them by their width."""

    active: ActiveBlocks
    rings: dict[int, Fringe]

    def lists(self) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        a = self.active
        return a.indices, a.count, a.block_map, a.grid.numbers()

    def edge(self, width: int) -> tuple[Tensor | None, Tensor | None]:
        """The ring of so many pixels; of none at all for 0."""
        return (self.rings[width].pixels, self.rings[width].count) if width else (None, None)


def first_derivatives(backward: Any) -> Any:
    """Decorates a backward pass that has no gradient itself: it raises where one would be recorded."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "sbnet: masked: create_graph: expected a context with a capacity (capacity=1.0 keeps every block), "
                "whose gradients can be differentiated, got capacity=None"
            )
        return backward(ctx, *grads)

    return run


class Passes:
    """Which backward pass it is, for what is held between its nodes: another that is begun inside would lose that."""

    def __init__(self) -> None:
        self._task = -1
        self._left: set[int] = set()  # passes that another one found unfinished

    def begins(self, unfinished: bool) -> bool:
        """Is it another one than at the last call? unfinished: is there something held for that one?

        Raises:
            RuntimeError: it has been left unfinished for another. (One that failed is left, too, and never comes back.)
        """
        task = torch._C._current_graph_task_id()
        if task in self._left:
            raise RuntimeError(
                "sbnet: masked: expected one backward pass at a time over the layers of a context, got one that was "
                "begun inside another, as by a hook"
            )
        if task == self._task:
            return False
        if unfinished:
            self._left.add(self._task)
        self._task = task
        return True


@dataclass
class Route:
    """Of a map whose pending layer others joined: their gradients leave it out, unless it was computed itself, for
    then a hook, another reader or whoever holds it may want its own."""

    computed: bool = False
    before: Route | None = None  # of the map whose layer it joined

    def through(self) -> bool:
        return self.computed or (self.before is not None and self.before.through())


def left_out(node: Any) -> bool:
    """Does a layer's node get no gradient, as those of all that read its result leave it out?"""
    return node.joined and not node.route.through()


class Readers:
    """The layers that read an open map. In a backward pass they hold what they give of it for the last one, which adds
    it to its own: autograd would add whole planes."""

    def __init__(self, source: Any, plane: Plane) -> None:
        self.source, self._plane = source, plane
        self._nodes: list[weakref.ref] = []
        self._pass, self._last = Passes(), True
        self._held: Tensor | None = None
        self._done: set[int] = set()

    def join(self, node: Any) -> int:
        self._nodes.append(weakref.ref(node))
        return len(self._nodes) - 1

    def take(self, reader: int) -> Tensor | None:
        """What the others held, for the last one; before it gives its own."""
        if self._pass.begins(not self._last):
            self._held, self._done = None, set()
        self._done.add(reader)
        rest = [node() for k, node in enumerate(self._nodes) if k not in self._done]
        self._last = not any(
            node is not None and not left_out(node) and torch._C._will_engine_execute_node(node) for node in rest
        )
        held = self._held
        if self._last:
            self._held = None
        return held if self._last else None

    def give(self, grad: Tensor | None, taken: Tensor | None) -> Tensor | None:
        """The map's gradient from the last one; from the others nothing, yet. taken: what is still to be added."""
        if self._last:
            return self._sum(grad, taken)
        self._held = self._sum(grad, self._held)
        return None

    def _sum(self, a: Tensor | None, b: Tensor | None) -> Tensor | None:
        if a is None or b is None:
            return b if a is None else a
        indices, count, _, grid = self._plane.lists()
        found = like(b if is_channels_last(b) else a, a.shape)  # one may be some channels of another tensor
        _ops.sparse_pointwise_(a, b, None, None, None, indices, count, grid, "add a", found, None, None)
        return found
