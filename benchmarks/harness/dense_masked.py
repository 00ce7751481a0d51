"""The training step under masks as those write it who have no sparse ops: all of it dense, multiplied by masks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
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
        if func in (F.batch_norm, F.group_norm):
            found = self._norm(func, inspect.signature(func).bind(*args, **kwargs))
            if found is not None:
                return found
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if not isinstance(out, Tensor) or out.dim() != 4 or not out.is_floating_point() or out.shape[0] != self.batch:
            return out
        size = out.shape[2], out.shape[3]
        layer = name.startswith("conv") or "pool" in name or name == "interpolate"
        if layer and size[0] * size[1] > 1:
            self.sizes.add(size)
        if name in MOVES or size not in self.sizes:
            return out
        return torch.where(self.planes(size), out, torch.zeros((), dtype=out.dtype, device=out.device))

    def _norm(self, func: Any, call: inspect.BoundArguments) -> Tensor | None:
        call.apply_defaults()
        of = call.arguments
        x = of["input"]
        inside = self.planes((x.shape[2], x.shape[3]))
        if func is F.group_norm:
            return norm_whole(x, of["weight"], of["bias"], inside, "group", of["num_groups"], of["eps"])
        return batch_norm_whole(x, of["weight"], of["bias"], inside, of["eps"]) if of["training"] else None
