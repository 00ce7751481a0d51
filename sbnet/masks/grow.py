"""Masks that grow."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def grow(mask: Tensor, margin: int) -> Tensor:
    """[N,H,W] bool: pixels at most `margin` rows and columns from a set one; by doubling, so that a wide margin costs
    little more than a narrow one. With no margin, a mask of bool is returned as it is.

    >>> wider = grow(mask, 32)
    """
    if margin < 0:
        raise ValueError(f"sbnet: margin: expected at least 0, got {margin}")
    found = mask if mask.dtype == torch.bool else mask > 0.5 if mask.is_floating_point() else mask != 0
    if not margin:
        return found
    # Rows of zeros and their ends keep apart what is not beside each other, so that all is one long row: its pieces are
    # contiguous, for which PyTorch has vectors.
    height, width = found.shape[1:]
    wide = F.pad(found, (margin, margin, margin, margin))
    apart = wide.shape[2]
    across = _windows(wide.flatten(), 1, margin)  # from `margin` columns left of a pixel on
    down = F.pad(_windows(across, apart, margin), (0, 2 * margin * (apart + 1)))
    return down.view(wide.shape)[:, :height, :width]


def _windows(found: Tensor, apart: int, margin: int) -> Tensor:
    """Is one set of the pixel and the 2 * margin after it, each `apart` from the one before?"""
    width, whole = 1, 2 * margin + 1  # pixels that each says something of, from itself on
    while width < whole:
        step = min(width, whole - width)
        left = found.shape[0] - step * apart
        found = found.narrow(0, 0, left) | found.narrow(0, step * apart, left)
        width += step
    return found
