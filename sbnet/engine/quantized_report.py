"""What a quantised network gives beside the float one, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.engine.accuracy import inside
from sbnet.engine.arguments import planes_of
from sbnet.engine.sparsify import SparseRun
from sbnet.graph.functional import PlannedModule
from sbnet.graph.ir import Value
from sbnet.graph.kinds import kind_of
from sbnet.graph.passes.quantize import KIND, Quantization, stays_float


@dataclass(frozen=True)
class Layer:
    """Of one convolution.

    Attributes:
        path: of its module.
        computes: "int8", "fp8" or the dtype of the network's floats.
        reads, writes: dtypes in memory; floats that a layer of bytes reads are rounded as they are read.
        error: rms difference of what it gives from the float network, over active pixels, relative to the rms there;
            with the errors of all layers before.
        why: it stays in float.
    """

    path: str
    computes: str
    reads: str
    writes: str
    error: float
    why: str = ""


@dataclass(frozen=True)
class Output:
    """Of one output of the network.

    Attributes:
        error: as of a layer, over the mask's pixels; of outputs without a plane over all numbers.
        psnr: of outputs with a plane: dB of a signal of 1, as pictures have it, over the rms difference.
        agreement: of outputs [N,K]: share of samples whose greatest is the same.
    """

    error: float
    psnr: float | None = None
    agreement: float | None = None

    def __str__(self) -> str:
        more = "" if self.psnr is None else f", PSNR {self.psnr:.2f} dB"
        more += "" if self.agreement is None else f", the same class in {self.agreement:.1%}"
        return f"error {self.error:.3%}{more}"


@dataclass(frozen=True)
class Report:
    """A quantised network beside the float one, over some frames. Printed as a table."""

    layers: list[Layer] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)

    @property
    def error(self) -> float:
        """The largest of an output."""
        return max((output.error for output in self.outputs), default=0.0)

    def __str__(self) -> str:
        width = max((len(layer.path) for layer in self.layers), default=5)
        lines = [f"{'layer':<{width}}  {'computes':<8} {'reads':<8} {'writes':<8} {'error':>8}  float because"]
        lines += [
            f"{v.path:<{width}}  {v.computes:<8} {v.reads:<8} {v.writes:<8} {v.error:>8.3%}  {v.why}"
            for v in self.layers
        ]
        lines += [f"output {k}: {output}" for k, output in enumerate(self.outputs)]
        return "\n".join(line.rstrip() for line in lines)


class Walk:
    """Runs a run's network frame by frame, node by node, and tells what lies on planes."""

    def __init__(self, run: SparseRun) -> None:
        self.run = run
        self._key: Any = None
        self._states: list[Tensor] | None = None
        self._module: PlannedModule

    def module(self, inputs: Sequence[Any]) -> PlannedModule:
        """The network, for inputs of these shapes."""
        key = [v.shape if isinstance(v, Tensor) else v for v in inputs]
        if key != self._key:
            compiled = self.run._for(inputs)
            compiled.executor.refresh()
            self._module = PlannedModule(compiled.plan, compiled.constants, self.run.margin)
            self._key, self._states = key, None
        return self._module

    @torch.no_grad()
    def __call__(self, inputs: Sequence[Any], mask: Tensor) -> list[tuple[Value, Tensor, Tensor]]:
        """(value, what it holds, its active pixels) of the frame; `self.result` is what the network returns, flat."""
        module, mask = self.module(inputs), planes_of(mask, inputs[0])
        seen: list[tuple[Value, Tensor, Tensor]] = []
        for value, tensor in zip(module.plan.graph.inputs, inputs, strict=True):
            if value is not None and value.plane == tuple(mask.shape[1:]):
                seen.append((value, tensor, mask[:, None]))
        module.watch = lambda *what: seen.append(what)
        states = self._states or []
        if module.states and self._states is None:  # the first frame is computed whole
            states = [tensor_like(value, inputs[0]) for value in module.states]
            mask = torch.ones_like(mask)
        result = module(*inputs, mask, *states)
        if module.states:
            result, *self._states = result
        self.result = pytree.tree_leaves(result)
        return seen


def tensor_like(value: Value, x: Tensor) -> Tensor:
    return x.new_zeros(value.shape, dtype=value.dtype)


@dataclass
class _Sums:
    """Squares, added up over frames."""

    wrong: float = 0.0
    right: float = 0.0
    count: int = 0
    same: int = 0
    samples: int = 0

    def add(self, got: Tensor, want: Tensor, pixels: Tensor) -> None:
        pixels = pixels.expand_as(want)
        got, want = got.double()[pixels], want.double()[pixels]
        self.wrong += float((got - want).square().sum())
        self.right += float(want.square().sum())
        self.count += want.numel()

    @property
    def error(self) -> float:
        return math.sqrt(self.wrong / self.right) if self.right else 0.0 if not self.wrong else math.inf


def measure(floats: SparseRun, run: SparseRun, frames: Sequence[Any], masks: Sequence[Tensor]) -> Report:
    """A quantised run beside the float one, frame by frame."""
    before, after = Walk(floats), Walk(run)
    sums: dict[str, _Sums] = {}
    outputs: list[tuple[_Sums, Any]] = []
    for inputs, mask in zip(frames, masks, strict=True):
        graph = after.module(inputs).plan.graph
        named = {node.output.name: node for node in graph.nodes if kind_of(node).filters}
        wanted = {value.name: (tensor, pixels) for value, tensor, pixels in before(inputs, mask) if value.name in named}
        for value, tensor, _ in after(inputs, mask):
            if value.name in wanted:
                scale = named[value.name].options.get("out_scale") or 1.0
                sums.setdefault(value.name, _Sums()).add(scale * tensor.double(), *wanted[value.name])
        values = graph.outputs
        outputs = outputs or [(_Sums(), value) for value in values]
        for (found, _), value, got, want in zip(outputs, values, after.result, before.result, strict=True):
            if isinstance(value, Value) and value.dtype.is_floating_point:
                found.add(got, want, inside(want, mask, inputs[0]) > 0)
                if len(value.shape) == 2:
                    found.same += int((got.argmax(1) == want.argmax(1)).sum())
                    found.samples += len(want)
    told: Quantization = run.quantization  # type: ignore[attr-defined]
    why = stays_float(graph, told)
    layers = [
        Layer(
            node.path, dtype_name(told.dtype if node.kind == KIND else node.output.dtype),
            dtype_name(node.args[0].dtype), dtype_name(node.output.dtype), sums[name].error, why.get(node, ""),
        )
        for name, node in named.items() if name in sums
    ]  # fmt: skip
    return Report(layers, [_output(found, value) for found, value in outputs if isinstance(value, Value)])


def dtype_name(dtype: torch.dtype) -> str:
    return "fp8" if dtype == torch.float8_e4m3fn else str(dtype).removeprefix("torch.")


def _output(sums: _Sums, value: Value) -> Output:
    psnr = None
    if value.plane is not None:
        psnr = math.inf if not sums.wrong else -10 * math.log10(sums.wrong / sums.count)
    return Output(sums.error, psnr, sums.same / sums.samples if sums.samples else None)
