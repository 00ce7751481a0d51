"""Planes that are active as a whole, of which PyTorch's layers give what `sbnet.masked` would. On a CPU, whose lists
are known, they serve them; on a GPU they are not looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from sbnet.engine.modes import open_of

if TYPE_CHECKING:
    from sbnet.engine.eager import masked

_WITHOUT_INPLACE = {"gelu"}


def whole(mode: masked, size: Any) -> bool:
    """Is every block of a plane of (height, width) active, for sure?"""
    if open_of(mode) is None or mode.mask.device.type != "cpu":
        return False
    active = mode.active(size)
    return int(active.count) == active.block_map.numel() > 0


def densely(mode: masked, func: Any, *args: Any) -> Tensor:
    """What func gives of maps, which are 0 outside of their active blocks, on such a plane."""
    maps = open_of(mode)
    maps.close_all(args)
    return mode.kept(func(*args))


def activate(mode: masked, x: Tensor, name: str, param: float | None, inplace: bool) -> Tensor:
    """An activation of such a plane."""
    args = [] if param is None else [param]
    if name not in _WITHOUT_INPLACE:
        args.append(inplace)
    return densely(mode, getattr(F, name), x, *args)
