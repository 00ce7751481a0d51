"""ONNX file -> nn.Module -> Graph: each node is a module named after it, whose op of PyTorch `capture` then reads.

What depends on shapes and constants alone (sizes of a Resize, shapes of a Reshape) is NumPy and gone before the graph.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sbnet.graph.capture import CaptureError, capture
from sbnet.graph.ir import Graph


def read_onnx(path: str | os.PathLike[str], inputs: Sequence[Any]) -> Graph:
    """The graph of an ONNX model for inputs of these shapes."""
    return capture(OnnxNetwork(path).to(inputs[0].device, inputs[0].dtype), inputs)


class OnnxNetwork(nn.Module):
    """A model of standard ONNX ops as a module of PyTorch; its weights are buffers, its nodes submodules.

    Args:
        path: the file. Feature maps are [N,C,H,W].

    Attributes:
        input_names, output_names: in the file's order; `forward` takes and returns tensors in it (one tensor, not a
            tuple of one).
        shapes: of the inputs, None for each dimension that the file leaves open.

    Raises:
        ValueError: the file is no ONNX model, or has an op that has no form in PyTorch here; one line names the node.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        onnx = _onnx()
        try:
            model = onnx.load(os.fspath(path))
        except FileNotFoundError:
            raise ValueError(f"sbnet: {path}: no such file") from None
        except Exception as error:  # protobuf raises classes of its own
            raise ValueError(f"sbnet: {path}: not an ONNX model: {str(error).splitlines()[0][:200]}") from error
        self.path, graph = str(path), model.graph
        self.opsets = {entry.domain: entry.version for entry in model.opset_import}
        known = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
        given = [value for value in graph.input if value.name not in known]
        self.input_names = [value.name for value in given]
        self.output_names = [value.name for value in graph.output]
        self.shapes = [[d.dim_value or None for d in value.type.tensor_type.shape.dim] for value in given]
        self.numbers: dict[str, np.ndarray] = {}
        self._buffer_of: dict[str, str] = {}
        self._steps: list[tuple[str, list[str], list[str]]] = []  # submodule, inputs, outputs
        for name, array in known.items():
            self._keep(name, array)
        for at, node in enumerate(graph.node):
            self._add(node, at)

    def _keep(self, name: str, array: np.ndarray) -> None:
        self.numbers[name] = array
        if np.issubdtype(array.dtype, np.floating):
            own = re.sub(r"\W", "_", name)
            while hasattr(self, own):
                own += "_"
            self.register_buffer(own, torch.from_numpy(array.copy()))
            self._buffer_of[name] = own

    def _add(self, node: Any, at: int) -> None:
        if node.op_type == "Constant" or (node.input and all(not i or i in self.numbers for i in node.input)):
            for name, array in zip(node.output, _folded(node, [self.numbers.get(i) for i in node.input]), strict=False):
                self._keep(name, array)
            return
        own = re.sub(r"\W+", "_", node.name).strip("_") or f"{node.op_type}_{at}"
        while hasattr(self, own):
            own += "_"
        self.add_module(own, OnnxOp(node, self.opsets.get(node.domain, 1), self.path))
        self._steps.append((own, list(node.input), list(node.output)))

    def forward(self, *inputs: Tensor) -> Any:
        """The model's outputs for its inputs."""
        env: dict[str, Any] = dict(self.numbers)
        env.update({name: getattr(self, own) for name, own in self._buffer_of.items()})
        env.update(zip(self.input_names, inputs, strict=True))
        for own, names, outputs in self._steps:
            values = [env[name] if name else None for name in names]
            op: Any = self.get_submodule(own)
            numbers = [self.numbers.get(name) if name in self.numbers else _number(env.get(name)) for name in names]
            found = op(values, numbers)
            env.update(zip(outputs, found if isinstance(found, (tuple, list)) else [found], strict=False))
        results = tuple(env[name] for name in self.output_names)
        return results[0] if len(results) == 1 else results


def _onnx() -> Any:
    try:
        import onnx
        import onnx.numpy_helper
    except ImportError as error:
        raise ImportError(f"sbnet: ONNX files need the extra onnx: pip install 'sbnet[onnx]' ({error})") from error
    return onnx


def _number(value: Any) -> np.ndarray | None:
    return value if isinstance(value, np.ndarray) else None


def _folded(node: Any, values: Sequence[Any]) -> list[np.ndarray]:
    """What a node gives whose inputs are known."""
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    named = {f"v{k}": v for k, v in enumerate(values) if v is not None}
    alone = type(node)()
    alone.CopyFrom(node)
    del alone.input[:]
    alone.input.extend(f"v{k}" if v is not None else "" for k, v in enumerate(values))
    graph = helper.make_graph(
        [alone], "one", [helper.make_tensor_value_info(n, 1, None) for n in named],
        [helper.make_tensor_value_info(n, 1, None) for n in alone.output if n],
    )  # fmt: skip
    return [np.asarray(v) for v in ReferenceEvaluator(helper.make_model(graph)).run(None, named)]


class OnnxOp(nn.Module):
    """One node of an ONNX model."""

    def __init__(self, node: Any, opset: int, path: str) -> None:
        super().__init__()
        from onnx import helper

        from sbnet.graph.onnx_elementwise import OPS

        self.node, self.opset = node, opset
        self.options = {a.name: _plain(helper.get_attribute_value(a)) for a in node.attribute}
        self.label = f"{path}: node {node.name or node.output[0]} ({node.op_type})"
        function = OPS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        if function is None:
            raise CaptureError(f"sbnet: {self.label}: op {node.op_type} is not read from ONNX files")
        self.function: Callable[..., Any] = function

    def forward(self, values: list[Any], numbers: list[Any]) -> Any:
        """What the node gives: tensors, or, of known sizes, arrays."""
        if (
            self.node.op_type != "Shape"
            and numbers
            and all(v is None or n is not None for v, n in zip(values, numbers, strict=True))
        ):
            return _folded(self.node, numbers)
        try:
            return self.function(Arguments(values, numbers, self.options, self.opset))
        except Unsupported as error:
            raise CaptureError(f"sbnet: {self.label}: {error}") from None


class Unsupported(ValueError):
    """An option that has no form in PyTorch."""


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


class Arguments:
    """Of a node: `a[0]` is its first input as a tensor, `a.number(1)` its second as an array, `a.axis` an option."""

    def __init__(self, values: list[Any], numbers: list[Any], options: dict[str, Any], opset: int) -> None:
        self.values, self.numbers, self.options, self.opset = values, numbers, options, opset
        self.like = next((v for v in values if isinstance(v, Tensor)), None)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, at: int) -> Any:
        """An input as a tensor; None where it is left out."""
        value = self.values[at] if at < len(self.values) else None
        if isinstance(value, np.ndarray):
            assert self.like is not None
            dtype = self.like.dtype if np.issubdtype(value.dtype, np.floating) else None
            return torch.as_tensor(value, dtype=dtype, device=self.like.device)
        return value

    def number(self, at: int, otherwise: Any = None) -> Any:
        """An input that is known, as a list or a number."""
        if at >= len(self.values) or self.values[at] is None:
            return otherwise
        if self.numbers[at] is None:
            raise Unsupported(f"input {at}: expected a constant, got one computed from values")
        return self.numbers[at].tolist()

    def option(self, name: str, otherwise: Any = None) -> Any:
        value = self.options.get(name, otherwise)
        return list(value) if isinstance(value, (list, tuple)) or hasattr(value, "extend") else value

    def either(self, name: str, at: int, otherwise: Any = None) -> Any:
        """An attribute in old opsets, an input in new ones."""
        return self.option(name) if name in self.options else self.number(at, otherwise)
