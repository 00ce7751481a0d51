"""Rotary embeddings, found by what ops make of a few vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.graph.ir import Value


def form_of(value: Value, start: Value) -> tuple[Any, ...]:
    """What a computation does with `start`, and with which constants: the same of two that are the same."""
    seen, steps = dict[int, Any](), list[Any]()

    def visit(one: Any) -> Any:
        if not isinstance(one, Value):
            return repr(one)
        if id(one) not in seen:
            node = one.producer
            if one is start:
                seen[id(one)] = "start"
            elif one.constant or node is None:
                seen[id(one)] = id(one)
            else:
                given, spec = pytree.tree_flatten((node.args, node.kwargs))
                at = next(k for k, out in enumerate(node.outputs) if out is one)
                steps.append((node.target, at, str(spec), *map(visit, given)))
                seen[id(one)] = f"step {len(steps)}"
        return seen[id(one)]

    visit(value)
    return tuple(steps)


def leaves_of(value: Value) -> list[Value]:
    """The values with tensors of which a computation and its constants are made."""
    seen, found, todo = set[int](), list[Value](), [value]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if one.tensor is not None:
            found.append(one)
        elif one.producer is not None and (one.constant or one.producer.kind == "aten"):
            todo += one.producer.inputs()
    return found


def computed_of(value: Value, known: dict[int, Tensor]) -> Any:
    """What ops make of the values that are known, in float64."""
    if id(value) in known:
        return known[id(value)]
    node = value.producer
    if node is None:
        raise LookupError(value.name)
    args, kwargs = pytree.tree_map(
        lambda v: computed_of(v, known) if isinstance(v, Value) else v, (node.args, node.kwargs)
    )
    made = node.target(*args, **kwargs)
    for out, tensor in zip(node.outputs, made if node.options.get("many") else [made], strict=True):
        known[id(out)] = tensor
    return known[id(value)]


def turns(
    value: Value, start: Value, dim: int, leaves: Sequence[Value], tensors: Sequence[Tensor]
) -> tuple[Tensor, Tensor, bool] | None:
    """Tables a and b [tokens,dim] with value = start * a + turned start * b for all heads, and whether pairs of the
    turn are half a head apart (else neighbours); None where it is no such thing.

    start: [N,heads,tokens,dim]. tensors: what the leaves hold.
    """
    device = next((t.device for t in tensors if t.dim()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    vectors = torch.rand(3, dim, dtype=torch.float64, generator=generator) + 0.5
    held = {id(v): t.detach().double() if t.is_floating_point() else t for v, t in zip(leaves, tensors, strict=True)}
    made = []
    for vector in vectors:
        whole = vector.to(device).expand(start.shape).contiguous()
        try:
            y = computed_of(value, {**held, id(start): whole})
        except (LookupError, RuntimeError):
            return None
        if not isinstance(y, Tensor) or y.shape != start.shape or not torch.equal(y, y[:1, :1].expand_as(y)):
            return None
        made.append(y[0, 0].double().cpu())
    at = torch.arange(dim)
    for halves, other in ((True, at.roll(dim // 2)), (False, at ^ 1)):
        (u, v, w), (yu, yv, yw) = vectors, made
        det = u * v[other] - v * u[other]
        a = (yu * v[other] - yv * u[other]) / det
        b = (u * yv - v * yu) / det
        if torch.allclose(w * a + w[other] * b, yw, rtol=1e-6, atol=1e-6):
            return a.to(device), b.to(device), halves
    return None
