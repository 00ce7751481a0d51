"""Results of a network's parts, in place of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import nn


class _Taps(nn.Module):
    """A module that returns what some of its parts return."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self.names = module, list(names)

    def forward(self, *args: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        hooks = [
            self.module.get_submodule(name).register_forward_hook(
                lambda _, __, out, name=name: found.__setitem__(name, out)
            )
            for name in self.names
        ]
        try:
            self.module(*args)
        finally:
            for hook in hooks:
                hook.remove()
        return {name: found[name] for name in self.names}


def tapped(model: Any, names: Sequence[str]) -> Any:
    """The model, or, with names, one that returns what these parts of it return."""
    if isinstance(model, (str, os.PathLike)):
        return model
    if not isinstance(model, nn.Module):
        raise TypeError(f"sbnet: sparsify: model: expected an nn.Module or an ONNX file, got {type(model).__name__}")
    for name in names:
        try:
            model.get_submodule(name)
        except AttributeError:
            raise ValueError(f"sbnet: sparsify: out: {name}: no such submodule") from None
    return _Taps(model, names) if names else model
