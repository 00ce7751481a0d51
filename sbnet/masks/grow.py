"""Masks grown by a margin."""

from __future__ import annotations

import torch
from torch import Tensor


def grow(mask: Tensor, margin: int) -> Tensor:
    """[N,H,W] bool: pixels at most `margin` rows and columns from a set one; by running sums, so that a wide margin
    costs what a narrow one does.

    >>> wider = grow(mask, 32)
    """
    if margin < 0:
        raise ValueError(f"sbnet: margin: expected at least 0, got {margin}")
    found = mask != 0 if mask.dtype == torch.bool or not mask.is_floating_point() else mask > 0.5
    for dim in (1, 2):
        if not margin:
            break
        sums = found.to(torch.int32).cumsum(dim, dtype=torch.int32)
        length = found.shape[dim]
        at = torch.arange(length, device=mask.device)
        last = sums.index_select(dim, (at + margin).clamp(max=length - 1))
        before = sums.index_select(dim, (at - margin - 1).clamp(min=0))
        first = (at - margin - 1 < 0).view(1, -1, 1) if dim == 1 else (at - margin - 1 < 0).view(1, 1, -1)
        found = last - before.masked_fill(first, 0) > 0
    return found
