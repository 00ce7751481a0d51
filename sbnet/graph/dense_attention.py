"""Attention that no rule takes, beside those that are: it runs dense, but its keys are active pixels, and what it gives
of a plane is a feature map again."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from sbnet.graph.axes import REDUCTIONS, Axes, Dim, op_name, role
from sbnet.graph.builder import PLANNED_DTYPES, Builder, Call, feature_map
from sbnet.graph.ir import Node, Value
from sbnet.graph.pixelwise import PIXELWISE
from sbnet.graph.token_views import root_of, tokens_at
from sbnet.graph.tracing import plane_root, traced
from sbnet.graph.window_attention import active_pixels, table_of

ATEN = torch.ops.aten
MOST_STEPS = 32  # ops between products and a softmax
PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}
# What makes weights of scores, or chooses among them.
KEYED = {"softmax", "log_softmax", "exp", "logsumexp", "amax", "max", "argmax", "topk", "sort", "argsort"}


def with_active_keys(b: Builder, call: Call) -> Call:
    """Of a softmax of scores, or of attention in one op, whose keys are all pixels of a plane: a call that sees those
    that are active."""
    if call.name in KEYED and isinstance(call.args[0], Value):
        scores, rank = call.args[0], len(call.args[0].shape)
        at = call.argument("dim", -1)  # exp has none: keys are columns
        at = at[0] if isinstance(at, (tuple, list)) and len(at) == 1 else at
        if rank not in (3, 4, 5) or at not in (-1, rank - 1, -2, rank - 2):
            return call
        product = _product_under(scores)
        if product is not None and at in (-1, rank - 1) and product.output.shape == scores.shape and rank >= 4:
            windows = _active_keys(b, call, product.args[1], rank - 1)
            if windows is not None:
                hidden = _added(b, call, hide_in_windows, [scores, windows], scores)
                return dataclasses.replace(call, args=(hidden, *call.args[1:]))
        if rank == 5:
            return call
        among_pixels = product is None
        if among_pixels and (call.name not in SPREAD or call.argument("dtype") or not _is_plane(scores, at % rank)):
            return call
        keys = _keys(b, call, scores, at % rank)
        if keys is None:
            return call
        if among_pixels:  # a plane, which would be 0 where it is hidden if it were hidden by itself
            return dataclasses.replace(call, target=SPREAD[call.name], args=(scores, keys, at % rank - rank), kwargs={})
        hidden = _added(b, call, hide, [scores, keys, at % rank - rank], scores)
        return dataclasses.replace(call, args=(hidden, *call.args[1:]))
    if call.name != "scaled_dot_product_attention" or call.argument("is_causal"):
        return call
    rank = len(call.args[1].shape)
    keys = _keys(b, call, call.args[1], rank - 2) if rank < 5 else None
    in_windows = keys is None
    if in_windows:
        keys = _active_keys(b, call, call.args[1], rank - 2)
    if keys is None:
        return call
    rest = {name: call.argument(name) for name in ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")}
    images, joined, mask = keys.shape[0], call.args[1].shape[0], rest["attn_mask"]
    shape = tuple(keys.shape)
    if not in_windows:
        shape = (joined, 1, keys.shape[-1]) if rank == 3 else (images, 1, 1, keys.shape[-1])
    given = [keys, mask, call.args[0].dtype, joined // images if rank == 3 and not in_windows else 0]
    if mask is not None:
        shape = tuple(torch.broadcast_shapes(shape, mask.shape))
    rest["attn_mask"] = _added(b, call, shown, given, dataclasses.replace(keys, shape=shape))
    return dataclasses.replace(call, args=tuple(call.args[:3]), kwargs=rest)


def hide(scores: Tensor, active: Tensor, at: int) -> Tensor:
    """Scores [N,...,keys], or of keys at another dimension, -1 or -2: -inf of those that are not active [N,keys]; of an
    image without any they stay, as its results are not active either. Each image may be several rows, its heads."""
    active = active | ~active.any(1, keepdim=True)
    shape = [len(active), *[1] * scores.dim()]
    shape[at] = active.shape[1]
    parted = scores.unflatten(0, (len(active), -1))
    return parted.masked_fill(~active.view(shape), -torch.inf).flatten(0, 1)


def hide_in_windows(scores: Tensor, active: Tensor) -> Tensor:
    """The same of scores [...,queries,keys] of windows: active [...,1,keys]."""
    return scores.masked_fill(~(active | ~active.any(-1, keepdim=True)), -torch.inf)


def softmax(x: Tensor, active: Tensor, at: int) -> Tensor:
    return hide(x, active, at).softmax(at)


def log_softmax(x: Tensor, active: Tensor, at: int) -> Tensor:
    return hide(x, active, at).log_softmax(at)


SPREAD = {"softmax": softmax, "log_softmax": log_softmax}  # over all pixels of a plane


def shown(active: Tensor, mask: Tensor | None, dtype: torch.dtype, joined: int) -> Tensor:
    """The mask of attention [N,1 or heads,1 or queries,keys] beside another one, as `hide` does it; of windows `active`
    is [N,...,1,keys]. joined: heads that lie beside their image, [N*heads,1 or queries,keys]; or 0."""
    active = active | ~active.any(-1, keepdim=True)
    if joined:
        active = active.repeat_interleave(joined, 0)[:, None]
    active = active[:, None, None] if active.dim() == 2 else active
    if mask is None:
        return active
    return active & mask if mask.dtype == torch.bool else torch.where(active, mask, -torch.inf).to(dtype)


def _added(b: Builder, call: Call, target: Any, args: list[Any], like: Value) -> Value:
    node = Node("aten", args, [], target=target, path=call.path, line=call.line, reason="keys that are active")
    made = Value(f"{call.label}_{len(b.nodes)}", like.shape, like.dtype, like.axes, producer=node)
    node.outputs.append(made)
    b.nodes.append(node)
    return made


def _keys(b: Builder, call: Call, value: Value, at: int) -> Value | None:
    """[N,keys] bool: the active pixels of the plane that a dimension of a tensor [N,...] is, or the active tokens."""
    if value.constant or value.axes is None:
        return None
    atoms, first = value.axes.dims[at], value.axes.dims[0]
    joined = first[0] == ("N", b.batch or 1) and all(role(name) == "C" for name, _ in first[1:])  # images and heads
    if not joined and (len(first) > 1 or first[0][0] not in "N?" or value.shape[0] != (b.batch or 1)):
        return None
    if tokens_at(value) == at:
        root = root_of(value)
    elif [name for name, _ in atoms] == ["H", "W"]:
        root = _map_of(value, (atoms[0][1], atoms[1][1]))
    else:
        return None
    if root is None:
        return None
    return active_pixels(b, call, root, {})[0]


def _active_keys(b: Builder, call: Call, value: Value, at: int) -> Value | None:
    """Which keys of windows are active; of queries and keys of a plane as a whole `_keys` knows."""
    if value.constant:
        return None
    found = _keys_shown(b, call, value, at)
    return _keys_of_windows(b, call, value, at) if found is None else found


def _keys_shown(b: Builder, call: Call, value: Value, at: int) -> Value | None:
    """[...,1,keys] bool of what shows pixels of a plane, as windows that were gathered from it: which keys are active.
    What is no pixel, as padding of windows, is."""
    found, rank = traced(value), len(value.shape)
    if found is None or found.root.tokens is not None or found.root.given or found.undefined:
        return None
    pixels = found.pixels.movedim(at, rank - 1)
    keys = pixels[..., :1, :]
    if not torch.equal(pixels, keys.expand_as(pixels)):
        return None
    for dim in range(rank - 2):  # of heads
        if torch.equal(keys, keys.narrow(dim, 0, 1).expand_as(keys)):
            keys = keys.narrow(dim, 0, 1)
    mask = active_pixels(b, call, found.root, {})[0]
    index = table_of(f"{call.label}_{len(b.nodes)}_keys", mask, keys.long())
    return _added(b, call, shown_keys, [mask, index], dataclasses.replace(index, axes=None))


def shown_keys(active: Tensor, index: Tensor) -> Tensor:
    """Of index [...,1,keys], pixels of all images from 1 on, or 0: is it active [N,pixels], or no pixel?"""
    return (index == 0) | active.flatten()[index.sub(1).clamp_(min=0)]


def _keys_of_windows(b: Builder, call: Call, value: Value, at: int) -> Value | None:
    """[...,1,keys] bool: which keys of the windows that a plane was parted into are active. The value is
    [...,keys,width], or [...,width,keys]; `at` is the dimension of keys."""
    axes, rank, n = value.axes, len(value.shape), b.batch or 1
    if value.constant or axes is None or rank < 3 or axes.dims[0][0] != ("N", n):
        return None
    inside = [[name[0] in "NHW" for name, _ in dim] for dim in axes.dims]
    kept = [all(found) for found in inside]
    atoms = [atom for dim in axes.dims for atom in dim if atom[0][0] in "NHW"][1:]
    parts = sorted(atoms)
    if len(set(parts)) < len(parts) or not kept[at] or kept[2 * rank - 3 - at] or at == 0:
        return None
    if any(any(found) and not all(found) for found in inside) or any(name[0] == "N" for name, _ in atoms):
        return None
    size = tuple(math.prod(length for name, length in parts if name[0] == side) for side in "HW")
    root = _map_of(value, size)  # type: ignore[arg-type]
    if root is None:
        return None
    mask = active_pixels(b, call, root, {})[0]
    lengths = [n, *(length for _, length in parts)]
    made = b.move(mask, ATEN.reshape.default, lengths, lengths, call)
    order = [0, *(1 + parts.index(atom) for atom in atoms)]
    made = b.move(made, ATEN.permute.default, order, [lengths[k] for k in order], call)
    shape = [*(value.shape[k] if kept[k] else 1 for k in range(rank - 2)), 1, value.shape[at]]
    return b.move(made, ATEN.reshape.default, shape, shape, call)


def _is_plane(value: Value, at: int) -> bool:
    """Is a dimension all pixels of a plane, and nothing else?"""
    if tokens_at(value) == at and (root := root_of(value)) is not None and root.tokens is not None:
        return not root.tokens.prefix and not root.tokens.suffix
    return value.axes is not None and [name for name, _ in value.axes.dims[at]] == ["H", "W"]


def _product_under(value: Value) -> Node | None:
    """The product of two tensors that the network computes of which a value is made, as scores are of queries and
    keys."""
    seen, todo = set[int](), [value]
    while todo:
        one = todo.pop()
        if id(one) in seen or one.producer is None or one.producer.kind != "aten" or len(seen) > MOST_STEPS:
            continue
        seen.add(id(one))
        given = [v for v in one.producer.inputs() if not v.constant]
        if op_name(one.producer.target) in ("matmul", "bmm") and len(given) == 2:
            return one.producer
        todo += given
    return None


def _map_of(value: Value, plane: tuple[int, int]) -> Value | None:
    """A feature map of that plane from which a value is made."""
    seen, todo = set[int](), [value]
    while todo:
        one = todo.pop()
        if id(one) in seen or one.constant:
            continue
        seen.add(id(one))
        root = feature_map(one)
        if root is not None and root.plane == plane and root.tokens is None and not root.given:
            return root
        if one.producer is not None:
            todo += one.producer.inputs()
    return None


def entered(b: Builder, call: Call, value: Value) -> Value:
    """What an op gave dense, where it is all pixels of a plane with their channels, [N,H*W,C] or [N,H,W,C]: an
    arrangement of a feature map."""
    axes = value.axes
    if call.name in PIXELWISE or call.name in REDUCTIONS:  # steps of norms that are written out, for which rules look
        return value
    if value.constant or axes is None or value.dtype not in PLANNED_DTYPES or feature_map(value) is not None:
        return value
    thinned = call.name == "slice" and (call.argument("step") or 1) > 1  # every second pixel is a plane, a part is none
    if root_of(value) is not None or (plane_root(value) is not None and not thinned):
        return value  # an arrangement, as of windows that are padded
    pixels = axes.dims[1:-1]
    names = [name for dim in pixels for name, _ in dim]
    channels = axes.dims[-1]
    first = [name for name, _ in axes.dims[0]]
    whole = first == ["N"] and value.shape[0] == b.batch and names == ["H", "W"]
    if not whole or not channels or any(role(name) != "C" for name, _ in channels):
        return value
    n, c = value.shape[0], value.shape[-1]
    h, w = [length for dim in pixels for _, length in dim]
    if h * w <= 1:
        return value
    flat = value if len(pixels) == 1 else b.move(value, ATEN.reshape.default, [n, h * w, c], [n, h * w, c], call)
    turned = b.move(flat, ATEN.permute.default, [0, 2, 1], [n, c, h * w], call)
    plane = b.move(turned, ATEN.reshape.default, [n, c, h, w], [n, c, h, w], call)
    plane.axes = Axes.planes(plane.shape)
    atoms: dict[str, tuple[str, int]] = {"N": ("N", n), "C": ("C", c), "H": ("H", h), "W": ("W", w)}
    dims: list[Dim] = [(atoms["N"],), *(tuple(atoms[name] for name, _ in dim) for dim in pixels), (atoms["C"],)]
    return b.arranged(plane, Axes(tuple(dims)), call)


def as_bmm(b: Builder, call: Call) -> Any:
    """Of baddbmm(x, q, k, beta, alpha), alpha q k + beta x."""
    x, q, k = call.args[:3]
    beta, alpha = call.argument("beta"), call.argument("alpha")

    def read(name: str, target: Any, *args: Any) -> Any:
        return b.read(target, args, {}, call.made, f"{call.label}_{name}", call.path, call.line)

    found = read("product", ATEN.bmm.default, q, k)
    found = found if alpha == 1 else read("scaled", ATEN.mul.Scalar, found, alpha)
    if beta == 0:
        return found
    return read("sum", ATEN.add.Tensor, found, x if beta == 1 else read("added", ATEN.mul.Scalar, x, beta))


def as_matmul(b: Builder, call: Call) -> Any:
    """Of einsum("bhlk,bhtk->bhlt") and the like, what torch.matmul gives of the same."""
    equation: str = call.args[0]
    operands: Any = call.args[1] if len(call.args) > 1 else ()
    if len(operands) != 2 or "." in equation or not all(isinstance(v, Value) for v in operands):
        return None
    given, _, out = equation.replace(" ", "").partition("->")
    left, _, right = given.partition(",")
    batch, rows, columns = out[:-2], out[-2:-1], out[-1:]
    pairs = list(zip((left, right), operands, strict=True))
    if rows in right and columns in left:
        pairs.reverse()
    (left, x), (right, y) = pairs
    summed = "".join(letter for letter in left if letter not in out)
    if rows == columns or len(set(out)) != len(out) or len(summed) != 1:
        return None

    def turned(letters: str, value: Value, wanted: str) -> Value | None:
        """Its last two dimensions in the order of `wanted`."""
        if letters == batch + wanted:
            return value
        if letters != batch + wanted[::-1]:
            return None
        made = torch.empty((*value.shape[:-2], value.shape[-1], value.shape[-2]), dtype=value.dtype, device="meta")
        return b.read(ATEN.transpose.int, (value, -2, -1), {}, made, f"{call.label}_turned", call.path, call.line)

    x, y = turned(left, x, rows + summed), turned(right, y, summed + columns)
    if x is None or y is None:
        return None
    return b.read(ATEN.matmul.default, (x, y), {}, call.made, call.label, call.path, call.line)


WRITTEN = {"baddbmm": as_bmm, "einsum": as_matmul}  # in other words than a product


HIDES = (hide, hide_in_windows, shown, shown_keys)  # they only say which keys are active
