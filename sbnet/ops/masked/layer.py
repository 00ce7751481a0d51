"""What every layer on active blocks checks of its arguments before torch.ops.sbnet.* is called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks, Fringe
from sbnet.geometry import to_pair
from sbnet.ops.common import (
    check_active,
    refuse_gradient,
    refuse_meta_mix,
    require_active,
    require_batch,
    require_tensor,
)


def layer_inputs(op: str, x: Tensor, active: ActiveBlocks) -> tuple[Tensor, Tensor, list[int]]:
    """(indices, count, grid) of the list that an op takes, which is of x's batch."""
    require_tensor(op, "x", x)
    require_active(op, active)
    require_batch(op, x, active)
    check_active(op, active)
    return active.indices, active.count, active.grid.numbers()


def layer_output(
    op: str, out: Tensor, fringe: Fringe | None, *inputs: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(out, fringe pixels, fringe count) of a form in place, which records no gradient of its inputs."""
    require_tensor(op, "out", out)
    if fringe is not None and not isinstance(fringe, Fringe):
        raise TypeError(f"sbnet::{op}: fringe: {type(fringe).__name__}; an sbnet.Fringe or None is wanted")
    refuse_gradient(op, op.rstrip("_"), *inputs, out)
    return (out, None, None) if fringe is None else (out, fringe.pixels, fringe.count)


def in_place_fake(op: str) -> None:
    """Registers the fake implementation of a form in place, which has nothing to return: it looks at the devices."""
    torch.library.register_fake(f"sbnet::{op}", lambda *arguments: refuse_meta_mix(op, *arguments))


def pairs(op: str, **values: Any) -> list[list[int]]:
    """Arguments of a window as the op takes them."""
    return [list(to_pair(value, f"{op}: {name}")) for name, value in values.items()]
