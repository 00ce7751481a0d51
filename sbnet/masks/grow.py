"""What masks take of the pixels around one: any that is set, or their sum."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def grow(mask: Tensor, margin: int) -> Tensor:
    """[N,H,W] bool: pixels at most `margin` rows and columns from a set one; by doubling, so that a wide margin costs
    little more than a narrow one.

    >>> wider = grow(mask, 32)
    """
    if margin < 0:
        raise ValueError(f"sbnet: margin: expected at least 0, got {margin}")
    found = mask != 0 if mask.dtype == torch.bool or not mask.is_floating_point() else mask > 0.5
    if not margin:
        return found
    return _windows(_windows(found, 1, margin), 2, margin)


def _windows(found: Tensor, dim: int, margin: int) -> Tensor:
    """Is one set of the `margin` pixels before, the pixel, and the `margin` after it?"""
    found = F.pad(found, (0, 0, margin, margin) if dim == 1 else (margin, margin))
    width, whole = 1, 2 * margin + 1  # pixels that each says something of, from itself on
    while width < whole:
        step = min(width, whole - width)
        left = found.shape[dim] - step
        found = found.narrow(dim, 0, left) | found.narrow(dim, step, left)
        width += step
    return found


def box_sums(x: Tensor, side: int) -> Tensor:
    """[N,C,H,W]: sums over boxes of side x side pixels around each (side is odd); outside the plane lie zeros.
    (avg_pool2d does not use vectors on a CPU.)"""
    for dim in (2, 3):
        x = _sums(x, dim, side)
    return x


def _sums(x: Tensor, dim: int, side: int) -> Tensor:
    """Along one axis, of 1, 2, 4, ... pixels, and of those that make `side` together."""
    part = F.pad(x, (0, 0, side // 2, side // 2) if dim == 2 else (side // 2, side // 2))
    found: Tensor | None = None
    start, width, length = 0, 1, x.shape[dim]
    while True:
        if side & width:
            piece = part.narrow(dim, start, length)
            found = piece if found is None else found + piece
            start += width
        if 2 * width > side:
            assert found is not None
            return found
        left = part.shape[dim] - width
        part = part.narrow(dim, 0, left) + part.narrow(dim, width, left)
        width *= 2
