"""The masked contract in plain PyTorch, and how close a result comes to it. See docs/contracts.md."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sbnet.active import ActiveBlocks
from sbnet.geometry import Pair, to_pair
from sbnet.graph.oracle import active_norm
from sbnet.ops.common import set_pixels

PixelMasks = Mapping[Pair, Tensor]  # (H, W) of a plane: [N,1,H,W] bool


def plane_masks(mask: Tensor, planes: Sequence[tuple[int, int, int | Sequence[int]]]) -> dict[Pair, Tensor]:
    """The pixels of each plane that the contract computes: M of docs/contracts.md.

    Args:
        mask: [N,H,W] or [N,1,H,W], on the network's input; bool, or set where greater than 0.5.
        planes: (height, width, block size) of each plane.

    Returns:
        {(height, width): [N,1,height,width] bool}.
    """
    mask = set_pixels("plane_masks", mask)
    masks = {}
    for height, width, block in planes:
        on_plane = F.adaptive_max_pool2d(mask.float()[:, None], (height, width))
        bh, bw = to_pair(block, "plane_masks: block")
        blocks = F.max_pool2d(F.pad(on_plane, (0, -width % bw, 0, -height % bh)), (bh, bw))
        pixels = blocks.repeat_interleave(bh, 2).repeat_interleave(bw, 3)[:, :, :height, :width]
        masks[height, width] = pixels > 0
    return masks


class _MaskEveryOp(TorchFunctionMode):
    """After every call of PyTorch that gives a spatial tensor, zero its inactive pixels."""

    def __init__(self, mask_of: Callable[[Pair], Tensor | None]) -> None:
        super().__init__()
        self.mask_of = mask_of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = active_norm(func, args, kwargs or {}, self.mask_of)
        out = func(*args, **(kwargs or {})) if out is None else out
        if not isinstance(out, Tensor) or out.dim() != 4 or not out.is_floating_point():
            return out
        mask = self.mask_of((out.shape[2], out.shape[3]))
        if mask is None:
            return out
        zeroed = torch.where(mask, out, torch.zeros_like(out))
        # An op in place is followed by others that know its argument, not its result.
        return out.copy_(zeroed) if args and out is args[0] else zeroed


@torch.no_grad()
def masked_oracle(net: Callable[[Tensor], Any], x: Tensor, active: ActiveBlocks | PixelMasks) -> Any:
    """What the masked contract says `net` gives: after every op with a spatial output, what is not active is 0.

    Args:
        net: a dense network in eval mode, before anything is fused: any module whose feature maps are [N,C,H,W].
        x: [N,C,H,W], read as it is.
        active: active blocks of the plane where all feature maps are of one size; else the pixel masks of all planes
            that the network has (`plane_masks`). What global pooling leaves, 1 x 1, is not masked.

    Returns:
        What the network returns.
    """

    if not isinstance(active, (ActiveBlocks, Mapping)):
        raise TypeError(
            f"sbnet: masked_oracle: active: expected an sbnet.ActiveBlocks, "
            f"or plane_masks(), got {type(active).__name__}"
        )

    def mask_of(size: Pair) -> Tensor | None:
        if isinstance(active, ActiveBlocks):
            return active.pixel_mask(size)
        if size not in active and size != (1, 1):
            raise ValueError(
                f"sbnet: masked_oracle: active: expected masks of each plane, {size} too, got {sorted(active)}"
            )
        return active.get(size)

    x = x.clone()  # a first layer that works in place must not change the caller's input
    with _MaskEveryOp(mask_of):
        return net(x)


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
def compare(
    result: Tensor,
    net: nn.Module,
    x: Tensor,
    active: ActiveBlocks | PixelMasks,
    inside: tuple[slice, slice] = (slice(None), slice(None)),
) -> Agreement:
    """How far `result` is from what the masked contract says `net` gives for `x`.

    The networks are copied, and run in float64: minutes of work for a large one.

    Args:
        result: of the network's output shape.
        net: as for `masked_oracle`, any dtype.
        x: [N,C,H,W] of the result's dtype.
        active: as for `masked_oracle`.
        inside: rows and columns of a feature map that count: of a window of a frame, those that see nothing beyond it.
    """
    # Every run starts from the parameters that the run in x's dtype has.
    own = copy.deepcopy(net).to(x.device, x.dtype)
    exact = masked_oracle(copy.deepcopy(own).double(), x.double(), active)
    if result.shape != exact.shape or result.dtype != x.dtype:
        raise ValueError(
            f"sbnet: compare: result: expected {tuple(exact.shape)} {x.dtype}, got {tuple(result.shape)} {result.dtype}"
        )
    torchs = masked_oracle(own, x, active).double()
    if exact.dim() == 4:
        result, torchs, exact = (v[:, :, inside[0], inside[1]] for v in (result, torchs, exact))
    ours, torchs = result.double() - exact, torchs - exact
    rms = exact.square().mean().sqrt().item()
    return Agreement(
        error=ours.square().mean().sqrt().item(),
        torch_error=torchs.square().mean().sqrt().item(),
        ulp=torch.finfo(x.dtype).eps * rms,
        largest=ours.abs().max().item(),
    )
