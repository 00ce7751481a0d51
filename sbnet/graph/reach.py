"""How far a network sees: by how many pixels of its input the result at a pixel depends on its neighbours."""

from __future__ import annotations

import math
from fractions import Fraction

from sbnet.graph.ir import Value
from sbnet.graph.kinds import POINTWISE, reads
from sbnet.graph.plan import Plan

# An output pixel o of one axis reads input pixels from scale * o + low to scale * o + high.
Extent = tuple[Fraction, Fraction, Fraction]


def reach(plan: Plan) -> int | None:
    """Pixels of the first input beside those that an output pixel lies over, the most of both axes and all outputs;
    None where an output needs the whole plane (global pools, layers that are not planned)."""
    first = next(v for v in plan.graph.inputs if v is not None)
    known: dict[Value, tuple[Extent, Extent] | None] = {}
    start = (Fraction(1), Fraction(0), Fraction(0))
    for value in plan.graph.inputs:
        if value is not None:
            known[value] = (start, start) if value is first else None
    for node in plan.graph.nodes:
        found: tuple[Extent, Extent] | None = None
        lost = False
        for value in node.inputs():
            if value.constant:
                continue
            before = known.get(value)
            for window in reads(node, value):
                if before is None or isinstance(window, str):
                    lost = True
                    continue
                through = tuple(_through(before[k], window, k) for k in (0, 1))
                found = through if found is None else tuple(map(_union, found, through))  # type: ignore[assignment]
        for value in node.outputs:
            known[value] = None if lost else found
    most = 0
    for output in plan.graph.outputs:
        if not isinstance(output, Value):
            continue
        extents = known.get(output)
        if extents is None:
            return None
        for scale, low, high in extents:
            inside = max(scale - 1, Fraction(0))
            most = max(most, math.ceil(-low), math.ceil(high - inside))
    return most


def _through(extent: Extent, window: object, axis: int) -> Extent:
    scale, low, high = extent
    if window == POINTWISE:
        return extent
    num, den, lo, hi = (pair[axis] for pair in (window.num, window.den, window.lo, window.hi))  # type: ignore[attr-defined]
    return scale * num / den, low + scale * Fraction(lo - den + 1, den), high + scale * Fraction(hi, den)


def _union(a: Extent, b: Extent) -> Extent:
    return max(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2])
