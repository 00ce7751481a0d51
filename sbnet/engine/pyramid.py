"""Active blocks and fringes of all planes of a network, from one pixel mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.blocks import ActiveBlocks, BlockGrid, Fringe
from sbnet.engine.planner import Consumer, Plane
from sbnet.ops import fringe, reduce_mask


def mask_pyramid(
    mask: Tensor, planes: Sequence[Plane], tol: float = 0.5, fringes: Sequence[tuple[int, Sequence[Consumer]]] = ()
) -> tuple[list[ActiveBlocks], list[Fringe]]:
    actives = []
    for height, width, block in planes:
        on_plane = F.adaptive_max_pool2d(mask.float()[:, None], (height, width))
        actives.append(reduce_mask(on_plane, BlockGrid.cover((height, width), block), tol))
    found = []
    for plane, consumers in fringes:
        parts = [fringe(actives[plane], actives[c[0]], planes[plane][:2], *c[1:]) for c in consumers]
        pixels = torch.cat([f.pixels for f in parts])
        order = torch.argsort(pixels < 0, stable=True)
        found.append(Fringe(pixels[order], torch.stack([f.count for f in parts]).sum(0, dtype=torch.int32)))
    return actives, found
