"""Names of a model's outputs, after what its network returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.utils._pytree as pytree

from sbnet.graph.functional import PlannedModule
from sbnet.graph.ir import Value


def output_names(module: PlannedModule, taken: Sequence[str]) -> list[str] | None:
    """Of a network that returns a dict its keys, in the order of its tensors: "out", or "parts.0" of a list under a
    key; of another y0, y1, ...; then next0, ... of its states and block_map0, ... None of one that gives tensors alone.

    Args:
        taken: names of inputs, which no output may have; such a key gets "y." before it.
    """
    spec, outputs = module.plan.graph.out_spec, module.plan.graph.outputs
    leaves, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))
    keys = [
        [getattr(key, "key", getattr(key, "idx", getattr(key, "name", None))) for key in path] for path, _ in leaves
    ]
    named = [".".join(map(str, path)) for path, value in zip(keys, outputs, strict=True) if isinstance(value, Value)]
    keyed = any(isinstance(key, str) for path in keys for key in path) and len(set(named)) == len(named)
    counts = {"next": len(module.states), "block_map": len(module.plan.planes) if module.block_maps else 0}
    more = [f"{name}{k}" for name, count in counts.items() for k in range(count)]
    if not (keyed or more):
        return None
    results = [f"y.{name}" if name in taken else name for name in named]
    return [*(results if keyed else [f"y{k}" for k in range(len(named))]), *more]


def name_outputs(outputs: Sequence[Any], names: Sequence[str] | None) -> None:
    """Gives the outputs of a graph their names, one by one: PyTorch's exporter renames a value that is an output twice
    by the later one, and the earlier, by a name of its own."""
    if names is None or len(outputs) != len(names) or len({id(value) for value in outputs}) != len(outputs):
        return
    for k, value in enumerate(outputs):  # a name may be another output's now
        value.name = f"{value.name}_{k}_of_outputs"
    for value, name in zip(outputs, names, strict=True):
        value.name = name
