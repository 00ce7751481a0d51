"""Names of a model's outputs, after what its network returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.utils._pytree as pytree


def output_names(spec: Any, taken: Sequence[str]) -> list[str] | None:
    """The keys of a network that returns a dict, in the order of its tensors: "out", or "parts.0" of a list under a
    key. None of one that returns tensors alone.

    Args:
        spec: pytree's of what it returns.
        taken: names of inputs, which no output may have; such a key gets "y." before it.
    """
    leaves, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))
    paths = [
        [getattr(key, "key", getattr(key, "idx", getattr(key, "name", None))) for key in path] for path, _ in leaves
    ]
    if not any(isinstance(key, str) for path in paths for key in path):
        return None
    names = [".".join(map(str, path)) for path in paths]
    names = [f"y.{name}" if name in taken else name for name in names]
    return names if len(set(names)) == len(names) else None


def name_outputs(outputs: Sequence[Any], names: Sequence[str] | None) -> None:
    """Gives the outputs of a graph their names, one by one: PyTorch's exporter renames a value that is an output twice
    by the later one, and the earlier, by a name of its own."""
    if names is None or len(outputs) != len(names) or len({id(value) for value in outputs}) != len(outputs):
        return
    for k, value in enumerate(outputs):  # a name may be another output's now
        value.name = f"{value.name}_{k}_of_outputs"
    for value, name in zip(outputs, names, strict=True):
        value.name = name
