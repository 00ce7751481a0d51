"""The contracts of docs/contracts.md in plain PyTorch, for any network: its mask follows each op of an eager run.

A dispatch mode sees every op that PyTorch runs and follows the axes of every tensor (axes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from sbnet.geometry import Pair, to_pair
from sbnet.graph.axes import (
    REARRANGING,
    VIEWS,
    WINDOWED,
    Axes,
    infer,
    moves,
    op_name,
    planes_of,
    reads_unseen_planes,
    tensors_in,
)
from sbnet.graph.dense_attention import KEYED, SPREAD
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

    def __init__(
        self, change: Callable[[Tensor, Axes], Tensor], planes: Sequence[Tensor], keys: ActiveKeys | None = None
    ) -> None:
        super().__init__()
        self.change, self.axes, self.keys = change, WeakTensorKeyDictionary(), keys
        self.unseen = WeakTensorKeyDictionary()  # computed where no plane was seen, and views of it
        self.batch = len(planes[0]) if planes else 1
        for tensor in planes:
            if len(tensor) == self.batch:
                self.axes[tensor] = Axes.planes(tensor.shape)

    def _axes_of(self, value: Any) -> Axes | None:
        return self.axes.get(value) if isinstance(value, Tensor) else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = {k: self._axes_of(v) for k, v in enumerate(args)} if func._schema.is_mutable else {}
        if self.keys is not None:
            args = self.keys.before(func, args, self._axes_of)
        if reads_unseen_planes(func, args, self._axes_of, self.batch):
            args = (self.change(args[0], Axes.planes(args[0].shape)), *args[1:])
        unseen = bool(args) and isinstance(args[0], Tensor) and args[0] in self.unseen
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
            computed = unseen or not moves(func, args, tensor.dtype)
            if computed and (axes is None or axes.size is None):
                self.unseen[tensor] = True
            if axes is not None and axes.size is not None and computed and tensor.is_floating_point():
                changed = self.change(tensor, axes)
                if changed is not tensor and own is not None:  # others that know the argument see the result
                    changed = tensor.copy_(changed)
                tensor = changed
            if axes is not None:
                self.axes[tensor] = axes
            if self.keys is not None:
                self.keys.after(func, args, kwargs, tensor, at if many else None, self._axes_of)
            results.append(tensor)
        return type(out)(results) if many and type(out) in (tuple, list) else results[0] if not many else out


class ActiveKeys:
    """Which numbers of a tensor are of active pixels, through whatever arranges them; scores of attention, products
    with what is one pixel a column, are -inf where that is not active before a softmax makes weights of them."""

    def __init__(self, masks: Callable[[Pair], Tensor | None]) -> None:
        self.masks = masks
        self.active, self.scores = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self.turned = WeakTensorKeyDictionary()  # scores whose keys are rows

    def of(self, value: Any, axes_of: Callable[[Any], Axes | None]) -> Tensor | None:
        if not isinstance(value, Tensor):
            return None
        axes = axes_of(value)
        mask = None if axes is None or axes.size is None else self.masks(axes.size)
        if mask is not None and axes is not None:
            return axes.arrange(mask).expand(value.shape)
        return self.active.get(value)

    def before(self, func: Any, args: Any, axes_of: Callable[[Any], Axes | None]) -> Any:
        """The arguments of an op, of which a softmax, or what chooses among scores, reads no inactive keys."""
        name = op_name(func).lstrip("_")
        if name not in KEYED or not isinstance(args[0], Tensor):
            return args
        x, at = args[0], args[1] if len(args) > 1 and name not in ("exp", "topk") else -1
        at = args[2] if name == "topk" and len(args) > 2 else at[0] if isinstance(at, (list, tuple)) and at else at
        if not isinstance(at, int) or x.dim() < 3:
            return args
        at = at % x.dim() - x.dim()
        shown = (self.scores if at == -1 else self.turned).get(x) if at >= -2 else None
        axes = axes_of(x)
        if shown is None and name in SPREAD and at >= -2 and axes is not None:
            shown = self.of(x, axes_of) if [atom for atom, _ in axes.dims[at]] == ["H", "W"] else None
        if shown is None:
            return args
        none = ~shown.any(at, keepdim=True)  # the results of such queries are not active either
        return (x.masked_fill(~(shown | none), -torch.inf), *args[1:])

    def after(
        self, func: Any, args: Any, kwargs: Any, out: Tensor, at: int | None, axes_of: Callable[[Any], Axes | None]
    ) -> None:
        """Notes what an op returned, its result number `at` of many."""
        name = op_name(func)
        if name in ("bmm", "mm", "matmul", "baddbmm"):
            left, right = (self.of(v, axes_of) for v in args[-2:])
            if right is not None and torch.equal(right, right[..., :1, :].expand_as(right)):
                self.scores[out] = right[..., :1, :].expand(out.shape)
            if left is not None and torch.equal(left, left[..., :1].expand_as(left)):
                self.turned[out] = left[..., :1].expand(out.shape)
        for noted in (self.active, self.scores, self.turned):
            tensors = [v if isinstance(v, Tensor) else None for v in args]
            given = [
                None if v is None else self.of(v, axes_of) if noted is self.active else noted.get(v) for v in tensors
            ]
            first = next((k for k, v in enumerate(given) if v is not None), None)
            if first is None or out in noted:
                continue
            seen = given[first]
            assert seen is not None
            if first == 0 and (name in REARRANGING or name == "roll"):
                if name in ("_to_copy", "clone", "contiguous"):
                    noted[out] = seen
                    continue
                shaped = name in VIEWS
                made = seen.reshape(out.shape) if shaped else func(seen, *args[1:], **kwargs)
                noted[out] = made if at is None else made[at]
            elif first == 0 and name == "constant_pad_nd":
                noted[out] = F.pad(seen, args[1], value=True)  # padding is a key
            elif seen.shape == out.shape and name.lstrip("_") not in SPREAD and name not in WINDOWED:
                noted[out] = seen
            elif name in ("addmm", "mm", "bmm", "linear") and noted is self.active:
                rows = seen[..., :1]
                if rows.shape[:-1] == out.shape[:-1] and torch.equal(seen, rows.expand_as(seen)):
                    noted[out] = rows.expand(out.shape)


class _NormsOfActivePixels(TorchFunctionMode):
    """Group and instance norms take their statistics from the active pixels (the masked contract)."""

    def __init__(self, masks: Callable[[Pair], Tensor | None], axes_of: Callable[[Any], Axes | None]) -> None:
        super().__init__()
        self.masks, self.axes_of = masks, axes_of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        x = args[0] if args else None
        axes = self.axes_of(x) if func in (F.group_norm, F.instance_norm) else None
        shape = None if axes is None or axes.size is None else planes_of(axes)
        found = None
        if axes is None or axes.size is None or shape is not None:  # else of planes in another arrangement
            found = active_norm(func, args, kwargs, self.masks, shape)
        return func(*args, **kwargs) if found is None else found


def _attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *_: Any, **kwargs: Any) -> Tensor:
    """scaled_dot_product_attention, written out."""
    scale = kwargs.get("scale") or q.shape[-1] ** -0.5
    if kwargs.get("is_causal") or kwargs.get("enable_gqa"):
        return torch.ops.aten.scaled_dot_product_attention(q, k, v, attn_mask, *_, **kwargs)
    scores = (q * scale) @ k.transpose(-2, -1)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(-1) @ v


def active_norm(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], masks: Callable[[Pair], Tensor | None],
    shape: tuple[int, ...] | None = None,
) -> Tensor | None:  # fmt: skip
    """What the masked contract says of a call of F.group_norm, or of F.instance_norm without running statistics, on
    feature maps, which it may have as a reshape of shape [N,C,H,W]; None of any other call."""
    if func is F.group_norm:
        given = dict(zip(("input", "num_groups", "weight", "bias", "eps"), args, strict=False)) | kwargs
    elif func is F.instance_norm:
        names = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
        given = dict(zip(names, args, strict=False)) | kwargs
        given["num_groups"] = given["input"].shape[1]
    else:
        return None
    x = given["input"]
    shape = shape or tuple(x.shape)
    if len(shape) != 4 or not given.get("use_input_stats", True):
        return None
    mask = masks((shape[2], shape[3]))
    if mask is None:
        return None
    each = shape[1] // x.shape[1]
    weight, bias = (v if v is None else v.repeat_interleave(each) for v in (given.get("weight"), given.get("bias")))
    y = norm_whole(x.reshape(shape), weight, bias, mask, "group", given["num_groups"], given.get("eps", 1e-5))
    return y.reshape(x.shape)


def _run(
    net: Callable[..., Any], inputs: Sequence[Any], change: Callable[[Tensor, Axes], Tensor],
    masks: Callable[[Pair], Tensor | None] | None = None,
) -> Any:  # fmt: skip
    """masks: of norms' statistics and of attention's keys."""
    # A first layer that works in place must not change the caller's input.
    inputs = [v.clone() if isinstance(v, Tensor) else v for v in inputs]
    planes = [v for v in inputs if isinstance(v, Tensor) and v.dim() == 4 and v.is_floating_point()]
    after = _AfterEveryOp(change, planes, None if masks is None else ActiveKeys(masks))
    norms = nullcontext() if masks is None else _NormsOfActivePixels(masks, after.axes.get)
    with torch.no_grad(), norms, after:
        return net(*inputs)


def masked_oracle(net: Callable[..., Any], inputs: Sequence[Any], masks: Callable[[Pair], Tensor | None]) -> Any:
    """What the masked contract says `net` returns: after every op with a spatial result, what is not active is 0;
    group and instance norms take their statistics from the active pixels, and these alone are keys of attention.

    Args:
        net: a dense network in eval mode, before anything is fused.
        inputs: its inputs, read as they are; feature maps among them are [N,C,H,W].
        masks: the pixels of a plane of (height, width), [N,1,height,width] bool, or None where nothing is masked.
    """

    def change(tensor: Tensor, axes: Axes) -> Tensor:
        mask = masks(axes.size)  # type: ignore[arg-type]
        return tensor if mask is None else torch.where(axes.arrange(mask), tensor, torch.zeros_like(tensor))

    return _run(net, inputs, change, masks)


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
