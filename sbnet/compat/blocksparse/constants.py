"""Tables of an object that its calls read on whatever device they run."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class Constants:
    """Tensors on the CPU, and a copy of them on each device that has asked.

    Copies are made outside of whatever traces a program, so that none of its stand-ins for tensors stays behind.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors
        self._on: dict[torch.device, tuple[Tensor, ...]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """The tensors on a device."""
        if device.type == "cpu":
            return self.tensors
        if device not in self._on:
            with _disable_current_modes():
                self._on[device] = tuple(t.to(device) for t in self.tensors)
        return self._on[device]

    def __reduce__(self) -> tuple:
        return Constants, self.tensors
