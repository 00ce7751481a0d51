"""`sbnet.quantize`: convolutions of a network in int8 or fp8, scales read off the active pixels of some frames."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sbnet.engine.quantized_report import Report, Walk, dtype_name, measure
from sbnet.engine.sparsify import SparseRun, sparsify
from sbnet.graph.ir import Graph, Node
from sbnet.graph.passes.quantize import KIND, Quantization, stays_float
from sbnet.graph.passes.quantize import quantize as quantize_graph

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "float8_e4m3fn": torch.float8_e4m3fn}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def quantize(
    run: SparseRun | nn.Module | str | os.PathLike[str],
    frames: Sequence[Any],
    masks: Sequence[Tensor],
    *,
    dtype: str = "int8",
    keep: Sequence[str] = (),
    ends: bool = False,
    percentile: float = 100.0,
    error: float | None = None,
    **options: Any,
) -> QuantizedRun:
    """A run like that of `sparsify` whose convolutions are int8, their sums exact, or fp8 (e4m3), in float32.

    Symmetric: weights have a scale for each output channel, feature maps one each, which is the largest magnitude (or a
    percentile) of their active pixels over all frames. Bias, PReLU or activation, and residual stay in float32, in the
    epilogue. What such convolutions alone read is of bytes in memory. In float stay: `keep`, first and last layers,
    transposed convolutions, groups of 2, 4 or 8 channels and depthwise layers that read and write floats anyway (of fp8
    and on GPUs all groups), and all that is no convolution.

    On a CPU fp8 says what it costs in accuracy, slowly; on GPUs before Hopper, too, it is no faster than floats.

    Args:
        run: of `sparsify`; or a network, to which it is given with the first frame and `options`.
        frames: inputs [N,C,H,W] float32, on a GPU float16 or bfloat16, too (or tuples of inputs, as calls take
            them), such as those that it will see.
        masks: [N,H,W] of each frame.
        dtype: "int8" or "fp8".
        keep: paths of modules that stay in float.
        ends: first and last layers are rounded, too.
        percentile: of magnitudes, that bytes reach; 100: the largest. Greater ones saturate.
        error: of an output, relative as in the report, that is accepted on these frames. Layers that by themselves cost
            an output most stay in float until none has more; plans the network, and runs a frame, once a layer.

    Returns:
        `QuantizedRun`; its `report` is what it costs in accuracy on these frames.

    Raises:
        ValueError: another dtype or device, no frames, a path of no module, a layer without an active pixel, an error
            that is not positive.

    >>> run = sbnet.quantize(sbnet.sparsify(net, frames[0], mode="cached"), frames, masks)
    >>> print(run.report)
    """
    if dtype not in DTYPES:
        raise ValueError(f"sbnet: quantize: dtype: expected 'int8' or 'fp8', got {dtype!r}")
    if len(frames) != len(masks) or not len(frames):
        raise ValueError(f"sbnet: quantize: masks: expected {max(len(frames), 1)}, one a frame, got {len(masks)}")
    if not 0 < percentile <= 100:
        raise ValueError(f"sbnet: quantize: percentile: expected more than 0 and at most 100, got {percentile}")
    if error is not None and not error > 0:
        raise ValueError(f"sbnet: quantize: error: expected a positive number or None, got {error}")
    given = [tuple(frame) if isinstance(frame, (tuple, list)) else (frame,) for frame in frames]
    if isinstance(run, QuantizedRun):
        raise TypeError("sbnet: quantize: run: expected one of sparsify, got one of quantize")
    if not isinstance(run, SparseRun):
        run = sparsify(run, given[0], **options)  # type: ignore[arg-type]
    elif options:
        raise TypeError(f"sbnet: quantize: expected options of sparsify with a network alone, got {', '.join(options)}")
    x = run.example[0]
    fp8, on_cpu = DTYPES[dtype] != torch.int8, x.device.type == "cpu"
    if x.dtype not in FLOATS or (x.dtype != torch.float32 and on_cpu):
        raise ValueError(
            "sbnet: quantize: run: expected float32, or on a GPU float16 or bfloat16, "
            f"got {dtype_name(x.dtype)} on {x.device}"
        )
    told = Quantization({}, tuple(keep), ends, DTYPES[dtype], groups=on_cpu and not fp8)
    told = replace(told, ranges=_ranges(run, given, masks, told, percentile))
    made = _reported(run, told, given, masks)
    return made if error is None else _within(error, made, run, given, masks)


class QuantizedRun(SparseRun):
    """What `quantize` returns: a `SparseRun` (calls, clone, profile, export, pickle) with convolutions in int8 or fp8.

    Attributes:
        report: `Report` of the frames that it was made with.
    """

    report: Report

    def __init__(self, model: Any, example: Any, told: Quantization, **options: Any) -> None:
        self.quantization = told
        super().__init__(model, example, **options)

    def measure(self, frames: Sequence[Any], masks: Sequence[Tensor]) -> Report:
        """What it costs in accuracy on other frames, given as to `quantize`."""
        given = [tuple(frame) if isinstance(frame, (tuple, list)) else (frame,) for frame in frames]
        return measure(SparseRun(self.model, self.example, **self.options), self, given, masks)

    def export(self, path: str | os.PathLike[str], **options: Any) -> Any:
        """As of a float run; halves are cast to float32 beside bytes. fp8 is of opset 21, or a newer one, and the
        states of its cached runs go through float16, to the same bits."""
        if self.quantization.dtype == torch.float8_e4m3fn:
            options = {"opset_version": 21, **options}  # whose Transpose takes float8, as shapes are inferred
        return super().export(path, **options)

    def _graph(self, inputs: Sequence[Any]) -> Graph:
        return quantize_graph(super()._graph(inputs), self.quantization)

    def __repr__(self) -> str:
        nodes, told = self.plan.graph.nodes, self.quantization
        ours = [node for node in nodes if node.kind == KIND]
        convolutions = len(ours) + sum(node.kind in ("conv", "conv_transpose") for node in nodes)
        between, name = sum(node.output.dtype == told.dtype for node in ours), dtype_name(told.dtype)
        counts = f"{len(ours)} of {convolutions} convolutions {name}, {between} of which write {name}"
        return f"{super().__repr__()[:-1]}; {counts}>"

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"quantization": self.quantization, "report": self.report}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"], state["example"], state["quantization"], **state["options"])  # type: ignore[misc]
        self.report = state["report"]


def _reported(run: SparseRun, told: Quantization, frames: Sequence[Any], masks: Sequence[Tensor]) -> QuantizedRun:
    made = QuantizedRun(run.model, run.example, told, **run.options)
    made.report = measure(run, made, frames, masks)
    return made


def _within(
    error: float, made: QuantizedRun, run: SparseRun, frames: Sequence[Any], masks: Sequence[Tensor]
) -> QuantizedRun:
    """With so many more layers in float that no output has a greater error."""
    if made.report.error <= error:
        return made
    told = made.quantization
    paths = list(dict.fromkeys(v.path for v in made.report.layers if v.computes == dtype_name(told.dtype)))

    def with_kept(kept: Sequence[str], count: int) -> QuantizedRun:
        return _reported(run, replace(told, keep=(*told.keep, *kept)), frames[:count], masks[:count])

    costs = {path: with_kept([p for p in paths if p != path], 1).report.error for path in paths}
    dearest = sorted(costs, key=lambda path: costs[path], reverse=True)
    for kept in range(1, len(dearest) + 1):
        rest = math.sqrt(sum(costs[path] ** 2 for path in dearest[kept:]))  # as of errors that are independent
        if rest <= error:
            made = with_kept(dearest[:kept], len(frames))
            if made.report.error <= error:
                break
    return made


# ---- calibration


def _ranges(
    run: SparseRun, frames: Sequence[Any], masks: Sequence[Tensor], told: Quantization, percentile: float
) -> dict[str, float]:
    """The largest magnitudes of what convolutions of bytes will read, by name."""
    found: dict[str, float] = {}
    walk, chosen = Walk(run), list[Node]()
    for inputs, mask in zip(frames, masks, strict=True):
        graph = walk.module(inputs).plan.graph
        for path in told.keep:
            if not any(node.path == path or node.path.startswith(path + ".") for node in graph.nodes):
                raise ValueError(f"sbnet: quantize: keep: expected paths of modules with layers, got {path!r}")
        kept = stays_float(graph, told)
        chosen = [node for node in graph.nodes if node.kind == "conv" and node not in kept]
        wanted = {v for node in chosen for v in (node.args[0], node.params.get("residual")) if v is not None}
        for value, tensor, pixels in walk(inputs, mask):
            inside = tensor.abs()[pixels.expand_as(tensor)] if value in wanted else tensor.new_empty(0)
            if not inside.numel():
                continue
            largest = float(_percentile(inside, percentile))
            if not math.isfinite(largest):
                raise ValueError(f"sbnet: quantize: frames: expected finite values, got {largest} in {value.name}")
            found[value.name] = max(found.get(value.name, 0.0), largest)
    for node in chosen:
        if node.args[0].name not in found:
            raise ValueError(f"sbnet: quantize: masks: expected active pixels in what {node.path} reads, got none")
    return found


def _percentile(values: Tensor, percentile: float) -> Tensor:
    if percentile == 100:
        return values.max()
    return values.kthvalue(max(1, math.ceil(values.numel() * percentile / 100))).values
