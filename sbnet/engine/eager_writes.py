"""What an op inside `sbnet.masked` is to its arguments: a move of numbers, a write, a write through a view of a map."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sbnet.engine.modes import open_of
from sbnet.ops import sparse_fill
from sbnet.ops.common import constant_in_traces

if TYPE_CHECKING:
    from sbnet.engine.eager import masked

# They give their argument another shape or other memory.
REMADE = {
    "resize_", "resize_as_", "set_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_",
    "an assignment to .data", "an assignment to .real",
}  # fmt: skip
COPY = "_sbnet_copy"  # a note: PyTorch would have given a view of the map
# Compute nothing: what they give has been masked, or is the network's input.
MOVES = {
    "chunk", "split", "contiguous", "clone", "detach", "view", "reshape", "flatten", "permute", "transpose", "expand",
    "unbind", "narrow", "__getitem__", "unsqueeze", "squeeze", "to", "cpu", "cuda", "requires_grad_", "dropout",
    "float", "half", "double", "type", "movedim", "unflatten", "view_as", "reshape_as", "expand_as", "__get__",
    "__set__", "backward", "register_hook", "retain_grad", "size", "stride", "bfloat16", "swapaxes", "select",
    "detach_", "dim", "numel", "is_floating_point", "is_contiguous", "element_size", "ndimension", "data_ptr",
    "slice", "alias", "_to_copy", "_unsafe_view", "_reshape_alias",
}  # fmt: skip
OVERLOADS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)  # of torch.ops
AUGMENTED = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__setitem__"}


def with_views(mode: masked, func: Any, args: Any, kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
    """run(), an op that may write a map through a view of another shape, which is known under its own name: layers that
    read the map before do so first, and it is 0 outside of the active blocks again afterwards.

    Raises:
        ValueError: what is written should be a view, and is a copy; an op gives a map another shape or other memory.
    """
    maps = open_of(mode)
    name = named(func)[0]
    if name == "__set__":
        name = f"an assignment to .{getattr(getattr(func, '__self__', None), '__name__', '')}"
    if name in REMADE and args and isinstance(args[0], Tensor) and mode.carries(args[0]):
        raise moved_memory(name)
    through = [] if maps is None else _maps_through(mode, *_written(func, args, kwargs))
    if maps is None or not through:
        return run()
    maps.settle_others()
    for x in through:
        maps.close(x)
    out = run()
    for x in through:
        x.copy_(sparse_fill(x, mode.active(x.shape[2:])))
        mode.kept(x)
    return out


def moved_memory(got: str) -> ValueError:
    return ValueError(f"sbnet: masked: expected a map to keep its shape and memory, got {got}")


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that an op writes as its first argument, and others: of lists, as torch._foreach has, by out=, by its
    schema."""
    given = [args[0]] if args and kind(func, args, kwargs)[1] else []
    beside = [kwargs["out"]] if kwargs.get("out") is not None else []
    if isinstance(func, OVERLOADS):
        beside += [t for at, t in enumerate(args) if at and at in _mutated(func)]
        beside += [t for name, t in kwargs.items() if name != "out" and name in _mutated(func)]
    lists = [t for some in (*given, *beside) for t in (some if isinstance(some, (tuple, list)) else [])]
    lists += [t for t in beside if isinstance(t, Tensor)]
    return [t for t in given if isinstance(t, Tensor)], [t for t in lists if isinstance(t, Tensor)]


def _maps_through(mode: masked, single: list[Tensor], listed: list[Tensor]) -> list[Tensor]:
    found: list[Tensor] = []
    for t in (*single, *listed):
        alone = any(t is one for one in single)
        if t.layout != torch.strided or not t.is_floating_point() or not t.numel():
            continue
        memory = t.untyped_storage()
        if alone and mode.is_map(t) and t.numel() * t.element_size() == memory.nbytes():
            continue  # a map itself
        for x in mode.known():
            if x.layout != torch.strided or x.untyped_storage().data_ptr() != memory.data_ptr():
                continue
            if COPY in x.__dict__:
                raise ValueError(
                    f"sbnet: masked: expected a map to be written in its own shape, got a write to a view of "
                    f"{tuple(x.shape)}: maps are channels_last here, of which such a view is a copy"
                )
            alike = alone and mode.is_map(t) and t.shape[2:] == x.shape[2:]
            if mode.keeps(x) and not alike and all(x is not other for other in found):
                found.append(x)
    return found


def kind(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[str | None, str | None]:
    """(name of a move, name of an op that writes its first argument), or None each."""
    name, at = named(func)
    given = args[at] if at is not None and at < len(args) else kwargs.get("inplace", False)
    if name in MOVES:  # dropout may be one in place
        return name, name if given else None
    writes = bool(given) or name in AUGMENTED or (name[-1:] == "_" and name[-2:] != "__")
    return None, name if writes else None


@constant_in_traces
def named(func: Any) -> tuple[str, int | None]:
    return _looked_up(func)


@functools.cache
def _looked_up(func: Any) -> tuple[str, int | None]:
    """The name of a function (`relu_` of torch.ops.aten.relu_.default, too), and where it takes `inplace`, if
    torch.nn.functional has it."""
    if isinstance(func, OVERLOADS):
        return getattr(func, "overloadpacket", func).__name__, None
    try:
        names = list(inspect.signature(func).parameters) if inspect.isfunction(func) else []
    except ValueError:  # a wrapper of a built-in function, as T.__pow__ is
        names = []
    return getattr(func, "__name__", ""), names.index("inplace") if "inplace" in names else None


@functools.cache
def _mutated(func: Any) -> set[int | str]:
    """Places and names of the arguments that an op of torch.ops says it writes."""
    ops = [func] if isinstance(func, torch._ops.OpOverload) else [getattr(func, name) for name in func.overloads()]
    at = [
        (k, a.name) for op in ops for k, a in enumerate(op._schema.arguments) if a.alias_info and a.alias_info.is_write
    ]
    return {key for pair in at for key in pair}


def in_place_of_pixels(name: str, args: Any) -> bool:
    """Do indices leave every pixel where it was? Tensors of indices may permute rows and columns."""
    if name != "__getitem__":
        return True
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(isinstance(i, slice) or i is Ellipsis for i in index)


def drops_nothing(p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """Is it a dropout that gives its argument?"""
    return p == 0 or not training


def by_place(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The first argument by its place. (That of torch.where and torch.searchsorted is another one than `input`.)"""
    first = next(iter(kwargs), None)
    if args or first not in ("input", "tensors") or "condition" in kwargs or "sorted_sequence" in kwargs:
        return args, kwargs
    return (kwargs[first],), {name: value for name, value in kwargs.items() if name != first}


def tensors_of(args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Those among an op's arguments, and in lists of them."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from (t for t in value if isinstance(t, Tensor))
