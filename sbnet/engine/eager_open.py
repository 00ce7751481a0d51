"""What `sbnet.masked` leaves undone until somebody looks: zeros outside of the active blocks, and layers whose sum and
activation are still to come.

A convolution or a batch norm gives an *open* map: memory that is to hold its active blocks, undefined elsewhere. It is
not even computed until the next op is known: a sum and an activation join its launch. Layers that read active blocks,
or a ring of one pixel around them, take open maps as they are; for every other op the map is closed first, as it is
for who still holds it when the context ends. Gradients between these layers are open likewise.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sbnet.geometry import to_pair
from sbnet.ops.common import is_channels_last
from sbnet.ops.masked.conv import autocast
from sbnet.ops.masked.conv_grad import input_gradient, masked_gradient, read_lists

if TYPE_CHECKING:
    from sbnet.active import ActiveBlocks, Fringe
    from sbnet.engine.eager import masked

_ops = torch.ops.sbnet
OPEN, CLEAN = "_sbnet_open", "_sbnet_clean"  # notes of tensors: of open maps, and of gradients whose ring is 0
# What tells the size or the kind of a tensor reads none of its pixels.
PLAIN = {
    "size", "stride", "dim", "numel", "is_floating_point", "is_contiguous", "element_size", "ndimension", "is_complex",
    "get_device", "nelement", "__len__", "storage_offset",
}  # fmt: skip
PROPERTIES = {
    "shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "is_cpu", "is_meta", "layout", "is_leaf", "grad_fn",
    "is_sparse", "is_quantized", "itemsize", "nbytes", "is_nested", "is_mkldnn", "is_xla", "is_mps", "is_xpu", "names",
}  # fmt: skip


def _told(name: str, param: float) -> bool:
    """Does what an activation gives say what its gradient is?"""
    return name in ("relu", "relu6") or (name == "leaky_relu" and param > 0)


def _like(x: Tensor, shape: Any) -> Tensor:
    """Unwritten, in x's memory format: no view, which autograd lets nobody write in place."""
    form = torch.channels_last if is_channels_last(x) else torch.contiguous_format
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=form)


@dataclass
class _Plane:
    """The list that a layer writes: its blocks, and the ring around them."""

    active: ActiveBlocks
    ring: Fringe

    def lists(self) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        a = self.active
        return a.indices, a.count, a.block_map, a.grid.numbers()

    def edge(self, wanted: bool) -> tuple[Tensor | None, Tensor | None]:
        return (self.ring.pixels, self.ring.count) if wanted else (None, None)


@dataclass
class _Norm:
    """A batch norm, the sum and the activation that follow it."""

    plane: _Plane
    eps: float
    follow: list[Any]  # running statistics and their momentum; empty once they have followed
    source_ring: bool  # is a ring of zeros wanted around the gradient of x?
    activation: str = "none"
    param: float = 0.0
    statistics: Tensor | None = None

    def takes(self, name: str, param: float, added: bool) -> bool:
        return _told(name, param) or not added

    def shape(self, x: Tensor, weight: Any) -> Any:
        return x.shape

    def run(self, out: Tensor, x: Tensor, weight: Any, bias: Any, residual: Any, ring: bool) -> None:
        follow = self.follow[:] or [None, None, 0.0]
        self.follow.clear()
        self.statistics = _ops.sparse_batch_norm2d_(
            x, weight, bias, residual, *self.plane.lists(), self.eps, self.activation, self.param, out,
            *self.plane.edge(ring), *follow,
        )  # fmt: skip

    def kept(self, ctx: Any, x: Tensor, weight: Any, bias: Any, out: Any) -> tuple:
        return x.detach(), weight, bias, out

    def gradients(self, ctx: Any, grad: Tensor) -> tuple:
        x, weight, bias, given = ctx.saved_tensors
        given = _still(ctx.given) if given is None else given
        grad_x = _like(x, x.shape)
        added = _like(x, x.shape) if ctx.added else None
        params = _ops.sparse_batch_norm2d_backward_(
            grad, x, given, weight, bias, self.statistics, *self.plane.lists(), self.eps, self.activation, self.param,
            grad_x, added, *self.plane.edge(self.source_ring),
        )  # fmt: skip
        if self.source_ring:
            _note_clean(grad_x)
        return (
            grad_x, None if weight is None else params[0].to(weight.dtype),
            None if bias is None else params[1].to(bias.dtype), added,
        )  # fmt: skip


@dataclass
class _Conv:
    """A convolution, the sum and the activation that follow it."""

    plane: _Plane
    window: tuple[list[int], list[int], list[int]]
    groups: int
    reach: int  # pixels next to a block that are read
    x_plane: _Plane | None  # None: the network's input
    exact: bool  # does every block of x's plane read the gradient's blocks and a ring of one pixel at most?
    same: Tensor  # the weight in x's dtype
    turned: Tensor | None
    activation: str = "none"
    param: float = 0.0

    def takes(self, name: str, param: float, added: bool) -> bool:
        return True

    def shape(self, x: Tensor, weight: Tensor) -> Any:
        from sbnet.geometry import conv_output_size

        return x.shape[0], weight.shape[0], *conv_output_size(x.shape[2:], weight.shape[2:], *self.window)

    def run(self, out: Tensor, x: Tensor, weight: Any, bias: Any, residual: Any, ring: bool) -> None:
        indices, count, _, grid = self.plane.lists()
        _ops.sparse_conv2d_(
            x, self.same, bias, residual, None, indices, count, grid, *self.window, self.groups, self.activation,
            self.param, False, False, out, *self.plane.edge(ring), None,
        )  # fmt: skip

    def kept(self, ctx: Any, x: Tensor, weight: Tensor, bias: Any, out: Any) -> tuple:
        ctx.weight_dtype, ctx.weight_form = weight.dtype, is_channels_last(weight)
        return x.detach(), self.same, self.turned, bias, out

    def gradients(self, ctx: Any, grad: Tensor) -> tuple:
        x, same, turned, bias, given = ctx.saved_tensors
        given = _still(ctx.given) if given is None else given
        lists = indices, count, block_map, grid = self.plane.lists()
        need_x, need_weight, need_bias = ctx.needs_input_grad[1:4]
        reads_ring = need_x and self.reach > 0
        clean = grad.__dict__.get(CLEAN) == grad._version
        if self.activation != "none":
            z = given
            if z is None:
                z = _like(x, grad.shape)
                replace(self, activation="none").run(z, x, None, bias, ctx.residual, False)
            g = _like(z, z.shape)
            _ops.sparse_activation_grad_(
                grad, z, None, indices, count, grid, self.activation, self.param, g, *self.plane.edge(reads_ring)
            )
            clean = reads_ring
        else:
            g = grad
        whole = need_x and (self.x_plane is None or not self.exact)
        if whole or (reads_ring and not clean):
            g = masked_gradient(g, block_map, grid)
        grad_weight = grad_bias = grad_x = None
        if need_weight or (need_bias and bias is not None):
            wanted = need_bias and bias is not None
            grad_weight, summed = _ops.sparse_conv2d_weight_grad(
                x, g, indices, count, grid, list(same.shape[2:]), *self.window, self.groups, False, ctx.weight_form,
                wanted, ctx.weight_dtype == torch.float32,
            )  # fmt: skip
            grad_weight = grad_weight.to(ctx.weight_dtype) if need_weight else None
            grad_bias = summed.to(bias.dtype) if wanted else None
        if need_x:
            grad_x = self._of_x(x, g, same, turned, list(lists))
        return grad_x, grad_weight, grad_bias, g if ctx.added else None

    def _of_x(self, x: Tensor, g: Tensor, same: Tensor, turned: Tensor | None, lists: list) -> Tensor:
        stride, padding, dilation = self.window
        kernel = list(same.shape[2:])
        if self.x_plane is None:
            x_lists = read_lists(lists, kernel, self.window, x.shape[2:])
            return input_gradient(g, same, x, lists, x_lists, self.window, self.groups, False)
        indices, count, x_map, grid = self.x_plane.lists()
        if kernel == [1, 1] and stride != [1, 1]:
            x_lists = [indices, count, x_map, grid]
            return input_gradient(g, same, x, lists, x_lists, self.window, self.groups, False)
        found = _like(x, x.shape)
        if turned is not None:
            opposite = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding, strict=True)]
            _ops.sparse_conv2d_(
                g, turned, None, None, None, indices, count, grid, [1, 1], opposite, dilation, 1, "none", 0.0, False,
                False, found, None, None, None,
            )  # fmt: skip
            return found
        least = [
            (n - 1) * s - 2 * p + d * (k - 1) + 1
            for n, s, p, d, k in zip(g.shape[2:], stride, padding, dilation, kernel, strict=True)
        ]
        more = [n - m for n, m in zip(x.shape[2:], least, strict=True)]
        _ops.sparse_conv_transpose2d_(
            g, same, None, None, None, indices, count, grid, stride, padding, more, dilation, self.groups, "none", 0.0,
            False, found, None, None,
        )  # fmt: skip
        return found


class _Layer(torch.autograd.Function):
    """A layer of either kind. `at`: its result's memory, a map that it changes; or None. added: 1 where the residual is
    a tensor of its own, 2 where it is `at`."""

    @staticmethod
    def forward(
        ctx: Any, at: Tensor | None, x: Tensor, weight: Any, bias: Any, residual: Any, of: Any, now: bool, added: int
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.of, ctx.added, ctx.residual, ctx.given = of, added, None, None
        out = _like(x, of.shape(x, weight)) if at is None else at
        if at is not None:
            ctx.mark_dirty(at)
        told = _told(of.activation, of.param)
        if added and of.activation != "none" and not told:
            ctx.residual = residual.detach()
        if now:
            of.run(out, x, weight, bias, at if added == 2 else residual, True)
        ctx.save_for_backward(*of.kept(ctx, x, weight, bias, out if told else None))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple:  # type: ignore[override]
        if grad is None:  # of a map that became another before anything was computed
            return (None,) * 8
        found, weight, bias, added = ctx.of.gradients(ctx, grad)
        of_at, residual = (added, None) if ctx.added == 2 else (None, added)
        return of_at, found, weight, bias, residual, None, None, None


@dataclass
class _Pending:
    """A layer that has not been run."""

    of: Any
    x: Tensor
    weight: Any
    bias: Any
    residual: Any = None
    added: int = 0


@dataclass
class _Open:
    """What is known of an open map."""

    plane: _Plane
    pending: _Pending | None
    ring: bool = False  # are the pixels next to its blocks 0?
    wants_ring: bool = False  # of the gradient


def _still(given: tuple[Tensor, int] | None) -> Tensor | None:
    """What an activation gave, if nobody has written it since."""
    if given is None:
        return None
    if given[0]._version != given[1]:
        raise RuntimeError(
            "sbnet: masked: one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: the result of an activation is at version {given[0]._version}, expected {given[1]}"
        )
    return given[0]


def _note_clean(grad: Tensor) -> None:
    grad.__dict__[CLEAN] = grad._version


class OpenMaps:
    """The open maps of a context."""

    def __init__(self, mode: masked) -> None:
        self._mode = weakref.proxy(mode)
        self._seen: list[weakref.ref] = []  # of all that were ever open
        self._weights: dict[Any, Any] = {}

    # ---- what is known

    def of(self, x: Any) -> _Open | None:
        return x.__dict__.get(OPEN) if isinstance(x, Tensor) else None

    def _add(self, x: Tensor, known: _Open) -> Tensor:
        x.__dict__[OPEN] = known
        self._seen.append(weakref.ref(x))
        return self._mode.kept(x)

    def settle(self, x: Any, ring: bool = False) -> None:
        """Computes what is pending."""
        known = self.of(x)
        if known is None or known.pending is None:
            return
        p, known.pending = known.pending, None
        with torch.no_grad():
            p.of.run(x, p.x, p.weight, p.bias, x if p.added == 2 else p.residual, ring)
        known.ring = ring

    def settle_others(self, *but: Any) -> None:
        """Before an op writes anything: what is pending may read it."""
        for reference in self._seen:
            x = reference()
            if x is not None and all(x is not t for t in but):
                self.settle(x)

    def close(self, x: Any) -> None:
        """Zeros outside of the active blocks."""
        known = self.of(x)
        if known is None:
            return
        self.settle(x)
        _ops.sparse_fill_(x.detach(), known.plane.active.block_map, known.plane.active.grid.numbers(), 0.0)
        del x.__dict__[OPEN]

    def close_all(self, args: Any, hooked: bool = False) -> None:
        """The same of all tensors among arguments. hooked: their gradients are looked at, too."""
        for t in args:
            if isinstance(t, (tuple, list)):
                self.close_all(t, hooked)
            elif isinstance(t, Tensor):
                self.close(t)
                if hooked and self._mode.keeps(t):
                    self._hook(t)

    def _hook(self, x: Tensor) -> None:
        """Whoever looks at its gradient sees zeros outside of the active blocks."""
        if x.requires_grad and not x.__dict__.get("_sbnet_hooked"):
            active = self._mode.active(x.shape[2:])
            block_map, grid = active.block_map, active.grid.numbers()
            x.register_hook(lambda grad: masked_gradient(grad, block_map, grid))
            x.__dict__["_sbnet_hooked"] = True

    def finish(self, failed: bool) -> None:
        """Who holds a map when the context ends may do anything with it."""
        living = [x for x in (reference() for reference in self._seen) if x is not None]
        for x in living if not failed else ():
            self.settle(x)
        for x in living:
            if not failed:
                self.close(x)
                self._hook(x)
            x.__dict__.pop(OPEN, None)
            x.__dict__.pop("_sbnet_hooked", None)
        self._seen.clear()
        self._weights.clear()

    # ---- layers

    def _plane(self, size: Any) -> _Plane:
        return _Plane(self._mode.active(size), self._mode.ring(size))

    def _weight(self, weight: Tensor, dtype: torch.dtype, turn: bool) -> tuple[Tensor, Tensor | None]:
        """The weight in a dtype and channels_last memory, and turned. A network may use it more than once."""
        key = id(weight), weight._version, dtype, turn
        if key not in self._weights:
            with torch.no_grad():
                if turn:
                    found = _ops.turn_conv_weight(weight, dtype)
                else:
                    found = weight.detach().to(dtype).contiguous(memory_format=torch.channels_last), None
            self._weights[key] = weight, found
        return self._weights[key][1]

    def conv(self, x: Tensor, weight: Tensor, bias: Any, size: Any, window: Any, groups: int) -> Tensor:
        stride, padding, dilation = ([*to_pair(v, "masked: window")] for v in window)
        kernel = weight.shape[2:]
        reach = max(max(p, d * (k - 1) - p) for p, d, k in zip(padding, dilation, kernel, strict=True))
        alike = stride == [1, 1] and tuple(size) == tuple(x.shape[2:])
        known, listed = self.of(x), self._mode.keeps(x)
        if known is not None:
            self.settle(x, ring=reach > 0)
            if not alike or reach > 1 or (reach == 1 and not known.ring):
                self.close(x)
        (x,) = autocast(x)
        plane = self._plane(size)
        x_plane = self._plane(x.shape[2:]) if listed else None
        turn = groups == 1 and listed and alike and torch.is_grad_enabled() and x.requires_grad
        same, turned = self._weight(weight, x.dtype, turn)
        exact = x_plane is not None and _fits(plane, x_plane, x, size, stride) and reach <= 1
        of = _Conv(plane, (stride, padding, dilation), groups, reach, x_plane, exact, same, turned)
        out = _Layer.apply(None, x, weight, bias, None, of, False, 0)
        known = _Open(plane, _Pending(of, x, weight, bias), wants_ring=exact and reach > 0)
        return self._add(out, known)

    def norm(self, x: Tensor, weight: Any, bias: Any, eps: float, follow: list[Any]) -> Tensor:
        """follow: running statistics, and by how much they move; or nothing."""
        self.settle(x)
        known = self.of(x)
        plane = self._plane(x.shape[2:])
        of = _Norm(plane, eps, follow, known is not None and known.wants_ring)
        out = _Layer.apply(None, x, weight, bias, None, of, False, 0)
        return self._add(out, _Open(plane, _Pending(of, x, weight, bias)))

    def activate(self, x: Tensor, name: str, param: float, inplace: bool) -> Tensor | None:
        """As the end of the pending layer; None where it must be an op of its own."""
        known = self.of(x)
        p = None if known is None else known.pending
        if known is None or p is None or not p.of.takes(name, param, p.added > 0):
            self.settle(x)
            return None
        of = replace(p.of, activation=name, param=param)
        if p.added == 2:  # the node of the sum has the residual's own node for its next: it learns of the activation
            if not inplace or not _told(name, param):
                self.settle(x)
                return None
            known.pending = None
            with torch.no_grad():
                of.run(x, p.x, p.weight, p.bias, x, True)
            if x.grad_fn is not None:
                x.grad_fn.of, x.grad_fn.given = of, (x.detach(), x._version)  # type: ignore[attr-defined]
            return self._add(x, _Open(known.plane, None, ring=True))
        if inplace:
            known.pending = None
        out = _Layer.apply(x if inplace else None, p.x, p.weight, p.bias, p.residual, of, True, p.added)
        return self._add(out, _Open(known.plane, None, ring=True))

    def add(self, a: Tensor, b: Tensor, inplace: bool) -> Tensor | None:
        """Of two maps, as the residual of the one that is pending; None where neither is."""
        for x, other in ((a, b), (b, a)):
            known = self.of(x)
            p = None if known is None else known.pending
            if known is None or p is None or p.added or p.of.activation != "none":
                continue
            self.settle(other)
            if x is a and inplace:
                known.pending = None
                p = replace(p, residual=other, added=1)
                out = _Layer.apply(a, p.x, p.weight, p.bias, other, p.of, False, 1)
            elif inplace:
                p = replace(p, added=2)
                out = _Layer.apply(a, p.x, p.weight, p.bias, None, p.of, False, 2)
            else:
                p = replace(p, residual=other, added=1)
                out = _Layer.apply(None, p.x, p.weight, p.bias, other, p.of, False, 1)
            return self._add(out, _Open(known.plane, p))
        return None

    def cat(self, tensors: Any) -> Tensor:
        """Channels of maps."""
        for t in tensors:
            self.settle(t)
        known = [self.of(t) for t in tensors]
        out = torch.cat(tensors, 1)
        open_ones = [k for k in known if k is not None]
        if not open_ones:
            return self._mode.kept(out)
        return self._add(out, _Open(open_ones[0].plane, None, ring=all(k.ring for k in open_ones)))


def _fits(plane: _Plane, x_plane: _Plane, x: Tensor, size: Any, stride: list[int]) -> bool:
    """Lies every block of x's plane, seen from the result's, within one block of that?"""
    for d in range(2):
        own, other = plane.active.grid.bsize[d], x_plane.active.grid.bsize[d]
        if x.shape[2 + d] != size[d] * stride[d] or other % stride[d] or own % (other // stride[d]):
            return False
    return True
