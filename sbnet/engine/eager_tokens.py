"""Tokens inside `sbnet.masked`: which tensors are those of a plane, so that attention looks at active ones alone.

A plane whose rows and columns a network makes one dimension of is a list of tokens; class tokens and registers may be
added before or behind it. Where they lie in what a move of numbers gives, its result for their indices says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.engine.eager_unseen import in_parts, refuse_statistics
from sbnet.engine.eager_writes import with_views
from sbnet.geometry import Pair

if TYPE_CHECKING:
    from sbnet.engine.eager import masked

TOKENS = "_sbnet_tokens"
CONVOLVES = {"conv2d", "conv_transpose2d"}  # whatever their input was, it is a plane
PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum", "tensordot"}
MEANS = {"mean", "nanmean"}
# They leave every number where it was, ...
SAME = {
    "dropout", "contiguous", "clone", "detach", "to", "float", "half", "bfloat16", "double", "type", "requires_grad_",
    "cpu", "cuda", "dropout_", "detach_",
}  # fmt: skip
# ... and these move some: what they make of indices says where tokens lie then.
MOVES_TOO = {
    "roll", "flip", "fliplr", "flipud", "rot90", "index_select", "gather", "take_along_dim", "take", "scatter",
    "index_copy", "index_add", "repeat", "tile", "repeat_interleave", "unfold", "moveaxis", "swapdims", "t", "ravel",
    "broadcast_to", "tensor_split", "hsplit", "vsplit", "dsplit", "adjoint",
}  # fmt: skip
BY_VALUE = {"sort", "msort", "topk", "masked_select"}  # they move numbers by what these are
# Of zeros they give zeros: what follows them need not be masked again.
KEEP_ZEROS = {"gelu", "relu", "silu", "dropout", "mul", "__mul__", "__rmul__", "neg", "tanh"}
ATTEND = {
    "scaled_dot_product_attention", "multi_head_attention_forward", "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
}  # fmt: skip
REDUCE = {"sum", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "var", "std", "median"}


MOST_BESIDE = 16  # rows beside the pixels of a plane


def refused(got: str, expected: str) -> NotImplementedError:
    return NotImplementedError(
        f"sbnet: masked: attention: expected {expected}, got {got}: it would see inactive pixels. Give it masks of "
        "your own, outside of the context"
    )


class Tokens(NamedTuple):
    """A dimension `at` that counts `prefix` rows, the pixels of a plane of this size, and `suffix` rows, and the one of
    images, which is None where a batch of one was squeezed away."""

    size: Pair
    prefix: int
    suffix: int
    at: int
    images: int | None = 0

    @property
    def rows(self) -> int:
        return self.prefix + self.size[0] * self.size[1] + self.suffix


LOOSE = "loose"  # in the place of Tokens: pixels of a plane in some other arrangement
ROWS = "rows"  # none of them: class tokens, whose heads are no feature maps either
MAP, NHWC = "map", "nhwc"  # what a move may make of tokens: a plane again


class TokenNotes:
    """`__call__(name, move, func, args, kwargs)` gives what an op does; move: it computes nothing."""

    def __init__(self, context: masked) -> None:
        self.context, self.met = context, False

    def __call__(self, name: str, move: bool, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        return with_views(self.context, func, args, kwargs, lambda: self._op(name, move, func, args, kwargs))

    def _op(self, name: str, move: bool, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        run = functools.partial(self.context.op, func, args, kwargs)
        if name in ATTEND:
            return self._attention(name, func, args, kwargs)
        known = [self.of(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)] if self.met else []
        if not any(known):
            x = args[0] if args else None
            at = self._plane_of(x) if move and isinstance(x, Tensor) else None
            return run() if at is None else self._leaves(func, args, kwargs, at, run)
        if name in PRODUCTS and sum(note not in (None, ROWS) for note in known) > 1:
            raise refused(f"{name} of tokens with tokens", "`scaled_dot_product_attention`, or no such product")
        note = self.of(args[0]) if args and isinstance(args[0], Tensor) else None
        if note is not None and note != ROWS:
            refuse_statistics(name, args, kwargs, "of pixels in another arrangement than [N,C,H,W]")
        if name in ("cat", "concat", "concatenate"):
            return self._joined(args, kwargs, func(*args, **kwargs))
        if move or (name in MOVES_TOO and note is not None):
            if note is None:
                return run()
            out = func(*args, **kwargs)
            return self._noted(out, note) if name in SAME else self._moved(func, args, kwargs, note, out)
        if name in BY_VALUE and note is not None:
            return self._noted(func(*args, **kwargs), LOOSE)
        held = next((n for n in known if isinstance(n, Tokens)), None)
        if held is None and LOOSE not in known:
            planes = any(isinstance(t, Tensor) and self._plane_of(t) for t in args)
            return run() if planes else self._noted(func(*args, **kwargs), ROWS)
        if held is None:
            if name in CONVOLVES and self.context.is_scaled(args[0]):
                return self.context.op(func, (self.context.plane(args[0], False), *args[1:]), kwargs)
            planes = any(isinstance(t, Tensor) and self._plane_of(t) for t in pytree.tree_leaves((args, kwargs)))
            return self._noted(run() if planes else func(*args, **kwargs), LOOSE)
        if isinstance(note, Tokens) and (name in MEANS or name in REDUCE):
            return self._reduced(name, func, args, kwargs, note)
        out = func(*args, **kwargs)
        if name == "__setitem__":
            out = args[0]
        made = self._computed(name, held, out)
        # What is written in place is known by its old name: zeros are put there.
        if isinstance(note, Tokens) and out is args[0] and made is not out:
            out.copy_(made)
            made = out
        if name == "__setitem__" and note is None:  # of a tensor that was not known
            self._noted(args[0], LOOSE)
        return None if name == "__setitem__" else made

    def of(self, x: Tensor) -> Any:
        """Tokens, LOOSE, ROWS or None."""
        note = x.__dict__.get(TOKENS)
        return None if note in (LOOSE, ROWS) and self._plane_of(x) is not None else note

    def _noted(self, out: Any, note: Any) -> Any:
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor) and t.is_floating_point():
                self.context.noted(t, TOKENS, note)
        self.met = True
        return out

    def loose(self, out: Any) -> Any:
        """Notes pixels of a plane in some other arrangement."""
        return self._noted(out, LOOSE)

    # ---- moves of numbers

    def _plane_of(self, x: Tensor) -> Any:
        """Which dimensions of a feature map, 0 outside of the active blocks, are rows and columns."""
        if self.context.keeps(x):
            return 2
        return 1 if self.context.lies_nhwc(x) else None

    def _leaves(self, func: Any, args: Any, kwargs: Any, at: int, run: Callable[[], Any]) -> Any:
        """A move of a feature map: what it gives may be tokens."""
        x, out = args[0], run()
        size = int(x.shape[at]), int(x.shape[at + 1])
        if not any(isinstance(t, Tensor) and self._anew(t) for t in pytree.tree_leaves(out)):
            return out
        return self._told(out, _found(func, args, kwargs, x, Tokens(size, 0, 0, -at)), x)

    def _anew(self, t: Tensor) -> bool:
        return t.is_floating_point() and self._plane_of(t) is None

    def _moved(self, func: Any, args: Any, kwargs: Any, note: Any, out: Any) -> Any:
        if not any(isinstance(t, Tensor) for t in pytree.tree_leaves(out)):
            return out
        if note in (LOOSE, ROWS):
            return self._noted(out, note)
        return self._told(out, _found(func, args, kwargs, args[0], note), args[0])

    def _told(self, out: Any, found: Any, x: Tensor) -> Any:
        parts = list(out) if isinstance(out, (tuple, list)) else [out]
        for k, (t, note) in enumerate(zip(parts, found or [LOOSE] * len(parts), strict=False)):
            if not isinstance(t, Tensor) or t is x or not t.is_floating_point():
                continue
            if note in (MAP, NHWC) and t._base is not None:  # what is written to it is the map's
                self.context.seen(t, note == NHWC)
            elif note in (MAP, NHWC):
                parts[k] = self.context.plane(t, note == NHWC)
            elif note != LOOSE or self._anew(t):
                self._noted(t, note)
        if not isinstance(out, (tuple, list)):
            return parts[0]
        return type(out)(parts) if type(out) in (tuple, list) else out

    def _joined(self, args: Any, kwargs: dict[str, Any], out: Tensor) -> Tensor:
        parts = list(args[0])
        dim = int(args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim()
        notes = [self.of(t) for t in parts]
        held = [(k, n) for k, n in enumerate(notes) if isinstance(n, Tokens)]
        if len(held) == 1 and LOOSE not in notes and held[0][1].at == dim:
            k, n = held[0]
            before, behind = (sum(t.shape[dim] for t in some) for some in (parts[:k], parts[k + 1 :]))
            return self._noted(out, n._replace(prefix=n.prefix + before, suffix=n.suffix + behind))
        if held and all(n == held[0][1] for n in notes) and dim not in (held[0][1].at, held[0][1].images):
            return self._noted(out, held[0][1])
        return self._noted(out, LOOSE)

    # ---- what is computed

    def active(self, tokens: Tokens) -> Tensor:
        """[N,tokens] bool."""
        seen = self.context.active(tokens.size).pixel_mask(tokens.size).flatten(1)
        return F.pad(seen, (tokens.prefix, tokens.suffix), value=True)

    def _computed(self, name: str, held: Tokens, out: Any) -> Any:
        """An op that looks at each token, or, of zeros, at all: where it gives tokens, inactive ones are 0."""
        if isinstance(out, (tuple, list)):
            return pytree.tree_map(functools.partial(self._computed, name, held), out)
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return out
        images = held.images
        if out.dim() < 2 or out.dim() <= max(held.at, images or 0) or out.shape[held.at] != held.rows:
            return self._noted(out, LOOSE) if out.dim() else out
        if images is not None and out.shape[images] != len(self.context.mask):
            return self._noted(out, LOOSE)
        if name not in KEEP_ZEROS:
            seen = self.active(held) if images is None or images < held.at else self.active(held).t()
            shape = [1] * out.dim()
            shape[held.at] = held.rows
            if images is not None:
                shape[images] = out.shape[images]
            out = torch.where(seen.reshape(shape), out, out.new_zeros(()))
        return self._noted(out, held)

    def _reduced(self, name: str, func: Any, args: Any, kwargs: dict[str, Any], tokens: Tokens) -> Any:
        x, rest = args[0], args[1:]
        dims = rest[0] if rest else kwargs.get("dim", kwargs.get("axis"))
        dims = [dims] if isinstance(dims, int) else list(dims or range(x.dim()))
        dims = sorted(int(d) % x.dim() for d in dims)
        keepdim = bool(rest[1] if len(rest) > 1 else kwargs.get("keepdim", kwargs.get("keepdims", False)))
        if tokens.at not in dims:
            out = func(*args, **kwargs)
            at, images = tokens.at, tokens.images
            if images in dims:
                return self._noted(out, LOOSE)
            if not keepdim:
                at = at - sum(d < at for d in dims)
                images = images if images is None else images - sum(d < images for d in dims)
            return self._noted(out, tokens._replace(at=at, images=images)) if isinstance(out, Tensor) else out
        if name not in MEANS or dims != [tokens.at] or tokens.images != 0:
            return func(*args, **kwargs)  # of zeros, as any layer
        count = self.active(tokens).sum(1).clamp(min=1)
        shape = [1] * x.dim()
        shape[0] = len(count)
        out = x.sum(tokens.at, keepdim=True, dtype=kwargs.get("dtype")) / count.view(shape)
        return out if keepdim else out.squeeze(tokens.at)

    def _attention(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        notes = [self.of(t) for t in args if isinstance(t, Tensor)][:3] if self.met else []
        if all(note in (None, ROWS) for note in notes):
            keys = args[1].shape[-2 if name == "scaled_dot_product_attention" else 0]
            if in_parts() and any(0 <= keys - h * w <= MOST_BESIDE and h * w > 1 for h, w in self.context.planes()):
                raise refused(f"attention of {keys} keys in a step that is compiled in parts", "one that runs eagerly")
            return func(*args, **kwargs)  # heads are no feature maps
        (q, k, _), tokens, kwargs = args[:3], notes[1] if len(notes) == 3 else None, dict(kwargs)
        if not isinstance(tokens, Tokens) or any(note != tokens for note in notes):
            raise refused("windows, or queries and keys of two planes", "attention among all tokens of a plane")
        keys = self.active(tokens)
        keys = keys | ~keys.any(1, keepdim=True)  # a softmax of nothing is NaN
        if func is F.multi_head_attention_forward:
            if (tokens.at, tokens.images) != (0, 1) or kwargs.get("is_causal"):
                raise refused("another order, or causal attention", "[tokens,N,channels], all of which are seen")
            hidden, given = ~keys, kwargs.get("key_padding_mask")
            if given is not None:
                hidden = hidden | given if given.dtype == torch.bool else given.masked_fill(hidden, -torch.inf)
            elif kwargs.get("attn_mask") is not None and kwargs["attn_mask"].dtype != torch.bool:
                hidden = torch.zeros(keys.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, -torch.inf)
            out, weights = func(*args, **{**kwargs, "key_padding_mask": hidden})
            return self._computed("attention", tokens, out), weights
        if (
            name != "scaled_dot_product_attention"
            or tokens.at != k.dim() - 2
            or tokens.images != 0
            or len(k) != len(keys)
        ):
            raise refused(f"{name} of another order", "[N,heads,tokens,channels]")
        mask = args[3] if len(args) > 3 else kwargs.pop("attn_mask", None)
        if kwargs.get("is_causal") or (len(args) > 5 and args[5]):
            raise refused("causal attention", "attention that sees all keys")
        seen = keys.view(len(keys), *[1] * (k.dim() - 2), keys.shape[1])
        if mask is not None:
            seen = seen & mask if mask.dtype == torch.bool else torch.where(seen, mask, -torch.inf)
        return self._computed("attention", tokens, func(q, k, args[2], seen, *args[4:], **kwargs))


@functools.lru_cache(maxsize=4096)
def _looked_up(func: Any, shape: tuple[int, ...], tokens: Tokens, given: str, held: Any) -> list[Any]:
    """Where tokens lie in what a move gives: of each tensor Tokens, MAP, NHWC, LOOSE or ROWS."""
    args, kwargs = held.value
    count, at = tokens.rows, tokens.at
    index = torch.arange(count, dtype=torch.int32, device="cpu")
    if at < 0:  # of a plane, whose rows are dimension -at
        view = [1] * len(shape)
        view[-at], view[-at + 1] = tokens.size
        x = index.view(view).expand(shape)
    else:
        x = index.view([count if d == at else 1 for d in range(len(shape))]).expand(shape)
    images = torch.arange(1 if tokens.images is None else shape[tokens.images], dtype=torch.int32, device="cpu")
    of = images.view([-1 if d == tokens.images else 1 for d in range(len(shape))]).expand(shape)
    try:
        out, owners = func(x, *args, **kwargs), func(of, *args, **kwargs)
    except (RuntimeError, TypeError):  # of numbers that are no integers alone
        return []
    pairs = zip(out, owners, strict=True) if isinstance(out, (tuple, list)) else [(out, owners)]
    return [_where(t, tokens, owner, images) for t, owner in pairs]


def _where(t: Any, tokens: Tokens, owner: Tensor, images: Tensor) -> Any:
    if not isinstance(t, Tensor) or t.dim() < 2:
        return LOOSE

    rest = [1] * (t.dim() - 1)
    at_images = [
        d for d in range(t.dim())
        if owner.shape[d] == len(images) and bool((owner.movedim(d, 0) == images.view(-1, *rest)).all())
    ]  # fmt: skip

    size, pixels = tokens.size, tokens.size[0] * tokens.size[1]
    for at in range(t.dim()):
        lines = t.movedim(at, 0).flatten(1)
        if not lines.numel():
            return LOOSE
        first = lines[:, 0]
        if not bool((lines == first[:, None]).all()):
            continue
        start, end = int(first[0]), int(first[0]) + len(first)
        if len(first) < 2 or not torch.equal(first, torch.arange(start, end, dtype=first.dtype, device="cpu")):
            continue
        if start <= tokens.prefix and end >= tokens.prefix + pixels:
            found = next((d for d in at_images if d != at), None)
            if found is None and len(images) > 1:
                return LOOSE
            return Tokens(size, tokens.prefix - start, end - tokens.prefix - pixels, at, found)
    if bool((t < tokens.prefix).all()) or bool((t >= tokens.prefix + pixels).all()):
        return ROWS
    plane = torch.arange(pixels, dtype=t.dtype, device="cpu").view(size) + tokens.prefix
    if 0 not in at_images:
        return LOOSE
    if t.dim() == 4 and t.shape[2:] == plane.shape and bool((t == plane).all()):
        return MAP
    if t.dim() == 4 and t.shape[1:3] == plane.shape and bool((t == plane[None, :, :, None]).all()):
        return NHWC
    return LOOSE


class _Held:
    """Arguments beside their text, by which they are told apart."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)


def _found(func: Any, args: Any, kwargs: dict[str, Any], x: Tensor, tokens: Tokens) -> list[Any]:
    rest = args[1:], kwargs
    if any(isinstance(t, Tensor) for t in pytree.tree_leaves(rest)):
        return []
    return _looked_up(func, tuple(x.shape), tokens, repr(rest), _Held(rest))
