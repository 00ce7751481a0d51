"""What a step under `sbnet.masked` does once instead of once a layer: one launch of a GPU each."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_ops = torch.ops.sbnet

# By the first weight that a context met: the others that it turned. A training step meets them again.
_TOGETHER: Any = WeakTensorKeyDictionary()
_MOST_TOGETHER = 1024


def conv_weight(weight: Tensor) -> Tensor:
    """That of a convolution; a linear layer [K,C] is one of 1x1."""
    return weight[:, :, None, None] if weight.dim() == 2 else weight


class Weights:
    """The weights of a context in its maps' dtype, and turned for gradients: each once, however often it is used."""

    def __init__(self) -> None:
        self._found: dict[Any, tuple[Tensor, tuple[Tensor, Tensor | None]]] = {}  # with the weight, which stays alive
        self._of_memory: dict[int, list[Any]] = {}  # keys of what was found of it
        self._together: list[tuple[weakref.ref, torch.dtype]] | None = None

    def clear(self) -> None:
        self._found.clear()
        self._of_memory.clear()

    def written(self, tensors: Any) -> None:
        """Before an op writes these: of weights in their memory nothing is known any more. `weight.data` has a version
        of its own, and a weight may have been turned before a hook of its layer writes it."""
        for t in tensors:
            if isinstance(t, (tuple, list)):
                self.written(t)
            elif self._of_memory and isinstance(t, Tensor) and t.layout == torch.strided:
                for key in self._of_memory.pop(t.untyped_storage().data_ptr(), ()):
                    self._found.pop(key, None)

    def of(self, weight: Tensor, dtype: torch.dtype, turn: bool) -> tuple[Tensor, Tensor | None]:
        """The weight in channels_last memory, and turned."""
        key = _key(weight, dtype, turn)
        if key not in self._found:
            with torch.no_grad():
                if turn:
                    self._turn(weight, dtype)
                else:
                    same = conv_weight(weight.detach()).to(dtype).contiguous(memory_format=torch.channels_last)
                    self._keep(key, weight, (same, None))
        return self._found[key][1]

    def _turn(self, weight: Tensor, dtype: torch.dtype) -> None:
        """This one; the first of a context with those that came after it the last time."""
        wanted = [weight]
        if self._together is None:
            self._together = _TOGETHER.setdefault(weight, [])
            self._together[:] = [known for known in self._together if known[0]() is not None]
            for reference, their in self._together:
                other: Any = reference()
                alike = (other.dtype, other.device, their) == (weight.dtype, weight.device, dtype)
                if alike and other is not weight:
                    wanted.append(other)
        elif len(self._together) < _MOST_TOGETHER and not any(r() is weight for r, _ in self._together):
            self._together.append((weakref.ref(weight), dtype))
        found = _ops.turn_conv_weights([conv_weight(w) for w in wanted], dtype)
        for w, same, turned in zip(wanted, found[: len(wanted)], found[len(wanted) :], strict=True):
            self._keep(_key(w, dtype, True), w, (same, turned))

    def _keep(self, key: Any, weight: Tensor, found: tuple[Tensor, Tensor | None]) -> None:
        self._found[key] = weight, found
        self._of_memory.setdefault(weight.untyped_storage().data_ptr(), []).append(key)


def _key(weight: Tensor, dtype: torch.dtype, turn: bool) -> Any:
    return id(weight), weight.data_ptr(), weight._version, dtype, turn


class Counts:
    """Numbers added to integers in place, as batch norms count batches: together, before anything reads one."""

    def __init__(self) -> None:
        self._added: dict[Any, tuple[Tensor, int]] = {}  # by where they lie

    def take(self, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
        """Is this such a sum? It is kept for later then."""
        if name == "add_" and len(args) == 2 and not kwargs and type(args[1]) is int:
            x = args[0]
            if type(x) is Tensor and x.dim() == 0 and x.dtype == torch.int64 and x.device.type != "meta":
                key = x.device, x.data_ptr()
                self._added[key] = x, self._added.get(key, (x, 0))[1] + args[1]
                return True
        if self._added and self._reads((args, tuple(kwargs.values()))):
            self.flush()
        return False

    def _reads(self, args: Any) -> bool:
        known = [x.untyped_storage().data_ptr() for x, _ in self._added.values()]

        def found(t: Any) -> bool:
            if isinstance(t, (tuple, list)):
                return any(map(found, t))
            return isinstance(t, Tensor) and t.dtype == torch.int64 and t.untyped_storage().data_ptr() in known

        return found(args)

    def flush(self) -> None:
        by_device: dict[Any, list[tuple[Tensor, int]]] = {}
        for x, more in self._added.values():
            by_device.setdefault(x.device, []).append((x, more))
        self._added.clear()
        with torch.no_grad():
            for added in by_device.values():
                torch._foreach_add_([x for x, _ in added], [more for _, more in added])
