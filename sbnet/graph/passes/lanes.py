"""Streams of a GPU: nodes that do not read one another's results run side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sbnet.graph.ir import Node, Value
from sbnet.graph.kinds import kind_of

MOST = 4  # streams
LAUNCH, HOP = 4, 2  # a launch, and what it waits longer for one on another stream, which it cannot overlap


@dataclass
class Lanes:
    """What runs beside what.

    Attributes:
        of: the stream of each node that launches something; stream 0 is the caller's.
        waits: of a node, those on other streams that must have ended before it starts.
        before: of each node's index, those of the launches that have ended when it starts, bit by bit.
    """

    of: dict[Node, int] = field(default_factory=dict)
    waits: dict[Node, list[Node]] = field(default_factory=dict)
    before: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return 1 + max(self.of.values(), default=0)


def lanes(nodes: Sequence[Node], still: set[Node], most: int = MOST) -> Lanes:
    """Gives each node the stream on which it can start first, were every launch as long as any other.

    Args:
        nodes: in order.
        still: those that launch nothing, as slices and concatenations in place.

    Nodes that write memory they are given may run on any stream; others stay on stream 0.
    """
    found = Lanes()
    at = {node: k for k, node in enumerate(nodes)}
    end: dict[Node, int] = {}
    tails: list[Node | None] = [None] * most
    sources: dict[Value, list[Node]] = {}  # the launches that a value comes from
    for node in nodes:
        needed = list({n: None for v in node.inputs() for n in sources.get(v, ())})
        if node in still:
            sources |= {value: needed for value in node.outputs}
            found.before.append(_ended(needed, at, found.before))
            continue

        def start(lane: int, needed: list[Node] = needed) -> int:
            tail = tails[lane]
            ready = [end[n] + (HOP if found.of[n] != lane else 0) for n in needed]
            return max([0 if tail is None else end[tail], *ready])

        home = found.of[max(needed, key=end.__getitem__)] if needed else 0
        choice = range(most) if kind_of(node).written else (0,)
        lane = min(choice, key=lambda one: (start(one), one != home, one))
        end[node], found.of[node] = start(lane) + LAUNCH, lane
        tail = tails[lane]
        own = [] if tail is None else [tail]
        known = _ended(own, at, found.before)
        apart = [n for n in needed if not known >> at[n] & 1]
        found.waits[node] = [n for n in apart if not any(found.before[at[m]] >> at[n] & 1 for m in apart)]
        found.before.append(_ended([*own, *needed], at, found.before))
        tails[lane] = node
        sources |= {value: [node] for value in node.outputs}
    return found


def _ended(nodes: Sequence[Node], at: dict[Node, int], before: Sequence[int]) -> int:
    ended = 0
    for node in nodes:
        ended |= before[at[node]] | 1 << at[node]
    return ended
