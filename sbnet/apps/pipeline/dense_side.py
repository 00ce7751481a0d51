"""The dense network beside a pipeline's sparse one: the fastest form at hand, called on some of the frames."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from sbnet.apps.pipeline.summary import larger
from sbnet.masks.base import resized


@dataclass(frozen=True)
class Dense:
    """name: of what runs it. prepare: x as it takes it. run: what was prepared -> the output."""

    name: str
    prepare: Callable[[Tensor], Any]
    run: Callable[[Any], Any]

    def __call__(self, x: Tensor) -> Any:
        return self.run(self.prepare(x))


def dense_side(model: Any, x: Tensor) -> Dense:
    """The dense form of an nn.Module or an ONNX file, for inputs like x."""
    if isinstance(model, nn.Module):
        return _on_cuda(model, x) if x.is_cuda else _on_cpu(model, x)
    if not x.is_cuda:
        try:
            return _onnxruntime(model)
        except ImportError:  # an extra
            pass
    run, everything = _all_blocks(model, x)
    return Dense(ALL_BLOCKS, _as_it_is, lambda given: run(given, everything))


ALL_BLOCKS = "sbnet, all blocks"


def _all_blocks(model: Any, x: Tensor) -> tuple[Any, Tensor]:
    """A run of the model, and the mask of all pixels."""
    import sbnet

    return sbnet.sparsify(model, x), torch.ones(x.shape[0], *x.shape[2:], dtype=torch.bool, device=x.device)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _on_cpu(model: nn.Module, x: Tensor) -> Dense:
    """PyTorch, or what else is installed where that takes one tensor to one tensor."""
    from sbnet.benchmarks.harness import dense

    with torch.no_grad():
        example = model(x)
    if not isinstance(example, Tensor):
        return Dense(dense.PLAIN, _as_it_is, torch.no_grad()(model))
    try:
        found = dense.forms(model, x)
    except Exception:  # not every network that PyTorch runs can be exported
        found = {dense.PLAIN: dense.form_of_torch(model, x.dtype)}
    name = dense.fastest(found, x, rounds=1)
    return Dense(name, found[name].prepare, found[name].run)


CUDA_FORM = "PyTorch, a CUDA graph"


def form_on_cuda(model: Any, x: Tensor) -> tuple[str, Callable[[Tensor], Any]]:
    """The name of the dense form that a CUDA graph is made of, and that form: of an nn.Module cuDNN's in its benchmark
    mode, channels_last, activations of a chain of convolutions fused into them; of an ONNX file its layers on all
    blocks, whose lists are made once."""
    from sbnet.benchmarks.harness import dense

    if not isinstance(model, nn.Module):
        run, everything = _all_blocks(model, x)
        lists = run.lists(everything)
        return ALL_BLOCKS, lambda given: run.layers(given, lists=lists)
    if isinstance(model, nn.Sequential):
        try:
            return CUDA_FORM, dense.cudnn_chain(model, x)
        except ValueError:  # it is none
            pass
    return CUDA_FORM, copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _on_cuda(model: nn.Module, x: Tensor) -> Dense:
    from sbnet.engine.capture import cuda_graph

    name, form = form_on_cuda(model, x)
    own = x.clone(memory_format=torch.channels_last)
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        graph, output = cuda_graph(lambda: form(own), x.device)

    def run(given: Tensor, _weights: Any = form) -> Any:  # which the graph reads: kept as long as it
        own.copy_(given)
        graph.replay()
        return output

    return Dense(name, _as_it_is, run)


def _onnxruntime(path: Any) -> Dense:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(_of_any_size(path), options, ["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def run(given: Any) -> list[Tensor]:
        return [torch.from_numpy(v) for v in session.run(None, {name: given})]

    return Dense("ONNX Runtime", lambda given: given.float().contiguous().numpy(), run)  # in the file's own dtype


def _of_any_size(path: Any) -> bytes:
    """The model without the sizes that its file fixes."""
    import onnx

    model = onnx.load(str(path))
    for value in [*model.graph.input, *model.graph.output]:
        for at, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"{value.name}_{at}"
    del model.graph.value_info[:]
    return model.SerializeToString()


def compared(got: Any, wanted: Any, mask: Tensor | None) -> tuple[float, float, tuple[int, ...]]:
    """(rms difference relative to the rms of what is wanted, largest difference, its place in its tensor) of all
    floating tensors: of feature maps on the pixels of a mask [N,H,W], or everywhere."""
    wrong = right = largest = 0.0
    place: tuple[int, ...] = ()
    pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(wanted), strict=True)
    for a, b in pairs:
        if not isinstance(a, Tensor) or not a.is_floating_point() or not a.numel():
            continue
        b = b.to(a.device).double()
        apart = a.double() - b
        if mask is not None and a.dim() == 4 and a.shape[2] * a.shape[3] > 1:
            inside = resized(mask, (a.shape[2], a.shape[3]))[:, None]
            apart, b = apart * inside, b * inside
        wrong += float(apart.square().sum())
        right += float(b.square().sum())
        most, at = apart.abs().flatten().max(0)
        if not (float(most) <= largest or math.isnan(largest)):
            place = tuple(int(k) for k in np.unravel_index(int(at), apart.shape))
        largest = larger(largest, float(most))
    return ((wrong / right) ** 0.5 if right else 0.0), largest, place


def differences(got: Any, wanted: Any, mask: Tensor | None) -> np.ndarray | None:
    """[h,w] uint8, the first feature map's differences over its channels, the largest as 255; on the pixels of a mask
    [N,H,W], or everywhere. None without one."""
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(wanted), strict=True):
        if isinstance(a, Tensor) and a.dim() == 4 and a.shape[2] * a.shape[3] > 1:
            apart = (a[0].float() - b[0].to(a.device).float()).abs().amax(0).nan_to_num(torch.inf)
            if mask is not None:
                apart = apart * resized(mask[:1], (a.shape[2], a.shape[3]))[0]
            scaled = apart / apart.amax().clamp(min=1e-30)
            return scaled.nan_to_num(1.0).mul(255).byte().cpu().numpy()
    return None
