"""Lists of active blocks and fringes that a call's mask makes, by the mode's contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks, BlockGrid, Fringe
from sbnet.graph.ir import Value
from sbnet.graph.passes.demand import demands, pixels
from sbnet.graph.passes.storage import Storage
from sbnet.graph.plan import Plan
from sbnet.ops import mask_pyramid, reduce_mask

MOST_PLANES, MOST_FRINGES, MOST_CONSUMERS = 16, 20, 32  # of one call of mask_pyramid


class PlaneLists:
    """Of the masked and cached contracts: all tensors of one size share one list."""

    def __init__(self, plan: Plan, storage: Storage) -> None:
        self.plan, self.fringes = plan, storage.fringes

    def of(self, value: Value) -> int:
        """Which list is a value's."""
        return self.plan.plane(value)

    def __call__(self, mask: Tensor) -> tuple[tuple[ActiveBlocks, ...], Sequence[Fringe]]:
        """(lists, fringes), in as few calls of the op as its limits allow."""
        planes, fringes = self.plan.planes, self.fringes
        consumers = sum(len(found) for _, found in fringes)
        if len(planes) <= MOST_PLANES and len(fringes) <= MOST_FRINGES and consumers <= MOST_CONSUMERS:
            made = mask_pyramid(mask, planes, fringes=_requests(fringes))
            return made.planes, made.fringes
        active: list[ActiveBlocks] = []
        for at in range(0, len(planes), MOST_PLANES):
            active += mask_pyramid(mask, planes[at : at + MOST_PLANES]).planes
        found: list[Fringe] = []
        for group in _groups(fringes):
            used = sorted({p for plane, readers in group for p in (plane, *(c for c, _ in readers))})
            numbers = {plane: k for k, plane in enumerate(used)}
            asked = [(numbers[p], tuple((numbers[c], w) for c, w in readers)) for p, readers in group]
            found += mask_pyramid(mask, [planes[p] for p in used], fringes=_requests(asked)).fringes
        return tuple(active), found


class ExactLists:
    """Of the exact contract: each tensor has the blocks that touch what is needed of it."""

    def __init__(self, plan: Plan) -> None:
        self.demands = demands(plan)
        self.grids = []
        for demand in self.demands.demands:
            height, width, block = plan.planes[plan.index[demand.size]]
            self.grids.append(BlockGrid.cover((height, width), block))

    def of(self, value: Value) -> int:
        return self.demands.of[value]

    def __call__(self, mask: Tensor) -> tuple[tuple[ActiveBlocks, ...], Sequence[Fringe]]:
        needed = pixels(self.demands.demands, mask)
        return tuple(reduce_mask(p, grid) for p, grid in zip(needed, self.grids, strict=True)), ()


def lists_of(plan: Plan, storage: Storage) -> PlaneLists | ExactLists:
    return ExactLists(plan) if plan.mode == "exact" else PlaneLists(plan, storage)


def all_pixels(mask: Tensor) -> Tensor:
    return torch.ones_like(mask, dtype=torch.bool)


def _requests(fringes: Any) -> list[Any]:
    return [(plane, [(p, *window) for p, window in consumers]) for plane, consumers in fringes]


def _groups(fringes: Sequence[Any]) -> list[list[Any]]:
    """Fringes cut into calls of mask_pyramid."""
    groups: list[list[Any]] = [[]]
    for one in fringes:
        group = [*groups[-1], one]
        planes = {p for plane, consumers in group for p in (plane, *(c for c, _ in consumers))}
        if len(group) > MOST_FRINGES or len(planes) > MOST_PLANES or sum(len(c) for _, c in group) > MOST_CONSUMERS:
            group = [one]
            groups.append([])
        groups[-1] = group
    return groups
