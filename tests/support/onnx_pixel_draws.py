"""What is drawn for ops of ONNX that look at one element or one axis at a time."""

from __future__ import annotations

import numpy as np
from onnx import numpy_helper

from support.onnx_draw import F32, I64, Draw, maker


@maker(
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "HardSwish",
    "Identity", "IsNaN", "Log", "Mish", "Neg", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Sinh",
    "Softplus", "Softsign", "Sqrt", "Tan", "Tanh", "GlobalAveragePool", "GlobalMaxPool", "Shape", "Size",
)  # fmt: skip
def _plain(d: Draw) -> None:
    d.maybe("start", -3, 0, 1, 2)
    d.maybe("end", -1, 2, 3, 9)


@maker(
    "Celu", "Elu", "HardSigmoid", "LeakyRelu", "Selu", "Shrink", "Swish", "ThresholdedRelu", "Gelu", "IsInf",
    "GlobalLpPool", "MeanVarianceNormalization",
)  # fmt: skip
def _numbers(d: Draw) -> None:
    for name in ("alpha", "beta", "gamma", "lambd"):
        d.maybe(name, 0.2, 0.5, 1.0, 1.7, 1 / 6)
    d.maybe("bias", -0.3, 0.0, 0.4)
    d.maybe("approximate", "none", "tanh")
    d.maybe("detect_negative", 0, 1)
    d.maybe("detect_positive", 0, 1)
    d.maybe("p", 1, 2, 3)
    d.maybe("axes", [0, 2, 3], [2, 3], [1])


@maker("Clip")
def _clip(d: Draw) -> None:
    low, high = d.rng.choice([(-0.5, 0.5), (0.0, 6.0), (0.0, 1.0), (0.5, -0.5)])
    if d.has("min"):
        d.maybe("min", low)
        d.maybe("max", high)
        return
    for value in (low, high):
        if d.rng.random() < 0.6:
            d.constant(value, F32)
        else:
            d.skip()


@maker("PRelu")
def _prelu(d: Draw) -> None:
    _, c, h, w = d.shape
    d.constant(d.floats(*d.rng.choice([(c, 1, 1), (1,), (1, c, 1, 1), (w,), (c, h, w)])))


@maker(
    "Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum", "Mean", "Greater", "Less", "GreaterOrEqual", "LessOrEqual",
    "Equal", "Mod",
)  # fmt: skip
def _two(d: Draw) -> None:
    _, c, h, w = d.shape
    for _ in range(d.rng.randint(0, 2) if d.op in ("Max", "Min", "Sum", "Mean") else 1):
        if d.rng.random() < 0.25:
            d.inputs.append("h")
        else:
            shape = d.rng.choice([(), (1,), (c, 1, 1), (1, c, 1, 1), (w,), (h, w), (c, h, w)])
            d.constant(d.floats(*shape, low=0.3, high=2.0))
    d.maybe("fmod", 1, always=True)


@maker("And", "Or", "Xor", "Not")
def _booleans(d: Draw) -> None:
    d.inputs = ["bools"]
    if d.op != "Not":
        d.constant(d.floats(*d.rng.choice([(1,), (d.shape[1], 1, 1), d.shape[1:]])) > 0)


@maker("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", "BitShift")
def _bits(d: Draw) -> None:
    shifts = d.op == "BitShift"
    d.inputs = ["bytes" if shifts else "ints"]
    d.maybe("direction", "LEFT", "RIGHT")
    if d.op != "BitwiseNot":
        d.constant(d.numbers.integers(0, 4, d.shape[1:]), np.uint8 if shifts else np.int32)


@maker("Det")
def _det(d: Draw) -> None:
    d.inputs = ["squares"]


@maker("Col2Im")
def _col2im(d: Draw) -> None:
    """Of channels that are columns of 2x2 windows."""
    d.inputs = ["columns"]
    _, _, h, w = d.shape
    d.maybe("pads", [0, 0, 0, 0], [1, 0, 0, 1])
    pads = d.attributes.get("pads", [0] * 4)
    d.constant([h + 1 - pads[0] - pads[2], w + 1 - pads[1] - pads[3]], I64)
    d.constant([2, 2], I64)
    d.maybe("strides", [1, 1])
    d.maybe("dilations", [1, 1])


@maker("Range")
def _range(d: Draw) -> None:
    d.inputs.clear()
    for value in (1.0, d.rng.choice([4.0, 7.5]), d.rng.choice([1.0, 0.5])):
        d.constant(value, F32)
    d.maybe("stash_type", 1)


@maker("ConstantOfShape")
def _constant_of_shape(d: Draw) -> None:
    d.inputs.clear()
    d.constant([2, 3], I64)
    d.maybe("value", numpy_helper.from_array(np.asarray([1.5], F32)), numpy_helper.from_array(np.asarray([3], I64)))


@maker("DequantizeLinear")
def _dequantize(d: Draw) -> None:
    d.inputs = ["bytes"]
    per_axis = d.version >= 13 and d.rng.random() < 0.5
    d.constant(d.floats(d.shape[1], low=0.01, high=0.1) if per_axis else 0.03, F32)
    d.constant(np.full(d.shape[1], 3) if per_axis else 3, np.uint8)
    d.maybe("axis", 1)


@maker("Where")
def _where(d: Draw) -> None:
    _, c, h, w = d.shape
    d.inputs.clear()
    d.constant(d.floats(*d.rng.choice([(1,), (c, 1, 1), (h, w)])) > 0)
    d.inputs += ["h"]
    d.constant(d.floats(*d.rng.choice([(1,), (c, 1, 1)])))


@maker("Cast")
def _cast(d: Draw) -> None:
    d.maybe("to", 1, 2, 3, 6, 7, 9, 10, 11, always=True)
    d.maybe("saturate", 0, 1)


@maker("CastLike")
def _cast_like(d: Draw) -> None:
    d.constant([1], d.rng.choice([np.float16, np.float64, np.int32, np.bool_]))


@maker("Dropout")
def _dropout(d: Draw) -> None:
    d.maybe("ratio", 0.3)
    d.maybe("seed", 7)
    d.outputs = d.rng.choice([1, 1, 2])


@maker("Softmax", "LogSoftmax", "Hardmax", "LpNormalization")
def _one_axis(d: Draw) -> None:
    d.maybe("axis", d.axis())
    d.maybe("p", 1, 2)


@maker("LRN")
def _lrn(d: Draw) -> None:
    d.maybe("size", 1, 3, 5)
    d.maybe("alpha", 0.1, 1.0)
    d.maybe("beta", 0.5, 0.75)
    d.maybe("bias", 1.0, 2.0)


@maker("BatchNormalization")
def _batch_norm(d: Draw) -> None:
    c = d.shape[1]
    for low in (0.5, -1.0, -1.0, 0.5):
        d.constant(d.floats(c, low=low, high=1.5))
    d.maybe("epsilon", 1e-5, 1e-2)
    d.maybe("momentum", 0.9, 0.3)
    d.maybe("spatial", 1)
    d.maybe("training_mode", 0, 1)
    d.outputs = 3 if d.attributes.get("training_mode") else 1


@maker("InstanceNormalization")
def _instance_norm(d: Draw) -> None:
    d.constant(d.floats(d.shape[1]))
    d.constant(d.floats(d.shape[1]))
    d.maybe("epsilon", 1e-5, 1e-2)


@maker("LayerNormalization", "RMSNormalization")
def _layer_norm(d: Draw) -> None:
    axis = d.axis()
    d.maybe("axis", axis)
    shape = d.shape[d.attributes.get("axis", -1) :]
    d.constant(d.floats(*shape))
    if d.op == "LayerNormalization" and d.rng.random() < 0.7:
        d.constant(d.floats(*shape))
    d.maybe("epsilon", 1e-5, 1e-2)
    d.maybe("stash_type", 1)


@maker("GroupNormalization")
def _group_norm(d: Draw) -> None:
    d.maybe("num_groups", 1, 2, 4)
    count = d.attributes["num_groups"] if d.version < 21 else d.shape[1]
    d.constant(d.floats(count))
    d.constant(d.floats(count))
    d.maybe("epsilon", 1e-5, 1e-2)


@maker("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
       "ReduceSum", "ReduceSumSquare")  # fmt: skip
def _reduce(d: Draw) -> None:
    d.maybe("keepdims", 0, 1)
    d.maybe("noop_with_empty_axes", 0, 1)
    if d.rng.random() < 0.75:
        d.either("axes", d.axes())


@maker("ArgMax", "ArgMin")
def _arg(d: Draw) -> None:
    d.maybe("axis", d.axis())
    d.maybe("keepdims", 0, 1)
    d.maybe("select_last_index", 0, 1)


@maker("CumSum", "CumProd")
def _running(d: Draw) -> None:
    d.constant(d.axis(), I64)
    d.maybe("exclusive", 0, 1)
    d.maybe("reverse", 0, 1)


@maker("TopK")
def _top_k(d: Draw) -> None:
    if d.has("k"):
        d.attributes["k"] = d.rng.randint(1, 3)
    else:
        d.constant([d.rng.randint(1, 3)], I64)
    d.maybe("axis", d.axis())
    d.maybe("largest", 0, 1)
    d.maybe("sorted", 1)
    d.outputs = 2
