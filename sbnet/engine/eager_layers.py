"""What `sbnet.masked` runs in the place of PyTorch's functions: sparse ops, which know what lies outside is 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.engine import eager_whole
from sbnet.engine.eager_losses import LOSSES
from sbnet.engine.eager_unseen import refuse_convolution, statistics_refused
from sbnet.engine.eager_whole import densely, whole
from sbnet.engine.eager_writes import COPY
from sbnet.engine.modes import open_of
from sbnet.geometry import Pair, resize_output_size, to_pair, to_scales
from sbnet.ops import (
    sparse_avg_pool2d,
    sparse_conv2d,
    sparse_conv_transpose2d,
    sparse_group_norm,
    sparse_max_pool2d,
    sparse_pointwise,
    sparse_resize2d,
)
from sbnet.ops.masked.batch_norm import batch_norm2d, follow_, synchronized_batch_norm2d
from sbnet.ops.masked.resize import resize_arguments

if TYPE_CHECKING:
    from sbnet.active import ActiveBlocks
    from sbnet.engine.eager import masked

_ops = torch.ops.sbnet


def conv2d(
    mode: masked, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Tensor | None:  # fmt: skip
    size = _size(input, weight.shape[2:], stride, padding, dilation) if mode.is_map(input) else None
    if size is None:
        refuse_convolution(mode, "conv2d", input)
        if input.shape[0] != mode.mask.shape[0]:
            mode.met_others(f"one for each of {input.shape[0]} samples, got {len(mode.mask)}")
        return None
    geometry = {"stride": _one(stride), "padding": _one(padding), "dilation": _one(dilation), "groups": groups}
    x_active = mode.list_of(input)
    if x_active is None:  # the network's input: what follows has its memory format, whose kernels are the fast ones
        input = input.contiguous(memory_format=torch.channels_last)
    if whole(mode, size):
        return densely(mode, F.conv2d, input, weight, bias, stride, padding, dilation, groups)
    if (maps := open_of(mode)) is not None:
        window = tuple(geometry[name] for name in ("stride", "padding", "dilation"))
        return maps.conv(input, weight, bias, size, window, groups)
    return mode.kept(sparse_conv2d(input, weight, bias, mode.active(size), x_active=x_active, **geometry))


def view(mode: masked, input: Tensor, *shape: Any) -> Tensor | None:
    """Feature maps are channels_last here, which a network that was written for the other format need not know."""
    dtype = len(shape) == 1 and isinstance(shape[0], torch.dtype)
    if dtype or not mode.keeps(input):
        return None
    out = input.reshape(*shape)
    if out.data_ptr() != input.data_ptr() and not torch.compiler.is_compiling():
        mode.noted(out, COPY, True)
    return out


def conv_transpose2d(
    mode: masked, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Tensor | None:  # fmt: skip
    if not mode.is_map(input):
        refuse_convolution(mode, "conv_transpose2d", input)
        return None
    values = (stride, padding, output_padding, dilation)
    pairs = [to_pair(_one(v), "masked: window") for v in values]
    sides = [
        (n - 1) * s - 2 * p + d * (k - 1) + o + 1
        for n, k, s, p, o, d in zip(input.shape[2:], weight.shape[2:], *pairs, strict=True)
    ]
    if sides[0] * sides[1] <= 1:
        return None
    if whole(mode, sides):
        return densely(mode, F.conv_transpose2d, input, weight, bias, *pairs[:3], groups, pairs[3])
    names = ("stride", "padding", "output_padding", "dilation")
    geometry: dict[str, Any] = dict(zip(names, pairs, strict=True))
    x_active = mode.list_of(input)
    active = mode.active(sides)
    return mode.kept(sparse_conv_transpose2d(input, weight, bias, active, groups=groups, x_active=x_active, **geometry))


def max_pool2d(
    mode: masked, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Tensor | None:  # fmt: skip
    size = _size(input, kernel_size, stride or kernel_size, padding, dilation) if mode.is_map(input) else None
    if size is None or ceil_mode or return_indices:
        return None
    if whole(mode, size):
        return densely(mode, F.max_pool2d, input, kernel_size, stride, padding, dilation)
    if (maps := open_of(mode)) is not None and mode.keeps(input):
        return maps.pool(input, size, True, (kernel_size, stride or kernel_size, padding, dilation))
    return mode.kept(sparse_max_pool2d(input, mode.active(size), kernel_size, stride, padding, dilation))


def avg_pool2d(
    mode: masked, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor | None:  # fmt: skip
    size = _size(input, kernel_size, stride or kernel_size, padding, 1) if mode.is_map(input) else None
    if size is None or ceil_mode:
        return None
    if whole(mode, size):
        args = stride, padding, ceil_mode, count_include_pad, divisor_override
        return densely(mode, F.avg_pool2d, input, kernel_size, *args)
    if (maps := open_of(mode)) is not None and mode.keeps(input):
        window = kernel_size, stride or kernel_size, padding, 1
        return maps.pool(input, size, False, window, count_include_pad, divisor_override)
    options = count_include_pad, divisor_override
    return mode.kept(sparse_avg_pool2d(input, mode.active(size), kernel_size, stride, padding, False, *options))


def batch_norm(
    mode: masked, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False, momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:  # fmt: skip
    own = training or running_mean is None
    if not own or not mode.is_map(input) or (weight is not None and bias is not None and weight.dtype != bias.dtype):
        return None
    for running in (running_mean, running_var):
        if running is not None and running.dtype != torch.float32:
            raise statistics_refused(f"batch_norm with running statistics of {running.dtype}", "such of float32")
    many = mode.synchronized and torch.distributed.is_available() and torch.distributed.is_initialized()
    if not many and whole(mode, input.shape[2:]):
        return densely(mode, F.batch_norm, input, running_mean, running_var, weight, bias, True, momentum, eps)
    if (maps := open_of(mode)) is not None and not many and mode.keeps(input):
        follow = [] if running_mean is None or running_var is None else [running_mean, running_var, momentum]
        return maps.norm(input, weight, bias, eps, follow)
    if (maps := open_of(mode)) is not None:
        maps.close(input)
    norm = synchronized_batch_norm2d if many else batch_norm2d
    y, statistics = norm(input, mode.active(input.shape[2:]), weight, bias, eps)
    if running_mean is not None and running_var is not None:
        follow_(running_mean, running_var, statistics, momentum)
    return mode.kept(y)


def group_norm(
    mode: masked, input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:  # fmt: skip
    if not mode.is_map(input):
        return None
    if whole(mode, input.shape[2:]):
        return densely(mode, F.group_norm, input, num_groups, weight, bias, eps)
    if (maps := open_of(mode)) is not None and mode.keeps(input):
        return maps.norm2d(input, weight, bias, "group", num_groups, eps)
    if maps is not None:
        maps.close(input)
    return mode.kept(sparse_group_norm(input, mode.active(input.shape[2:]), num_groups, weight, bias, eps))


def instance_norm(
    mode: masked, input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:  # fmt: skip
    if not use_input_stats or not mode.is_map(input):
        return None
    if running_mean is not None:
        raise statistics_refused("instance_norm with running statistics", "one without, or in eval mode")
    return group_norm(mode, input, input.shape[1], weight, bias, eps)


def interpolate(
    of: masked, input: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> Tensor | None:  # fmt: skip
    known = mode in ("nearest", "nearest-exact", "bilinear", "bicubic")
    if not of.is_map(input) or not known or recompute_scale_factor or antialias:
        return None
    if size is not None:
        sides = to_pair(size, "masked: size")
    else:
        sides = resize_output_size(input.shape[2:], to_scales(scale_factor, "masked: scale_factor"))
    if whole(of, sides):
        return densely(of, F.interpolate, input, size, scale_factor, mode, align_corners)
    if (maps := open_of(of)) is not None and of.keeps(input):
        return maps.resize(input, *resize_arguments("sparse_resize2d", input, size, scale_factor, mode, align_corners))
    options: dict[str, Any] = {"mode": mode, "align_corners": align_corners}
    options |= {"size": sides} if size is not None else {"scale_factor": scale_factor}
    return of.kept(sparse_resize2d(input, of.active(sides), **options))


def add(mode: masked, input: Any, other: Any, alpha: Any = 1) -> Tensor | None:
    """Of two feature maps that are both 0 outside of the active blocks."""
    if not mode.keeps(input) or not mode.keeps(other) or alpha != 1:
        return None
    if input.shape != other.shape or input.dtype != other.dtype or input.device != other.device:
        return None
    if whole(mode, input.shape[2:]):
        return densely(mode, torch.add, input, other)
    if (maps := open_of(mode)) is not None:
        found = maps.add(input, other, False) if input is not other else None
        if found is not None:
            return found
        maps.settle(input)
        maps.settle(other)
    return mode.kept(_Sum.apply(input, other, mode.active(input.shape[2:])))


class _Sum(torch.autograd.Function):
    """a + b on the active blocks. The gradient is passed on as it is: what made a and b reads it there alone."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, active: ActiveBlocks) -> Tensor:
        return sparse_pointwise(a, active, "add a", b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return grad, grad, None


def add_(mode: masked, input: Any, other: Any, alpha: Any = 1) -> Tensor | None:
    """The same in place."""
    same = mode.keeps(input) and mode.keeps(other) and alpha == 1 and input is not other
    if not same or input.shape != other.shape or input.dtype != other.dtype or torch.compiler.is_compiling():
        return None
    if whole(mode, input.shape[2:]):
        return densely(mode, T.add_, input, other)
    if (maps := open_of(mode)) is not None:
        found = maps.add(input, other, True)
        if found is not None:
            return found
        maps.settle(input)
        maps.settle(other)
    return mode.kept(_SumInPlace.apply(input, other, mode.active(input.shape[2:])))


class _SumInPlace(torch.autograd.Function):
    """a += b on the active blocks."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, active: ActiveBlocks) -> Tensor:
        _ops.activate_blocks_(a, b, active.block_map, active.grid.numbers(), "none", 0.0)
        ctx.mark_dirty(a)
        return a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return grad, grad, None


class _InPlace(torch.autograd.Function):
    """An activation in place, of a feature map that is 0 outside of the active blocks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, active: ActiveBlocks, name: str, param: float) -> Tensor:
        told = name in ("relu", "relu6") or (name == "leaky_relu" and param > 0)
        z = None if told else sparse_pointwise(x, active, "")
        ctx.of = active.block_map, active.grid.numbers(), name, param
        _ops.activate_blocks_(x, None, *ctx.of)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x if told else z)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (z,) = ctx.saved_tensors
        block_map, grid, name, param = ctx.of
        return _ops.sparse_activation_grad(grad, z, None, block_map, grid, name, param), None, None, None


def _activate(mode: masked, x: Tensor, name: str, param: float | None, inplace: bool) -> Tensor | None:
    if not mode.is_map(x):
        return None
    if whole(mode, x.shape[2:]):
        return eager_whole.activate(mode, x, name, param, inplace)
    active = mode.active(x.shape[2:])
    if (maps := open_of(mode)) is not None:
        found = maps.activate(x, name, param or 0.0, inplace)
        if found is not None:
            return found
    if not inplace:
        program = name if param is None else f"{name} {param!r}"
        return mode.kept(sparse_pointwise(x, active, program))
    if not mode.keeps(x) or torch.compiler.is_compiling():
        program = name if param is None else f"{name} {param!r}"
        return mode.kept(x.copy_(sparse_pointwise(x.clone(), active, program)))  # what gradients want of x
    return mode.kept(_InPlace.apply(x, active, name, param or 0.0))


def _activation(name: str, writes: bool = False) -> Any:
    def run(mode: masked, input: Tensor, inplace: bool = False) -> Tensor | None:
        return _activate(mode, input, name, None, inplace or writes)

    run.activates = True  # type: ignore[attr-defined]
    return run


def _leaky(writes: bool = False) -> Any:
    def run(mode: masked, input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor | None:
        return _activate(mode, input, "leaky_relu", float(negative_slope), inplace or writes)

    run.activates = True  # type: ignore[attr-defined]
    return run


def gelu(mode: masked, input: Tensor, approximate: str = "none") -> Tensor | None:
    return _activate(mode, input, "gelu", None, False) if approximate == "none" else None


def cat(mode: masked, tensors: Any, dim: int = 0) -> Tensor | None:
    """Channels of maps that are all 0 outside of the active blocks."""
    if dim not in (1, -3) or not isinstance(tensors, (tuple, list)) or not all(map(mode.keeps, tensors)):
        return None
    if whole(mode, tensors[0].shape[2:]):
        return densely(mode, torch.cat, tensors, dim)
    return mode.kept(torch.cat(tensors, dim)) if (maps := open_of(mode)) is None else maps.cat(tensors)


def _size(x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Pair | None:
    """(height, width) of what a window gives; None where it is one pixel or padded by name."""
    if isinstance(padding, str):
        return None
    pairs = [to_pair(_one(v), "masked: window") for v in (kernel, stride, padding, dilation)]
    sides = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(x.shape[2:], *pairs, strict=True)]
    return (sides[0], sides[1]) if sides[0] * sides[1] > 1 else None


def _one(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


T = torch.Tensor
LAYERS: dict[Any, Any] = {
    torch.conv2d: conv2d, F.conv2d: conv2d, torch.conv_transpose2d: conv_transpose2d,
    F.conv_transpose2d: conv_transpose2d, F.max_pool2d: max_pool2d, torch.max_pool2d: max_pool2d,
    F.avg_pool2d: avg_pool2d, F.batch_norm: batch_norm, F.group_norm: group_norm,
    F.instance_norm: instance_norm, F.interpolate: interpolate,
    torch.add: add, T.add: add, T.__add__: add, T.__radd__: add, torch.cat: cat, torch.concat: cat,
    T.add_: add_, T.__iadd__: add_, T.view: view,
    F.relu: _activation("relu"), torch.relu: _activation("relu"), T.relu: _activation("relu"),
    F.relu_: _activation("relu", True), torch.relu_: _activation("relu", True), T.relu_: _activation("relu", True),
    F.relu6: _activation("relu6"), F.silu: _activation("silu"), F.hardswish: _activation("hardswish"),
    F.leaky_relu: _leaky(), F.leaky_relu_: _leaky(True), F.gelu: gelu, **LOSSES,
}  # fmt: skip


# What takes open maps (eager_open.py) as they are.
TAKES_OPEN = {func for func, layer in LAYERS.items() if getattr(layer, "activates", False)} | LOSSES.keys()
_OPEN_LAYERS = (
    conv2d, batch_norm, group_norm, instance_norm, add, add_, cat, gelu, max_pool2d, avg_pool2d, interpolate,
)  # fmt: skip
TAKES_OPEN |= {func for func, layer in LAYERS.items() if layer in _OPEN_LAYERS}
