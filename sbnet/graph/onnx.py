"""ONNX file -> nn.Module -> Graph: each node is a module named after it, whose op of PyTorch `capture` then reads.

What depends on shapes and constants alone (sizes of a Resize, shapes of a Reshape) is NumPy and gone before the graph.
Which ops, versions and attributes are read says onnx_table.py, what they mean the functions of onnx_*.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sbnet.graph import onnx_arrange, onnx_elementwise, onnx_norms, onnx_resize, onnx_windows
from sbnet.graph.capture import CaptureError, capture
from sbnet.graph.ir import Graph
from sbnet.graph.onnx_run import TYPES, Floats, Unsupported, as_tensor, check, run_node
from sbnet.graph.refusal import VALUES

RULES = onnx_arrange, onnx_elementwise, onnx_norms, onnx_resize, onnx_windows  # imported for what they register


def read_onnx(path: str | os.PathLike[str], inputs: Sequence[Any], tokens: bool = False) -> Graph:
    """The graph of an ONNX model for inputs of these shapes. tokens: as of `capture`."""
    return capture(OnnxNetwork(path).to(inputs[0].device, inputs[0].dtype), inputs, tokens=tokens)


class OnnxNetwork(nn.Module):
    """A model of standard ONNX ops as a module of PyTorch; its weights are buffers, its nodes submodules.

    `.to(dtype)` and `.double()` mean the floating dtype of its first input: what the model itself casts to another one
    stays in that.

    Args:
        path: the file. Feature maps are [N,C,H,W].

    Attributes:
        input_names, output_names: in the file's order; `forward` takes and returns tensors in it (one tensor, not a
            tuple of one).
        fixed: constants of a file never change.
        shapes: of the inputs, None for each dimension that the file leaves open.
        dtypes: of the inputs.

    Raises:
        ValueError: the file is no ONNX model, or has an op, a version of one, or an attribute that is not read; one
            line names the node.
    """

    fixed = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path, model = str(path), _loaded(path)
        graph = model.graph
        self.opset = max([e.version for e in model.opset_import if e.domain in ("", "ai.onnx")], default=1)
        from onnx import numpy_helper

        if graph.sparse_initializer:
            raise CaptureError(
                f"sbnet: {path}: expected dense initializers, got {len(graph.sparse_initializer)} sparse"
            )
        known = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        given = [value for value in graph.input if value.name not in known]
        self.input_names = [value.name for value in given]
        self.output_names = [value.name for value in graph.output]
        self.shapes = [[d.dim_value or None for d in value.type.tensor_type.shape.dim] for value in given]
        self.dtypes = [self._dtype(value) for value in given]
        main = next((dtype for dtype in self.dtypes if dtype.is_floating_point), torch.float32)
        self.floats: Floats = (main, main)
        self.numbers: dict[str, np.ndarray] = {}
        self._buffer_of: dict[str, str] = {}
        self._steps: list[tuple[str, list[str], list[str]]] = []  # submodule, inputs, outputs
        for name, array in known.items():
            self._keep(name, array)
        for at, node in enumerate(graph.node):
            self._add(node, at)

    def _dtype(self, value: Any) -> torch.dtype:
        code = value.type.tensor_type.elem_type
        if code not in TYPES:
            raise CaptureError(
                f"sbnet: {self.path}: input {value.name}: expected a tensor of numbers, got {value.type}"
            )
        return TYPES[code]

    def _keep(self, name: str, array: np.ndarray) -> None:
        self.numbers[name] = array
        if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
            return
        own = re.sub(r"\W", "_", name)
        while hasattr(self, own):
            own += "_"
        self.register_buffer(own, as_tensor(array))
        self._buffer_of[name] = own

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> OnnxNetwork:
        super()._apply(fn, recurse)
        file, now = self.floats
        self.floats = file, fn(torch.empty(0, dtype=now)).dtype
        for name, own in self._buffer_of.items():  # constants of another dtype than the network's stay in it
            array, held = as_tensor(self.numbers[name]), getattr(self, own)
            if array.dtype != file and held.dtype != array.dtype:
                setattr(self, own, array.to(held.device))
        return self

    def _add(self, node: Any, at: int) -> None:
        op = OnnxOp(node, self.opset, self.path)
        if node.op_type != "If" and all(not name or name in self.numbers for name in node.input):
            numbers = [self.numbers.get(name) for name in node.input]
            for name, array in zip(node.output, op(numbers, numbers, self.floats), strict=False):
                if name:
                    self._keep(name, array)
            return
        own = re.sub(r"\W+", "_", node.name).strip("_") or f"{node.op_type}_{at}"
        while hasattr(self, own):
            own += "_"
        self.add_module(own, op)
        self._steps.append((own, list(node.input), list(node.output)))

    def forward(self, *inputs: Tensor) -> Any:
        """The model's outputs for its inputs."""
        env: dict[str, Any] = dict(self.numbers)
        env.update({name: getattr(self, own) for name, own in self._buffer_of.items()})
        env.update(zip(self.input_names, inputs, strict=True))
        known: dict[str, Any] = dict(self.numbers)
        for own, names, outputs in self._steps:
            op: Any = self.get_submodule(own)
            found = op([env[n] if n else None for n in names], [known.get(n) for n in names], self.floats, (env, known))
            for name, value in zip(outputs, found, strict=False):
                env[name] = value
                if isinstance(value, np.ndarray):
                    known[name] = value
        device = inputs[0].device if inputs else None
        results = tuple(
            as_tensor(v, device) if isinstance(v, np.ndarray) else v for v in (env[name] for name in self.output_names)
        )
        return results[0] if len(results) == 1 else results


def _loaded(path: str | os.PathLike[str]) -> Any:
    """The model, without functions of its own."""
    onnx = _onnx()
    try:
        model = onnx.load(os.fspath(path))
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
    except FileNotFoundError:
        raise ValueError(f"sbnet: {path}: no such file") from None
    except Exception as error:  # protobuf raises classes of its own
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"sbnet: {path}: expected an nn.Module or an ONNX model, got a file that is not ONNX: load a PyTorch file "
            f"and pass its nn.Module, or write it with torch.onnx.export ({first[:200]})"
        ) from error
    return model


def _onnx() -> Any:
    try:
        import onnx
        import onnx.inliner
        import onnx.numpy_helper
    except ImportError as error:
        raise ImportError(f"sbnet: ONNX files need the extra onnx: pip install 'sbnet[onnx]' ({error})") from error
    return onnx


class OnnxOp(nn.Module):
    """One node of an ONNX model."""

    def __init__(self, node: Any, opset: int, path: str) -> None:
        super().__init__()
        self.node, self.opset = node, opset
        self.label = f"{path}: node {node.name or next(iter(node.output), '')} ({node.op_type})"
        try:
            check(node, opset)
        except Unsupported as error:
            raise CaptureError(f"sbnet: {self.label}: {error}") from None

    def forward(self, values: list[Any], numbers: list[Any], floats: Floats, scope: Any = None) -> list[Any]:
        """What the node gives: tensors, or, of known sizes, arrays."""
        try:
            return run_node(self.node, self.opset, values, numbers, floats, scope)
        except Unsupported as error:
            raise CaptureError(f"sbnet: {self.label}: {error}") from None
        except Exception as error:  # what PyTorch says of shapes and dtypes that the op does not take
            if any(word in str(error) for word in VALUES):
                raise CaptureError(f"sbnet: {self.label}: sizes and branches may not depend on values") from error
            given = ", ".join("none" if v is None else f"{list(v.shape)} {v.dtype}" for v in values)
            said = next(iter(str(error).splitlines()), type(error).__name__)[:160].rstrip(" .")
            raise CaptureError(
                f"sbnet: {self.label}: inputs: expected what the op takes, got {given}: {said}"
            ) from error
