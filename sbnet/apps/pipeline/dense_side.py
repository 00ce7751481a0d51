"""The dense network beside a pipeline's sparse one: the fastest form at hand, called on some of the frames."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from sbnet.masks.base import resized

Dense = Callable[[Tensor], Any]


def dense_side(model: Any, x: Tensor) -> tuple[str, Dense]:
    """(what runs it, x -> output) of an nn.Module or an ONNX file, for inputs like x."""
    if isinstance(model, nn.Module):
        return _on_cuda(model, x) if x.is_cuda else _on_cpu(model, x)
    if not x.is_cuda:
        try:
            return "ONNX Runtime", _onnxruntime(model)
        except ImportError:  # an extra
            pass
    import sbnet

    run = sbnet.sparsify(model, x)
    everything = torch.ones(x.shape[0], *x.shape[2:], dtype=torch.bool, device=x.device)
    return "sbnet, all blocks", lambda given: run(given, everything)


def _on_cpu(model: nn.Module, x: Tensor) -> tuple[str, Dense]:
    """PyTorch, or what else is installed where that takes one tensor to one tensor."""
    from sbnet.benchmarks.harness import dense

    with torch.no_grad():
        example = model(x)
    if not isinstance(example, Tensor):
        return dense.PLAIN, torch.no_grad()(model)
    try:
        found = dense.forms(model, x)
    except Exception:  # not every network that PyTorch runs can be exported
        found = {dense.PLAIN: dense.form_of_torch(model, x.dtype)}
    name = dense.fastest(found, x, rounds=1)
    form = found[name]
    return name, lambda given: form.run(form.prepare(given))


def _on_cuda(model: nn.Module, x: Tensor) -> tuple[str, Dense]:
    from sbnet.engine.capture import cuda_graph

    model = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    own = x.clone(memory_format=torch.channels_last)
    with torch.no_grad():
        graph, output = cuda_graph(lambda: model(own), x.device)

    def run(given: Tensor, _weights: nn.Module = model) -> Any:  # which the graph reads: kept as long as it
        own.copy_(given)
        graph.replay()
        return output

    return "PyTorch, a CUDA graph", run


def _onnxruntime(path: Any) -> Dense:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(_of_any_size(path), options, ["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda given: [torch.from_numpy(v) for v in session.run(None, {name: given.contiguous().numpy()})]


def _of_any_size(path: Any) -> bytes:
    """The model without the sizes that its file fixes."""
    import onnx

    model = onnx.load(str(path))
    for value in [*model.graph.input, *model.graph.output]:
        for at, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"{value.name}_{at}"
    del model.graph.value_info[:]
    return model.SerializeToString()


def compared(got: Any, wanted: Any, mask: Tensor | None) -> tuple[float, float]:
    """(rms difference relative to the rms of what is wanted, largest difference) of all floating tensors: of feature
    maps on the pixels of a mask [N,H,W], or everywhere."""
    wrong = right = largest = 0.0
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
        furthest = float(apart.abs().max())
        largest = furthest if math.isnan(furthest) else max(largest, furthest)
    return ((wrong / right) ** 0.5 if right else 0.0), largest
