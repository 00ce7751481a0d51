"""From ONNX to ONNX: what `sbnet sparsify` does with a model that somebody else wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sbnet.engine.sparsify import SparseRun, sparsify
from sbnet.export.runtime import run, session
from sbnet.graph.capture import CaptureError
from sbnet.graph.onnx import OnnxNetwork


@dataclass(frozen=True)
class Errors:
    """Of the worst output, rms against the model in float64.

    Attributes:
        error: of the masked model in ONNX Runtime.
        own: of the model as it was, in ONNX Runtime.
        size: rms of the result.
    """

    error: float
    own: float
    size: float

    @property
    def holds(self) -> bool:
        """Is it rounding?"""
        return self.error <= 10 * self.own + 1e-5 * self.size


def write(
    model: Path,
    output: Path,
    size: tuple[int, int] | None = None,
    batch: int | None = None,
    *,
    mask_input: str = "mask",
    block: Any = "auto",
    margin: int = 0,
) -> tuple[SparseRun, Errors]:
    """Writes the masked form of an ONNX model, and compares both in ONNX Runtime where the mask is full.

    Args:
        model: of standard ops; its first input is an image [N,C,H,W].
        output: the file; inputs are the model's own and, last, the mask [N,H,W] bool.
        size: (height, width) of the frames; None: as the model has it.
        batch: frames a call; None: as the model has it, or 1.
        mask_input: the mask's name.
        block, margin: as for `sparsify`.

    Returns:
        (the run, errors at a full mask).

    Raises:
        ValueError: the model cannot be read, or has no fixed size and none was given.
    """
    network = OnnxNetwork(model)
    example = tuple(_example(network, k, size, batch) for k in range(len(network.input_names)))
    if mask_input in (*network.input_names, *network.output_names):
        raise CaptureError(f"sbnet: {model}: mask: expected a name that the model does not use, got {mask_input!r}")
    found = sparsify(network, example, block=block, margin=margin)
    names = [*network.input_names, mask_input]
    found.export(output, input_names=names, output_names=network.output_names)
    return found, _errors(network, output, example)


def _example(network: OnnxNetwork, at: int, size: tuple[int, int] | None, batch: int | None) -> Tensor:
    given = network.shapes[at]
    sides = [*size] if size is not None else given[2:] if len(given) == 4 else []
    shape = [batch or given[0] or 1, *given[1:2], *sides] if len(given) == 4 else [v or batch or 1 for v in given]
    if any(v is None for v in shape) or (len(given) == 4 and len(shape) < 4):
        raise CaptureError(f"sbnet: {network.path}: input {network.input_names[at]}: expected a size, got {given}")
    return torch.rand(shape)  # type: ignore[arg-type]


def _errors(network: OnnxNetwork, output: Path, example: tuple[Tensor, ...]) -> Errors:
    cpu = ["CPUExecutionProvider"]
    n, _, h, w = example[0].shape
    ours = run(session(output, cpu), [*example, torch.ones(n, h, w, dtype=torch.bool)])
    theirs = run(session(_of_sizes(network, example), cpu), example)
    with torch.no_grad():
        exact = network.double()(*(x.double() for x in example))
    found = []
    for our, their, right in zip(ours, theirs, exact if isinstance(exact, tuple) else (exact,), strict=True):
        found.append(Errors(_rms(our - right), _rms(their - right), _rms(right)))
    return max(found, key=lambda e: e.error / max(e.own, 1e-6 * e.size, 1e-300))


def _of_sizes(network: OnnxNetwork, example: tuple[Tensor, ...]) -> bytes:
    """The model as it was, for inputs of these sizes: those that it names may be others."""
    import onnx

    model = onnx.load(network.path)
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    del model.graph.input[:], model.graph.value_info[:]
    for value, x in zip(inputs, example, strict=True):
        for dim, size in zip(value.type.tensor_type.shape.dim, x.shape, strict=True):
            dim.dim_value = size
    model.graph.input.extend(inputs)
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    return model.SerializeToString()


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0
