"""The training step under masks as those write it who have no sparse ops: all of it dense, multiplied by masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sbnet.graph.oracle import PlaneMasks
from sbnet.ops.masked.batch_norm import batch_norm_whole
from sbnet.ops.masked.norm import norm_whole

MOVES = ("permute", "__get__", "chunk", "split", "clone", "detach", "__getitem__", "contiguous", "to")


class DenseMasked(TorchFunctionMode):
    """Inside, every op with a feature map as its result is followed by a product with the mask; batch and group norms
    in training have the statistics of the active pixels. What `sbnet.masked` is held to.

    Args:
        mask: [N,H,W] of bool, on the pixels of the network's input.
        block: block size of every plane.
    """

    def __init__(self, mask: Tensor, block: int) -> None:
        super().__init__()
        self.planes, self.sizes, self.batch = PlaneMasks(mask, block), {(mask.shape[1], mask.shape[2])}, mask.shape[0]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if name in ("batch_norm", "group_norm"):
            found = (self._batch_norm if name == "batch_norm" else self._group_norm)(*args, **kwargs)
            if found is not None:
                return found
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor) or out.dim() != 4 or not out.is_floating_point() or out.shape[0] != self.batch:
            return out
        size = out.shape[2], out.shape[3]
        if ("conv" in name or "pool" in name or name == "interpolate") and size[0] * size[1] > 1:
            self.sizes.add(size)
        last = (out.shape[1], out.shape[2]) in self.sizes and size not in self.sizes  # [N,H,W,C]
        casts = any(isinstance(t, Tensor) and not t.is_floating_point() for t in args[:1])
        if (name in MOVES and not casts) or not (last or size in self.sizes):
            return out
        inside = self.planes((out.shape[1], out.shape[2])).permute(0, 2, 3, 1) if last else self.planes(size)
        return torch.where(inside, out, torch.zeros((), dtype=out.dtype, device=out.device))

    def _batch_norm(
        self, input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
        training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor | None:  # fmt: skip
        return batch_norm_whole(input, weight, bias, self._inside(input), eps) if training else None

    def _group_norm(
        self, input: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> Tensor:
        return norm_whole(input, weight, bias, self._inside(input), "group", groups, eps)

    def _inside(self, x: Tensor) -> Tensor:
        return self.planes((x.shape[2], x.shape[3]))


@torch.compiler.assume_constant_result
def _name(func: Any) -> str:
    return getattr(func, "__name__", "")
