"""`with sbnet.masked(mask, block=16)`: the layers of any eager module on active blocks, differentiable."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sbnet.active import ActiveBlocks
from sbnet.engine.arguments import FLOATS
from sbnet.engine.modes import ENTERED
from sbnet.geometry import Pair, to_pair
from sbnet.masks.grow import grow
from sbnet.ops import mask_pyramid, sparse_avg_pool2d, sparse_conv2d, sparse_fill, sparse_max_pool2d
from sbnet.ops.common import mask_planes

# Compute nothing: what they give has been masked, or is the network's input.
MOVES = {
    "chunk", "split", "contiguous", "clone", "detach", "view", "reshape", "flatten", "permute", "transpose", "expand",
    "unbind", "narrow", "__getitem__", "unsqueeze", "squeeze", "to", "cpu", "cuda", "requires_grad_", "dropout",
    "float", "half", "double", "type", "movedim", "unflatten", "view_as", "reshape_as", "expand_as", "__get__",
    "__set__", "backward", "register_hook", "retain_grad", "size", "stride", "bfloat16", "swapaxes", "select",
    "detach_",
}  # fmt: skip
AUGMENTED = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}


class masked(TorchFunctionMode):
    """Inside, every op of PyTorch with a feature map [N,C,H,W] as its result computes or keeps active blocks alone.

    Convolutions and pools run the sparse ops; any other op runs dense and its result is masked, so that the masked
    contract holds (docs/contracts.md). Gradients flow. For training and fine-tuning under masks and for debugging: a
    planned run (`sparsify`) is faster. Statistics of normalisations in training are those of the whole masked plane.

    Args:
        mask: [N,H,W] of any dtype, on the pixels of the network's input.
        block: block size of every plane.
        margin: pixels by which the mask is grown.

    Raises:
        RuntimeError: on entering it inside another.
        ValueError: the first feature map inside is of another height or width than the mask; or, on leaving it, all
            convolutions were of other batches than the mask's: nothing was masked.

    >>> with sbnet.masked(mask, block=16):
    ...     loss = criterion(model(x), y)
    >>> loss.backward()
    """

    def __init__(self, mask: Tensor, block: int | Sequence[int] = 16, margin: int = 0) -> None:
        super().__init__()
        self.mask = grow(mask_planes("masked", mask), margin)
        self.block = to_pair(block, "masked: block")
        self._lists: dict[Pair, ActiveBlocks] = {}
        self._other: int | None = None  # samples of maps that convolutions met, not as many as masks
        self._met = False  # has it seen the network's input?

    def __enter__(self) -> masked:
        if getattr(ENTERED, "inside", False):  # modes are a thread's own
            raise RuntimeError("sbnet: masked: expected to be the only one around an op, got one inside another")
        super().__enter__()
        ENTERED.inside = True
        return self

    def __exit__(self, *error: Any) -> None:
        ENTERED.inside = False
        super().__exit__(*error)
        if error[0] is None and self._other is not None and not self._lists:
            masks = self.mask.shape[0]
            raise ValueError(f"sbnet: masked: mask: expected one for each of {self._other} samples, got {masks}")

    def active(self, size: Sequence[int]) -> ActiveBlocks:
        """The active blocks of a plane of (height, width)."""
        key = int(size[0]), int(size[1])
        if key not in self._lists:
            self._lists[key] = mask_pyramid(self.mask, [(*key, self.block)]).planes[0]
        return self._lists[key]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first = args[0] if args and not self._met and self._is_map(args[0]) else None
        if first is not None and first.shape[2:] == self.mask.shape[1:]:
            self._met, first = True, None
        sparse = _SPARSE.get(func)
        if sparse is not None:
            self._check(first)
            found = sparse(self, *args, **kwargs)
            if found is not None:
                return found
        # An op in place is followed by others that know its argument, not its result. It works on a copy: gradients may
        # want what it wrote, which is masked here.
        writes = name not in MOVES and bool(args) and self._is_map(args[0]) and _in_place(func, args, kwargs)
        own = args[0] if writes else None
        out = func(*args, **kwargs) if own is None else func(own.clone(), *args[1:], **kwargs)
        if name in MOVES or not isinstance(out, Tensor) or not self._is_map(out):
            return out
        self._check(first)
        kept = sparse_fill(out, self.active(out.shape[2:]))
        return kept if own is None else own.copy_(kept)

    def _check(self, first: Tensor | None) -> None:
        """Raises where the first feature map of all, the network's input, is not of the mask's plane."""
        if first is not None:
            wanted, got = [self.mask.shape[0], *first.shape[2:]], list(self.mask.shape)
            raise ValueError(f"sbnet: masked: mask: expected {wanted}, the pixels of the network's input, got {got}")

    def _is_map(self, x: Any) -> bool:
        return (
            isinstance(x, Tensor) and x.dim() == 4 and x.dtype in FLOATS and x.shape[0] == self.mask.shape[0]
            and x.shape[2] * x.shape[3] > 1
        )  # fmt: skip

    def _conv2d(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Tensor | None:  # fmt: skip
        size = _size(input, weight.shape[2:], stride, padding, dilation) if self._is_map(input) else None
        if size is None:
            if input.shape[0] != self.mask.shape[0]:
                self._other = input.shape[0]
            return None
        geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        return sparse_conv2d(input, weight, bias, self.active(size), **geometry)

    def _max_pool2d(
        self, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False, return_indices: bool = False,
    ) -> Tensor | None:  # fmt: skip
        size = _size(input, kernel_size, stride or kernel_size, padding, dilation) if self._is_map(input) else None
        if size is None or ceil_mode or return_indices:
            return None
        return sparse_max_pool2d(input, self.active(size), kernel_size, stride, padding, dilation)

    def _avg_pool2d(
        self, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Tensor | None:  # fmt: skip
        size = _size(input, kernel_size, stride or kernel_size, padding, 1) if self._is_map(input) else None
        if size is None or ceil_mode:
            return None
        options = count_include_pad, divisor_override
        return sparse_avg_pool2d(input, self.active(size), kernel_size, stride, padding, False, *options)


def _size(x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Pair | None:
    """(height, width) of what a window gives; None where it is one pixel or padded by name."""
    if isinstance(padding, str):
        return None
    pairs = [to_pair(_one(v), "masked: window") for v in (kernel, stride, padding, dilation)]
    sides = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(x.shape[2:], *pairs, strict=True)]
    return (sides[0], sides[1]) if sides[0] * sides[1] > 1 else None


def _in_place(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Does a call write its first argument?"""
    name, at = getattr(func, "__name__", ""), _flag(func)
    given = args[at] if at is not None and at < len(args) else kwargs.get("inplace", False)
    return bool(given) or name in AUGMENTED or (name.endswith("_") and not name.endswith("__"))


@functools.cache
def _flag(func: Any) -> int | None:
    """Where a function of torch.nn.functional takes `inplace`."""
    names = list(inspect.signature(func).parameters) if inspect.isfunction(func) else []
    return names.index("inplace") if "inplace" in names else None


def _one(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


_SPARSE: dict[Any, Any] = {
    torch.conv2d: masked._conv2d, F.conv2d: masked._conv2d, F.max_pool2d: masked._max_pool2d,
    F.avg_pool2d: masked._avg_pool2d,
}  # fmt: skip
