"""Where feature maps lie: concatenations written in place, buffers that tensors take turns in, fringes.

A root is a feature map with memory of its own; a part of it (an operand of a concatenation, a slice) is a range of its
channels. A tensor keeps its root's buffer from the node that writes it first to the last one that reads it; then others
may have it, those whose writers start when these have ended. What a root's consumers read beside its active blocks is
its fringe, which every node that writes into the root clears in the same launch: a buffer may hold anything before. A
root of which all pixels may be read (by a dense node or a caller) keeps a buffer of its own,
clean outside the active blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from sbnet.geometry import Window
from sbnet.graph.ir import Node, Value
from sbnet.graph.kinds import ACTIVE, POINTWISE, kind_of, reads
from sbnet.graph.passes.lanes import Lanes, lanes
from sbnet.graph.passes.rows import Rows, joined_rows
from sbnet.graph.plan import Plan

EMPTY: Mapping[Node, int] = MappingProxyType({})
Consumer = tuple[int, Window]  # plane that it writes, what it reads


@dataclass(eq=False)
class Root:
    """Memory of one feature map, or of several side by side in channels.

    Attributes:
        shape: [N,C,H,W] of the whole.
        parts: values in it, with the channel where each begins.
        writers: indices of the nodes that write into it.
        first, last: nodes that write it first and read it last; past the end where the caller reads it.
        touched: those that launch something and write or read it, bit by bit.
        kept: clean outside the active blocks between calls, in a buffer of its own.
        fringe: index into `Storage.fringes`, or None.
        buffer: index into `Storage.buffers`.
        start, apart: in the buffer, the element where the first image begins, and from one image to the next.
    """

    shape: tuple[int, ...]
    plane: int
    parts: list[tuple[Value, int]] = field(default_factory=list)
    writers: list[int] = field(default_factory=list)
    first: int = 0
    last: int = 0
    touched: int = 0
    kept: bool = False
    fringe: int | None = None
    buffer: int = -1
    start: int = 0
    apart: int = 0


@dataclass
class Storage:
    """The memory of a plan.

    Attributes:
        place: of each value that lies in a root: the root, and its first channel there.
        copies: of each concatenation: operands (and where they go) that are copied into it.
        fringes: (plane, consumers): what roots share.
        buffers: (dtype, elements) of each.
        lanes: what runs beside what, where it may; else all nodes run one after another.
        rows: dense concatenations that roots were written into.
    """

    place: dict[Value, tuple[Root, int]]
    copies: dict[Node, list[tuple[Value, int]]]
    roots: list[Root]
    fringes: list[tuple[int, tuple[Consumer, ...]]]
    buffers: list[tuple[torch.dtype, int]]
    lanes: Lanes | None = None
    rows: dict[Node, Rows] = field(default_factory=dict)


def store(plan: Plan, chains: Mapping[Node, int] = EMPTY, side_by_side: bool = False) -> Storage:
    """Finds a place for what planned nodes write.

    Args:
        chains: nodes that may run as one with some before them: what the first reads lives until the last has written.
        side_by_side: nodes may run on several streams.
    """
    nodes = plan.graph.nodes
    roots: list[Root] = []
    place: dict[Value, tuple[Root, int]] = {}
    for node in nodes:
        if kind_of(node).written or node.kind == "cat":
            root = Root(node.output.shape, plan.plane(node.output), [(node.output, 0)])
            roots.append(root)
            place[node.output] = root, 0
    copies = _concatenations(plan, place, roots)
    for node in nodes:
        if node.kind == "slice" and node.args[0] in place:
            root, start = place[node.args[0]]
            place[node.output] = root, start + node.options["start"]
            root.parts.append((node.output, start + node.options["start"]))
    roots = [root for root in roots if root.parts]
    for at, node in enumerate(nodes):
        if kind_of(node).written or copies.get(node):
            place[node.output][0].writers.append(at)
    still = {node for node in nodes if node.kind in ("slice", "cat") and node.output in place and not copies.get(node)}
    beside = lanes(nodes, still) if side_by_side else None
    _lives(plan, roots, chains, still)
    fringes: dict[tuple[int, tuple[Consumer, ...]], int] = {}
    if plan.mode == "masked":
        for root in roots:
            found = None if root.kept else consumers(plan, root.plane, [value for value, _ in root.parts])
            if found:
                root.fringe = fringes.setdefault((root.plane, tuple(found)), len(fringes))
    before = [(1 << k) - 1 for k in range(len(nodes))] if beside is None else beside.before
    rows = joined_rows(plan, place)
    buffers = _buffers(plan, roots, place, chains, before, list(rows.values()))
    return Storage(place, copies, roots, list(fringes), buffers, beside, rows)


def _concatenations(
    plan: Plan, place: dict[Value, tuple[Root, int]], roots: list[Root]
) -> dict[Node, list[tuple[Value, int]]]:
    """Operands are written where the concatenation needs them; where they cannot be, they are copied."""
    copies: dict[Node, list[tuple[Value, int]]] = {}
    for node in reversed(plan.graph.nodes):  # from the last on: a dense block's last one holds all before it
        if node.kind != "cat":
            continue
        own, base = place[node.output]
        start = _adjacent(node.args, place)
        if start is not None:  # the operands lie side by side already
            root, at = start
            _move(own, root, at - base, place)
            copies[node] = []
            continue
        at, missing = base, []
        for value in node.args:
            if _may_move(value, node, own, at, place, plan):
                _move(place[value][0], own, at, place)
            else:
                missing.append((value, at))
            at += value.shape[1]
        copies[node] = missing
    return copies


def _adjacent(values: list[Value], place: dict[Value, tuple[Root, int]]) -> tuple[Root, int] | None:
    found = [place.get(v) for v in values]
    if found[0] is None:
        return None
    root, first = found[0]
    if len(root.parts) < 2:
        return None
    at = first
    for value, spot in zip(values, found, strict=True):
        if spot is None or spot[0] is not root or spot[1] != at:
            return None
        at += value.shape[1]
    return root, first


def _may_move(value: Value, node: Node, into: Root, at: int, place: dict[Value, tuple[Root, int]], plan: Plan) -> bool:
    spot = place.get(value)
    if spot is None or spot[1] != 0 or spot[0] is into or spot[0].shape != value.shape:
        return False  # lies elsewhere already, or is a dense node's, or the network's input
    if sum(v is value for v in node.args) > 1 or value.dtype != node.output.dtype:
        return False
    wide = 4 if value.dtype.itemsize == 4 else 8  # what a vector of 16 bytes holds
    return at % wide == 0 and into.shape[1] % wide == 0


def _move(old: Root, new: Root, at: int, place: dict[Value, tuple[Root, int]]) -> None:
    for value, start in old.parts:
        place[value] = new, start + at
        new.parts.append((value, start + at))
    old.parts = []


def _lives(plan: Plan, roots: list[Root], chains: Mapping[Node, int], still: set[Node]) -> None:
    nodes = plan.graph.nodes
    at_of = {id(node): k for k, node in enumerate(nodes)}
    for node, count in chains.items():
        end = at_of[id(node)]
        at_of |= {id(before): end for before in nodes[end + 1 - count : end]}
    for root in roots:
        root.first = min(root.writers)
        root.last = max(root.writers)
        root.touched = sum(1 << at for at in set(root.writers))
        for value, _ in root.parts:
            for user in value.users:
                root.last = max(root.last, at_of[id(user)])
                if user not in still:
                    root.touched |= 1 << at_of[id(user)]
                if user.moves:  # a view of the memory: it lives as long as the root
                    root.last = len(nodes)
            if plan.graph.is_output(value):
                root.kept, root.last = True, len(nodes)
        anywhere = consumers(plan, root.plane, [value for value, _ in root.parts]) is None
        root.kept = root.kept or anywhere or plan.mode == "cached"
        if root.kept:
            root.last = len(nodes)


def consumers(plan: Plan, plane: int, parts: Sequence[Value]) -> list[Consumer] | None:
    """What is read of a root beside its own active blocks; None where any pixel may be."""
    found: set[Consumer] = set()
    for value in parts:
        for user in value.users:
            if user.kind == "slice":
                continue
            for window in reads(user, value):
                own = value.tokens is not None or user.output.tokens is not None
                if window == ACTIVE and (own or plan.lists.get(user.output, plane) == plane):
                    continue
                if isinstance(window, str):
                    return None
                packed = user.output.tokens if value.tokens is None else None  # tokens' list says what is read
                found.add((plan.plane(user.output) if packed is None else dict(plan.tokens)[packed], window))
    found.discard((plane, POINTWISE))
    return sorted(found)


def _buffers(
    plan: Plan,
    roots: list[Root],
    place: dict[Value, tuple[Root, int]],
    chains: Mapping[Node, int],
    before: list[int],
    rows: Sequence[Rows],
) -> list[tuple[torch.dtype, int]]:
    """Gives each root its buffer, in the order in which they are first written."""
    sizes: list[tuple[torch.dtype, int]] = []
    busy: dict[int, Root] = {}  # of each buffer, whose it was last
    for joined in rows:
        for root, start in joined.roots.items():
            root.buffer, root.start, root.apart = len(sizes), start, joined.apart
            busy[len(sizes)] = root
        sizes.append((root.parts[0][0].dtype, root.shape[0] * joined.apart))
    for root in sorted((r for r in roots if r.buffer < 0), key=lambda r: r.first):
        root.apart = root.shape[1] * root.shape[2] * root.shape[3]
        wanted = root.shape[0] * root.apart
        dtype = root.parts[0][0].dtype
        taken_over = _in_place(plan, root, place, chains, before)
        free = [b for b, other in busy.items() if sizes[b][0] == dtype and _ended(other, root, before)]
        free.sort(key=lambda b: sizes[b][1])
        fitting = [b for b in free if sizes[b][1] >= wanted]
        candidates = [*fitting, *free[::-1], len(sizes)]
        if taken_over is not None and not root.kept:
            candidates.insert(0, taken_over)
        buffer = len(sizes) if root.kept else candidates[0]
        if buffer == len(sizes):
            sizes.append((dtype, 0))
        sizes[buffer] = dtype, max(sizes[buffer][1], wanted)
        root.buffer = buffer
        busy[buffer] = root
    return sizes


def _ended(old: Root, new: Root, before: list[int]) -> bool:
    """Has all that writes or reads one root ended when the first of another's writers starts?"""
    return old.last < new.first and all(old.touched & ~before[at] == 0 for at in new.writers)


def _in_place(
    plan: Plan, root: Root, place: dict[Value, tuple[Root, int]], chains: Mapping[Node, int], before: list[int]
) -> int | None:
    """The residual's buffer, where the node that writes the root is the last to read it: the sum takes its place. Not
    that of a chain, whose tiles read pixels around those that others have written."""
    node = plan.graph.nodes[root.first]
    if node in chains:
        return None
    residual = node.params.get("residual")
    if node.kind not in ("conv", "conv_quantized") or len(root.writers) > 1 or residual in (None, node.args[0]):
        return None
    spot = place.get(residual)  # type: ignore[arg-type]
    if spot is None or spot[0].shape != root.shape or spot[0].last != root.first or spot[0].kept:
        return None
    if residual.dtype != node.output.dtype:  # type: ignore[union-attr]
        return None
    if spot[0].touched & ~(before[root.first] | 1 << root.first):
        return None  # of which another stream's node may still read
    return spot[0].buffer
