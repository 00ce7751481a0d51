"""The layers of `sbnet.masked` as autograd sees them: a convolution or a batch norm, with the sum and the activation
that join its launch. They read and write active blocks, forward and backward; eager_open.py says what lies outside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sbnet.engine.eager_passes import Plane, Route, first_derivatives, left_out, like
from sbnet.geometry import conv_output_size
from sbnet.ops.common import is_channels_last
from sbnet.ops.masked.conv_grad import input_gradient, masked_gradient, read_lists

_ops = torch.ops.sbnet
CLEAN = "_sbnet_clean"  # note of a gradient: how many pixels next to its active blocks are 0, at that version


def told(name: str, param: float) -> bool:
    """Does what an activation gives say what its gradient is?"""
    return name in ("relu", "relu6") or (name == "leaky_relu" and param > 0)


class Pool(torch.autograd.Function):
    """A pool of a closed map; the gradient of x is written in the blocks of x's plane."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plane: Plane, x_plane: Plane, maximum: bool, kernel: list[int], stride: list[int],
        padding: list[int], dilation: list[int], counted: bool, divisor: int | None,
    ) -> Tensor:  # fmt: skip
        if maximum:
            y = _ops.sparse_max_pool2d(x, *plane.lists(), kernel, stride, padding, dilation, False)
        else:
            y = _ops.sparse_avg_pool2d(x, *plane.lists(), kernel, stride, padding, False, counted, divisor)
        ctx.save_for_backward(x.detach())
        ctx.planes, ctx.numbers = (plane, x_plane), (kernel, stride, padding, dilation, False, counted, divisor or 0)
        ctx.maximum, ctx.joined, ctx.read = maximum, False, None
        return y

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        (_, _, block_map, grid), (_, _, x_map, x_grid) = (plane.lists() for plane in ctx.planes)
        found = like(x, x.shape)
        taken = None if ctx.read is None else ctx.read[0].take(ctx.read[1])
        _ops.sparse_pool2d_grad_(grad, x, block_map, grid, ctx.maximum, *ctx.numbers, x_map, x_grid, found)
        return found if ctx.read is None else ctx.read[0].give(found, taken), *[None] * 9


def of_sum(of: Norm | Conv, ctx: Any, grad: Tensor, ring: int = 0) -> Tensor:
    """The gradient of what an activation was of, in the blocks and, 0, in a ring around them."""
    if of.activation == "none":
        return grad
    x, weight, *_, bias, given = ctx.saved_tensors
    z = _still(ctx.given) if given is None else given
    if z is None:
        z = like(x, grad.shape)
        replace(of, activation="none").run(z, x, weight, bias, ctx.residual, 0)
    found = like(z, z.shape)
    indices, count, _, grid = of.plane.lists()
    _ops.sparse_activation_grad_(
        grad, z, None, indices, count, grid, of.activation, of.param, found, *of.plane.edge(ring)
    )
    return found


@dataclass
class Norm:
    """A batch norm, the sum and the activation that follow it."""

    plane: Plane
    eps: float
    follow: list[Any]  # running statistics and their momentum; empty once they have followed
    source_ring: int  # pixels around the gradient of x that are wanted to be 0
    activation: str = "none"
    param: float = 0.0
    statistics: Tensor | None = None

    def takes(self, name: str, param: float, added: bool) -> bool:
        return told(name, param) or not added

    def shape(self, x: Tensor, weight: Any) -> Any:
        return x.shape

    def run(self, out: Tensor, x: Tensor, weight: Any, bias: Any, residual: Any, ring: int) -> None:
        follow = self.follow[:] or [None, None, 0.0]
        self.follow.clear()
        self.statistics = _ops.sparse_batch_norm2d_(
            x, weight, bias, residual, *self.plane.lists(), self.eps, self.activation, self.param, out,
            *self.plane.edge(ring), *follow,
        )  # fmt: skip

    def kept(self, ctx: Any, x: Tensor, weight: Any, bias: Any, out: Any) -> tuple:
        return x.detach(), weight, bias, out

    def gradients(self, ctx: Any, grad: Tensor, others: Tensor | None) -> tuple:
        x, weight, bias, given = ctx.saved_tensors
        given = _still(ctx.given) if given is None else given
        if is_channels_last(x) and not is_channels_last(grad):  # as a mean's is
            grad = grad.contiguous(memory_format=torch.channels_last)
        grad_x = like(x, x.shape)
        added = like(x, x.shape) if ctx.added else None
        params = _ops.sparse_batch_norm2d_backward_(
            grad, x, given, weight, bias, self.statistics, *self.plane.lists(), self.eps, self.activation, self.param,
            grad_x, added, *self.plane.edge(self.source_ring),
        )  # fmt: skip
        note_clean(grad_x, self.source_ring)
        return (
            grad_x, None if weight is None else params[0].to(weight.dtype),
            None if bias is None else params[1].to(bias.dtype), added, others,
        )  # fmt: skip


@dataclass
class Conv:
    """A convolution, the sum and the activation that follow it."""

    plane: Plane
    window: tuple[list[int], list[int], list[int]]
    groups: int
    reach: int  # pixels next to a block that are read
    x_plane: Plane | None  # None: the network's input
    exact: bool  # does every block of x's plane read the gradient's blocks and a ring around them at most?
    same: Tensor  # the weight in x's dtype
    turned: Tensor | None
    weight_dtype: torch.dtype
    weight_form: bool  # is it channels_last?
    weight_shape: torch.Size
    later: Any  # the Group that computes the weight's gradient, and the weight's place there; or nothing
    activation: str = "none"
    param: float = 0.0

    def takes(self, name: str, param: float, added: bool) -> bool:
        return True

    def shape(self, x: Tensor, weight: Any) -> Any:
        filters, _, *kernel = self.same.shape
        return x.shape[0], filters, *conv_output_size(x.shape[2:], kernel, *self.window)

    def run(self, out: Tensor, x: Tensor, weight: Any, bias: Any, residual: Any, ring: int) -> None:
        indices, count, _, grid = self.plane.lists()
        _ops.sparse_conv2d_(
            x, self.same, bias, residual, None, indices, count, grid, *self.window, self.groups, self.activation,
            self.param, False, False, out, *self.plane.edge(ring), None,
        )  # fmt: skip

    def kept(self, ctx: Any, x: Tensor, weight: Any, bias: Any, out: Any) -> tuple:
        return x.detach(), self.same, self.turned, bias, out

    def gradients(self, ctx: Any, grad: Tensor, others: Tensor | None) -> tuple:
        x, same, turned, bias, _ = ctx.saved_tensors
        lists = indices, count, block_map, grid = self.plane.lists()
        need_x, need_weight, need_bias = ctx.needs_input_grad[1:4]
        ring = self.reach if need_x and self.exact else 0
        g = of_sum(self, ctx, grad, ring)
        clean = clean_pixels(grad) if g is grad else ring
        whole = need_x and (self.x_plane is None or not self.exact)
        if whole or clean < ring:
            g = masked_gradient(g, block_map, grid)
        grad_weight = grad_bias = grad_x = None
        if need_weight or (need_bias and bias is not None):
            wanted = need_bias and bias is not None
            of = [list(same.shape[2:]), *self.window]
            flags = self.groups, False, self.weight_form, wanted, self.weight_dtype == torch.float32
            if self.later and need_weight:
                group, place = self.later
                numbers = [n for pair in of for n in pair]
                group.give(place, x, g, indices, count, [*grid, *numbers, *map(int, flags)])
            else:
                grad_weight, summed = _ops.sparse_conv2d_weight_grad(x, g, indices, count, grid, *of, *flags)
                grad_weight = grad_weight.to(self.weight_dtype).view(self.weight_shape) if need_weight else None
                grad_bias = summed.to(bias.dtype) if wanted else None
        if need_x:
            grad_x, others = self._of_x(x, g, same, turned, list(lists), others)
        return grad_x, grad_weight, grad_bias, g if ctx.added else None, others

    def _of_x(
        self, x: Tensor, g: Tensor, same: Tensor, turned: Tensor | None, lists: list, others: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """x's gradient, and what of the others' is still to be added to it."""
        stride, padding, dilation = self.window
        kernel = list(same.shape[2:])
        if self.x_plane is None:
            x_lists = read_lists(lists, kernel, self.window, x.shape[2:])
            return input_gradient(g, same, x, lists, x_lists, self.window, self.groups, False), others
        indices, count, x_map, grid = self.x_plane.lists()
        if kernel == [1, 1] and stride != [1, 1]:
            x_lists = [indices, count, x_map, grid]
            return input_gradient(g, same, x, lists, x_lists, self.window, self.groups, False), others
        found = like(x, x.shape)
        if turned is not None:
            opposite = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding, strict=True)]
            _ops.sparse_conv2d_(
                g, turned, None, others, None, indices, count, grid, [1, 1], opposite, dilation, 1, "none", 0.0, False,
                False, found, None, None, None,
            )  # fmt: skip
            return found, None
        least = [
            (n - 1) * s - 2 * p + d * (k - 1) + 1
            for n, s, p, d, k in zip(g.shape[2:], stride, padding, dilation, kernel, strict=True)
        ]
        more = [n - m for n, m in zip(x.shape[2:], least, strict=True)]
        _ops.sparse_conv_transpose2d_(
            g, same, None, others, None, indices, count, grid, stride, padding, more, dilation, self.groups, "none",
            0.0, False, found, None, None,
        )  # fmt: skip
        return found, None


class Layer(torch.autograd.Function):
    """A layer of either kind. `at`: its result's memory, a map that it changes; or None. added: 1 where the residual is
    a tensor of its own, 2 where it is `at`; since: not in the layer of `before`, the map whose layer this one joins."""

    @staticmethod
    def forward(
        ctx: Any, at: Tensor | None, x: Tensor, weight: Any, bias: Any, residual: Any, of: Any, now: bool, added: int,
        before: Tensor | None, since: bool,
    ) -> Tensor:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.route, ctx.joined, ctx.since = Route(), False, since
        ctx.of, ctx.added, ctx.residual, ctx.given = of, added, None, None
        ctx.read = ctx.read_residual = None  # Readers of x and of the residual, and which of them this is
        out = like(x, of.shape(x, weight)) if at is None else at
        if at is not None:
            ctx.mark_dirty(at)
        by_result = told(of.activation, of.param)
        if added and of.activation != "none" and not by_result:
            ctx.residual = residual.detach()
        if now:
            of.run(out, x, weight, bias, at if added == 2 else residual, 1)
        ctx.save_for_backward(*of.kept(ctx, x, weight, bias, out if by_result else None))
        return out

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, grad: Tensor | None) -> tuple:  # type: ignore[override]
        if left_out(ctx):
            return (None,) * 10
        taken = None if ctx.read is None else ctx.read[0].take(ctx.read[1])
        found = weight = bias = added = before = None  # of a map that became another before anything was computed
        if grad is not None and ctx.route.before is not None and ctx.route.before.through():
            before = of_sum(ctx.of, ctx, grad)
            added = before if ctx.since else None
        elif grad is not None:
            found, weight, bias, added, taken = ctx.of.gradients(ctx, grad, taken)
        if ctx.read is not None:
            found = ctx.read[0].give(found, taken)
        of_at, residual = (added, None) if ctx.added == 2 else (None, added)
        if ctx.read_residual is not None:
            readers, own = ctx.read_residual
            residual = readers.give(residual, readers.take(own))
        return of_at, found, weight, bias, residual, None, None, None, before, None


def _still(given: tuple[Tensor, int] | None) -> Tensor | None:
    """What an activation gave, if it was not written since."""
    if given is None:
        return None
    if given[0]._version != given[1]:
        raise RuntimeError(
            "sbnet: masked: one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: the result of an activation is at version {given[0]._version}, expected {given[1]}"
        )
    return given[0]


def note_clean(grad: Tensor, pixels: int) -> None:
    grad.__dict__[CLEAN] = grad._version, pixels


def clean_pixels(grad: Tensor) -> int:
    version, pixels = grad.__dict__.get(CLEAN, (None, 0))
    return pixels if version == grad._version else 0


def fits(plane: Plane, x_plane: Plane, x: Tensor, size: Any, stride: list[int]) -> bool:
    """Lies every block of x's plane, seen from the result's, within one block of that?"""
    for d in range(2):
        own, other = plane.active.grid.bsize[d], x_plane.active.grid.bsize[d]
        if x.shape[2 + d] != size[d] * stride[d] or other % stride[d] or own % (other // stride[d]):
            return False
    return True
