"""Feature maps whose pixels a dense concatenation puts one behind the other, as a detector's heads end: written there.

Each is a view of the concatenation's result, so that this launches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.graph.axes import op_name
from sbnet.graph.ir import Node, Value

if TYPE_CHECKING:
    from sbnet.graph.passes.storage import Root
    from sbnet.graph.plan import Plan

WORD = 16  # bytes: where a part may begin


@dataclass(eq=False)
class Rows:
    """What a concatenation joins in one buffer.

    Attributes:
        roots: feature maps, each with the element of an image where its own begins.
        apart: elements from one image to the next.
        strides: of the result.
    """

    roots: dict[Root, int]
    apart: int
    strides: tuple[int, ...]


def joined_rows(plan: Plan, place: Mapping[Value, tuple[Root, int]]) -> dict[Node, Rows]:
    """The concatenations whose operands are views of feature maps that may lie in one buffer. Roots are kept ones: what
    reads them through a view may read every pixel."""
    found: dict[Node, Rows] = {}
    taken: set[Root] = set()
    for node in plan.graph.nodes:
        if node.kind != "aten" or op_name(node.target) != "cat" or node.output.size is not None:
            continue
        rows = _rows(node, place)
        if rows is not None and not taken & set(rows.roots):
            found[node] = rows
            taken |= set(rows.roots)
    return found


def _rows(node: Node, place: Mapping[Value, tuple[Root, int]]) -> Rows | None:
    values, dim = node.args[0], node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
    roots: dict[Root, int] = {}
    chains: list[list[Node]] = []
    apart = 0
    for value in values:
        chain: list[Node] = []
        while value not in place and value.producer is not None and value.producer.moves:
            chain.insert(0, value.producer)
            value = value.producer.args[0]
        root, start = place.get(value, (None, 0))
        if root is None or not root.kept or root in roots or start or root.shape != value.shape:
            return None
        if value.dtype != node.output.dtype:
            return None
        roots[root] = apart
        chains.append(chain)
        apart += root.shape[1] * root.shape[2] * root.shape[3]
    if any(at * node.output.dtype.itemsize % WORD for at in (*roots.values(), apart)):
        return None
    batch = next(iter(roots)).shape[0]
    if any(root.shape[0] != batch for root in roots):
        return None
    base = torch.empty(batch * apart, dtype=node.output.dtype, device="meta")
    parts = [
        _moved(view_of(base, root, at, apart), chain) for (root, at), chain in zip(roots.items(), chains, strict=True)
    ]
    strides = _strides(parts, node.output.shape, dim % len(node.output.shape))
    whole = torch.Size(node.output.shape).numel() == batch * apart
    return Rows(roots, apart, strides) if whole and strides is not None else None


def _strides(parts: list[Tensor | None], shape: tuple[int, ...], axis: int) -> tuple[int, ...] | None:
    """Of a tensor of which these lie side by side along the axis; None if they do not."""
    found: list[int | None] = [None] * len(shape)
    at = 0
    for part in parts:
        if part is None or part.dim() != len(shape):
            return None
        for d, (size, stride) in enumerate(zip(part.shape, part.stride(), strict=True)):
            if size > 1 and found[d] not in (None, stride):
                return None
            found[d] = stride if size > 1 else found[d]
        if at and found[axis] is None:
            found[axis] = part.storage_offset() // at
        if part.storage_offset() != at * (found[axis] or 0):
            return None
        at += part.shape[axis]
    return tuple(1 if stride is None else stride for stride in found)


def view_of(buffer: Tensor, root: Root, at: int, apart: int) -> Tensor:
    """A root [N,C,H,W], channels_last, of which each image begins `at` elements into its part of a buffer."""
    n, c, h, w = root.shape
    return buffer.as_strided((n, c, h, w), (apart, 1, w * c, c), at)


def _moved(tensor: Tensor, chain: list[Node]) -> Tensor | None:
    """What ops that only rearrange make of a tensor; None where that is no view."""
    for node in chain:
        if any(v is not node.args[0] for v in node.inputs()):
            return None
        given: Any = pytree.tree_map(lambda v, now=tensor: now if isinstance(v, Value) else v, (node.args, node.kwargs))
        try:
            moved = node.target(*given[0], **given[1])
        except RuntimeError:  # no view of these strides
            return None
        if not isinstance(moved, Tensor) or moved.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
            return None
        tensor = moved
    return tensor
