"""The masked contract in plain PyTorch, and how close a result comes to it. See docs/contracts.md."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sbnet.blocks import ActiveBlocks


@torch.no_grad()
def masked_oracle(net: nn.Sequential, x: Tensor, active: ActiveBlocks) -> Tensor:
    """What the masked contract says `net` gives: after every layer, everything outside the active blocks is 0.

    Args:
        net: layers that keep the plane's size, nested in nn.Sequential or not.
        x: [N,C,H,W], read as it is.
        active: active blocks of the H x W plane.

    Returns:
        [N,K,H,W] of x's dtype.
    """
    mask = active.pixel_mask(x.shape[2:])
    x = x.clone()  # a first layer that works in place must not change the caller's input
    for _, layer in net.named_modules(remove_duplicate=False):
        if isinstance(layer, nn.Sequential):
            continue
        x = layer(x)
        x = torch.where(mask, x, torch.zeros_like(x))
    return x


@dataclass(frozen=True)
class Agreement:
    """Distances from the masked oracle in float64, over all elements of an output.

    Attributes:
        error: rms error of the result.
        torch_error: rms error of PyTorch's own masked run in the result's dtype.
        ulp: one unit in the last place of that dtype at the oracle's rms.
        largest: largest absolute error of the result.
    """

    error: float
    torch_error: float
    ulp: float
    largest: float

    @property
    def holds(self) -> bool:
        """At most twice PyTorch's own error, and a unit in the last place (False where a result is not finite)."""
        return self.error <= 2 * self.torch_error + self.ulp


@torch.no_grad()
def compare(result: Tensor, net: nn.Sequential, x: Tensor, active: ActiveBlocks) -> Agreement:
    """How far `result` is from what the masked contract says `net` gives for `x`.

    The networks are copied, and run in float64: minutes of work for a large one.

    Args:
        result: [N,K,H,W].
        net: as for `masked_oracle`, any dtype.
        x: [N,C,H,W] of the result's dtype.
        active: active blocks of the plane.
    """
    # Every run starts from the parameters that the run in x's dtype has.
    own = copy.deepcopy(net).to(x.device, x.dtype)
    exact = masked_oracle(copy.deepcopy(own).double(), x.double(), active)
    ours, torchs = result.double() - exact, masked_oracle(own, x, active).double() - exact
    rms = exact.square().mean().sqrt().item()
    return Agreement(
        error=ours.square().mean().sqrt().item(),
        torch_error=torchs.square().mean().sqrt().item(),
        ulp=torch.finfo(x.dtype).eps * rms,
        largest=ours.abs().max().item(),
    )
