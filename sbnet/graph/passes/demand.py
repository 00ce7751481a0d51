"""The exact contract: which pixels of every feature map the mask's pixels of the outputs depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.geometry import Window
from sbnet.graph.ir import Node, Value
from sbnet.graph.kinds import POINTWISE, WHOLE, kind_of, reads
from sbnet.graph.plan import Plan

Term = tuple[int, Window | str]  # of which demand, through which window
OUTPUT = -1  # stands for the mask itself, brought to the plane


@dataclass(frozen=True)
class Demand:
    """Pixels of a plane: the union of what is read to compute others. The terms name earlier demands."""

    size: tuple[int, int]
    terms: tuple[Term, ...]


@dataclass
class Demands:
    """Of a plan. `of` says which demand is a value's."""

    demands: list[Demand] = field(default_factory=list)
    of: dict[Value, int] = field(default_factory=dict)


def demands(plan: Plan) -> Demands:
    """Goes backwards through the graph: every value's demand from those of its readers."""
    found, known = Demands(), dict[Demand, int]()
    graph = plan.graph
    whole: set[Value] = set()  # no plane, but read: it needs all pixels of its sample
    for node in reversed(graph.nodes):
        for value in node.outputs:
            terms: set[Term] = set()
            if graph.is_output(value):
                terms.add((OUTPUT, POINTWISE if value.size is not None else WHOLE))
            for user in value.users:
                terms |= _terms(found, whole, user, value)
            if value.size is None:
                whole.add(value)
                continue
            if any(window == WHOLE for _, window in terms) or value.plane is None:
                terms = {(OUTPUT, WHOLE)}
            demand = Demand(value.size, tuple(sorted(terms, key=repr)))
            if len(demand.terms) == 1:
                at, window = demand.terms[0]
                if window == POINTWISE and at != OUTPUT and found.demands[at].size == value.size:
                    found.of[value] = at  # what its only reader needs
                    continue
            found.of[value] = known.setdefault(demand, len(found.demands))
            if found.of[value] == len(found.demands):
                found.demands.append(demand)
    return found


def _terms(found: Demands, whole: set[Value], user: Node, value: Value) -> set[Term]:
    terms: set[Term] = set()
    for window in reads(user, value):
        window = kind_of(user).demanded(user, value, window)
        for out in user.outputs:
            if out in whole or isinstance(window, str):
                terms.add((OUTPUT, WHOLE))
            else:
                terms.add((found.of[out], window))
    return terms


def pixels(demands: Sequence[Demand], mask: Tensor) -> list[Tensor]:
    """[N,1,height,width] float, 0 or 1, of each demand, for a mask [N,H,W] of the outputs."""
    mask = mask.float()[:, None]
    made: list[Tensor] = []
    for demand in demands:
        union: Tensor | None = None
        for at, window in demand.terms:
            one = _read(demand.size, mask if at == OUTPUT else made[at], window, at == OUTPUT)
            union = one if union is None else torch.maximum(union, one)
        made.append(mask.new_zeros(mask.shape[0], 1, *demand.size) if union is None else union)
    return made


def _read(size: tuple[int, int], wanted: Tensor, window: Window | str, is_mask: bool) -> Tensor:
    """Pixels of a plane of this size that the wanted pixels read."""
    if window == WHOLE:
        return wanted.amax((2, 3), keepdim=True).expand(-1, -1, *size)
    assert not isinstance(window, str)
    if is_mask:
        return _brought(wanted, size)
    if window == POINTWISE:  # also of what adds rows and columns at the end
        return _fitted(wanted, size)
    if window.den != (1, 1) or (window.step == (1, 1) and max(window.lo) > 0):  # no padding: a crop
        return _read_axis(_read_axis(wanted, window, 0, size[0]), window, 1, size[1])
    stride, padding, dilation = window.num, tuple(-v for v in window.lo), window.step
    reach = [hi - lo for lo, hi in zip(window.lo, window.hi, strict=True)]
    r, s = (e // d + 1 for e, d in zip(reach, dilation, strict=True))
    if stride == (1, 1) and all(2 * p <= e for p, e in zip(padding, reach, strict=True)):
        # a pixel is read if one of those that its window, mirrored, covers is wanted
        before = [e - p for e, p in zip(reach, padding, strict=True)]
        padded = F.pad(wanted, (before[1], before[1], before[0], before[0]))
        return _fitted(F.max_pool2d(padded, (r, s), 1, 0, dilation), size)
    kernel = wanted.new_ones(1, 1, r, s)
    # All that windows cover from `padding` pixels before the plane on; cut to the plane.
    spread = F.conv_transpose2d(wanted, kernel, None, stride, 0, 0, 1, dilation)[:, :, padding[0] :, padding[1] :]
    return (_fitted(spread, size) > 0).float()


def _fitted(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Cut to a plane that is padded at the end before it is read; with zeros for pixels that no window reaches."""
    pixels = pixels[:, :, : size[0], : size[1]]
    missing = [n - m for n, m in zip(size, pixels.shape[2:], strict=True)]
    return F.pad(pixels, (0, missing[1], 0, missing[0])) if any(missing) else pixels


def _read_axis(wanted: Tensor, window: Window, axis: int, side: int) -> Tensor:
    """Along one axis: is one of the neighbouring outputs wanted that reach a coordinate? (Their step is 1.)"""
    num, den, lo, hi = (pair[axis] for pair in (window.num, window.den, window.lo, window.hi))
    out = wanted.shape[2 + axis]
    at = torch.arange(side, device=wanted.device)
    first = torch.div(at * den - hi - 1, num, rounding_mode="floor") + 1
    last = torch.div((at + 1) * den - 1 - lo, num, rounding_mode="floor")
    return _any(wanted, axis, first.clamp(0, out), (last + 1).clamp(0, out))


def _any(x: Tensor, axis: int, first: Tensor, end: Tensor) -> Tensor:
    """Along one axis: is one set of those from `first` on, before `end`?"""
    sums = F.pad(x.cumsum(2 + axis), (0, 0, 1, 0) if axis == 0 else (1, 0))
    before, upto = (sums.index_select(2 + axis, v) for v in (first, end))
    return (upto > before).float()


def _brought(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """adaptive_max_pool2d of zeros and ones, in ops that ONNX has."""
    for axis, side in enumerate(size):
        length = mask.shape[2 + axis]
        if length != side:
            at = torch.arange(side, device=mask.device)
            first, end = (
                torch.div(v, side, rounding_mode="floor") for v in (at * length, (at + 1) * length + side - 1)
            )
            mask = _any(mask, axis, first, end)
    return mask
