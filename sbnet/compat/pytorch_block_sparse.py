"""Hugging Face's pytorch_block_sparse: its layer, patcher and optimizer, with its names, arguments and counts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sbnet import weights
from sbnet.nn import blocksparse
from sbnet.ops import BlockLayout
from sbnet.weights.patch import finish, reads_weight, replace


class BlockSparseLinear(blocksparse.BlockSparseLinear):
    """`sbnet.nn.BlockSparseLinear` with the reference's arguments.

    Args:
        in_features, out_features, bias: as in nn.Linear; taken from torch_nn_linear where that is given.
        density: share of the blocks, int(density * blocks) of them at random places.
        torch_nn_linear: a layer whose values at those places are taken, times 1 / sqrt(density), so that outputs keep
            their spread. (The reference takes as many values from the beginning of the matrix.)
        verbose: taken, and changes nothing.
        block_shape: (rows, columns) of a block: squares of 8, 16, 32, 64 or 128.

    Attributes:
        block_count: blocks stored.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        density: float = 0.5,
        torch_nn_linear: nn.Module | None = None,
        verbose: bool = False,
        block_shape: tuple[int, int] = (32, 32),
    ) -> None:
        op = "BlockSparseLinear"
        if len(block_shape) != 2 or block_shape[0] != block_shape[1]:
            raise ValueError(f"{op}: block_shape: expected a square, got {tuple(block_shape)}")
        if not 0 <= density <= 1:
            raise ValueError(f"{op}: density: expected 0 to 1, got {density}")
        values: Tensor | None = None
        shift: Tensor | None = None
        placed: dict[str, Any] = {}
        if torch_nn_linear is not None:
            values, shift = blocksparse.dense_weights(torch_nn_linear)
            (in_features, out_features), bias = values.shape, shift is not None
            placed = {"device": values.device, "dtype": values.dtype}
        size = block_shape[0]
        self_count = int(density * (in_features * out_features / size**2))
        rows, columns = -(-in_features // size), -(-out_features // size)
        mask = torch.zeros(rows * columns, dtype=torch.bool)
        mask[torch.randperm(rows * columns)[:self_count]] = True
        layout = BlockLayout(mask.view(rows, columns), size, in_features=in_features, out_features=out_features)
        super().__init__(in_features, out_features, bias, layout=layout, **placed)
        self.block_shape, self.verbose = tuple(block_shape), verbose
        if values is not None:
            with torch.no_grad():
                scale = 1 / math.sqrt(density) if density else 0.0
                self.weight.copy_(layout.from_dense(values) * scale)
                if self.bias is not None and shift is not None:
                    self.bias.copy_(shift)

    @property
    def block_count(self) -> int:
        return self.layout.blocks


class PseudoBlockSparseLinear(nn.Module):
    """What a `BlockSparseLinear` computes, by a dense weight and a mask: for debugging."""

    mask: Tensor

    def __init__(self, block_sparse_linear: blocksparse.BlockSparseLinear) -> None:
        super().__init__()
        layout = block_sparse_linear.layout
        weight = block_sparse_linear.weight.detach()
        self.weight = nn.Parameter(layout.to_dense(weight).t().contiguous())
        self.register_buffer("mask", layout.to_dense(torch.ones_like(weight)).t() == 1)
        bias = block_sparse_linear.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        self.in_features, self.out_features = layout.shape
        self.density = float(self.mask.float().mean())

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in_features] -> [..., out_features]."""
        return torch.nn.functional.linear(input, self.weight * self.mask, self.bias)


class ModelPatcher:
    """Patterns of module names first, a model later; a subclass says what replaces a layer."""

    def __init__(self) -> None:
        self.patterns: list[dict[str, Any]] = []

    def is_patchable(self, module_name: str, module: nn.Module, raiseError: bool) -> bool:
        """Whether a layer can be replaced; with raiseError, a ValueError where it cannot."""
        return True

    def get_patchable_layers(self, model: nn.Module) -> list[dict[str, Any]]:
        """{"regexp": the escaped name, "layer": the module} of every layer that can be replaced."""
        named = model.named_modules()
        return [{"regexp": re.escape(k), "layer": v} for k, v in named if self.is_patchable(k, v, raiseError=False)]

    def add_pattern(self, pattern: str, patch_info: dict[str, Any]) -> None:
        """A regular expression of the beginnings of names, and the options of the layers that it matches."""
        re.compile(pattern)
        self.patterns.append({"pattern": pattern, "patch_info": patch_info})

    def pattern_match(self, module_name: str) -> tuple[bool, Any]:
        """(whether a pattern matches, the options of the first that does)."""
        for entry in self.patterns:
            if re.match(entry["pattern"], module_name):
                return True, entry["patch_info"]
        return False, -1

    def new_child_module(self, child_module_name: str, child_module: nn.Module, patch_info: Any) -> nn.Module | None:
        """What a layer becomes; None: it stays."""
        raise NotImplementedError("expected a subclass that says what a layer becomes")

    def patch_model(self, model: nn.Module) -> None:
        """Replaces every layer that a pattern matches; the first match counts."""
        modules = dict(model.named_modules())
        modified = False
        for name, module in modules.items():
            found, info = self.pattern_match(name)
            if not name or not found or not self.is_patchable(name, module, raiseError=True):
                continue
            parent, _, child = name.rpartition(".")
            if reads_weight(modules[parent], module):
                raise ValueError(
                    f"patch_model: expected layers that are called, got {name}, whose weight "
                    f"{type(modules[parent]).__name__} reads as a matrix"
                )
            made = self.new_child_module(name, module, info)
            if made is not None:
                replace(modules[parent], child, made)
                modified = True
        if not modified:
            print(
                "Warning: the patcher did not patch anything! Check patchable layers with "
                "`mp.get_patchable_layers(model)`"
            )
        finish(model)


class BlockSparseModelPatcher(ModelPatcher):
    """Replaces linear layers by block-sparse ones, to be trained then; options {"density": 0 to 1, "pseudo_linear"}.

    `sbnet.weights.patch` and `prune` keep the blocks of largest norm instead, for networks that are trained already.

    >>> mp = BlockSparseModelPatcher()
    >>> mp.add_pattern(r"roberta\\.encoder\\.layer\\.[0-9]+\\.output\\.dense", {"density": 0.5})
    >>> mp.patch_model(model)
    """

    def is_patchable(self, module_name: str, module: nn.Module, raiseError: bool) -> bool:
        if isinstance(module, nn.Linear):
            return True
        if raiseError:
            raise ValueError(f"patch_model: expected an nn.Linear, got {module_name}, a {type(module).__name__}")
        return False

    def new_child_module(self, child_module_name: str, child_module: nn.Module, patch_info: Any) -> nn.Module:
        unknown = sorted(set(patch_info) - {"density", "pseudo_linear"})
        if unknown or "density" not in patch_info:
            raise ValueError(
                f"add_pattern: expected the options density and pseudo_linear, got {', '.join(map(str, patch_info))}"
            )
        made = BlockSparseLinear(0, 0, False, torch_nn_linear=child_module, density=patch_info["density"])
        return PseudoBlockSparseLinear(made) if patch_info.get("pseudo_linear") else made


class _Movement(weights.SparseOptimizer):
    """Blocks in new places begin at small random values, in proportion to the layer's own."""

    scale, distribution = 0.1, "uniform"

    def _initial(self, weight: Tensor, count: int) -> Tensor:
        fresh = weight.new_empty(count, *weight.shape[1:])
        mean, spread = float(weight.mean()), float(weight.std())
        if self.distribution == "gaussian":
            return fresh.normal_(mean * self.scale, spread * self.scale)
        return fresh.uniform_(-spread * self.scale, spread * self.scale)


class SparseOptimizer:
    """Moves, each step, the share lr of the blocks of least norm to random places, where they begin at small values.

    Args:
        sparse_objects: a layer, or several; `SparseOptimizer.sparse_objects(model)` finds a model's.
        lr: share of the blocks.
        method: "magnitude".
        new_coefficients_scale: of the new values: times the spread of the layer's weights (uniform, to both sides) or
            times their mean and spread (gaussian).
        new_coefficients_distribution: "uniform" or "gaussian".
    """

    METHODS = ("magnitude",)
    COEFFICIENTS_DISTRIBUTION = ("uniform", "gaussian")

    def __init__(
        self,
        sparse_objects: Any,
        lr: float = 1e-1,
        method: str = "magnitude",
        new_coefficients_scale: float = 0.1,
        new_coefficients_distribution: str = "uniform",
    ) -> None:
        self.defaults = {
            "lr": lr,
            "method": method,
            "new_coefficients_scale": new_coefficients_scale,
            "new_coefficients_distribution": new_coefficients_distribution,
        }
        self.param_groups: list[dict[str, Any]] = []
        self.attached_optimizers: list[torch.optim.Optimizer] = []
        self.add_param_group({"sparse_objects": sparse_objects})

    @staticmethod
    def sparse_objects(model: nn.Module) -> list[blocksparse.BlockSparseLinear]:
        """The block-sparse layers of a model."""
        return [m for m in model.modules() if isinstance(m, blocksparse.BlockSparseLinear)]

    def add_param_group(self, sparse_objects_group: dict[str, Any]) -> None:
        """{"sparse_objects": layers, and any of the constructor's other arguments}."""
        op = "SparseOptimizer"
        unknown = sorted(set(sparse_objects_group) - {"sparse_objects", *self.defaults})
        if unknown:
            raise ValueError(f"{op}: expected {', '.join(self.defaults)}, got {', '.join(unknown)}")
        group = {**self.defaults, **sparse_objects_group}
        layers = group["sparse_objects"]
        layers = [layers] if isinstance(layers, nn.Module) else list(layers)
        for layer in layers:
            if not isinstance(layer, blocksparse.BlockSparseLinear):
                raise TypeError(f"{op}: sparse_objects: expected BlockSparseLinear, got {type(layer).__name__}")
        if not 0 < group["lr"] <= 1:
            raise ValueError(f"{op}: lr: expected more than 0 and at most 1, got {group['lr']}")
        if group["method"] not in self.METHODS:
            raise ValueError(f"{op}: method: expected magnitude, got {group['method']!r}")
        if group["new_coefficients_distribution"] not in self.COEFFICIENTS_DISTRIBUTION:
            raise ValueError(
                f"{op}: new_coefficients_distribution: expected uniform or gaussian, got "
                f"{group['new_coefficients_distribution']!r}"
            )
        held = {layer for other in self.param_groups for layer in other["sparse_objects"]}
        if held.intersection(layers):
            raise ValueError(f"{op}: sparse_objects: expected layers of no other group, got one twice")
        self.param_groups.append({**group, "sparse_objects": layers})

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """The torch optimizer whose moments go with the blocks."""
        if optimizer not in self.attached_optimizers:
            self.attached_optimizers.append(optimizer)

    def step(self) -> None:
        """Moves blocks in every layer."""
        for group in self.param_groups:
            for layer in group["sparse_objects"]:
                mover = _Movement([layer], group["lr"])
                mover.scale, mover.distribution = (
                    group["new_coefficients_scale"],
                    group["new_coefficients_distribution"],
                )
                for optimizer in self._holding(layer):
                    mover.attach_optimizer(optimizer)
                mover.step()

    def _holding(self, layer: blocksparse.BlockSparseLinear) -> Iterable[torch.optim.Optimizer]:
        """Those of the attached optimizers that train the layer; one does where any is attached."""
        found = [
            o
            for o in self.attached_optimizers
            if any(p is layer.weight for group in o.param_groups for p in group["params"])
        ]
        if self.attached_optimizers and not found:
            raise ValueError("SparseOptimizer: optimizer: expected one with the layer's weight, got none")
        return found
