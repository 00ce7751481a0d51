"""Runs of `sparsify` as many tests make them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import sbnet
from sbnet.engine import SparseRun


def run_of(
    net: nn.Module,
    size: Sequence[int],
    block: Any = 8,
    *,
    batch: int = 1,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> SparseRun:
    """A run of a copy of `net` for frames [batch,C,*size], C being what its first convolution takes."""
    own = copy.deepcopy(net).eval().requires_grad_(False).to(device, dtype)
    channels = next(m.in_channels for m in own.modules() if isinstance(m, nn.Conv2d))
    example = torch.zeros(batch, channels, *size, dtype=dtype, device=device)
    return sbnet.sparsify(own, example, block=block, **options)
