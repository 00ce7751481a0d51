"""What `sparsify` and its runs are given: models, examples, masks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from sbnet.graph.blocks import is_tuning, predict, tuned
from sbnet.graph.cost import Work, work
from sbnet.graph.ir import Graph
from sbnet.graph.plan import spatial_sizes
from sbnet.masks.grow import grow
from sbnet.ops.common import mask_planes

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def planes_of(mask: Tensor, x: Tensor) -> Tensor:
    """A call's mask as bool [N,H,W], where x is."""
    if isinstance(mask, Tensor) and mask.dtype is torch.bool and mask.device == x.device:
        n, _, h, w = x.shape
        if mask.shape == (n, h, w):
            return mask
    if isinstance(mask, Tensor) and not (mask.is_floating_point() or mask.is_complex()):
        mask = mask != 0  # of negative numbers, too
    elif isinstance(mask, Tensor) and mask.itemsize == 1:  # PyTorch compares no float8
        mask = mask.float()
    mask = mask_planes("run", mask)
    if mask.shape[1:] != x.shape[2:] or mask.shape[0] not in (1, x.shape[0]):
        raise ValueError(
            f"sbnet: run: mask: expected [{x.shape[0]},{x.shape[2]},{x.shape[3]}], got {tuple(mask.shape)}"
        )
    if mask.dtype != torch.bool:
        mask = mask > 0.5
    if mask.device != x.device:
        mask = mask.to(x.device, non_blocking=True)
    return mask if mask.shape[0] == x.shape[0] else mask.expand(x.shape[0], -1, -1)


# No method: what a run's CUDA graph refers to does not refer to the run, so that both go when the run does.
def mask_of(source: Callable[[Tensor], Tensor] | None, inputs: Sequence[Any], mask: Tensor | None) -> Tensor:
    """A call's mask: inside the CUDA graph, where there is one."""
    if source is not None and mask is None:
        mask = source(inputs[0])
        if not isinstance(mask, Tensor):
            raise TypeError(f"sbnet: run: mask: expected a tensor from mask_source, got {type(mask).__name__}")
        mask = planes_of(mask, inputs[0])
    assert mask is not None
    return mask


def margin_of(margin: Any, of: str) -> int:
    """Pixels by which masks are grown."""
    if not hasattr(margin, "__index__") or margin < 0:
        raise ValueError(f"sbnet: {of}: margin: expected a whole number of at least 0, got {margin!r}")
    return int(margin)


def counters(module: Any) -> list[Tensor]:
    """How often modules have moved their statistics, which they write without PyTorch counting it."""
    buffers = module.named_buffers() if isinstance(module, nn.Module) else ()
    return [buffer for name, buffer in buffers if name.rpartition(".")[2] == "num_batches_tracked"]


def check_example(inputs: Sequence[Any], of: str = "sparsify: example") -> None:
    x = inputs[0] if inputs else None
    if not isinstance(x, Tensor) or x.dim() != 4 or x.dtype not in FLOATS:
        came = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"sbnet: {of}: expected [N,C,H,W] float32, float16 or bfloat16, got {came}")
    for k, value in enumerate(inputs):
        if isinstance(value, (tuple, list, dict)) and any(isinstance(v, Tensor) for v in pytree.tree_leaves(value)):
            raise TypeError(f"sbnet: {of}: expected tensors and numbers, got a {type(value).__name__} as input {k}")


def key_of(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """What inputs of one plan have in common."""
    key = tuple((v.shape, v.dtype, v.device) if isinstance(v, Tensor) else v for v in inputs)
    try:
        hash(key)
    except TypeError:
        check_example(inputs, "run: x")
        raise
    return key


def block_sizes(graph: Graph, device: torch.device, options: dict[str, Any], margin: int) -> Any:
    """Of a run's options, as `plan` takes them."""
    block, masks = options["block"], options["masks"]
    if is_tuning(block):
        return tuned(block, device)
    if not isinstance(block, str) or block != "auto" or not len(masks):
        return block
    grown = [grow(mask_planes("sparsify", mask), margin) if margin else mask for mask in masks]
    layers = work(graph)
    return predict({size: layers.get(size, Work()) for size in spatial_sizes(graph)}, grown, device.type)


class Taps(nn.Module):
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


def check_counted(model: nn.Module) -> nn.Module:
    """The network, if PyTorch counts the writes of all that it is made of."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference():
            raise ValueError(
                f"sbnet: sparsify: model: expected parameters made outside of torch.inference_mode, got {name}"
            )
    return model


def tapped(model: Any, names: Sequence[str]) -> Any:
    if isinstance(model, (str, os.PathLike)):
        return model
    if not isinstance(model, nn.Module):
        raise TypeError(f"sbnet: sparsify: model: expected an nn.Module or an ONNX file, got {type(model).__name__}")
    if isinstance(names, str):
        raise TypeError(f"sbnet: sparsify: out: expected a list of names, got the string {names!r}")
    for name in names:
        try:
            model.get_submodule(name)
        except AttributeError:
            raise ValueError(f"sbnet: sparsify: out: {name}: no such submodule") from None
    return Taps(model, names) if names else model
