"""Random ONNX models of standard ops: one op after a convolution, or a few after one another. What is drawn is valid by
ONNX's own schemas; whether ONNX Runtime runs it is for the caller to find out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import defs, helper, numpy_helper

F32, I64 = np.float32, np.int64
Shape = tuple[int, ...]


class Draw:
    """One node being drawn: its random numbers, the shape that it reads, and constants beside it."""

    def __init__(self, rng: random.Random, op: str, opset: int, shape: Shape, prefix: str = "") -> None:
        self.rng, self.op, self.opset, self.shape, self.prefix = rng, op, opset, shape, prefix
        self.schema = defs.get_schema(op, opset, "")
        self.version = self.schema.since_version
        self.numbers = np.random.default_rng(rng.randrange(1 << 30))
        self.constants: dict[str, np.ndarray] = {}
        self.inputs: list[str] = ["h"]
        self.attributes: dict[str, Any] = {}
        self.outputs = 1

    def has(self, name: str) -> bool:
        return name in self.schema.attributes

    def maybe(self, name: str, *values: Any, always: bool = False) -> None:
        """An attribute, where this version has it: always, or left out half the time."""
        required = self.has(name) and self.schema.attributes[name].required
        if self.has(name) and (always or required or self.rng.random() < 0.6):
            self.attributes[name] = self.rng.choice(values)

    def constant(self, array: Any, dtype: Any = None) -> None:
        name = f"{self.prefix}c{len(self.constants)}"
        self.constants[name] = np.asarray(array, dtype)
        self.inputs.append(name)

    def skip(self) -> None:
        self.inputs.append("")

    def either(self, name: str, array: Any, dtype: Any = I64) -> None:
        """An attribute in old versions, an input in new ones."""
        if self.has(name):
            self.attributes[name] = np.asarray(array, dtype).tolist()
        else:
            self.constant(array, dtype)

    def floats(self, *shape: int, low: float = -1.0, high: float = 1.0) -> np.ndarray:
        return self.numbers.uniform(low, high, shape).astype(F32)

    def ints(self, count: int, low: int, high: int) -> list[int]:
        return [self.rng.randint(low, high) for _ in range(count)]

    def axis(self) -> int:
        """Negative ones only where the schema's text speaks of them: from version 11 on, as a rule."""
        rank = len(self.shape)
        return self.rng.randint(-rank if self.version >= 11 else 0, rank - 1)

    def axes(self) -> list[int]:
        rank = len(self.shape)
        found = self.rng.sample(range(rank), self.rng.randint(1, rank))
        return [k - rank if self.version >= 11 and self.rng.random() < 0.4 else k for k in found]


# What an op reads that takes no floats of four dimensions, made of "h" beside it.
BEFORE: dict[str, list[tuple[str, list[str], dict[str, Any]]]] = {
    "flat": [("Reshape", ["h", "rows"], {})],
    "bools": [("Greater", ["h", "zero"], {})],
    "ints": [("Mul", ["h", "ten"], {}), ("Cast", [], {"to": 6})],
    "bytes": [("Abs", ["h"], {}), ("Mul", ["", "ten"], {}), ("Cast", [], {"to": 2})],
    "squares": [("Slice", ["h", "from", "upto", "last"], {})],
    "columns": [("Reshape", ["h", "columns_of"], {})],
}


def before(name: str, shape: Shape, prefix: str = "") -> tuple[list[Any], dict[str, np.ndarray]]:
    """(nodes that make it, constants that they read)."""
    n, c, h, w = shape
    side = min(h, w, 5)
    constants = {
        "rows": np.asarray([-1, w], I64), "zero": np.asarray(0, F32), "ten": np.asarray(10, F32),
        "from": np.zeros(2, I64), "upto": np.asarray([side, side], I64), "last": np.asarray([2, 3], I64),
        "columns_of": np.asarray([n, c, -1], I64),
    }  # fmt: skip
    steps, nodes, used, last = BEFORE[name], [], {}, ""
    for at, (op, inputs, attributes) in enumerate(steps):
        made = name if at == len(steps) - 1 else f"{name}{at}"
        given = [i or last for i in inputs] or [last]
        used |= {i: constants[i] for i in given if i in constants}
        nodes.append(helper.make_node(op, given, [made], **attributes))
        last = made
    return nodes, used


Maker = Callable[[Draw], None]
MAKERS: dict[str, Maker] = {}


def maker(*names: str) -> Callable[[Maker], Maker]:
    def register(function: Maker) -> Maker:
        MAKERS.update(dict.fromkeys(names, function))
        return function

    return register


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
    n, c, h, w = d.shape
    d.constant(d.floats(*d.rng.choice([(c, 1, 1), (1,), (1, c, 1, 1), (w,), (c, h, w)])))


@maker("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum", "Mean", "Greater", "Less", "GreaterOrEqual", "LessOrEqual",
       "Equal", "Mod")  # fmt: skip
def _two(d: Draw) -> None:
    n, c, h, w = d.shape
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
    n, c, h, w = d.shape
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
    n, c, h, w = d.shape
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


def _window(d: Draw, kernel: list[int], same: bool = True) -> None:
    d.maybe("kernel_shape", kernel)
    d.maybe("strides", [1, 1], [2, 2], [2, 1], [3, 2])
    d.maybe("dilations", [1, 1], [2, 1], [2, 2])
    d.maybe("ceil_mode", 0, 1)
    d.maybe("count_include_pad", 0, 1)
    if same and d.rng.random() < 0.35:
        d.maybe("auto_pad", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")
    if d.attributes.get("auto_pad", "NOTSET") == "NOTSET":
        most = [k - 1 for k in kernel]
        d.maybe("pads", [0, 0, 0, 0], [most[0] // 2, most[1] // 2] * 2, [d.rng.randint(0, m) for m in most * 2])


@maker("MaxPool", "AveragePool", "LpPool")
def _pool(d: Draw) -> None:
    _window(d, d.rng.choice([[1, 1], [2, 2], [3, 3], [3, 2], [4, 3]]))
    d.maybe("p", 1, 2, 3)


@maker("Conv")
def _conv(d: Draw) -> None:
    kernel, c = d.rng.choice([[1, 1], [3, 3], [2, 3], [4, 4]]), d.shape[1]
    d.maybe("group", 1, 2, c)
    d.constant(d.floats(2 * c, c // d.attributes.get("group", 1), *kernel))
    if d.rng.random() < 0.6:
        d.constant(d.floats(2 * c))
    _window(d, kernel)


@maker("ConvTranspose")
def _conv_transpose(d: Draw) -> None:
    kernel, c = d.rng.choice([[1, 1], [3, 3], [2, 3], [4, 4]]), d.shape[1]
    d.maybe("group", 1, 2, c)
    d.constant(d.floats(c, 2, *kernel))
    if d.rng.random() < 0.6:
        d.constant(d.floats(2 * d.attributes.get("group", 1)))
    _window(d, kernel)
    stride, dilation = d.attributes.get("strides", [1, 1]), d.attributes.get("dilations", [1, 1])
    most = [max(s, 1) - 1 for s, _ in zip(stride, dilation, strict=True)]
    if d.rng.random() < 0.4:
        d.attributes["output_padding"] = [d.rng.randint(0, m) for m in most]
    if d.rng.random() < 0.25 and "pads" not in d.attributes:
        full = [(n - 1) * s + g * (k - 1) + 1 for n, s, g, k in zip(d.shape[2:], stride, dilation, kernel, strict=True)]
        d.attributes["output_shape"] = [f - d.rng.randint(-1, min(k - 1, 2)) for f, k in zip(full, kernel, strict=True)]
        d.attributes.pop("output_padding", None)


SCALES = [0.4, 0.5, 0.75, 1.0, 1.5, 1.6, 2.0, 2.3, 3.0]


@maker("Resize")
def _resize(d: Draw) -> None:
    if d.version < 11:
        d.constant([1, 1, d.rng.choice(SCALES), d.rng.choice(SCALES)], F32)
        d.maybe("mode", "nearest", "linear")
        return
    mode = d.rng.choice(["nearest", "linear", "cubic"])
    if mode != "nearest" or d.rng.random() < 0.6:
        d.attributes["mode"] = mode
    d.maybe("coordinate_transformation_mode", *("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"),
            *(["tf_crop_and_resize"] if d.rng.random() < 0.3 else []),
            *(["half_pixel_symmetric"] if d.version >= 19 else []))  # fmt: skip
    if mode == "nearest":
        d.maybe("nearest_mode", "round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    if mode == "cubic":
        d.maybe("cubic_coeff_a", -0.75, -0.5)
        d.maybe("exclude_outside", 0, 1)
    if mode != "nearest" and d.rng.random() < 0.5:
        d.maybe("antialias", 0, 1)
    crops = d.attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    axes = [0, 1, 2, 3]
    if d.has("axes") and d.rng.random() < 0.4:
        axes = d.attributes["axes"] = d.rng.choice([[2, 3], [3, 2], [-2, -1], [3]])
    if crops:
        d.maybe("extrapolation_value", 0.0, 2.5)
        planes = [k % 4 in (2, 3) for k in axes]
        d.constant([0.1 if p else 0.0 for p in planes] + [d.rng.choice([0.8, 1.2]) if p else 1.0 for p in planes], F32)
    else:
        d.skip()
    if d.rng.random() < 0.5:
        d.constant([d.rng.choice(SCALES) if k % 4 in (2, 3) else 1 for k in axes], F32)
    else:
        d.skip()
        d.constant([d.rng.randint(3, 20) if k % 4 in (2, 3) else d.shape[k] for k in axes], I64)
        d.maybe("keep_aspect_ratio_policy", *(["stretch"] if len(axes) > 2 else ["stretch", "not_larger", "not_smaller"]))


@maker("Upsample")
def _upsample(d: Draw) -> None:
    d.maybe("mode", "nearest", "linear")
    d.either("scales", [1, 1, d.rng.choice([1.0, 1.5, 2.0, 3.0]), d.rng.choice([1.0, 2.0, 2.3])], F32)


@maker("GridSample")
def _grid_sample(d: Draw) -> None:
    names = ("bilinear", "nearest", "bicubic") if d.version < 20 else ("linear", "nearest", "cubic")
    d.constant(d.floats(d.shape[0], 5, 6, 2, low=-1.2, high=1.2))
    d.maybe("mode", *names)
    d.maybe("padding_mode", "zeros", "border", "reflection")
    d.maybe("align_corners", 0, 1)


@maker("DepthToSpace", "SpaceToDepth")
def _shuffle(d: Draw) -> None:
    d.maybe("blocksize", 2, always=True)
    d.maybe("mode", "DCR", "CRD")


@maker("Gemm")
def _gemm(d: Draw) -> None:
    d.inputs.clear()
    d.inputs.append("flat")
    d.maybe("transA", 0, 1)
    d.maybe("transB", 0, 1)
    rows, inner, columns = d.shape[0] * d.shape[1] * d.shape[2], d.shape[-1], d.rng.randint(2, 5)
    if d.attributes.get("transA"):
        rows, inner = inner, rows
    d.maybe("alpha", 1.0, 0.5)
    d.maybe("beta", 1.0, 2.0)
    d.constant(d.floats(*((columns, inner) if d.attributes.get("transB") else (inner, columns))))
    if d.version < 11 or d.rng.random() < 0.7:
        d.constant(d.floats(*d.rng.choice([(columns,), (1, columns), (rows, 1), (rows, columns), ()])))


@maker("MatMul")
def _matmul(d: Draw) -> None:
    d.constant(d.floats(*d.rng.choice([(), (d.shape[1],)]), d.shape[-1], 5))


@maker("Einsum")
def _einsum(d: Draw) -> None:
    d.constant(d.floats(d.shape[1], 3))
    d.attributes["equation"] = d.rng.choice(["nchw,cd->ndhw", "nchw, cd -> nhwd", "...chw,cd->...dhw"])


@maker("Concat")
def _concat(d: Draw) -> None:
    d.maybe("axis", d.axis(), always=True)
    d.inputs += ["h"] * d.rng.randint(0, 2)


@maker("Split")
def _split(d: Draw) -> None:
    axis = d.axis()
    d.maybe("axis", axis, always=True)
    n = d.shape[axis]
    d.outputs = d.rng.randint(1, min(n, 3))
    even = d.version >= 18 or n % d.outputs == 0
    if not even or d.rng.random() < 0.5:
        d.either("split", [1] * (d.outputs - 1) + [n - d.outputs + 1])
    elif d.has("num_outputs"):
        d.attributes["num_outputs"] = d.outputs


@maker("Slice")
def _slice(d: Draw) -> None:
    axes = d.rng.sample(range(4), d.rng.randint(1, 3))
    starts, ends = [d.rng.choice([0, 1, -3, 0]) for _ in axes], [d.rng.choice([2, 4, -1, 1 << 40]) for _ in axes]
    if d.has("starts"):
        d.attributes |= {"starts": starts, "ends": ends, "axes": axes}
        return
    steps = [d.rng.choice([1, 1, 2, -1, -2]) for _ in axes]
    for k, step in enumerate(steps):
        if step < 0:
            starts[k], ends[k] = d.rng.choice([(-1, -(1 << 40)), (3, 0), (100, 1)])
    for values in (starts, ends, axes, steps):
        d.constant(values, I64)


@maker("Gather")
def _gather(d: Draw) -> None:
    axis = d.axis()
    d.maybe("axis", axis, always=True)
    n = d.shape[axis]
    low = -n if d.version >= 11 else 0
    shape = d.rng.choice([(), (2,), (2, 3)])
    d.constant(d.numbers.integers(low, n, shape), I64)


@maker("GatherElements", "ScatterElements", "Scatter")
def _elements(d: Draw) -> None:
    axis = d.axis()
    d.maybe("axis", axis, always=True)
    shape = [*d.shape]
    shape[axis] = d.shape[axis] - 1
    index = np.argsort(d.numbers.random(d.shape), axis)
    index = np.take(index, range(shape[axis]), axis)
    d.constant(index, I64)
    if d.op != "GatherElements":
        d.constant(d.floats(*shape))
        d.maybe("reduction", "none", "add", "mul", *(["max", "min"] if d.version >= 18 else []))


@maker("GatherND")
def _gather_nd(d: Draw) -> None:
    d.maybe("batch_dims", 0, 1)
    batch = d.attributes.get("batch_dims", 0)
    depth = d.rng.randint(1, 3 - batch)
    front = d.shape[:batch]
    d.constant(np.stack([d.numbers.integers(0, d.shape[batch + k], (*front, 3)) for k in range(depth)], -1), I64)


@maker("ScatterND")
def _scatter_nd(d: Draw) -> None:
    depth = d.rng.randint(1, 3)
    places = [d.numbers.permutation(d.shape[k])[:1] for k in range(depth)]
    d.constant(np.stack(places, -1), I64)
    d.constant(d.floats(1, *d.shape[depth:]))
    d.maybe("reduction", "none", "add", "mul", *(["max", "min"] if d.version >= 18 else []))


@maker("Compress")
def _compress(d: Draw) -> None:
    axis = d.axis()
    d.maybe("axis", axis, always=True)
    d.constant(d.numbers.random(d.shape[axis]) > 0.3, np.bool_)


@maker("Reshape")
def _reshape(d: Draw) -> None:
    n, c, h, w = d.shape
    d.constant(d.rng.choice([[0, -1], [0, 0, -1], [n, c, h * w], [0, 2, -1, h, w], [-1]]), I64)
    d.maybe("allowzero", 0)


@maker("Flatten")
def _flatten(d: Draw) -> None:
    d.maybe("axis", *range(-4 if d.version >= 11 else 0, 5))


@maker("Transpose")
def _transpose(d: Draw) -> None:
    d.maybe("perm", [0, 2, 3, 1], [0, 1, 3, 2], [3, 2, 1, 0])


@maker("Squeeze")
def _squeeze(d: Draw) -> None:
    if d.rng.random() < 0.7:
        d.either("axes", [0])


@maker("Unsqueeze")
def _unsqueeze(d: Draw) -> None:
    d.either("axes", d.rng.choice([[0], [4], [1, 3], [0, 2]] + ([[-1], [-2, 0]] if d.version >= 11 else [])))


@maker("Expand")
def _expand(d: Draw) -> None:
    n, c, h, w = d.shape
    d.constant(d.rng.choice([[1], [3, 1, 1, 1, 1], [n, c, h, w], [1, c, 1, 1]]), I64)


@maker("Tile")
def _tile(d: Draw) -> None:
    d.constant(d.rng.choice([[1, 1, 1, 1], [1, 2, 1, 1], [1, 1, 2, 3], [2, 1, 1, 1]]), I64)


@maker("Trilu")
def _trilu(d: Draw) -> None:
    if d.rng.random() < 0.6:
        d.constant(d.rng.choice([-2, 0, 1]), I64)
    d.maybe("upper", 0, 1)


@maker("ReverseSequence")
def _reverse(d: Draw) -> None:
    batch, time = d.rng.choice([(0, 1), (1, 0)])
    d.constant([d.rng.randint(1, d.shape[time]) for _ in range(d.shape[batch])], I64)
    d.attributes |= {"batch_axis": batch, "time_axis": time}


@maker("Pad")
def _pad(d: Draw) -> None:
    d.maybe("mode", *("constant", "reflect", "edge"), *(["wrap"] if d.version >= 19 else []))
    mode = d.attributes.get("mode", "constant")
    low = -1 if mode == "constant" else 0
    pads = [d.rng.randint(low, 2) if k % 4 > 1 else 0 for k in range(8)]
    if d.has("pads"):
        d.attributes["pads"] = pads
        if mode == "constant":
            d.maybe("value", 0.7)
        return
    axes = d.version >= 18 and d.rng.random() < 0.4
    d.constant([pads[2], pads[3], pads[6], pads[7]] if axes else pads, I64)
    if mode == "constant" and d.rng.random() < 0.5:
        d.constant(0.7, F32)
    elif axes:
        d.skip()
    if axes:
        d.constant(d.rng.choice([[2, 3], [-2, -1]]), I64)


@maker("CenterCropPad")
def _center_crop(d: Draw) -> None:
    d.constant([d.rng.randint(3, 12), d.rng.randint(3, 12)], I64)
    d.attributes["axes"] = [2, 3]


@maker("QuantizeLinear")
def _quantize(d: Draw) -> None:
    c = d.shape[1]
    per_axis = d.version >= 13 and d.rng.random() < 0.5
    kind = d.rng.choice([np.uint8, np.int8])
    d.constant(d.floats(c, low=0.01, high=0.1) if per_axis else 0.03, F32)
    d.constant(np.full(c, 3) if per_axis else 3, kind)
    d.maybe("axis", 1)


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
    "Conv", "Conv", "ConvTranspose", "MaxPool", "AveragePool", "Resize", "Relu", "Clip", "LeakyRelu", "Sigmoid", "Add", "Mul",
    "BatchNormalization", "InstanceNormalization", "Concat", "Slice", "Pad", "Softmax", "PRelu", "HardSwish",
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
