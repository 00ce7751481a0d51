"""How often tensors were written."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sbnet._library import host_functions

VERSION = operator.attrgetter("_version")


class Writes:
    """Counts the writes of some tensors, as PyTorch does: one in place, through whatever view, raises the number.

    Writes of tensors that were made in inference mode are not counted.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._counted = [tensor for tensor in tensors if not tensor.is_inference()]
        self._pointers = None
        if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in self._counted):
            return  # whose counts may be methods of theirs
        counters = [_counter(tensor) for tensor in self._counted]
        self._count = host_functions().sbnet_count_writes
        self._pointers = (ctypes.c_void_p * len(counters))(*(counter._cdata for counter in counters))
        if self._count(self._pointers, len(counters)) == sum(map(VERSION, self._counted)):
            self._counted = counters
        else:  # a PyTorch that does not tell
            self._pointers = None

    def __call__(self) -> int:
        if self._pointers is None:
            return sum(map(VERSION, self._counted))
        return int(self._count(self._pointers, len(self._counted)))


def _counter(tensor: Tensor) -> Tensor:
    """A tensor that shares the count of writes and keeps no memory, whose address stays when others swap theirs."""
    with torch.inference_mode(False):
        alias = tensor.detach()
        alias.data = alias.new_empty(0)
    return alias
