"""Pruned Hugging Face models: `save_pretrained` says which layers are block-sparse, `from_pretrained` makes them so.

transformers lets a config name a quantiser, which changes layers before weights are loaded. Ours makes linear layers
block-sparse, nothing else. Where a process has not called `register_transformers`, transformers says that it does not
know "sbnet_blocksparse" before it lists the weights that do not fit.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

import torch
from torch import nn

from sbnet.nn.blocksparse import BlockSparseLinear
from sbnet.ops import BlockLayout

METHOD = "sbnet_blocksparse"


def remember(model: nn.Module) -> None:
    """Writes the block-sparse linear layers of a transformers model into its config; of other models nothing."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return
    layers = _layers(model)
    if layers:
        model.config.quantization_config = register_transformers()(layers=layers).of(model)


def _layers(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {
        name: {"block_size": module.block_size, "blocks": module.layout.blocks, "allow_tf32": module.allow_tf32}
        for name, module in model.named_modules()
        if isinstance(module, BlockSparseLinear)
    }


@functools.cache
def register_transformers() -> Any:
    """Lets transformers' `from_pretrained` load models that were pruned by `patch` or `prune` and saved.

    Call it once in a process that loads such models; `patch` and `prune` call it themselves.

    Returns:
        The class of the config's entry.

    >>> sbnet.weights.register_transformers()
    >>> model = AutoModel.from_pretrained("pruned")
    """
    from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(METHOD)
    class BlockSparseConfig(QuantizationConfigMixin):
        def __init__(self, layers: dict[str, dict[str, Any]], **_: Any) -> None:
            self.quant_method: Any = METHOD
            self.layers = layers
            self._model: Any = lambda: None

        def of(self, model: nn.Module) -> BlockSparseConfig:
            """The entry of a model that is there: layers may be given other layouts until it is saved."""
            self._model = weakref.ref(model)
            return self

        def to_dict(self) -> dict[str, Any]:
            model = self._model()
            layers: Any = self.layers if model is None else _layers(model)
            return {"quant_method": METHOD, "layers": layers}

        def __deepcopy__(self, memo: dict) -> BlockSparseConfig:
            return BlockSparseConfig(layers=dict(self.to_dict()["layers"]))

    @register_quantizer(METHOD)
    class BlockSparseQuantizer(HfQuantizer):
        requires_calibration = False
        quantization_config: BlockSparseConfig

        def _process_model_before_weight_loading(self, model: nn.Module, **options: Any) -> None:
            modules = dict(model.named_modules())
            for name, entry in self.quantization_config.layers.items():
                if name not in modules:
                    raise ValueError(f"{METHOD}: layers: expected layers of {type(model).__name__}, got {name}")
                parent, _, child = name.rpartition(".")
                with torch.device("cpu"):  # transformers builds models on the meta device, where layouts cannot be read
                    setattr(modules[parent], child, _empty(modules[name], **entry))

        def _process_model_after_weight_loading(self, model: nn.Module, **options: Any) -> nn.Module:
            modules = dict(model.named_modules())
            for name in self.quantization_config.layers:
                layer = modules[name]
                old = layer.layout
                layer.layout = BlockLayout.from_coords(
                    layer.coords,
                    (old.block_rows, old.block_columns),
                    old.block_size,
                    in_features=old.in_features,
                    out_features=old.out_features,
                )
            self.quantization_config.of(model)
            return model

        def is_serializable(self, *_: Any, **__: Any) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return True

    return BlockSparseConfig


def _empty(linear: nn.Module, block_size: int, blocks: int, allow_tf32: bool) -> BlockSparseLinear:
    """A block-sparse layer for a linear one whose weights are still to come; its blocks are at the first places."""
    weight = linear.weight
    assert isinstance(weight, torch.Tensor)
    shape = weight.shape[::-1] if isinstance(linear, nn.Linear) else weight.shape  # transformers' Conv1D has [C, K]
    rows, columns = (-(-n // block_size) for n in shape)
    mask = (torch.arange(rows * columns) < blocks).view(rows, columns)
    layout = BlockLayout(mask, block_size, in_features=shape[0], out_features=shape[1])
    options: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype, "allow_tf32": allow_tf32}
    return BlockSparseLinear(shape[0], shape[1], linear.bias is not None, layout=layout, **options)
