"""Lists of active blocks and fringes that a call's mask makes, by the mode's contract."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks, BlockGrid, Fringe
from sbnet.graph.ir import Value
from sbnet.graph.passes.demand import demands, pixels
from sbnet.graph.passes.storage import Storage
from sbnet.graph.plan import Plan
from sbnet.graph.tokens import with_tokens
from sbnet.masks.grow import grow
from sbnet.ops import reduce_mask
from sbnet.ops.lists.pyramid import PyramidRequest


class PlaneLists:
    """Of the masked and cached contracts: all tensors of one size share one list."""

    def __init__(self, plan: Plan, storage: Storage) -> None:
        self.plan, self.request = plan, PyramidRequest.of(plan.images, storage.fringes)

    def of(self, value: Value) -> int:
        """Which list is a value's."""
        return self.plan.plane(value)

    def __call__(self, mask: Tensor, margin: int = 0) -> tuple[tuple[ActiveBlocks, ...], Sequence[Fringe]]:
        """margin: pixels by which the mask is grown."""
        made = self.request.run(mask, margin=margin)
        return with_tokens(made.planes, self.plan.tokens), made.fringes


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

    def __call__(self, mask: Tensor, margin: int = 0) -> tuple[tuple[ActiveBlocks, ...], Sequence[Fringe]]:
        """margin: pixels by which the mask is grown."""
        needed = pixels(self.demands.demands, grow(mask, margin) if margin else mask)
        return tuple(reduce_mask(p, grid) for p, grid in zip(needed, self.grids, strict=True)), ()


def lists_of(plan: Plan, storage: Storage) -> PlaneLists | ExactLists:
    """What makes the lists of a plan's mode."""
    return ExactLists(plan) if plan.mode == "exact" else PlaneLists(plan, storage)


def all_pixels(mask: Tensor) -> Tensor:
    return torch.ones_like(mask, dtype=torch.bool)
