"""From ONNX to ONNX: what `sbnet sparsify` does with a model that somebody else wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sbnet.engine.sparsify import SparseRun, sparsify
from sbnet.export.runtime import run, session
from sbnet.graph.capture import CaptureError
from sbnet.graph.onnx import OnnxNetwork


def write(
    model: Path,
    output: Path,
    size: tuple[int, int] | None = None,
    batch: int | None = None,
    *,
    mask_input: str = "mask",
    block: Any = "auto",
    margin: int = 0,
) -> tuple[SparseRun, float]:
    """Writes the masked form of an ONNX model, and compares both in ONNX Runtime where the mask is full.

    Args:
        model: of standard ops; its first input is an image [N,C,H,W].
        output: the file; inputs are the model's own and, last, the mask [N,H,W] bool.
        size: (height, width) of the frames; None: as the model has it.
        batch: frames a call; None: as the model has it, or 1.
        mask_input: the mask's name.
        block, margin: as for `sparsify`.

    Returns:
        (the run, the largest rms error of an output at a full mask, of the output's rms).

    Raises:
        ValueError: the model cannot be read, or has no fixed size and none was given.
    """
    network = OnnxNetwork(model)
    example = tuple(_example(network, k, size, batch) for k in range(len(network.input_names)))
    if mask_input in (*network.input_names, *network.output_names):
        raise CaptureError(f"sbnet: {model}: has a value {mask_input!r} already; another name of the mask is wanted")
    found = sparsify(network, example, block=block, margin=margin)
    names = [*network.input_names, mask_input]
    found.export(output, input_names=names, output_names=network.output_names)
    return found, _error(model, output, example)


def _example(network: OnnxNetwork, at: int, size: tuple[int, int] | None, batch: int | None) -> Tensor:
    given = network.shapes[at]
    sides = [*size] if size is not None else given[2:] if len(given) == 4 else []
    shape = [batch or given[0] or 1, *given[1:2], *sides] if len(given) == 4 else [v or batch or 1 for v in given]
    if any(v is None for v in shape) or (len(given) == 4 and len(shape) < 4):
        raise CaptureError(f"sbnet: {network.path}: input {network.input_names[at]} is {given}; a size is wanted")
    return torch.rand(shape)  # type: ignore[arg-type]


def _error(model: Path, output: Path, example: tuple[Tensor, ...]) -> float:
    """rms of the difference between both models at a full mask, of the first one's rms: the worst output's."""
    cpu = ["CPUExecutionProvider"]
    n, _, h, w = example[0].shape
    theirs = run(session(model, cpu), example)
    ours = run(session(output, cpu), [*example, torch.ones(n, h, w, dtype=torch.bool)])
    errors = [float(_rms(a.double() - b) / _rms(b).clamp(min=1e-30)) for a, b in zip(ours, theirs, strict=True)]
    return max(errors, default=0.0)


def _rms(x: Tensor) -> Tensor:
    return x.double().square().mean().sqrt()
