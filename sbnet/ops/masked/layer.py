"""What every layer on active blocks has in common: checks of its arguments, calls, fake implementations, gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks, BlockGrid, Fringe
from sbnet.geometry import to_pair
from sbnet.ops.common import (
    check_active,
    empty4,
    is_channels_last,
    mark_written,
    pixels_of,
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


def input_list(op: str, x: Tensor, active: ActiveBlocks | None) -> tuple[Tensor | None, Tensor | None, Any, list[int]]:
    """(indices, count, block map, grid) of the list of x's own plane, which its gradient is wanted on."""
    if active is None:
        return None, None, None, []
    require_active(f"{op}: x_active", active)
    require_batch(op, x, active)
    wanted = BlockGrid.cover(x.shape[2:], active.grid.bsize)
    if active.grid != wanted:
        raise ValueError(f"sbnet::{op}: x_active: expected the blocks of x's plane, {wanted}, got {active.grid}")
    return active.indices, active.count, active.block_map, active.grid.numbers()


def layer_output(
    op: str, out: Tensor, fringe: Fringe | None, *inputs: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(out, fringe pixels, fringe count) of a form in place, which records no gradient of its inputs."""
    require_tensor(op, "out", out)
    if fringe is not None and not isinstance(fringe, Fringe):
        raise TypeError(f"sbnet::{op}: fringe: expected an sbnet.Fringe or None, got {type(fringe).__name__}")
    refuse_gradient(op, op.rstrip("_"), *inputs, out)
    return (out, None, None) if fringe is None else (out, fringe.pixels, fringe.count)


Tensors = Sequence[Tensor | None]


def run_layer(op: str, x: Tensor, active: ActiveBlocks, *numbers: Any, tensors: Tensors = ()) -> Tensor:
    """Calls a layer that csrc/core/masked/plain_layers.h declares. tensors: what it reads besides x."""
    *lists, grid = layer_inputs(op, x, active)
    return getattr(torch.ops.sbnet, op)(x, *tensors, *lists, active.block_map, grid, *numbers)


def run_layer_(
    op: str, x: Tensor, active: ActiveBlocks, out: Tensor, fringe: Fringe | None, *numbers: Any, tensors: Tensors = ()
) -> None:
    """Calls its form in place."""
    lists, edge = layer_inputs(op, x, active), layer_output(op, out, fringe, x, *tensors)
    getattr(torch.ops.sbnet, op)(x, *tensors, *lists, *numbers, *edge)
    mark_written(out)


def layer_fakes(
    op: str,
    size: Callable[..., Sequence[Any]] = lambda shape, *_: shape,
    dtype: Callable[..., torch.dtype] | None = None,
    in_place: bool = True,
) -> None:
    """Registers the fake implementations of a layer's two forms, whose y has x's memory format.

    size(x.shape, *shapes of the weights that it needs, *what follows the grid in the schema): y's [N,C,H,W]; that of x
    where it is left out. dtype(*arguments): y's; x's where it is left out.
    """
    schema = getattr(torch.ops.sbnet, op).default._schema.arguments
    after = _names(op).index("grid") + 1
    weights = [k for k, a in enumerate(schema) if a.name.startswith("weight") and str(a.type) == "Tensor"]

    def fake(*arguments: Any) -> Tensor:
        refuse_meta_mix(op, *arguments)
        x = arguments[0]
        shape = size(x.shape, *(arguments[k].shape for k in weights), *arguments[after:])
        return empty4(x, shape, is_channels_last(x), None if dtype is None else dtype(*arguments))

    torch.library.register_fake(f"sbnet::{op}", fake)
    if in_place:
        in_place_fake(f"{op}_")


def require_channels(op: str, x: Sequence[Any], weight: Sequence[Any], groups: Any, at: int) -> None:
    """For fake implementations: that a weight is of x's channels. at: which of its dimensions they are."""
    fits = groups >= 1 and weight[at] * (groups if at else 1) == x[1] and weight[0] % groups == 0
    torch._check(
        fits,
        lambda: f"sbnet::{op}: weight: expected the {x[1]} channels of x, got {tuple(weight)} in {groups} groups",
    )


def whole_gradient(op: str, whole: Callable[..., Tensor], on_blocks: Callable[..., Any] | None = None) -> None:
    """Registers PyTorch's own gradient of whole(*tensors before the lists, inside, *what follows the grid).

    It says what the op gives, zeros where nothing is active; inside [N,1,H,W] bool: the active pixels. on_blocks(ctx,
    grad, tensors, block map, lists) gives the gradients of the tensors by ops of their own, or None.
    """
    names = _names(op)
    tensors = next(k for k, name in enumerate(names) if name in ("indices", "block_map"))
    at, after = names.index("block_map"), names.index("grid") + 1

    def setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
        lists = inputs[tensors : tensors + 2] if on_blocks is not None else ()
        ctx.save_for_backward(*inputs[:tensors], inputs[at], *lists)
        ctx.grid, ctx.numbers = inputs[after - 1], inputs[after:]

    def backward(ctx: Any, grad: Tensor) -> tuple:
        saved, (block_map, *lists) = ctx.saved_tensors[:tensors], ctx.saved_tensors[tensors:]
        found = None if on_blocks is None else on_blocks(ctx, grad, saved, block_map, lists)
        if found is not None:
            return *found, *[None] * (len(names) - tensors)
        wanted = [k for k in range(tensors) if ctx.needs_input_grad[k]]
        with torch.enable_grad():
            leaves = [None if t is None else t.detach().requires_grad_(k in wanted) for k, t in enumerate(saved)]
            y = whole(*leaves, pixels_of(block_map, ctx.grid, saved[0].shape[2:]), *ctx.numbers)
        found = torch.autograd.grad(y, [leaves[k] for k in wanted], grad)  # type: ignore[arg-type]
        given = dict(zip(wanted, found, strict=True))
        return tuple(given.get(k) for k in range(len(names)))

    torch.library.register_autograd(f"sbnet::{op}", backward, setup_context=setup)


def _names(op: str) -> list[str]:
    return [argument.name for argument in getattr(torch.ops.sbnet, op).default._schema.arguments]


def in_place_fake(op: str) -> None:
    """Registers the fake implementation of a form in place, which has nothing to return: it looks at the devices."""
    torch.library.register_fake(f"sbnet::{op}", lambda *arguments: refuse_meta_mix(op, *arguments))


def pairs(op: str, **values: Any) -> list[list[int]]:
    """Arguments of a window as the op takes them."""
    return [list(to_pair(value, f"{op}: {name}")) for name, value in values.items()]


def no_gradient(op: str) -> None:
    """Registers that an op has no gradient: who calls it without its wrapper learns so at the backward pass."""

    def refuse(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(f"sbnet::{op}: expected inputs that require no gradient, got a backward pass")

    torch.library.register_autograd(f"sbnet::{op}", refuse)
