"""Chains of convolutions of one plane by the name that they had before `sparsify`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sbnet.engine.sparsify import SparseRun, sparsify
from sbnet.geometry import to_pair


def MaskedConvNet(
    net: nn.Sequential,
    size: Sequence[int],
    block: int | Sequence[int] = 16,
    *,
    batch: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> SparseRun:
    """`sparsify` of a copy of `net` for frames [batch,C,*size] of that dtype, C being what its first convolution takes;
    options are those of `sparsify`. Later changes of the module are not seen.

    Raises:
        ValueError: there is no convolution, or what `sparsify` raises.

    >>> run = MaskedConvNet(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()), (400, 704))
    >>> y = run(torch.rand(1, 3, 400, 704), torch.rand(1, 400, 704) > 0.999)  # [1, 8, 400, 704]
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"sbnet: MaskedConvNet: net: expected an nn.Module, got {type(net).__name__}")
    own = copy.deepcopy(net).requires_grad_(False).to(device, dtype)
    first = next((m for m in own.modules() if isinstance(m, nn.Conv2d)), None)
    if first is None:
        raise ValueError("sbnet: MaskedConvNet: net: expected at least one nn.Conv2d, got none")
    shape = batch, first.in_channels, *to_pair(size, "MaskedConvNet: size")
    return sparsify(own, torch.zeros(shape, dtype=dtype, device=device), block=block, **options)
