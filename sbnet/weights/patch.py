"""From dense models to block-sparse ones: by patterns of names, or everywhere at one density."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from sbnet.nn.blocksparse import BlockSparseLinear, is_linear
from sbnet.nn.blocksparse_conv import layer_for

OPTIONS = ("density", "block_size", "layout", "by", "allow_tf32")


def patch(model: nn.Module, patterns: Mapping[str, Mapping[str, Any]]) -> nn.Module:
    """Replaces, in place, the layers whose names match a pattern by block-sparse ones of their values.

    Those are nn.Linear (and GPT-2's Conv1D, which is linear too) and the convolutions of one group that
    `sbnet.nn.BlockSparseConv2d` and its kin stand for.

    Args:
        model: any module.
        patterns: regular expression (of a whole name, as named_modules has it) -> keyword arguments of
            `BlockSparseLinear.from_linear` or `BlockSparseConv2d.from_dense`; the first that matches counts.

    Returns:
        The model.

    Raises:
        ValueError: a pattern that matches nothing, or something that is no such layer; an unknown option.

    >>> patch(model, {r"encoder\\..*\\.intermediate\\.dense": {"density": 0.25, "block_size": 32}})
    """
    patcher = BlockSparseModelPatcher()
    for pattern, options in patterns.items():
        patcher.add_pattern(pattern, options)
    return patcher.patch_model(model)


def prune(
    model: nn.Module,
    density: float,
    block_size: int = 32,
    by: str = "magnitude",
    exclude: str | None = None,
    convolutions: bool = False,
) -> nn.Module:
    """Replaces, in place, every nn.Linear of a model by one that keeps the share `density` of its blocks.

    Args:
        by: "magnitude" or "random".
        exclude: a regular expression of whole names that stay dense; by default none.
        convolutions: nn.Conv2d, nn.Conv3d and nn.ConvTranspose2d of one group, too.

    >>> prune(model, density=0.25, exclude="classifier")
    """
    named = model.named_modules(remove_duplicate=False)
    names = [n for n, m in named if n and (is_linear(m) or (convolutions and layer_for(m)))]
    chosen = [n for n in names if exclude is None or not re.fullmatch(exclude, n)]
    if not chosen:
        raise ValueError(f"prune: expected a layer that is not excluded, got {', '.join(names) or 'none'}")
    options = {"density": density, "block_size": block_size, "by": by}
    return patch(model, {re.escape(name): options for name in chosen})


class BlockSparseModelPatcher:
    """Patterns first, the model later: what pytorch_block_sparse's class of this name does.

    >>> patcher = BlockSparseModelPatcher()
    >>> patcher.add_pattern(r".*\\.fc1", {"density": 0.5})
    >>> patcher.patch_model(model)
    """

    def __init__(self) -> None:
        self.patterns: list[tuple[str, dict[str, Any]]] = []

    def add_pattern(self, pattern: str, patch_info: Mapping[str, Any]) -> None:
        """A regular expression of whole module names, and the options of the layers that it matches."""
        unknown = sorted(set(patch_info) - set(OPTIONS))
        if unknown:
            raise ValueError(f"patch: {pattern!r}: expected options {', '.join(OPTIONS)}, got {', '.join(unknown)}")
        re.compile(pattern)
        self.patterns.append((pattern, dict(patch_info)))

    def get_patchable_layers(self, model: nn.Module) -> list[str]:
        """Names of all layers that can be replaced, as patterns see them."""
        return [name for name, module in model.named_modules() if is_linear(module) or layer_for(module)]

    def patch_model(self, model: nn.Module) -> nn.Module:
        """Replaces every layer that a pattern matches; the first match counts."""
        # A layer that two names share is one layer in the patched model too.
        modules = dict(model.named_modules(remove_duplicate=False))
        chosen: dict[str, dict[str, Any]] = {}
        for pattern, options in self.patterns:
            names = [n for n in modules if n and re.fullmatch(pattern, n)]
            if not names:
                raise ValueError(
                    f"patch: {pattern!r}: expected the name of a layer, got no match; layers are "
                    f"{', '.join(self.get_patchable_layers(model)) or 'none'}"
                )
            for name in names:
                if not is_linear(modules[name]) and layer_for(modules[name]) is None:
                    raise ValueError(
                        f"patch: {pattern!r}: expected an nn.Linear or a convolution of one group, got {name}, a "
                        f"{type(modules[name]).__name__}"
                    )
                if layer_for(modules[name]) and "allow_tf32" in options:
                    raise ValueError(f"patch: {pattern!r}: allow_tf32: expected for linear layers, got it for {name}")
                chosen.setdefault(name, options)
        made: dict[nn.Module, nn.Module] = {}
        for name, options in chosen.items():
            layer = modules[name]
            if layer not in made:
                kind = layer_for(layer)
                made[layer] = (kind.from_dense if kind else BlockSparseLinear.from_linear)(layer, **options)
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, made[layer])
        return model
