"""The gate of squeeze and excitation in one op: global average of the active pixels, two products, two activations."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.active import ActiveBlocks
from sbnet.ops.common import empty4, mark_written, refuse_gradient, refuse_meta_mix, require_tensor
from sbnet.ops.masked.layer import in_place_fake, layer_inputs, whole_gradient

_ops = torch.ops.sbnet

STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "silu": F.silu, "hardswish": F.hardswish, "sigmoid": torch.sigmoid, "hardsigmoid": F.hardsigmoid,
}  # fmt: skip


def sparse_squeeze_excite2d(
    x: Tensor,
    active: ActiveBlocks,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    activation: str = "relu",
    gate: str = "sigmoid",
) -> Tensor:
    """A number a channel from the average of where(active, x, 0), as squeeze and excitation multiplies x by (Hu, Shen
    and Sun, 2018): gate(weight2 @ activation(weight1 @ average + bias1) + bias2).

    Nothing is rounded to x's dtype between. Hopper does all after the sums of the average in one kernel.

    Args:
        x: [N,C,H,W] float32, float16 or bfloat16, any layout; channels_last is the fast one. C at most 12288.
        active: active blocks of x's plane. (The output is dense.)
        weight1, weight2: [R,C] and [C,R] of x's dtype.
        bias1, bias2: [R] and [C], both of x's dtype or both float32, or None.
        activation, gate: "relu", "silu", "hardswish", "sigmoid" or "hardsigmoid".

    Returns:
        [N,C,1,1], channels_last. Differentiable.

    Raises:
        RuntimeError, ValueError, TypeError: wrong shapes, dtypes, devices or grid.

    >>> fc1, fc2 = torch.nn.Linear(16, 4), torch.nn.Linear(4, 16)
    >>> y = x * sbnet.sparse_squeeze_excite2d(x, active, fc1.weight, fc1.bias, fc2.weight, fc2.bias)
    """
    op = "sparse_squeeze_excite2d"
    _, _, grid = layer_inputs(op, x, active)
    for name, weight in (("weight1", weight1), ("weight2", weight2)):
        require_tensor(op, name, weight)
    return _ops.sparse_squeeze_excite2d(x, weight1, weight2, bias1, bias2, active.block_map, grid, activation, gate)


def sparse_squeeze_excite2d_(
    x: Tensor,
    active: ActiveBlocks,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    out: Tensor,
    *,
    activation: str = "relu",
    gate: str = "sigmoid",
) -> None:
    """x times what `sparse_squeeze_excite2d` gives, in the active blocks of `out`; the rest of it stays as it was. On
    Hopper it is one launch, which reads x again from the cache.

    Args:
        out: [N,C,H,W] of x's dtype, any layout; must not share memory with x.
        others: as `sparse_squeeze_excite2d`.

    Raises:
        RuntimeError, ValueError, TypeError: as `sparse_squeeze_excite2d`.

    >>> w1, w2 = torch.rand(4, 16), torch.rand(16, 4)
    >>> sbnet.sparse_squeeze_excite2d_(x, active, w1, None, w2, None, torch.empty_like(x))
    """
    op = "sparse_squeeze_excite2d_"
    _, _, grid = layer_inputs(op, x, active)
    for name, tensor in (("weight1", weight1), ("weight2", weight2), ("out", out)):
        require_tensor(op, name, tensor)
    refuse_gradient(op, op.rstrip("_"), x, weight1, bias1, weight2, bias2, out)
    _ops.sparse_squeeze_excite2d_(x, weight1, weight2, bias1, bias2, active.block_map, grid, activation, gate, out)
    mark_written(out)


def squeeze_excite_whole(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    inside: Tensor,
    activation: str,
    gate: str,
) -> Tensor:
    """What `sparse_squeeze_excite2d` gives, by PyTorch; `inside` [N,1,H,W] bool: active pixels."""

    def layer(y: Tensor, weight: Tensor, bias: Tensor | None, step: str) -> Tensor:
        return STEPS[step](F.linear(y, weight, None if bias is None else bias.to(y.dtype)))

    mean = torch.where(inside, x, torch.zeros_like(x)).mean((2, 3))
    return layer(layer(mean, weight1, bias1, activation), weight2, bias2, gate)[:, :, None, None]


# ---- fake implementation and gradient


@torch.library.register_fake("sbnet::sparse_squeeze_excite2d")
def _sparse_squeeze_excite2d_fake(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    block_map: Tensor,
    grid: list[int],
    activation: str,
    gate: str,
) -> Tensor:
    refuse_meta_mix("sparse_squeeze_excite2d", x, weight1, weight2, bias1, bias2, block_map)
    return empty4(x, (x.shape[0], x.shape[1], 1, 1), True)


in_place_fake("sparse_squeeze_excite2d_")


whole_gradient("sparse_squeeze_excite2d", squeeze_excite_whole)
