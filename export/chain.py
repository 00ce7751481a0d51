"""The convolutions of an exported chain as PyTorch's modules: the network that a model of `sbnet export` is."""

from __future__ import annotations

import os

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn

from sbnet.export.schemas import DOMAIN
from sbnet.nn.activations import activation_module


def network(path: str | os.PathLike[str]) -> nn.Sequential:
    """An nn.Sequential, in float32, of a model that takes x and gives a chain of convolutions of it.

    Raises:
        ValueError: the model is something else.
    """
    model = onnx.load(os.fspath(path))
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    modules: list[nn.Module] = []
    at, end = graph.input[0].name, graph.output[0].name
    while at != end:
        readers = [node for node in graph.node if at in node.input]
        node = readers[0] if len(readers) == 1 else None
        if node is not None and node.op_type == "Transpose":
            at = node.output[0]
            continue
        chained = node is not None and (node.domain, node.op_type) == (DOMAIN, "sparse_conv2d")
        if node is None or not chained or node.input[0] != at or any(node.input[6:7]) or node.input[1] not in weights:
            what = "several readers" if node is None else node.op_type
            raise ValueError(f"{path}: expected a chain of sparse_conv2d from x on, got {what} after {at}")
        bias, slope = (weights[node.input[k]] if any(node.input[k : k + 1]) else None for k in (5, 7))
        modules += _layer(node, weights[node.input[1]], bias, slope)
        at = node.output[0]
    return nn.Sequential(*modules).eval().requires_grad_(False)


def _layer(
    node: onnx.NodeProto, weight: onnx.TensorProto, bias: onnx.TensorProto | None, slope: onnx.TensorProto | None
) -> list[nn.Module]:
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    kernel = _tensor(weight).permute(0, 3, 1, 2)  # the op's own are KRSC
    groups, (outputs, inputs, *sides) = given.get("groups", 1), kernel.shape
    stride, padding, dilation = (given.get(n, [v, v]) for n, v in (("stride", 1), ("padding", 0), ("dilation", 1)))
    conv = nn.Conv2d(
        inputs * groups, outputs, (sides[0], sides[1]), tuple(stride), tuple(padding), tuple(dilation), groups,
        bias is not None,
    )  # fmt: skip
    conv.weight.data = kernel.contiguous()
    if bias is not None:
        conv.bias.data = _tensor(bias)  # type: ignore[union-attr]
    if slope is not None:
        prelu = nn.PReLU(outputs)
        prelu.weight.data = _tensor(slope)
        return [conv, prelu]
    activation = given.get("activation", b"none").decode()
    return [conv, *activation_module(activation, given.get("negative_slope", 0.01))]


def _tensor(tensor: onnx.TensorProto) -> torch.Tensor:
    return torch.from_numpy(np.array(numpy_helper.to_array(tensor), dtype=np.float32))
