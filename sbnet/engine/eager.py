"""`with sbnet.masked(mask, block=16)`: the layers of any eager module on active blocks, differentiable."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.active import ActiveBlocks
from sbnet.engine.arguments import FLOATS
from sbnet.engine.eager_layers import LAYERS, TAKES_OPEN
from sbnet.engine.eager_losses import LOSSES
from sbnet.engine.eager_nhwc import BASE, IN_NHWC, by_any, turned
from sbnet.engine.eager_open import OpenMaps, reads_no_pixels
from sbnet.engine.eager_planes import Planes
from sbnet.engine.eager_stacks import Stacks
from sbnet.engine.eager_tokens import ATTEND, TOKENS, TokenNotes, refused
from sbnet.engine.eager_unseen import Unseen, compiled_once, plainly_named, refuse_dtype, refuse_statistics
from sbnet.engine.eager_writes import (
    COPY,
    MOVES,
    by_place,
    drops_nothing,
    in_place_of_pixels,
    kind,
    moved_memory,
    named,
    tensors_of,
)
from sbnet.engine.modes import ENTERED, open_of
from sbnet.ops import sparse_fill

# Of MOVES, what gives pixels in their places: zeros outside of the active blocks stay there.
KEEPS = {
    "chunk", "split", "contiguous", "clone", "detach", "to", "cpu", "cuda", "requires_grad_", "dropout", "float",
    "half", "double", "type", "bfloat16", "narrow", "__getitem__", "detach_", "slice", "alias", "_to_copy",
}  # fmt: skip
# Of a map of that dtype they give itself.
SAME_AS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
# They look at gradients of maps.
LOOKED_AT = {"register_hook", "retain_grad", "requires_grad_", "backward"}
# In place of maps that are both 0 outside of the active blocks, they leave zeros there.
SUMS = {"__iadd__", "__isub__", "add_", "sub_"}
# Notes of tensors: of feature maps that are 0 outside of the active blocks, of such that are seen as [N,H,W,C], and of
# others seen so, whose last sides are no plane.
KEPT, NHWC, OTHER = "_sbnet_kept", "_sbnet_nhwc", "_sbnet_other"


class masked(Planes):
    """Inside, every op of PyTorch with a feature map [N,C,H,W] as its result computes or keeps active blocks alone.

    Convolutions, transposed ones, pools, normalisations, activations, sums and resizes run sparse ops, forward and
    backward; any other op runs dense and its result is masked, so that the masked contract holds (docs/contracts.md).
    The statistics of normalisations in training are those of the active pixels. For training and fine-tuning under
    masks and for debugging: a planned run (`sparsify`) is faster. A step waits for nothing on the device, so that
    all of it can be one CUDA graph. Feature maps are channels_last, whatever the network's input is.

    Args:
        mask: [N,H,W] of any dtype, on the pixels of the network's input.
        block: block size of every plane; "auto": 16, and 8 of planes of less than 128 pixels a side.
        margin: pixels by which the mask is grown.
        capacity: share of a plane's blocks that are kept at most, the first in raster order, or None: all. What the
            backward pass needs of feature maps is then saved as stacks of so many blocks instead of whole planes.
            `missed()` says what did not fit.
        synchronized: in training, batch norms have the statistics of all processes of torch.distributed, where it is
            initialised.

    Raises:
        RuntimeError: on entering it inside another.
        ValueError: the first feature map inside is of another height or width than the mask; or, on leaving it, nothing
            was masked: all convolutions were of other batches than the mask's, or no op was seen.
        NotImplementedError: what it would take wrongly: layers of torch.jit, of other threads or of a transform of
            torch.func, statistics of all pixels, attention in a form that is not known.

    >>> with sbnet.masked(mask, block=16):
    ...     loss = criterion(model(x), y)
    >>> loss.backward()
    """

    def __init__(
        self,
        mask: Tensor,
        block: int | Sequence[int] | str = 16,
        margin: int = 0,
        capacity: float | None = None,
        synchronized: bool = False,
    ) -> None:
        super().__init__(mask, block, margin, capacity)
        self.synchronized = synchronized
        self._stacks = None if capacity is None else Stacks(self)
        self.maps = OpenMaps(self) if capacity is None and not torch.compiler.is_compiling() else None
        self.tokens = TokenNotes(self)
        # Feature maps that are 0 outside of the active blocks carry a note of it, as long as the context lasts. Dynamo
        # knows no attributes of tensors: it has lists of them, of its trace alone.
        self._noted: list[weakref.ref] = []
        self._traced: dict[str, list[Tensor]] = {KEPT: [], NHWC: [], OTHER: []}
        self._other: str | None = None  # what a convolution met that is no map of the masks
        self._met = False  # has it seen the network's input?
        self._unseen: Unseen | None = None
        self.in_parts = torch.compiler.is_compiling()  # then ops that PyTorch compiled are not seen

    def __enter__(self) -> masked:
        if getattr(ENTERED, "inside", False):  # modes are a thread's own
            raise RuntimeError("sbnet: masked: contexts cannot be nested")
        super().__enter__()
        ENTERED.inside = self
        if not torch.compiler.is_compiling():
            self._unseen = Unseen()
        if self._stacks is not None:
            self._stacks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        ENTERED.inside = False
        if self._stacks is not None:
            self._stacks.__exit__(*error)
        super().__exit__(*error)
        if self.maps is not None:
            self.maps.finish(error[0] is not None)
        for reference in self._noted:
            x = reference()
            if x is not None:
                for what in (KEPT, NHWC, OTHER, TOKENS, COPY, BASE):
                    x.__dict__.pop(what, None)
        self._noted.clear()
        if error[0] is None and not self._lists and not self.in_parts and (self._other or self._met):
            expected = self._other or "layers of feature maps [N,C,H,W], got none of its images"
            raise ValueError(f"sbnet: masked: mask: expected {expected}: nothing was masked")
        if error[0] is None and self._unseen is not None and not self._unseen.others:
            raise ValueError("sbnet: masked: expected ops that PyTorch's modes see in this thread, got none")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = by_place(args, kwargs or {})
        name = named(func)[0]
        if not torch.compiler.is_compiling():
            return self._eagerly(name, plainly_named(func), args, kwargs)
        compiled_once()
        if name in ATTEND:  # Dynamo then leaves the step to Python, part by part, and notes are lost
            raise refused("attention in a compiled step", "attention that runs eagerly")
        return self.op(func, args, kwargs)

    @torch.compiler.disable
    def _eagerly(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Not in a trace: Dynamo knows no attributes of tensors."""
        self._unseen = unseen = self._unseen or Unseen()  # a step may be compiled in parts
        unseen.before(self, args)
        try:
            return self.tokens(name, name in MOVES, func, args, kwargs)
        finally:
            unseen.after()

    def op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What an op gives of feature maps."""
        first = args[0] if args and not self._met and self.is_map(args[0]) else None
        if first is not None and first.shape[2:] == self.mask.shape[1:]:
            self._met, first = True, None
        given = list(tensors_of(args, kwargs))
        known = len(args) > 0 and isinstance(args[0], Tensor)
        nhwc = known and self.lies_nhwc(args[0])
        last = nhwc or any(map(self.lies_nhwc, given))
        layer = None if last and not nhwc else (IN_NHWC if nhwc else LAYERS).get(func)
        layer = None if kwargs.get("out") is not None else layer
        if last and kwargs.get("out") is not None:
            raise ValueError(f"sbnet: masked: expected a result of its own, got {named(func)[0]} with out=")
        if layer is None:
            if any(map(self.is_map, args)):
                refuse_statistics(named(func)[0], args, kwargs)
            if named(func)[0] in ("conv3d", "conv_transpose3d"):
                self.met_others("convolutions of planes, got conv3d alone")
        if func in LOSSES and not (known and self.keeps(args[0])):
            layer = None
        maps = open_of(self)
        move, writes = kind(func, args, kwargs)
        if maps is not None:
            same = turned(self, move or "", args, kwargs) if known else None
            same = maps.responses.take(named(func)[0], func, args, kwargs) if same is None else same
            if same is not None:
                return same
            if maps.counts.take(named(func)[0], args, kwargs):
                return args[0]
            if writes or "out" in kwargs or named(func)[0] == "__set__":
                maps.settle_others(*args[:2])
                maps.weights.written((*args[:1], kwargs.get("out")))
            if len(args) == 1 and not kwargs and known and args[0].dtype == SAME_AS.get(move or ""):
                return args[0]
            if move == "dropout" and known and drops_nothing(*args[1:], **kwargs):
                return args[0]
            # A function of autograd's own, which no mode sees, may keep what its forward pass was given.
            hidden = not torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in args)
            takes = layer is not None and func in (IN_NHWC if nhwc else TAKES_OPEN) and not hidden
            if not takes and not reads_no_pixels(func, move):
                looked_at = move in LOOKED_AT or func is torch.autograd.grad
                maps.close_all((args, tuple(kwargs.values())), looked_at)
        if given and self._has(given[0], OTHER) and not last:
            return self._of_other(func, args, func(*args, **kwargs))
        if layer is not None:
            self._check(first)
            found = layer(self, *args, **kwargs)
            if found is not None:
                return found
            if maps is not None:
                maps.close_all((args, tuple(kwargs.values())))
        if move is not None:
            return self._moved(move, nhwc, args, func(*args, **kwargs))
        if last:
            return by_any(self, func, writes if nhwc else None, args, kwargs)
        # An op in place is followed by others that know its argument, not its result. It works on a copy: gradients may
        # want what it wrote, which is masked here.
        own = args[0] if writes and len(args) > 0 and self.is_map(args[0]) else None
        if own is not None and writes in SUMS and all(self.keeps(t) for t in args[:2]) and not kwargs:
            return self.kept(func(*args))
        written = args if own is None else (own.clone(), *args[1:])
        out = func(*written, **kwargs)
        if own is not None and writes == "__setitem__":
            out = written[0]
        if isinstance(out, (tuple, list)) and func is not torch.autograd.grad:  # maxima and their indices, say
            return pytree.tree_map(lambda t: self.plane(t, False) if self.is_map(t) else t, out)
        if not isinstance(out, Tensor) or not self.is_map(out):
            return out
        self._check(first)
        kept = self.kept(sparse_fill(out, self.active(out.shape[2:])))
        if own is not None:
            kept = self.kept(own.copy_(kept))
        return None if writes == "__setitem__" else kept

    # ---- what is known of a tensor: it is a feature map, 0 outside of the active blocks, or one seen as [N,H,W,C]

    def is_map(self, x: Any) -> bool:
        """Is it a feature map of the masks' batch?"""
        return (
            isinstance(x, Tensor) and x.dim() == 4 and x.dtype in FLOATS and x.shape[0] == self.mask.shape[0]
            and x.shape[2] * x.shape[3] > 1 and not self._has(x, OTHER)
        )  # fmt: skip

    def keeps(self, x: Any) -> bool:
        """Is it a feature map that is 0 outside of the active blocks?"""
        return self.is_map(x) and self._has(x, KEPT)

    def kept(self, x: Tensor) -> Tensor:
        """x, noted as one."""
        if self._stacks is not None:
            self._stacks.note(x)
        return self._note(x, KEPT)

    def seen(self, x: Tensor, nhwc: bool, is_plane: bool = True) -> Tensor:
        """Notes a view of a map, or of its tokens, as one; or what was one seen as [N,H,W,C], and is no plane."""
        if nhwc:
            return self._note(x, NHWC if is_plane else OTHER)
        return self.kept(x) if is_plane else x

    def plane(self, x: Tensor, nhwc: bool) -> Tensor:
        """What was moved to be a feature map again, 0 outside of the active blocks."""
        refuse_dtype(x)
        if nhwc:
            return self.as_nhwc(sparse_fill(x.permute(0, 3, 1, 2), self.active(x.shape[1:3])))
        return self.kept(sparse_fill(x, self.active(x.shape[2:])))

    def is_scaled(self, x: Any) -> bool:
        """Is it a map of a plane that the masks' is, some steps smaller?"""
        if not self.is_map(x):
            return False
        step = max(1, round(self.mask.shape[1] / x.shape[2]))
        return all(n in (of // step, -(-of // step)) for n, of in zip(x.shape[2:], self.mask.shape[1:], strict=True))

    def list_of(self, x: Tensor) -> ActiveBlocks | None:
        """The active blocks of a feature map that is 0 outside of them."""
        return self.active(x.shape[2:]) if self.keeps(x) else None

    def as_nhwc(self, x: Tensor) -> Tensor:
        """A feature map that is 0 outside of the active blocks, seen as [N,H,W,C]."""
        found = self._note(x.permute(0, 2, 3, 1), NHWC)
        if open_of(self) is not None:
            self.kept(x)
            self.noted(found, BASE, (x, x.grad_fn))
        return found

    def _note(self, x: Tensor, what: str) -> Tensor:
        if torch.compiler.is_compiling():
            self._traced[what].append(x)
        else:
            self.noted(x, what, (x.grad_fn, x.data_ptr()) if what == KEPT else x.grad_fn)
        return x

    def noted(self, x: Tensor, what: str, value: Any) -> None:
        """Leaves a note on a tensor, outside of a trace."""
        x.__dict__[what] = value
        self._noted.append(weakref.ref(x))

    def _has(self, x: Tensor, what: str) -> bool:
        if torch.compiler.is_compiling():
            return any(x is t for t in self._traced[what])
        if what != KEPT or what not in x.__dict__:
            return what in x.__dict__
        node, memory = x.__dict__[what]
        if x.data_ptr() != memory:  # no mode sees Tensor.set_
            raise moved_memory("other memory")
        return node is x.grad_fn  # else another function made it its own since: its gradient is wanted everywhere

    def carries(self, x: Tensor) -> bool:
        """Is it a map or a view of one, or of its tokens?"""
        return any(what in x.__dict__ for what in (KEPT, NHWC, OTHER, TOKENS))

    def known(self) -> list[Tensor]:
        """What carries notes."""
        return [x for x in (reference() for reference in self._noted) if x is not None]

    def lies_nhwc(self, x: Tensor) -> bool:
        return self._has(x, NHWC) and x.dim() == 4

    def _of_other(self, func: Any, args: Any, out: Any) -> Any:
        """What any op gives of such a one: another, until it is turned back."""
        if not isinstance(out, Tensor) or out.dim() != 4:
            return out
        if named(func)[0] != "permute" or list(args[1] if len(args) == 2 else args[1:]) != [0, 3, 1, 2]:
            return self._note(out, OTHER)
        return self.kept(sparse_fill(out, self.active(out.shape[2:]))) if self.is_map(out) else out

    def _moved(self, name: str, nhwc: bool, args: Any, out: Any) -> Any:
        """Notes of what a move gives, what is known of its argument."""
        x: Any = args[0] if args else None
        if name in ("permute", "movedim", "transpose") and isinstance(out, Tensor):
            order = args[1] if len(args) == 2 else args[1:]
            if name == "permute" and list(order) == [0, 2, 3, 1] and isinstance(x, Tensor) and x.dim() == 4:
                self._note(out, NHWC if self.keeps(x) else OTHER)
            elif name == "permute" and list(order) == [0, 3, 1, 2] and nhwc:
                self.kept(out)
            return out
        if name in KEEPS and self.keeps(x) and in_place_of_pixels(name, args):
            for part in out if isinstance(out, (tuple, list)) else (out,):
                if self.is_map(part) and part.shape[2:] == x.shape[2:]:
                    self.kept(part)
        elif name in KEEPS and nhwc and isinstance(out, Tensor) and out.shape == x.shape:
            refuse_dtype(out)
            self._note(out, NHWC)
        elif self.is_map(out) and isinstance(x, Tensor) and x.dtype not in FLOATS and self.met(out.shape[2:]):
            return self.plane(out, False)  # a cast of what compared maps, say: not of zeros alone
        return out

    def _check(self, first: Tensor | None) -> None:
        """Raises where the first feature map of all, the network's input, is not of the mask's plane."""
        if first is not None:
            wanted, got = [self.mask.shape[0], *first.shape[2:]], list(self.mask.shape)
            raise ValueError(f"sbnet: masked: mask: expected {wanted}, the pixels of the network's input, got {got}")

    def met_others(self, expected: str) -> None:
        """A convolution of something else than the masks' maps."""
        self._other = expected
