"""The cached contract in plain PyTorch, by hooks: what is not active stays, after every module, as the frame before
left it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Keep = Callable[[Any, Tensor], Tensor | None]


class Remembering:
    """`__call__(x, keep)`: keep(module, t): of the t that a module gives, which numbers are new ([...] bool that it
    expands to), or None where that is not a feature map or a list of tokens."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.held = net, dict[Any, Tensor]()
        self.keep: Keep = lambda module, t: None
        self.calls: dict[Any, int] = {}
        for module in net.modules():
            module.register_forward_hook(self._after)

    def _after(self, module: nn.Module, args: Any, out: Any) -> Any:
        return self.remembered(module, out)

    def remembered(self, module: Any, out: Any) -> Any:
        """What a module gives, or what has another name."""
        keep = self.keep(module, out) if isinstance(out, Tensor) else None
        if keep is None:
            return out
        key = module, self.calls.setdefault(module, 0)
        self.calls[module] += 1
        self.held[key] = torch.where(keep, out, self.held[key]) if key in self.held else out.clone()
        return self.held[key]

    def __call__(self, x: Tensor, keep: Keep) -> Tensor:
        self.keep, self.calls = keep, {}
        with torch.no_grad():
            return self.net(x)


def of_tokens(keep: Tensor) -> Keep:
    """keep [N,T] bool: of lists of as many tokens [N,T,C]."""
    return lambda module, t: keep[:, :, None] if t.dim() == 3 and t.shape[:2] == keep.shape else None


def of_planes(planes: Callable[[tuple[int, int]], Tensor], images: int) -> Keep:
    """Of square planes [N,C,H,W], [N,H,W,C] and [N,H*W,C]; planes: (height, width) to [N,1,height,width] bool."""

    def keep(module: nn.Module, t: Tensor) -> Tensor | None:
        if len(t) != images or t.dim() not in (3, 4):
            return None
        _, a, b, *last = t.shape
        if t.dim() == 3:
            side = round(a**0.5)
            return planes((side, side)).flatten(2).transpose(1, 2) if side**2 == a else None
        if a == b == last[0] and not isinstance(module, nn.Conv2d | nn.Linear | nn.LayerNorm):
            return None  # there is no telling
        behind = isinstance(module, nn.Linear) or type(module) is nn.LayerNorm
        if b == last[0] and not (a == b and behind):
            return planes((b, b))
        return planes((a, a)).permute(0, 2, 3, 1) if a == b else None

    return keep
