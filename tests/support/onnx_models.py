"""Random ONNX models of standard ops: one op after a convolution, or a few after one another. What is drawn is valid by
ONNX's own schemas; whether ONNX Runtime runs it is for the caller to find out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from support import onnx_pixel_draws, onnx_plane_draws
from support.onnx_draw import BEFORE, F32, MAKERS, Draw, Shape, before

DRAWS = onnx_pixel_draws, onnx_plane_draws  # imported for what they register


def names() -> list[str]:
    return sorted(MAKERS)


def drawn(rng: random.Random, op: str, opset: int, shape: Shape, prefix: str = "") -> Draw | None:
    """A node of this op; None where the opset has none, or no longer."""
    try:
        d = Draw(rng, op, opset, shape, prefix)
    except Exception:  # onnx.defs.SchemaError
        return None
    if d.schema.deprecated:
        return None
    MAKERS[op](d)
    while d.inputs and d.inputs[-1] == "":
        d.inputs.pop()
    return d


def one_op(rng: random.Random, op: str, opset: int) -> tuple[onnx.ModelProto, np.ndarray, Draw] | None:
    """A 1x1 convolution and then one op: (model, its input, the node), or None where the opset has no such op."""
    n, c, h, w = rng.choice([1, 1, 2]), 4, rng.choice([6, 8, 11]), rng.choice([6, 9, 14])
    if op in ("DepthToSpace", "SpaceToDepth"):
        h, w = 6, 8
    d = drawn(rng, op, opset, (n, c, h, w))
    if d is None:
        return None
    nodes = [helper.make_node("Conv", ["x", "w"], ["h"], "conv")]
    constants = {"w": d.numbers.uniform(-0.6, 0.6, (c, 3, 1, 1)).astype(F32), **d.constants}
    for name in set(d.inputs) & set(BEFORE):
        more, used = before(name, d.shape)
        nodes, constants = nodes + more, constants | used
    outputs = [f"y{k}" for k in range(d.outputs)]
    nodes.append(helper.make_node(op, d.inputs, outputs, op.lower(), **d.attributes))
    return made(nodes, (n, 3, h, w), constants, outputs, opset), d.numbers.standard_normal((n, 3, h, w)).astype(F32), d


def made(nodes: Any, shape: Shape, constants: dict[str, np.ndarray], outputs: list[str], opset: int) -> onnx.ModelProto:
    """A model with the input x."""
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", 1, shape)],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(v, n) for n, v in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    return onnx.shape_inference.infer_shapes(model)


# Where rounding decides on which side of a step a value falls, an error is none: their results are outputs alone.
STEPS = {
    "ArgMax", "ArgMin", "Cast", "CastLike", "Ceil", "Equal", "Floor", "Greater", "GreaterOrEqual", "Hardmax", "IsInf",
    "IsNaN", "Less", "LessOrEqual", "Mod", "QuantizeLinear", "Round", "Sign",
}  # fmt: skip
# Which make a small error a large one somewhere, or order equal values: not in a chain.
STEEP = {
    "Acos", "Acosh", "Asin", "Atanh", "Cosh", "CumProd", "Div", "Exp", "Log", "LogSoftmax", "LpNormalization", "Pow",
    "Reciprocal", "ReduceLogSum", "ReduceProd", "Sinh", "Sqrt", "Tan", "TopK",
}  # fmt: skip
USUAL = [
    "Conv", "Conv", "ConvTranspose", "MaxPool", "AveragePool", "Resize", "Relu", "Clip", "LeakyRelu", "Sigmoid", "Add",
    "Mul", "BatchNormalization", "InstanceNormalization", "Concat", "Slice", "Pad", "Softmax", "PRelu", "HardSwish",
]  # fmt: skip


class Chain:
    """A graph of a few nodes, grown one at a time: each reads the value before it, some an earlier one of its shape.

    Args:
        runs: what ONNX Runtime gives for a model; None where it does not run it. A node that it does not run is not
            kept.
    """

    def __init__(self, rng: random.Random, opset: int, runs: Callable[[onnx.ModelProto, np.ndarray], Any]) -> None:
        self.rng, self.opset, self.runs = rng, opset, runs
        n, h, w = rng.choice([1, 1, 1, 2]), rng.choice([8, 12, 16]), rng.choice([8, 12, 20])
        numbers = np.random.default_rng(rng.randrange(1 << 30))
        self.x = numbers.standard_normal((n, 3, h, w)).astype(F32)
        self.constants = {"w": numbers.uniform(-0.6, 0.6, (4, 3, 3, 3)).astype(F32)}
        self.nodes = [helper.make_node("Conv", ["x", "w"], ["v0"], "conv", pads=[1, 1, 1, 1])]
        self.shapes: dict[str, Shape] = {"v0": (n, 4, h, w)}
        self.last, self.outputs = "v0", list[str]()

    def model(self) -> onnx.ModelProto:
        outputs = list(dict.fromkeys([*self.outputs, self.last]))
        return made(self.nodes, self.x.shape, self.constants, outputs, self.opset)

    def grow(self) -> None:
        """One node more, if the one drawn can be run."""
        at = len(self.nodes)
        op = self.rng.choice(USUAL if self.rng.random() < 0.7 else names())
        d = drawn(self.rng, op, self.opset, self.shapes[self.last], f"n{at}_")
        if d is None or op in STEEP or set(d.inputs) & set(BEFORE):
            return
        like = [v for v, shape in self.shapes.items() if shape == self.shapes[self.last]]
        inputs, first = list[str](), True
        for name in d.inputs:
            inputs.append((self.last if first else self.rng.choice(like)) if name == "h" else name)
            first = first and name != "h"
        outputs = [f"v{at}"] + [f"v{at}_{k}" for k in range(1, d.outputs)]
        before_it = self.nodes, self.constants, self.outputs, self.last
        self.nodes = [*self.nodes, helper.make_node(op, inputs, outputs, f"{op}{at}", **d.attributes)]
        self.constants = self.constants | d.constants
        self.outputs, self.last = [*self.outputs, *outputs[1:]], outputs[0]
        found = self.runs(self.model(), self.x)
        if found is None or not all(value.size for value in found):
            self.nodes, self.constants, self.outputs, self.last = before_it
            return
        value = found[-1]
        kept = value.ndim == 4 and value.dtype == F32 and 0 < value.size < 40_000 and op not in STEPS
        if kept and len(value) == len(self.x) and np.isfinite(value).all() and np.abs(value).max() < 1e4:
            self.shapes[self.last] = value.shape
        else:  # an output; the chain goes on from before it
            self.outputs, self.last = [*self.outputs, self.last], before_it[3]
