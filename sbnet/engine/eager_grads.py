"""Gradients of weights and biases under `sbnet.masked`, of several layers at once: on a GPU they share launches.

Nothing of a backward pass waits for a weight's gradient. The weights of some layers, neighbours in the forward pass,
go through one node of autograd. Their layers leave it what their gradients are made of, and it computes them once the
last of these layers is done: hooks, sums and what else autograd does with gradients of weights come after it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sbnet.engine.eager_passes import Passes, first_derivatives

_ops = torch.ops.sbnet

DEVICES = {"cuda"}  # a CPU gains nothing by it
TOGETHER = 64  # layers
MOST_HELD = 1 << 30  # bytes of maps and their gradients, about: layers of large ones fill a GPU by themselves
MOST_KNOWN = 1024
# By the first weight that a context met: those that it met, in order. A training step meets them again.
_KNOWN: Any = WeakTensorKeyDictionary()


@dataclass
class _Work:
    """What the gradient of a weight is made of."""

    place: int
    x: Tensor
    grad: Tensor
    indices: Tensor
    count: Tensor
    numbers: list[int]
    versions: tuple[int, int]


class Group:
    """Weights whose gradients are computed together."""

    def __init__(self) -> None:
        self._node: Any = None
        self._pass = Passes()
        self._works: list[_Work] = []
        self._bytes = 0
        self._found: dict[int, Tensor] = {}

    def edge(self, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
        """What layers take in the place of their weights, once. It holds this group, which must not hold it. Places of
        biases follow those of all weights."""
        self._layers = len(weights)
        found = _Gradients.apply(self, *weights, *biases)
        self._node = weakref.ref(found.grad_fn)
        return found

    def give(self, place: int, x: Tensor, grad: Tensor, indices: Tensor, count: Tensor, numbers: list[int]) -> None:
        """In a backward pass. Both maps stay as they are until they were read."""
        node = self._node()
        if node is None or not torch._C._will_engine_execute_node(node):
            return
        self._enter()
        self._works.append(_Work(place, x, grad, indices, count, numbers, (x._version, grad._version)))
        self._bytes += x.nbytes + grad.nbytes
        if len(self._works) == TOGETHER or self._bytes > MOST_HELD:
            self._run()

    def take(self) -> dict[int, Tensor]:
        """Gradients of those that had any, by place."""
        self._enter()
        self._run()
        found, self._found = self._found, {}
        return found

    def _enter(self) -> None:
        """A pass that failed leaves what it was given; one that another interrupts would want it again."""
        if self._pass.begins(bool(self._works or self._found)):
            self._works, self._bytes, self._found = [], 0, {}

    def _run(self) -> None:
        works, self._works, self._bytes = self._works, [], 0
        if not works:
            return
        for work in works:
            if (work.x._version, work.grad._version) != work.versions:
                raise RuntimeError(
                    "sbnet: masked: expected hooks that leave gradients of feature maps as they are, got one that "
                    "writes in place: return what should be used in its place"
                )
        columns = [[getattr(w, name) for w in works] for name in ("x", "grad", "indices", "count")]
        grads = _ops.sparse_conv2d_weight_grads(*columns, [n for w in works for n in w.numbers])
        places = [w.place for w in works]
        for place, grad in zip([*places, *(self._layers + place for place in places)], grads, strict=True):
            before = self._found.get(place)
            self._found[place] = grad if before is None else before + grad


class _Gradients(torch.autograd.Function):
    """A group's node."""

    @staticmethod
    def forward(ctx: Any, group: Group, *parameters: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.group, ctx.like = group, [None if t is None else (t.dtype, t.shape) for t in parameters]
        assert parameters[0] is not None
        return parameters[0].new_empty(0)

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, _: Any) -> tuple:  # type: ignore[override]
        found, given = ctx.group.take(), [None]
        for k, like in enumerate(ctx.like):
            wanted = k in found and like is not None and ctx.needs_input_grad[k + 1]
            given.append(found[k].to(like[0]).view(like[1]) if wanted else None)
        return tuple(given)


class Groups:
    """The groups of a context."""

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref, weakref.ref | None]] | None = None
        self._at: dict[int, int] = {}  # of weights that were known when the context met the first
        self._groups: dict[int, tuple[Tensor, Group, int]] = {}  # by weight

    def clear(self) -> None:
        self._known = None
        self._at.clear()
        self._groups.clear()

    def of(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Group, int] | None:
        """What its layer takes in a weight's place, the group that computes the weight's gradient, and the weight's
        place there; None: the layer does so itself.

        Processes of torch.distributed send gradients while others are computed, and sharded ones want them when their
        layer is done.
        """
        if not _may_wait(weight, bias, weight.device):
            return None
        if self._known is None:
            self._known = _KNOWN.setdefault(weight, [])
            self._known[:] = [known for known in self._known if _both(known)[0] is not None]
            self._at = {id(_both(known)[0]): k for k, known in enumerate(self._known)}
        at = self._at.get(id(weight))
        if at is None:
            if len(self._known) < MOST_KNOWN:
                self._at[id(weight)] = len(self._known)
                self._known.append((weakref.ref(weight), None if bias is None else weakref.ref(bias)))
            return None
        # Another thread's context may have changed the list, and another layer may have the weight and another bias.
        known = _both(self._known[at]) if at < len(self._known) else (None, None)
        if known[0] is not weight or known[1] is not bias:
            return None
        if id(weight) not in self._groups:
            first = at // TOGETHER * TOGETHER
            near = [_both(known) for known in self._known[first : first + TOGETHER]]
            layers = [(w, b) for w, b in near if w is not None and _may_wait(w, b, weight.device)]
            group = Group()
            edge = group.edge([w for w, _ in layers], [b for _, b in layers])
            self._groups.update({id(w): (edge, group, place) for place, (w, _) in enumerate(layers)})
        return self._groups[id(weight)]


def _both(known: tuple[weakref.ref, weakref.ref | None]) -> tuple[Any, Any]:
    return known[0](), None if known[1] is None else known[1]()


def _may_wait(weight: Tensor, bias: Tensor | None, device: torch.device) -> bool:
    if not torch.is_grad_enabled() or not weight.requires_grad or not weight.is_leaf or weight.device != device:
        return False
    if bias is not None and not (bias.is_leaf and bias.device == device):
        return False
    many = torch.distributed.is_available() and torch.distributed.is_initialized()
    return device.type in DEVICES and not many
