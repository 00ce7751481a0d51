"""From dense models to block-sparse ones: by patterns of names, or everywhere at one density."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from sbnet.nn.blocksparse import BlockSparseLinear, is_linear
from sbnet.nn.blocksparse_conv import layer_for
from sbnet.weights.saved import remember

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
        ValueError: a pattern that matches nothing, something that is no such layer, or the output projection of
            nn.MultiheadAttention, whose weight PyTorch reads as a matrix; an unknown option.

    >>> patch(model, {r"encoder\\..*\\.intermediate\\.dense": {"density": 0.25, "block_size": 32}})
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen: dict[str, dict[str, Any]] = {}
    for pattern, options in patterns.items():
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise ValueError(f"patch: {pattern!r}: expected options {', '.join(OPTIONS)}, got {', '.join(unknown)}")
        names = [n for n in modules if n and re.fullmatch(pattern, n)]
        if not names:
            raise ValueError(
                f"patch: {pattern!r}: expected the name of a layer, got no match; layers are "
                f"{', '.join(patchable_layers(model)) or 'none'}"
            )
        for name in names:
            if not is_linear(modules[name]) and layer_for(modules[name]) is None:
                raise ValueError(
                    f"patch: {pattern!r}: expected an nn.Linear or a convolution of one group, got {name}, a "
                    f"{type(modules[name]).__name__}"
                )
            if layer_for(modules[name]) and "allow_tf32" in options:
                raise ValueError(f"patch: {pattern!r}: allow_tf32: expected for linear layers, got it for {name}")
            parent = modules[name.rpartition(".")[0]]
            if reads_weight(parent, modules[name]):
                raise ValueError(
                    f"patch: {pattern!r}: expected layers that are called, got {name}, whose weight "
                    f"{type(parent).__name__} reads as a matrix"
                )
            chosen.setdefault(name, dict(options))
    made: dict[nn.Module, nn.Module] = {}  # a layer that two names share is one layer in the patched model, too
    for name, options in chosen.items():
        layer = modules[name]
        if layer not in made:
            kind = layer_for(layer)
            made[layer] = (kind.from_dense if kind else BlockSparseLinear.from_linear)(layer, **options)
        replace(modules[name.rpartition(".")[0]], name.rpartition(".")[2], made[layer])
    finish(model)
    return model


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
        exclude: a regular expression of whole names that stay dense; by default none. Output projections of
            nn.MultiheadAttention stay so in any case, with a warning: PyTorch reads their weights as matrices.
        convolutions: nn.Conv2d, nn.Conv3d and nn.ConvTranspose2d of one group, too.

    >>> prune(model, density=0.25, exclude="classifier")
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    kept = [n for n, m in modules.items() if n and reads_weight(modules[n.rpartition(".")[0]], m)]
    names = [n for n, m in modules.items() if n and n not in kept and (is_linear(m) or (convolutions and layer_for(m)))]
    chosen = [n for n in names if exclude is None or not re.fullmatch(exclude, n)]
    if not chosen:
        raise ValueError(f"prune: expected a layer that is not excluded, got {', '.join(names) or 'none'}")
    if kept:
        warnings.warn(
            f"prune: {', '.join(kept)}: left dense, since the modules around them read their weights as matrices",
            stacklevel=2,
        )
    options = {"density": density, "block_size": block_size, "by": by}
    return patch(model, {re.escape(name): options for name in chosen})


def patchable_layers(model: nn.Module) -> list[str]:
    """Names of all layers that can be replaced, as patterns see them."""
    modules = dict(model.named_modules())
    return [
        name
        for name, module in modules.items()
        if (is_linear(module) or layer_for(module)) and not reads_weight(modules[name.rpartition(".")[0]], module)
    ]


def reads_weight(parent: nn.Module, layer: nn.Module) -> bool:
    """Whether `parent` computes with the weight of its layer `layer` instead of calling it."""
    return isinstance(parent, nn.MultiheadAttention) and layer is parent.out_proj


def replace(parent: nn.Module, name: str, layer: nn.Module) -> None:
    """Sets a layer of a module. PyTorch's transformer layers then no longer take the fused path that reads the weights
    of their linear layers, which they take in eval mode without gradients."""
    setattr(parent, name, layer)
    if isinstance(parent, nn.TransformerEncoderLayer):
        parent.activation_relu_or_gelu = 0  # 1 and 2 name the activations that the fused path knows


def finish(model: nn.Module) -> None:
    """What a model with new layers needs: nested tensors, which only that fused path takes, are not made of padded
    batches, and a transformers model's config names its layers."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and not all(
            getattr(layer, "activation_relu_or_gelu", 1) for layer in module.layers
        ):
            module.use_nested_tensor = False
    remember(model)
