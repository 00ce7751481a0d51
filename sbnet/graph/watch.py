"""What a network was captured of: is it all still in its place?"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from sbnet._library import host_functions
from sbnet.graph.exporting import EXPORTING

# Of what modules of PyTorch call constants: what their weights say as well, and what a result does not depend on.
SAID_OTHERWISE = {
    "in_channels", "out_channels", "in_features", "out_features", "num_features", "affine", "momentum", "inplace",
    "num_embeddings", "embedding_dim", "elementwise_affine", "name", "groups", "track_running_stats", "transposed",
}  # fmt: skip
OF_POOLS = {"kernel_size", "output_padding"}  # or of transposed convolutions
MISSING = object()
Item = tuple[dict[str, Any], str, Any]


class Items:
    """Items of dicts, as they are now: `unchanged()` says in one call of C whether each is the same object still, or
    still MISSING."""

    def __init__(self, items: Iterable[Item]) -> None:
        self.items = list(items)
        self._compare = host_functions().sbnet_items_are
        self._get = ctypes.cast(ctypes.pythonapi.PyDict_GetItemWithError, ctypes.c_void_p)
        array = ctypes.c_void_p * len(self.items)
        said = [(id(home), id(name), None if value is MISSING else id(value)) for home, name, value in self.items]
        self._arrays = [array(*column) for column in zip(*said, strict=True)] or [array()] * 3

    def unchanged(self) -> bool:
        return bool(self._compare(self._get, *self._arrays, len(self.items)))


class Watch:
    """Parameters, buffers, parts, hooks and numbers of a network, as they are now.

    Numbers are those that modules of PyTorch call constants (a normalisation's eps, a convolution's stride), and floats
    and flags of other modules. Writes in place are not looked for: `Writes` counts them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._items = Items(item for part in module.modules() for item in _items_of(part))
        self._hooks = [hooks for part in module.modules() for hooks in _hooks_of(part)]
        self._hooked, self._handles = self._count(), RemovableHandle.next_id

    def _count(self) -> int:
        return sum(map(len, self._hooks))

    def changed(self) -> bool:
        """Is a tensor, part or hook another one now, or a number of another value?"""
        hooked = RemovableHandle.next_id != self._handles  # somewhere
        if self._items.unchanged() and not hooked:
            return False
        with EXPORTING:  # torch.export puts other tensors into their places for a while
            if self._count() != self._hooked:
                return True
            self._handles = RemovableHandle.next_id
            now = [(home, name, home.get(name, MISSING)) for home, name, _ in self._items.items]
            pairs = zip(self._items.items, now, strict=True)
            if any(not _same(before[2], after[2]) for before, after in pairs):
                return True
            self._items = Items(now)  # numbers of the same values
            return False


def _hooks_of(part: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    return part._forward_hooks, part._forward_pre_hooks


def _items_of(part: nn.Module) -> Iterable[Item]:
    own = part.__dict__
    yield own, "forward", own.get("forward", MISSING)
    for hooks in _hooks_of(part):
        for handle, hook in hooks.items():
            yield hooks, handle, hook  # type: ignore[misc]
    for home in (part._parameters, part._buffers):
        for name, tensor in home.items():
            if tensor is None or tensor.is_floating_point():
                yield home, name, tensor  # type: ignore[misc]
    for name, child in part._modules.items():
        yield part._modules, name, child
    constants = getattr(type(part), "__constants__", None)
    if constants is None:
        public = (n for n in own if n != "training" and not n.startswith("_"))
        names = [n for n in public if isinstance(own[n], (float, bool))]
    else:
        weighted = "weight" in part._parameters and not own.get("transposed")
        left_out = SAID_OTHERWISE | OF_POOLS if weighted else SAID_OTHERWISE
        names = [n for n in constants if n not in left_out and n in own]
    for name in names:
        yield own, name, own[name]


def _same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    plain = (int, float, str, bool, tuple, list)
    return type(before) is type(after) and isinstance(before, plain) and before == after
