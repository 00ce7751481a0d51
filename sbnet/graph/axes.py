"""Which dimensions of a tensor are the plane's rows and columns, followed through every op of a network.

A tensor's axes are one tuple of atoms a dimension: ("H",) in [N,C,H,W], ("H", "W") where the plane is flattened, and so
through views, permutes and matrix products. A tensor is spatial where the whole of H and W, of more than one pixel, can
be found in it once: then the contracts speak of it, whatever its memory or shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Name, length: "N", "C", "H", "W"; parts "H0" and "H1" of a split one; "T..." packed tokens (tokens.py); "?" any other.
Atom = tuple[str, int]
Dim = tuple[Atom, ...]


@dataclass(frozen=True)
class Axes:
    """The atoms of each dimension of a tensor."""

    dims: tuple[Dim, ...]

    @staticmethod
    def planes(shape: Sequence[int]) -> Axes:
        """Those of an image or feature map [N,C,H,W]."""
        return Axes(tuple(((name, int(length)),) for name, length in zip("NCHW", shape, strict=True)))

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) of the plane; None where the tensor is not spatial."""
        atoms = [atom for dim in self.dims for atom in dim]
        tokens = [(length, 1) for name, length in atoms if is_tokens(name)]
        if tokens:
            return tokens[0] if len(tokens) == 1 and not self.parts_batch else None
        rows = [length for name, length in atoms if name == "H"]
        columns = [length for name, length in atoms if name == "W"]
        if len(rows) != 1 or len(columns) != 1 or rows[0] * columns[0] <= 1 or self.parts_batch:
            return None
        return rows[0], columns[0]

    @property
    def parts_batch(self) -> bool:
        """A view has parted the batch, as frames from films."""
        return any(name[0] == "N" and name != "N" for dim in self.dims for name, _ in dim)

    @property
    def is_planes(self) -> bool:
        """[N,C,H,W] of more than one pixel."""
        names = [[name for name, _ in dim] for dim in self.dims]
        if len(names) == 4 and len(names[2]) == 1 and is_tokens(names[2][0]):
            return names[0] == ["N"] and self.dims[3] == (("?", 1),)
        return len(names) == 4 and [names[0], *names[2:]] == [["N"], ["H"], ["W"]] and self.size is not None

    def arrange(self, mask: Tensor) -> Tensor:
        """A mask of pixels [N,1,H,W] as it lies in this tensor, to be broadcast."""
        atoms = [atom for dim in self.dims for atom in dim]
        found = [name for name, _ in atoms]
        own = {"N": mask.shape[0], "H": mask.shape[2], "W": mask.shape[3]}
        pixels = mask[:, 0]
        if "N" not in found:  # a batch of one, squeezed away
            pixels = pixels[:1]
        order = [name for name in found if name in own]
        pixels = pixels.permute([["N", "H", "W"].index(n) for n in order]) if "N" in order else pixels[0].permute(
            [["H", "W"].index(n) for n in order]
        )  # fmt: skip
        lengths = [length if name in own else 1 for name, length in atoms]
        pixels = pixels.reshape(lengths)
        wanted = [length for _, length in atoms]
        at, shape = 0, []
        for dim in self.dims:
            if any(name in own for name, _ in dim):
                for k in range(at, at + len(dim)):
                    lengths[k] = wanted[k]
                shape.append(_product(length for _, length in dim))
            else:
                shape.append(1)
            at += len(dim)
        return pixels.expand(lengths).reshape(shape)


def planes_of(axes: Axes) -> tuple[int, ...] | None:
    """The shape of the maps [N,C,H,W] of which a tensor with these axes is a reshape [N,G,...], G groups of channels
    being all or some of their dimension. None of any other tensor."""
    atoms = _join([atom for dim in axes.dims for atom in dim if atom[1] > 1])
    lengths = dict(atoms)
    shape = tuple(lengths.get(name, 1) for name in "NCHW")
    images = _product(length for _, length in axes.dims[0])
    groups = axes.dims[1] if len(axes.dims) > 2 else (("?", 0),)
    whole = [name for name, _ in atoms] == [name for name in "NCHW" if name in lengths] and images == shape[0]
    return shape if whole and all(name[0] in "C?" and length for name, length in groups) else None


def is_tokens(name: str) -> bool:
    """Is it the name of all tokens of an image, packed?"""
    return name[0] == "T" and name[-1] == ":"


def role(name: str) -> str:
    """What a dimension of a feature map, in any arrangement, is for ops that look at one pixel: N, H, W, or T of packed
    tokens; else C."""
    return name if name in ("N", "H", "W") else "T" if name[0] == "T" else "C"


def _product(lengths: Any) -> int:
    total = 1
    for length in lengths:
        total *= length
    return total


def _named(dim: Dim, length: int) -> Dim:
    """A dimension that may have changed its length."""
    if _product(n for _, n in dim) == length:
        return dim
    return ((dim[0][0], length),) if len(dim) == 1 and dim[0][0] in ("N", "C", "H", "W") else (("?", length),)


def _unknown(length: int) -> Dim:
    return (("?", length),)


# ---- views


def _split(atom: Atom, first: int) -> tuple[Atom, Atom]:
    name, length = atom
    return (name + "0" if name != "?" else name, first), (name + "1" if name != "?" else name, length // first)


def _join(atoms: list[Atom]) -> Dim:
    """Neighbouring parts of one atom are that atom."""
    done: list[Atom] = []
    for atom in atoms:
        done.append(atom)
        while len(done) > 1 and done[-2][0][-1:] == "0" and done[-1][0] == done[-2][0][:-1] + "1":
            last, before = done.pop(), done.pop()
            done.append((before[0][:-1], before[1] * last[1]))
    return tuple(done)


def _viewed(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """Axes after a view of another shape: atoms are dealt out in order, split where a dimension ends inside one."""
    atoms = [atom for dim in axes.dims for atom in dim if atom[1] != 1]
    dims: list[Dim] = []
    for length in shape:
        left, mine = int(length), []
        while left > 1:
            if not atoms:
                return None
            name, size = atoms.pop(0)
            if left % size == 0:
                mine.append((name, size))
                left //= size
            elif size % left == 0:
                front, back = _split((name, size), left)
                mine.append(front)
                atoms.insert(0, back)
                left = 1
            else:
                return None
        dims.append(_join(mine) or ((_only(axes, len(dims), len(shape)), 1),))
    return None if atoms else Axes(tuple(dims))


def _only(axes: Axes, at: int, count: int) -> str:
    """The name of a dimension of length 1: kept where a view keeps the number of dimensions."""
    same = len(axes.dims) == count and len(axes.dims[at]) == 1 and axes.dims[at][0][1] == 1
    if same:
        return axes.dims[at][0][0]
    names = {name for dim in axes.dims for name, length in dim if length == 1}
    return "N" if at == 0 and "N" in names else "?"


def _permuted(axes: Axes, order: Sequence[int]) -> Axes:
    return Axes(tuple(axes.dims[k] for k in order))


# ---- ops

WINDOWED = {
    "conv2d", "convolution", "conv_transpose2d", "max_pool2d", "max_pool2d_with_indices", "avg_pool2d", "lp_pool2d",
    "adaptive_avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d", "upsample_nearest2d", "upsample_bilinear2d",
    "upsample_bicubic2d", "_upsample_nearest_exact2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
    "pixel_shuffle", "pixel_unshuffle", "reflection_pad2d", "replication_pad2d",
    "repeat_plane", "as_planes", "_convolution", "mkldnn_convolution", "max_pool2d_with_indices_backward",
    "max_unpool2d", "col2im",
}  # fmt: skip
VIEWS = {"view", "reshape", "flatten", "unflatten", "_unsafe_view", "reshape_as", "view_as", "_reshape_alias"}
REDUCTIONS = {
    "mean", "sum", "amax", "amin", "max", "min", "var", "std", "var_mean", "logsumexp", "linalg_vector_norm", "norm",
    "argmax", "argmin", "any", "all", "prod", "median",
}  # fmt: skip
PRODUCTS = {"matmul", "bmm", "linear", "addmm", "mm", "baddbmm", "einsum", "_addmm_activation"}
# Compute nothing: a plane that they give has been masked, or is the network's input, unless something was computed
# where it could not be seen as one (`Node.moves`).
REARRANGING = VIEWS | {
    "permute", "transpose", "t", "movedim", "unsqueeze", "squeeze", "expand", "expand_as", "slice", "select", "narrow",
    "chunk", "split", "split_with_sizes", "unbind", "contiguous", "clone", "to", "_to_copy", "detach", "alias",
    "dropout", "dropout_", "feature_dropout", "lift_fresh", "lift_fresh_copy", "tensor_split", "T", "mT", "_conj",
    "unsafe_chunk", "unsafe_split", "positive", "type_as", "as_strided", "swapaxes", "swapdims", "moveaxis", "numpy_T",
    "mH", "adjoint", "matrix_H", "ravel", "broadcast_to", "hsplit", "vsplit", "dsplit", "atleast_1d", "atleast_2d",
    "atleast_3d", "broadcast_tensors", "lift", "real", "resolve_conj", "resolve_neg",
}  # fmt: skip
# Of those, what puts dimensions into another order.
PERMUTING = {"permute", "transpose", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "T", "mT", "mH", "adjoint",
             "matrix_H", "numpy_T"}  # fmt: skip


def moves(target: Any, args: Sequence[Any], dtype: torch.dtype) -> bool:
    """Does an op compute nothing, so that its result, of this dtype, is not masked anew? A cast of integers or booleans
    to floats gives the first feature map in floats: the contract speaks of it."""
    if op_name(target) not in REARRANGING:
        return False
    source = getattr(args[0], "dtype", dtype) if args else dtype
    return source.is_floating_point or not dtype.is_floating_point


def reads_unseen_planes(target: Any, args: Sequence[Any], axes_of: Callable[[Any], Axes | None], batch: int) -> bool:
    """Does a layer read images' planes in what could not be followed? Then these are what has to be masked."""
    shape = tuple(getattr(args[0], "shape", ())) if args else ()
    if op_name(target) not in WINDOWED or len(shape) != 4 or shape[0] != batch or shape[2] * shape[3] == 1:
        return False
    axes = axes_of(args[0])
    if axes is not None and all(len(dim) > 1 or dim[0][0] != "?" or dim[0][1] == 1 for dim in axes.dims[2:]):
        return False
    return bool(args[0].dtype.is_floating_point)


def op_name(target: Any) -> str:
    """The name of an op without overload and the underscore of one that works in place."""
    name = getattr(target, "_schema", None)
    text = name.name.split("::")[1] if name is not None else getattr(target, "__name__", str(target))
    return text[:-1] if text.endswith("_") and not text.endswith("__") else text


def infer(
    target: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    out: Any,
    axes_of: Callable[[Any], Axes | None],
    batch: int,
) -> Axes | None:
    """Axes of one tensor that an op returned.

    Args:
        target: the op.
        args, kwargs: its arguments; tensors, or what stands for them.
        out: what it returned: something with a shape.
        axes_of: axes of a tensor argument, None for anything else.
        batch: images, and masks, of a call. A tensor of more images (heads or views that lie in the batch) or of fewer
            is no feature map; where there is one mask alone, it still speaks of such a tensor.
    """
    found = _infer(target, args, kwargs, [int(v) for v in out.shape], axes_of, batch)
    if found is None:
        return None
    images = [n for dim in found.dims for name, n in dim if name == "N"]
    if batch > 1:
        return found if images == [batch] or found.parts_batch else None
    if all(n == 1 for n in images):
        return found
    return Axes(tuple(tuple(("?", n) if name == "N" else (name, n) for name, n in dim) for dim in found.dims))


def _infer(
    target: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    shape: list[int],
    axes_of: Callable[[Any], Axes | None],
    batch: int,
) -> Axes | None:
    name = op_name(target)
    x = axes_of(args[0]) if args else None
    if name in WINDOWED and len(shape) == 4:
        same = x is None or batch == 1 or x.dims[0] == (("N", batch),)
        return Axes.planes(shape) if shape[0] == batch and same else None
    if name in ("grid_sampler", "grid_sampler_2d"):  # pixels are where the grid's are
        grid = axes_of(args[1])
        if x is None or grid is None or len(shape) != 4:
            return None
        return Axes((*x.dims[:2], *grid.dims[1:3]))
    if name == "roll":  # of planes, the contract says; in windows pixels are no longer where they were
        return x if x is not None and x.is_planes else None
    if name == "native_batch_norm" or name == "native_layer_norm":
        return x if x is not None and len(x.dims) == len(shape) else None
    if x is not None:
        moved = _moved(target, name, x, args, kwargs, shape)
        if moved is not NotImplemented:
            return moved
    if name == "stack":
        first = next((a for a in map(axes_of, args[0]) if a is not None), None)
        if first is None:
            return None
        at = int(args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(shape)
        return Axes((*first.dims[:at], _unknown(shape[at]), *first.dims[at:]))
    if name == "einsum":
        return _einsum_axes(args[0], [axes_of(v) for v in args[1]], shape)
    if name in ("one_hot", "embedding"):  # pixels' numbers become vectors
        pixels = axes_of(args[1 if name == "embedding" else 0])
        return None if pixels is None else Axes((*pixels.dims, _unknown(shape[-1])))
    if name in PRODUCTS:
        return _product_axes(name, args, shape, axes_of)
    if name == "scaled_dot_product_attention" and x is not None:
        return Axes((*x.dims[:-1], _unknown(shape[-1])))
    return _elementwise(args, kwargs, shape, axes_of)


def _moved(target: Any, name: str, x: Axes, args: Sequence[Any], kwargs: dict[str, Any], shape: list[int]) -> Any:
    rank = len(x.dims)
    if name in VIEWS:
        return _viewed(x, shape)
    if name in PERMUTING:
        moved = target(torch.empty(tuple(range(2, rank + 2)), device="meta"), *args[1:], **kwargs)
        return _permuted(x, [int(n) - 2 for n in moved.shape])
    if name in ("unsqueeze", "squeeze", "ravel"):
        return _viewed(x, shape)
    if name == "as_strided":
        return None
    if name in REDUCTIONS:
        return _reduced(x, args, kwargs, shape)
    if name in ("select", "unbind"):
        at = int(args[1] if len(args) > 1 else kwargs.get("dim", 0)) % rank
        return Axes(tuple(dim for k, dim in enumerate(x.dims) if k != at))
    return NotImplemented


def _reduced(x: Axes, args: Sequence[Any], kwargs: dict[str, Any], shape: list[int]) -> Axes | None:
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if isinstance(args[1] if len(args) > 1 else None, (float, str)):  # linalg_vector_norm(x, ord, dim)
        dims = args[2] if len(args) > 2 else kwargs.get("dim")
    elif len(args) > 2 and isinstance(args[2], (list, tuple)):
        dims = args[2]
    if dims is None:
        return None
    rank = len(x.dims)
    gone = {int(k) % rank for k in (dims if isinstance(dims, (list, tuple)) else [dims])}
    if len(shape) == rank:
        return Axes(tuple(_unknown(1) if k in gone else dim for k, dim in enumerate(x.dims)))
    return Axes(tuple(dim for k, dim in enumerate(x.dims) if k not in gone))


def _product_axes(name: str, args: Sequence[Any], shape: list[int], axes_of: Callable[[Any], Axes | None]) -> Any:
    at = 1 if name in ("addmm", "baddbmm", "_addmm_activation") else 0
    left = axes_of(args[at])
    right = axes_of(args[at + 1]) if name != "linear" and len(args) > at + 1 else None
    if left is None and right is not None and name != "mm" and len(right.dims) == len(shape) > 2:
        return Axes((*right.dims[:-2], _unknown(shape[-2]), _named(right.dims[-1], shape[-1])))  # learned queries
    if left is None or len(left.dims) != len(shape):
        return None
    last = right.dims[-1] if right is not None and len(right.dims) > 1 else _unknown(shape[-1])
    return Axes((*(_named(dim, n) for dim, n in zip(left.dims[:-1], shape[:-1], strict=True)), _named(last, shape[-1])))


def _einsum_axes(equation: str, operands: Sequence[Axes | None], shape: list[int]) -> Axes | None:
    """Each letter is a dimension of the first spatial operand that has it, else of another one."""
    given, _, made = equation.replace(" ", "").partition("->")
    if "." in given or not made:
        return None
    dims: dict[str, Dim] = {}
    pairs = [(a, letters) for a, letters in zip(operands, given.split(","), strict=True) if a is not None]
    for axes, letters in sorted(pairs, key=lambda pair: pair[0].size is None):
        dims = {**dict(zip(letters, axes.dims, strict=True)), **dims}
    return Axes(tuple(_named(dims.get(k, _unknown(n)), n) for k, n in zip(made, shape, strict=True)))


def _elementwise(
    args: Sequence[Any], kwargs: dict[str, Any], shape: list[int], axes_of: Callable[[Any], Axes | None]
) -> Axes | None:
    """Of what an op without a rule returns: each dimension is that of the first spatial operand of as many, or of
    another one where that is spread."""
    flat: list[Any] = []
    for value in (*args, *kwargs.values()):
        flat += value if isinstance(value, (list, tuple)) else [value]
    known = [axes for axes in map(axes_of, flat) if axes is not None and len(axes.dims) == len(shape)]
    if not known:
        return None
    best = next((axes for axes in known if axes.size is not None), known[0])
    named = [_named(dim, n) for dim, n in zip(best.dims, shape, strict=True)]
    for axes in known:
        named = [own if found == _unknown(n) and _product(length for _, length in own) == n else found
                 for own, found, n in zip(axes.dims, named, shape, strict=True)]  # fmt: skip
    return Axes(tuple(named))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors among what an op returned."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in value if isinstance(v, torch.Tensor)] if isinstance(value, (tuple, list)) else []
