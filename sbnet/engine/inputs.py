"""The tensors that a CUDA graph reads, filled from those of a call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet._library import host_functions

ALIGNED = 16  # bytes: where kernels take a tensor to begin


class Inputs:
    """`__call__(given)` copies what a call was given to `own`: what lies in memory alike by one call of C.

    Args:
        own: on a CUDA device; None where nothing is read.
        addresses: int64, of each the address that kernels find it at, who read it where it is; without, all are copied.
        through: of which this is so.
    """

    def __init__(
        self,
        own: Sequence[Tensor | None],
        device: torch.device,
        addresses: Tensor | None = None,
        through: Sequence[bool] = (),
    ) -> None:
        self.own = own
        self.through = list(through) or [False] * len(own)
        self._addresses = addresses
        self._strides = [None if t is None else t.stride() for t in own]
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._places = [0 if t is None else t.data_ptr() for t in own]
        self._said = list(self._places) if addresses is None else addresses.tolist()
        to, sizes = list(self._places), [0 if t is None else t.nbytes for t in own]
        for k, found in enumerate(self.through):
            if found and addresses is not None:
                to[k], sizes[k] = addresses.data_ptr() + k * addresses.element_size(), -1
        self._to = (ctypes.c_void_p * len(own))(*to)
        self._from = (ctypes.c_void_p * len(own))()
        self._bytes = (ctypes.c_int64 * len(own))(*sizes)
        self._copy = host_functions().sbnet_copy_inputs

    def __call__(self, given: Sequence[Any]) -> None:
        """given: of the shapes, dtypes and device of `own`."""
        some = False
        for k, tensor in enumerate(given):
            own, at = self.own[k], None
            if own is not None and own is not tensor:
                if type(tensor) is Tensor and tensor.stride() == self._strides[k]:
                    at = tensor.data_ptr()
                    if self.through[k] and at % ALIGNED:
                        own.copy_(tensor.detach() if tensor.requires_grad else tensor)
                        at = None
                else:
                    own.copy_(tensor.detach() if tensor.requires_grad else tensor)
            if self.through[k]:
                at = at or self._places[k]
                at, self._said[k] = None if at == self._said[k] else at, at
            self._from[k] = at
            some |= at is not None
        if some:
            wrong = self._copy(self._to, self._from, self._bytes, len(self.own), self._device)
            if wrong:
                raise RuntimeError(wrong.decode())
