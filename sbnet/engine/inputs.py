"""The tensors that a CUDA graph reads, filled from those of a call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet._library import host_functions


class Inputs:
    """`__call__(given)` copies what a call was given to `own`: what lies in memory alike by one call of C.

    Args:
        own: on a CUDA device; None where nothing is read.
    """

    def __init__(self, own: Sequence[Tensor | None], device: torch.device) -> None:
        self.own = own
        self._strides = [None if t is None else t.stride() for t in own]
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._to = (ctypes.c_void_p * len(own))(*(None if t is None else t.data_ptr() for t in own))
        self._from = (ctypes.c_void_p * len(own))()
        self._bytes = (ctypes.c_int64 * len(own))(*(0 if t is None else t.nbytes for t in own))
        self._copy = host_functions().sbnet_copy_inputs

    def __call__(self, given: Sequence[Any]) -> None:
        """given: of the shapes, dtypes and device of `own`."""
        alike = False
        for k, tensor in enumerate(given):
            own = self.own[k]
            if own is None or own is tensor:
                self._from[k] = None
            elif type(tensor) is Tensor and tensor.stride() == self._strides[k]:
                self._from[k], alike = tensor.data_ptr(), True
            else:
                self._from[k] = None
                own.copy_(tensor.detach() if tensor.requires_grad else tensor)
        if alike:
            wrong = self._copy(self._to, self._from, self._bytes, len(self.own), self._device)
            if wrong:
                raise RuntimeError(wrong.decode())
