"""From ONNX to ONNX: what `sbnet sparsify` does with a model of another exporter."""

from __future__ import annotations

import copy
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
    """Of one output at a full mask, rms, both sides in ONNX Runtime.

    Attributes:
        difference: of the masked model from the model as it was.
        own: error of the model as it was, against its ops in float64.
        shaken: by how much its result moves where the input does so by its last digit.
        size: rms of the result.
        eps: the step of the output's dtype.
    """

    difference: float
    own: float
    shaken: float
    size: float
    eps: float

    @property
    def limit(self) -> float:
        """What rounding may explain. By the contract the masked model's error is at most twice the model's own, and one
        step: three times that apart. An error of its own that is far more than rounding makes of such a model says that
        the model was misread, and explains nothing."""
        rounding = min(self.own, max(self.eps**0.5 * self.size, 3 * self.shaken))
        return 3 * rounding + self.eps * self.size

    @property
    def holds(self) -> bool:
        return self.difference <= self.limit


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
    """Writes the masked form of an ONNX model, once ONNX Runtime gives the same for both where the mask is full.

    Args:
        model: of standard ops; its first input is an image [N,C,H,W].
        output: the file; inputs are the model's own and, last, the mask [N,H,W] bool.
        size: (height, width) of the frames; None: as the model has it.
        batch: frames a call; None: as the model has it, or 1.
        mask_input: the mask's name.
        block, margin: as for `sparsify`.

    Returns:
        (the run, errors of the worst output).

    Raises:
        ValueError: the model cannot be read or run by ONNX Runtime, has no fixed size and none was given, or the masked
            one differs beyond rounding. What stood at `output` before then still does.
    """
    network = OnnxNetwork(model)
    example = tuple(_example(network, k, size, batch) for k in range(len(network.input_names)))
    if mask_input in (*network.input_names, *network.output_names):
        raise CaptureError(f"sbnet: {model}: mask: expected a name that the model does not use, got {mask_input!r}")
    found = sparsify(network, example, block=block, margin=margin)
    names, errors = [*network.input_names, mask_input], list[Errors]()

    def accept(part: Path) -> None:
        """Raises where the written model, in its place beside `output`, does not give what the other gives."""
        errors.append(_compared(network, part, example, output))

    found.export(output, input_names=names, output_names=network.output_names, accept=accept)
    return found, errors[0]


def _example(network: OnnxNetwork, at: int, size: tuple[int, int] | None, batch: int | None) -> Tensor:
    given = network.shapes[at]
    sides = [*size] if size is not None else given[2:] if len(given) == 4 else []
    shape = [batch or given[0] or 1, *given[1:2], *sides] if len(given) == 4 else [v or batch or 1 for v in given]
    if any(v is None for v in shape) or (len(given) == 4 and len(shape) < 4):
        raise CaptureError(f"sbnet: {network.path}: input {network.input_names[at]}: expected a size, got {given}")
    dtype = network.dtypes[at]
    made = torch.rand(shape)  # type: ignore[arg-type]
    return made.to(dtype) if dtype.is_floating_point else torch.ones(shape, dtype=dtype)  # type: ignore[arg-type]


def _compared(network: OnnxNetwork, part: Path, example: tuple[Tensor, ...], output: Path) -> Errors:
    """The errors of the worst output. Raises where one is beyond rounding."""
    cpu = ["CPUExecutionProvider"]
    n, _, h, w = example[0].shape
    try:
        original = session(_of_sizes(network, example), cpu)
        theirs, shaken = run(original, example), run(original, [_shaken(example[0]), *example[1:]])
    except Exception as error:  # ONNX Runtime's own classes
        said = str(error).splitlines()[0][:200]
        raise CaptureError(f"sbnet: {network.path}: expected a model that ONNX Runtime runs, got: {said}") from error
    ours = run(session(part, cpu), [*example, torch.ones(n, h, w, dtype=torch.bool)])
    with torch.no_grad():
        exact = copy.deepcopy(network).double()(*(x.double() if x.is_floating_point() else x for x in example))
    found = []
    right_ones = exact if isinstance(exact, tuple) else (exact,)
    for name, our, their, moved, right in zip(network.output_names, ours, theirs, shaken, right_ones, strict=True):
        if our.shape != their.shape or our.dtype != their.dtype:
            got = f"{our.dtype} {list(our.shape)}"
            raise CaptureError(
                f"sbnet: {output}: not written: output {name}: expected {their.dtype} {list(their.shape)}, as "
                f"{network.path} gives it in ONNX Runtime, got {got}"
            )
        eps = (
            torch.finfo(their.dtype).eps if their.is_floating_point() else 0.01
        )  # of integers some may round elsewhere
        one = Errors(_rms(our, their), _rms(their, right), _rms(their, moved), _rms(their), eps)
        if not one.holds:
            raise CaptureError(
                f"sbnet: {output}: not written: output {name}: expected what {network.path} gives in ONNX Runtime, got "
                f"rms {one.difference:.2g} apart, of {one.size:.2g}; rounding explains {one.limit:.2g}"
            )
        found.append(one)
    return max(found, key=lambda e: e.difference / max(e.limit, 1e-300))


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


def _shaken(x: Tensor) -> Tensor:
    """x, each element with another last digit."""
    return x * (1 + torch.finfo(x.dtype).eps * torch.randn(x.shape).sign()).to(x.dtype)


def _rms(x: Tensor, of: Tensor | None = None) -> float:
    """Of x, or of how it differs from another; both may be NaN, or the same infinity, in the same places."""
    if not x.numel():
        return 0.0
    x, other = x.double(), torch.zeros_like(x, dtype=torch.float64) if of is None else of.double()
    same = (x == other) | (x.isnan() & other.isnan())
    apart = torch.where(same, torch.zeros_like(x), x - other)
    if of is None:
        apart = torch.where(x.isfinite(), apart, torch.zeros_like(x))
    return float(apart.square().mean().sqrt().nan_to_num(float("inf")))
