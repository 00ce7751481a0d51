"""What `sbnet.masked` leaves undone until it is read: zeros outside of the active blocks, and layers whose sum and
activation are still to come.

A convolution or a batch norm gives an *open* map: memory that is to hold its active blocks, undefined elsewhere. It is
not even computed until the next op is known: a sum and an activation join its launch. Layers that read active blocks,
or a ring of one pixel around them, take open maps as they are; for every other op the map is closed first, as it is
for who still holds it when the context ends. Gradients between these layers are open likewise.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sbnet.engine.eager_chains import Conv, Layer, Norm, Pool, fits, told
from sbnet.engine.eager_grads import Groups
from sbnet.engine.eager_joins import Cat, joins
from sbnet.engine.eager_losses import Product, Total
from sbnet.engine.eager_nhwc import BASE, base_of
from sbnet.engine.eager_norms import Norm2d
from sbnet.engine.eager_once import Counts, Weights, conv_weight
from sbnet.engine.eager_passes import Plane, Readers, Route
from sbnet.engine.eager_resize import How, Resize, reach_within
from sbnet.engine.eager_response import Responses
from sbnet.geometry import Window, to_pair
from sbnet.ops import fringe
from sbnet.ops.common import is_channels_last
from sbnet.ops.masked.conv import autocast
from sbnet.ops.masked.conv_grad import masked_gradient

if TYPE_CHECKING:
    from sbnet.active import Fringe
    from sbnet.engine.eager import masked

_ops = torch.ops.sbnet
OPEN, HOOKED = "_sbnet_open", "_sbnet_hooked"  # notes of tensors: of open maps, and of those whose gradient is masked
# What tells the size or the kind of a tensor reads none of its pixels.
PLAIN = {
    "size", "stride", "dim", "numel", "is_floating_point", "is_contiguous", "element_size", "ndimension", "is_complex",
    "get_device", "nelement", "__len__", "storage_offset",
}  # fmt: skip
PROPERTIES = {
    "shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "is_cpu", "is_meta", "layout", "is_leaf", "grad_fn",
    "is_sparse", "is_quantized", "itemsize", "nbytes", "is_nested", "is_mkldnn", "is_xla", "is_mps", "is_xpu", "names",
}  # fmt: skip


def reads_no_pixels(func: Any, move: str | None) -> bool:
    if move == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in PROPERTIES
    return move in PLAIN


@dataclass
class _Pending:
    """A layer that has not been run."""

    of: Any
    x: Tensor
    weight: Any
    bias: Any
    residual: Any = None
    added: int = 0
    before: weakref.ref | None = None  # the map whose layer it is, before the residual was added


@dataclass
class _Open:
    """What is known of an open map."""

    plane: Plane
    pending: _Pending | None
    ring: int = 0  # pixels next to its blocks that are 0
    wants_ring: int = 0  # pixels around the gradient that are wanted to be 0
    node: Any = None  # its grad_fn when it was noted: where another made it since, what is pending is not its history
    readers: Readers | None = None
    route: Route = field(default_factory=Route)


class OpenMaps:
    """The open maps of a context."""

    def __init__(self, mode: masked) -> None:
        self._mode = weakref.proxy(mode)
        self._seen: list[weakref.ref] = []  # of all that were ever open
        self.counts = Counts()
        self.weights = Weights()
        self.groups = Groups()
        self.responses = Responses(mode, self)
        self._fringes: dict[Any, Fringe] = {}
        self._rings: dict[Any, dict[int, Fringe]] = {}

    # ---- what is known

    def of(self, x: Any) -> _Open | None:
        return x.__dict__.get(OPEN) if isinstance(x, Tensor) else None

    def _add(self, x: Tensor, known: _Open) -> Tensor:
        known.node = x.grad_fn
        if known.pending is not None and known.node is not None:
            known.route = known.node.route
        x.__dict__[OPEN] = known
        self._seen.append(weakref.ref(x))
        return self._mode.kept(x)

    def _pending(self, x: Tensor) -> tuple[_Open, _Pending] | None:
        """What another op may join."""
        known = self.of(x)
        if known is None or known.pending is None or known.node is not x.grad_fn:
            return None
        p = known.pending
        given = (p.x, p.weight, p.bias, p.residual)
        wants = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in given)
        return None if wants and known.node is None else (known, p)  # not what was made without gradients

    def settle(self, x: Any, ring: int = 0) -> None:
        """Computes what is pending. ring: pixels next to its blocks that shall be 0."""
        known = self.of(x)
        if known is None or known.pending is None:
            return
        p, known.pending = known.pending, None
        known.route.computed = True
        with torch.no_grad():
            p.of.run(x, p.x, p.weight, p.bias, x if p.added == 2 else p.residual, ring)
        known.ring = ring

    def settle_others(self, *but: Any) -> None:
        """Before an op writes anything: what is pending may read it."""
        for reference in self._seen:
            x = reference()
            if x is not None and all(x is not t for t in but):
                self.settle(x)
        self.responses.make_all()

    def close(self, x: Any) -> None:
        """Zeros outside of the active blocks."""
        base = base_of(x)
        if base is not None:
            return self.close(base)
        known = self.of(x)
        if known is None:
            return
        self.settle(x)
        _ops.sparse_fill_(x.detach(), known.plane.active.block_map, known.plane.active.grid.numbers(), 0.0)
        del x.__dict__[OPEN]

    def clear(self, x: Tensor, plane: Plane, window: Any, size: Any = None) -> None:
        """Zeros where a window reads what no active block holds. window: kernel, stride, padding, dilation; or a Window
        and the size of the plane that it is for."""
        known = self.of(x)
        if known is None:
            return
        self.settle(x)
        pixels = self._fringe(known.plane, plane, x.shape[2:], window, size)
        own = known.plane.active
        _ops.sparse_pointwise_(
            torch.empty_like(x), None, None, None, None, own.indices[:0], own.count, own.grid.numbers(), "", x.detach(),
            pixels.pixels, pixels.count,
        )  # fmt: skip

    def close_all(self, args: Any, hooked: bool = False) -> None:
        """The same of all tensors among arguments. hooked: their gradients are looked at, too."""
        for t in args:
            if isinstance(t, (tuple, list)):
                self.close_all(t, hooked)
            elif isinstance(t, Tensor):
                self.responses.make(t)
                self.close(t)
                if hooked and self._mode.keeps(t):
                    self._hook(t)
                elif hooked and t.__dict__.pop(BASE, None) is not None:  # what reads it reads it as itself
                    self._hook(t, nhwc=True)

    def _hook(self, x: Tensor, nhwc: bool = False) -> None:
        """Whoever looks at its gradient sees zeros outside of the active blocks."""
        if x.requires_grad and not x.__dict__.get(HOOKED):
            there, back = ((0, 3, 1, 2), (0, 2, 3, 1)) if nhwc else ((0, 1, 2, 3), (0, 1, 2, 3))
            active = self._mode.active(x.shape[1:3] if nhwc else x.shape[2:])
            block_map, grid = active.block_map, active.grid.numbers()
            x.register_hook(lambda grad: masked_gradient(grad.permute(there), block_map, grid).permute(back))
            x.__dict__[HOOKED] = True

    def finish(self, failed: bool) -> None:
        """Who holds a map when the context ends may do anything with it."""
        self.counts.flush()
        if not failed:
            self.responses.make_all()
        living = [x for x in (reference() for reference in self._seen) if x is not None]
        for x in living if not failed else ():
            self.settle(x)
        for x in living:
            if not failed:
                self.close(x)
                self._hook(x)
            x.__dict__.pop(OPEN, None)
            x.__dict__.pop(HOOKED, None)
        self._seen.clear()
        self.weights.clear()
        self.groups.clear()
        self._fringes.clear()
        self._rings.clear()

    # ---- layers

    def _layer(
        self, at: Tensor | None, p: _Pending, now: bool, of: Any = None, before: Tensor | None = None,
        since: bool = True,
    ) -> Tensor:  # fmt: skip
        """A layer's node. Who reads the same open map adds up its gradient with this one. before: whose layer it joins;
        since: is the residual not in that?"""
        residual = p.residual if p.added == 1 else None
        of = p.of if of is None else of
        out = Layer.apply(at, p.x, p.weight, p.bias, residual, of, now, p.added, before, since)
        if out.grad_fn is not None:
            known = self.of(before)
            if known is not None and known.node is not None:
                out.grad_fn.route.before, known.node.joined = known.route, True
            out.grad_fn.read = self._read(p.x, out.grad_fn)
            out.grad_fn.read_residual = self._read(residual, out.grad_fn)
        return out

    def _read(self, x: Tensor | None, node: Any) -> tuple[Readers, int] | None:
        known = self.of(x)
        if known is None or x is None or x.grad_fn is None:
            return None
        if known.readers is None or known.readers.source is not x.grad_fn:
            known.readers = Readers(x.grad_fn, known.plane)
        return known.readers, known.readers.join(node)

    def _reads(self, x: Tensor, out: Tensor) -> Tensor:
        if (node := out.grad_fn) is not None:
            node.read = self._read(x, node)  # type: ignore[attr-defined]
        return out

    def _plane(self, size: Any) -> Plane:
        key = int(size[0]), int(size[1])
        if key not in self._rings:
            self._rings[key] = {1: self._mode.ring(size)}
        return Plane(self._mode.active(size), self._rings[key])

    def _widen(self, plane: Plane, size: Any, reach: int) -> None:
        """Its ring of so many pixels."""
        if reach and reach not in plane.rings:
            numbers = [[n, n] for n in (2 * reach + 1, 1, reach, 1)]
            plane.rings[reach] = self._fringe(plane, plane, size, numbers)

    def _fringe(self, own: Plane, plane: Plane, size: Any, window: Any, of: Any = None) -> Fringe:
        """Pixels of a plane of this size and its own list that a window reads for another one's, `of` that size."""
        window = (window,) if isinstance(window, Window) else tuple(map(tuple, window))
        key = tuple(size), tuple(plane.active.grid.numbers()), window
        if key not in self._fringes:
            self._fringes[key] = fringe(own.active, plane.active, size, *window, consumer_size=of)
        return self._fringes[key]

    def conv(self, x: Tensor, weight: Tensor, bias: Any, size: Any, window: Any, groups: int) -> Tensor:
        stride, padding, dilation = ([*to_pair(v, "masked: window")] for v in window)
        kernel = weight.shape[2:] or (1, 1)  # of a linear layer [K,C]
        reach = max(max(p, d * (k - 1) - p) for p, d, k in zip(padding, dilation, kernel, strict=True))
        alike = stride == [1, 1] and tuple(size) == tuple(x.shape[2:])
        known, listed = self.of(x), self._mode.keeps(x)
        if known is not None:
            ring = reach if alike else min(reach, 1)
            if known.pending is not None:
                self._widen(known.plane, x.shape[2:], ring)
            self.settle(x, ring)
            if not alike or known.ring < reach:
                self.clear(x, self._plane(size), (list(kernel), stride, padding, dilation))
        (x,) = autocast(x)
        plane = self._plane(size)
        x_plane = self._plane(x.shape[2:]) if listed else None
        turn = x.is_cuda and groups == 1 and listed and alike and torch.is_grad_enabled() and x.requires_grad
        same, turned = self.weights.of(weight, x.dtype, turn)
        exact = x_plane is not None and fits(plane, x_plane, x, size, stride) and (alike or reach <= 1)
        if exact:
            self._widen(plane, size, reach)
        later = self.groups.of(weight, bias)
        form = weight.dtype, is_channels_last(conv_weight(weight)), weight.shape
        edge, *of_group = (weight,) if later is None else later
        window = stride, padding, dilation
        of = Conv(plane, window, groups, reach, x_plane, exact, same, turned, *form, of_group)
        pending = _Pending(of, x, edge, bias)
        return self._add(self._layer(None, pending, False), _Open(plane, pending, wants_ring=reach if exact else 0))

    def norm(self, x: Tensor, weight: Any, bias: Any, eps: float, follow: list[Any]) -> Tensor:
        """follow: running statistics, and by how much they move; or nothing."""
        self.settle(x)
        known = self.of(x)
        plane = self._plane(x.shape[2:])
        of = Norm(plane, eps, follow, 0 if known is None else known.wants_ring)
        pending = _Pending(of, x, weight, bias)
        return self._add(self._layer(None, pending, False), _Open(plane, pending))

    def norm2d(self, x: Tensor, weight: Any, bias: Any, method: str, groups: int, eps: float) -> Tensor:
        """One without running statistics."""
        self.settle(x)
        known, plane = self.of(x), self._plane(x.shape[2:])
        ring = 0 if known is None else known.wants_ring
        out = Norm2d.apply(x, weight, bias, plane, method, groups, eps, ring)
        return self._add(out, _Open(plane, None))

    def activate(self, x: Tensor, name: str, param: float, inplace: bool) -> Tensor | None:
        """As the end of the pending layer; None where it must be an op of its own."""
        found = self._pending(x)
        if found is None or not found[1].of.takes(name, param, found[1].added > 0):
            self.settle(x)
            return None
        known, p = found
        of = replace(p.of, activation=name, param=param)
        if p.added == 2:  # the node of the sum has the residual's own node for its next: it learns of the activation
            if not inplace or not told(name, param):
                self.settle(x)
                return None
            known.pending = None
            with torch.no_grad():
                of.run(x, p.x, p.weight, p.bias, x, 1)
            if x.grad_fn is not None:
                x.grad_fn.of, x.grad_fn.given = of, (x.detach(), x._version)  # type: ignore[attr-defined]
            return self._add(x, _Open(known.plane, None, ring=1))
        before: Tensor | None = x
        if inplace:
            before = None if p.before is None else p.before()
            if before is None and known.route.through():  # of a map that nobody holds, and whose gradient is wanted
                self.settle(x)
                return None
            known.pending = None
        out = self._layer(x if inplace else None, p, True, of, before, since=inplace)
        return self._add(out, _Open(known.plane, None, ring=1))

    def add(self, a: Tensor, b: Tensor, inplace: bool) -> Tensor | None:
        """Of two maps, as the residual of the one that is pending; None where neither is."""
        if inplace and a._is_view():  # autograd runs what writes a view inside a node of its own, which has no notes
            self.settle(b)
            return None
        for x, other in ((a, b), (b, a)):
            found = self._pending(x)
            if found is None or found[1].added or found[1].of.activation != "none":
                continue
            known, p = found
            self.settle(other)
            p = replace(p, added=2) if inplace and x is not a else replace(p, residual=other, added=1)
            before = None if inplace and x is a else x
            if before is None:
                known.pending = None
            else:
                p.before = weakref.ref(x)
            return self._add(self._layer(a if inplace else None, p, False, before=before), _Open(known.plane, p))
        return None

    def pool(
        self, x: Tensor, size: Any, maximum: bool, window: Any, counted: bool = True, divisor: Any = None
    ) -> Tensor:
        """window: kernel, stride, padding and dilation."""
        numbers = [[*to_pair(v, "masked: window")] for v in window]
        planes = self._plane(size), self._plane(x.shape[2:])
        self.clear(x, planes[0], numbers)
        return self._mode.kept(self._reads(x, Pool.apply(x, *planes, maximum, *numbers, counted, divisor)))

    def resize(self, x: Tensor, size: list[int], how: How) -> Tensor:
        plane, x_plane = self._plane(size), self._plane(x.shape[2:])
        known, reach = self.of(x), reach_within(how, plane, x_plane, size, x.shape[2:])
        if known is not None:
            ring = 1 if reach is None else reach
            if known.pending is not None:
                self._widen(known.plane, x.shape[2:], ring)
            self.settle(x, ring)
            if reach is None or known.ring < reach:
                sides = (int(x.shape[2]), int(x.shape[3])), (size[0], size[1])
                self.clear(x, plane, Window.resize(*sides, how[0], how[1], how[2:]), size)
        out = self._reads(x, Resize.apply(x, plane, x_plane, size, how, 0 if known is None else known.wants_ring))
        return self._add(out, _Open(plane, None, ring=1))

    def product(self, x: Tensor, other: Any, name: str) -> Tensor:
        self.settle(x)
        self.settle(other)
        known, plane = self.of(x), self._plane(x.shape[2:])
        wants_ring = 0 if known is None else known.wants_ring
        return self._add(Product.apply(x, other, plane, name, wants_ring), _Open(plane, None))

    def total(self, x: Tensor, mean: bool) -> Tensor:
        self.settle(x)
        return Total.apply(x, self._plane(x.shape[2:]), mean)

    def cat(self, tensors: Any) -> Tensor:
        """Channels of maps."""
        for t in tensors:
            self.settle(t)
        open_ones = [k for k in map(self.of, tensors) if k is not None]
        if not open_ones:
            return self._mode.kept(torch.cat(tensors, 1))
        plane, ring = open_ones[0].plane, min(k.ring for k in open_ones)
        if not joins(tensors):
            return self._add(torch.cat(tensors, 1), _Open(plane, None, ring=ring))
        out = Cat.apply(plane, *tensors)
        if (node := out.grad_fn) is not None:
            node.reads = [self._read(t, node) for t in tensors]
        return self._add(out, _Open(plane, None, ring=1))
