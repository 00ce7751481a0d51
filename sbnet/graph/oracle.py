"""The contracts of docs/contracts.md in plain PyTorch, for any network: its mask follows each op of an eager run.

A dispatch mode sees every op that PyTorch runs, whoever calls it, and follows the axes of every tensor (axes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from sbnet.geometry import Pair, to_pair
from sbnet.graph.axes import Axes, infer, moves, op_name, tensors_in
from sbnet.ops.masked.norm import norm_whole

Blocks = int | Sequence[int] | Mapping[Pair, int | Sequence[int]]


class PlaneMasks:
    """M of docs/contracts.md for planes of any size: the pixels of the blocks that the mask touches.

    Args:
        mask: [N,H,W], any dtype: set where it is greater than 0.5.
        block: block size of every plane, or {(height, width): block size} with the size of others under None.
    """

    def __init__(self, mask: Tensor, block: Any = 16) -> None:
        if mask.dim() != 3:
            raise ValueError(f"sbnet: PlaneMasks: mask: expected [N,H,W], got shape {tuple(mask.shape)}")
        self.mask, self.block = (mask > 0.5).float()[:, None], block
        self._made: dict[Pair, Tensor] = {}

    def block_of(self, size: Pair) -> Pair:
        block = self.block.get(size, self.block.get(None, 16)) if isinstance(self.block, Mapping) else self.block
        return to_pair(block, "PlaneMasks: block")

    def __call__(self, size: Pair) -> Tensor:
        """[N,1,height,width] bool."""
        if size not in self._made:
            (height, width), (bh, bw) = size, self.block_of(size)
            blocks = F.adaptive_max_pool2d(self.mask, (height, width))
            blocks = F.max_pool2d(F.pad(blocks, (0, -width % bw, 0, -height % bh)), (bh, bw))
            pixels = blocks.repeat_interleave(bh, 2).repeat_interleave(bw, 3)[:, :, :height, :width]
            self._made[size] = pixels > 0
        return self._made[size]


class _AfterEveryOp(TorchDispatchMode):
    """Follows the axes of tensors; what an op with a spatial result returned is `change`d in place or anew."""

    def __init__(self, change: Callable[[Tensor, Axes], Tensor], planes: Sequence[Tensor]) -> None:
        super().__init__()
        self.change, self.axes = change, WeakTensorKeyDictionary()
        self.batch = len(planes[0]) if planes else 1
        for tensor in planes:
            if len(tensor) == self.batch:
                self.axes[tensor] = Axes.planes(tensor.shape)

    def _axes_of(self, value: Any) -> Axes | None:
        return self.axes.get(value) if isinstance(value, Tensor) else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = {k: self._axes_of(v) for k, v in enumerate(args)} if func._schema.is_mutable else {}
        out = func(*args, **kwargs)
        results = []
        many = isinstance(out, (tuple, list))
        for at, tensor in enumerate(out if many else [out]):
            if not isinstance(tensor, Tensor) or (op_name(func) == "native_batch_norm" and at):
                results.append(tensor)
                continue
            own = next((k for k in written if tensor is args[k]), None)
            if own is not None and written[own]:
                axes = written[own]
            else:
                axes = infer(func, args, kwargs, tensor, self._axes_of, self.batch)
            masks = tensor.is_floating_point() and not moves(func, args, tensor.dtype)
            if axes is not None and axes.size is not None and masks:
                changed = self.change(tensor, axes)
                if changed is not tensor and own is not None:  # others that know the argument see the result
                    changed = tensor.copy_(changed)
                tensor = changed
            if axes is not None:
                self.axes[tensor] = axes
            results.append(tensor)
        return type(out)(results) if many and type(out) in (tuple, list) else results[0] if not many else out


class _NormsOfActivePixels(TorchFunctionMode):
    """Group and instance norms take their statistics from the active pixels (the masked contract)."""

    def __init__(self, masks: Callable[[Pair], Tensor | None]) -> None:
        super().__init__()
        self.masks = masks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = active_norm(func, args, kwargs, self.masks)
        return func(*args, **kwargs) if found is None else found


def active_norm(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], masks: Callable[[Pair], Tensor | None]
) -> Tensor | None:
    """What the masked contract says of a call of F.group_norm, or of F.instance_norm without running statistics, on
    feature maps; None of any other call."""
    if func is F.group_norm:
        given = dict(zip(("input", "num_groups", "weight", "bias", "eps"), args, strict=False)) | kwargs
    elif func is F.instance_norm:
        names = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
        given = dict(zip(names, args, strict=False)) | kwargs
        given["num_groups"] = given["input"].shape[1]
    else:
        return None
    x = given["input"]
    if x.dim() != 4 or not given.get("use_input_stats", True):
        return None
    mask = masks((x.shape[2], x.shape[3]))
    if mask is None:
        return None
    weight, bias = given.get("weight"), given.get("bias")
    return norm_whole(x, weight, bias, mask, "group", given["num_groups"], given.get("eps", 1e-5))


def _run(net: Callable[..., Any], inputs: Sequence[Any], change: Callable[[Tensor, Axes], Tensor]) -> Any:
    # A first layer that works in place must not change the caller's input.
    inputs = [v.clone() if isinstance(v, Tensor) else v for v in inputs]
    planes = [v for v in inputs if isinstance(v, Tensor) and v.dim() == 4 and v.is_floating_point()]
    with torch.no_grad(), _AfterEveryOp(change, planes):
        return net(*inputs)


def masked_oracle(net: Callable[..., Any], inputs: Sequence[Any], masks: Callable[[Pair], Tensor | None]) -> Any:
    """What the masked contract says `net` returns: after every op with a spatial result, what is not active is 0, and
    group and instance norms take their statistics from the active pixels.

    Args:
        net: a dense network in eval mode, before anything is fused.
        inputs: its inputs, read as they are; feature maps among them are [N,C,H,W].
        masks: the pixels of a plane of (height, width), [N,1,height,width] bool, or None where nothing is masked.
    """

    def change(tensor: Tensor, axes: Axes) -> Tensor:
        mask = masks(axes.size)  # type: ignore[arg-type]
        return tensor if mask is None else torch.where(axes.arrange(mask), tensor, torch.zeros_like(tensor))

    with _NormsOfActivePixels(masks):
        return _run(net, inputs, change)


class CachedOracle:
    """The cached contract: outside the active pixels every op keeps what it gave for the frame before.

    >>> oracle = CachedOracle(net)
    >>> first = oracle([x], masks)  # all pixels, whatever the masks say
    >>> second = oracle([x], masks)
    """

    def __init__(self, net: Callable[..., Any]) -> None:
        self.net, self.kept = net, list[Tensor]()

    def reset(self) -> None:
        """The next frame computes all pixels."""
        self.kept = []

    def __call__(self, inputs: Sequence[Any], masks: Callable[[Pair], Tensor | None]) -> Any:
        before, now = self.kept, list[Tensor]()

        def change(tensor: Tensor, axes: Axes) -> Tensor:
            mask = masks(axes.size)  # type: ignore[arg-type]
            if before and mask is not None:
                tensor = torch.where(axes.arrange(mask), tensor, before[len(now)])
            now.append(tensor.clone())
            return tensor

        out = _run(self.net, inputs, change)
        self.kept = now
        return out


def exact_pixels(output: Tensor, mask: Tensor) -> Tensor:
    """[N,1,height,width] bool: where the exact contract promises the dense result of an output [N,C,height,width]."""
    return F.adaptive_max_pool2d((mask > 0.5).float()[:, None], output.shape[2:]) > 0


def is_eval(module: nn.Module) -> bool:
    """Is no part of it in training mode?"""
    return not any(part.training for part in module.modules())


__all__ = ["CachedOracle", "PlaneMasks", "exact_pixels", "is_eval", "masked_oracle", "tensors_in"]
