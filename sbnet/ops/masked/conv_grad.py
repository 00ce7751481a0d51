"""Gradients of convolutions on lists of blocks: of the weight, of the input, of what an activation was of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.geometry import conv_transpose_output_size
from sbnet.ops.common import empty4, is_channels_last, pixels_of, refuse_meta_mix
from sbnet.ops.masked.layer import in_place_fake

_ops = torch.ops.sbnet
_aten = torch.ops.aten

Lists = Sequence[Any]  # indices, count, block map, numbers of the grid
Window = Sequence[Sequence[int]]  # stride, padding, dilation


def active_of(block_map: Tensor, grid: Sequence[int]) -> list[Any]:
    """The list of the blocks that are set in a map [N,rows,columns], whose grid has these numbers."""
    return [*_ops.reduce_mask(block_map, [1, 1, 1, 1, 0, 0, *grid[6:]], 0.5, False, block_map.numel())]


def read_lists(lists: Lists, kernel: Sequence[int], window: Window, size: Sequence[int]) -> Lists:
    """The blocks of x's plane of `size` that the active blocks of a convolution's output read, without a sync.

    They are as large as what a block's pixels stand for, so that the block i of the output reads those from i + low to
    i + high: constants.
    """
    _, _, block_map, grid = lists
    stride, padding, dilation = window
    if list(kernel) == [1, 1] and list(stride) == [1, 1] and list(padding) == [0, 0]:
        return lists
    sides, pads, reach = [], [], []
    for d in range(2):
        side = grid[d] * stride[d]
        low = -padding[d] // side
        high = ((grid[d] - 1) * stride[d] - padding[d] + dilation[d] * (kernel[d] - 1)) // side
        blocks = -(-size[d] // side)
        sides.append((side, blocks))
        pads.append((high, blocks - low - block_map.shape[1 + d]))
        reach.append(high - low + 1)
    (height, rows), (width, columns) = sides
    numbers = [height, width, height, width, 0, 0, rows, columns]
    if block_map.shape[0] == 0:  # which max_pool2d does not take
        return _no_lists(block_map, numbers)
    active = F.pad((block_map >= 0).to(torch.float32), (*pads[1], *pads[0]))
    mask = F.max_pool2d(active, reach, 1)
    indices, count, _, own = active_of(mask, numbers)
    return [indices, count, own, numbers]


def writing_lists(
    lists: Lists, kernel: Sequence[int], window: Window, size: Sequence[int], plane: Sequence[int]
) -> Lists:
    """The blocks of x's plane of `size` that the active blocks of a transposed convolution's `plane` read."""
    _, _, block_map, grid = lists
    stride, padding, dilation = window
    sides = [b // s if b % s == 0 and b // s >= 4 else b for b, s in zip(grid[:2], stride, strict=True)]
    numbers = [*sides, *sides, 0, 0, *(-(-n // b) for n, b in zip(size, sides, strict=True))]
    if block_map.shape[0] == 0:
        return _no_lists(block_map, numbers)
    inside = pixels_of(block_map, grid, plane).to(torch.float32)
    read = F.conv2d(inside, inside.new_ones(1, 1, *kernel), None, stride, padding, dilation) > 0.5
    indices, count, _, own = _ops.reduce_mask(
        read[:, 0], numbers, 0.5, False, block_map.shape[0] * numbers[6] * numbers[7]
    )
    return [indices, count, own, numbers]


def _no_lists(like: Tensor, numbers: list[int]) -> Lists:
    return [like.new_zeros(0, 3), like.new_zeros(1), like.new_zeros(0, *numbers[6:]), numbers]


NO_LIST: Lists = (None, None, None, [])  # of x's plane


def conv(
    x: Any, weight: Any, bias: Tensor | None, residual: Tensor | None, lists: Lists, window: Window, groups: int,
    tf32: bool, activation: str = "none", param: float = 0.0,
) -> Tensor:  # fmt: skip
    """sparse_conv2d of arguments that its wrapper has seen."""
    numbers = groups, activation, param, False, tf32
    return _ops.sparse_conv2d(x, weight, bias, residual, None, *lists, *window, *numbers, *NO_LIST)


def masked_gradient(grad: Tensor, block_map: Tensor, grid: Sequence[int]) -> Tensor:
    """The gradient in active blocks, zeros elsewhere."""
    return _ops.sparse_fill(grad, block_map, grid, 0.0)


def weight_gradient(
    x: Tensor, grad: Tensor, lists: Lists, weight: Tensor, window: Window, groups: int, tf32: bool, with_bias: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of weight, of its shape and memory format, and of the bias, [K] float32."""
    kernel = list(weight.shape[2:])
    return _ops.sparse_conv2d_weight_grad(
        x, grad, lists[0], lists[1], lists[3], kernel, *window, groups, tf32, is_channels_last(weight), with_bias
    )


def input_gradient(
    grad: Tensor, weight: Tensor, x: Tensor, lists: Lists, x_lists: Lists, window: Window, groups: int, tf32: bool
) -> Tensor:
    """Gradient of a convolution's x in the blocks of x_lists, zeros elsewhere; grad is 0 outside of `lists`.

    A transposed convolution. Of a 1x1 kernel with a stride, whose outputs read one pixel in many, a plain one.
    """
    stride, padding, dilation = window
    kernel, size = weight.shape[2:], x.shape[2:]
    if tuple(kernel) == (1, 1) and list(padding) == [0, 0] and list(stride) != [1, 1]:
        turned = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
        read = conv(grad, turned, None, None, lists, ([1, 1], [0, 0], [1, 1]), groups, tf32)
        found = empty4(x, x.shape, is_channels_last(x)).zero_()
        found[:, :, :: stride[0], :: stride[1]] = read
        return found
    least = conv_transpose_output_size(grad.shape[2:], kernel, stride, padding, 0, dilation)
    more = [n - m for n, m in zip(size, least, strict=True)]
    return _ops.sparse_conv_transpose2d(
        grad, weight, None, None, None, *x_lists, stride, padding, more, dilation, groups, "none", 0.0, tf32, *NO_LIST
    )


# ---- fake implementation and gradient of the weight's gradient, which is linear in x and grad


@torch.library.register_fake("sbnet::sparse_conv2d_weight_grad")
def _weight_grad_fake(
    x: Tensor, grad: Tensor, indices: Tensor, count: Tensor, grid: list[int], kernel: list[int], stride: list[int],
    padding: list[int], dilation: list[int], groups: int, allow_tf32: bool, channels_last: bool, with_bias: bool,
    float32: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    refuse_meta_mix("sparse_conv2d_weight_grad", x, grad, indices, count)
    channels = grad.shape[1]
    dtype = torch.float32 if float32 else None
    weight = empty4(x, (channels, x.shape[1] // groups, *kernel), channels_last, dtype)
    return weight, x.new_empty(channels if with_bias else 0, dtype=torch.float32)


@torch.library.register_fake("sbnet::sparse_conv2d_weight_grads")
def _weight_grads_fake(
    x: list[Tensor], grad: list[Tensor], indices: list[Tensor], count: list[Tensor], numbers: list[int]
) -> list[Tensor]:
    """numbers: of each layer the grid's, kernel, window, groups, and whether to use tf32, to write channels_last, to
    sum biases, to give float32."""
    found = []
    for k, of in enumerate(zip(x, grad, indices, count, strict=True)):
        grid, kernel, *window = (numbers[21 * k + at : 21 * k + end] for at, end in _PARTS)
        found.append(_weight_grad_fake(*of, grid, kernel, *window, *numbers[21 * k + 16 : 21 * k + 21]))
    return [weight for weight, _ in found] + [bias for _, bias in found]


_PARTS = ((0, 8), (8, 10), (10, 12), (12, 14), (14, 16))


@torch.library.register_fake("sbnet::turn_conv_weights")
def _turn_fake(weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    turned = [empty4(w, (w.shape[1], w.shape[0], *w.shape[2:]), True, dtype) for w in weights]
    return [empty4(w, tuple(w.shape), True, dtype) for w in weights] + turned


def _weight_grad_setup(ctx: Any, inputs: tuple, output: Any) -> None:
    x, grad, indices, count, *rest, _ = inputs
    ctx.save_for_backward(x, grad, indices, count)
    ctx.grid, _kernel, *ctx.window, ctx.groups, ctx.tf32, _, ctx.with_bias = rest


def _weight_grad_backward(ctx: Any, weight: Tensor, bias: Tensor) -> tuple:
    """weight, bias: gradients of those gradients, which are themselves a weight and a bias."""
    x, grad, indices, count = ctx.saved_tensors
    need_x, need_grad = ctx.needs_input_grad[:2]
    grad_x = grad_grad = None
    weight = weight.to(x.dtype).contiguous()
    block_map = _map_of(indices, count, ctx.grid, x.shape[0])
    lists = [indices, count, block_map, ctx.grid]
    if need_x:
        masked = masked_gradient(grad, block_map, ctx.grid)
        x_lists = read_lists(lists, weight.shape[2:], ctx.window, x.shape[2:])
        grad_x = input_gradient(masked, weight, x, lists, x_lists, ctx.window, ctx.groups, ctx.tf32)
    if need_grad:
        added = bias.to(x.dtype) if ctx.with_bias else None
        grad_grad = conv(x, weight, added, None, lists, ctx.window, ctx.groups, ctx.tf32)
    return grad_x, grad_grad, *[None] * 12


def _map_of(indices: Tensor, count: Tensor, grid: Sequence[int], batch: int) -> Tensor:
    """The block map of a list: of 1 in the place of its blocks and -1 elsewhere."""
    rows, columns = grid[6:]
    image, row, column = indices.view(-1, 3).long().unbind(1)
    taken = torch.arange(len(image), device=indices.device) < count.view(())
    for at, size in ((image, batch), (row, rows), (column, columns)):  # kernels skip what is no block of the grid, too
        taken = taken & (at >= 0) & (at < size)
    found = torch.full((batch * rows * columns + 1,), -1, dtype=torch.int32, device=indices.device)
    places = torch.where(taken, (image * rows + row) * columns + column, batch * rows * columns)
    return found.index_fill(0, places, 1)[:-1].view(batch, rows, columns)


torch.library.register_autograd(
    "sbnet::sparse_conv2d_weight_grad", _weight_grad_backward, setup_context=_weight_grad_setup
)


# ---- activations


def slope_backward(grad: Tensor, z: Tensor, slope: Tensor) -> Tensor:
    """[K] gradient of slopes at pre-activation z [N,K,H,W]: the sum of grad * z where z is not above 0."""
    below = torch.where(z > 0, 0.0, grad * z)
    return below.sum((0, 2, 3), dtype=torch.float64).to(slope.dtype)


def activation_backward(name: str, grad: Tensor, z: Tensor, param: float, slope: Tensor | None = None) -> Tensor:
    """Gradient of activation `name` at pre-activation z."""
    match name:
        case "leaky_relu" if slope is not None:
            return torch.where(z > 0, grad, grad * slope.to(grad.dtype)[:, None, None])
        case "relu":
            return _aten.threshold_backward(grad, z, 0)
        case "relu6":
            return _aten.hardtanh_backward(grad, z, 0, 6)
        case "leaky_relu":
            return _aten.leaky_relu_backward(grad, z, param, False)
        case "silu":
            if torch.is_grad_enabled():  # aten::silu_backward itself has no gradient
                s = z.sigmoid()
                return grad * s * (1 + z * (1 - s))
            return _aten.silu_backward(grad, z)
        case "gelu":
            return _aten.gelu_backward(grad, z)
        case "hardswish":
            return _aten.hardswish_backward(grad, z)
    return grad


@torch.library.register_fake("sbnet::sparse_activation_grad")
def _activation_grad_fake(
    grad: Tensor, z: Tensor, slope: Tensor | None, block_map: Tensor, grid: list[int], activation: str, param: float
) -> Tensor:
    refuse_meta_mix("sparse_activation_grad", grad, z, slope, block_map)
    return empty4(z, z.shape, is_channels_last(z))


in_place_fake("activate_blocks_")
in_place_fake("sparse_activation_grad_")


def _activation_grad_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    grad, z, slope, block_map, ctx.grid, ctx.activation, ctx.param = inputs
    ctx.save_for_backward(grad, z, slope, block_map)


def _activation_grad_backward(ctx: Any, grad: Tensor) -> tuple:
    """Second derivatives: PyTorch's own, of whole planes, in active blocks."""
    *saved, block_map = ctx.saved_tensors
    inside = pixels_of(block_map, ctx.grid, saved[0].shape[2:])
    wanted = [k for k in range(3) if ctx.needs_input_grad[k]]
    with torch.enable_grad():
        first, z, slope = (None if t is None else t.detach().requires_grad_(k in wanted) for k, t in enumerate(saved))
        y = activation_backward(ctx.activation, first, torch.where(inside, z, 1.0), ctx.param, slope)  # type: ignore
        y = torch.where(inside, y, 0.0)
        leaves = [(first, z, slope)[k] for k in wanted]
        if not y.requires_grad:
            return (None,) * 7
        found = torch.autograd.grad(y, leaves, grad, allow_unused=True)  # type: ignore[arg-type]
    given = dict(zip(wanted, found, strict=True))
    return *(given.get(k) for k in range(3)), *[None] * 4


torch.library.register_autograd(
    "sbnet::sparse_activation_grad", _activation_grad_backward, setup_context=_activation_grad_setup
)


def before_activation(
    name: str, param: float, slope: Tensor | None, after: bool, y: Tensor, again: Any, grad: Tensor, lists: Lists,
    want_slope: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The gradient of what an activation was of, on the list, and that of its slopes.

    Of relu, relu6 and leaky_relu with a slope above 0, y tells enough. Of the others again() gives what they were of: a
    convolution of the active blocks, which costs less than keeping its result of every layer.
    """
    block_map, grid = lists[2:]
    told = not after and slope is None and (name in ("relu", "relu6") or (name == "leaky_relu" and param > 0))
    z = y if told else again()
    given = _ops.sparse_activation_grad(grad, z, slope, block_map, grid, name, param)
    if slope is None or not want_slope:
        return given, None
    return given, slope_backward(masked_gradient(grad, block_map, grid), masked_gradient(z, block_map, grid), slope)
