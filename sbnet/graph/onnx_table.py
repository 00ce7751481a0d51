"""What `OnnxNetwork` reads: every op by the versions whose meaning it knows, and every attribute of those.

A row is `Op: versions | attributes`. An attribute's mark says what becomes of it:

    name     it is honoured
    -name    it cannot change what an inference gives (a seed, a momentum)
    !name    it is refused by name, unless it has the value that the schema gives it by default

An op or version without a row is run by the body that ONNX itself gives it, if it has one, and refused by name if not.
An attribute that no row knows is refused. `tests/graph/test_onnx_table.py` holds the rows to onnx.defs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

ROWS = """
Abs Ceil Exp Floor Log Neg Reciprocal Sigmoid Sqrt Tanh: 6 13
Acos Asin Atan Cos Sin Tan: 7 22
Acosh Asinh Atanh Cosh Sinh: 9 22
BitwiseAnd BitwiseNot BitwiseOr BitwiseXor: 18
Erf Sign: 9 13
HardSwish: 14 22
IsInf: 10 20 | detect_negative detect_positive
IsNaN: 9 13 20
Identity: 1 13 14 16 19 21 23 24 25
Mish: 18 22
Not: 1
Relu: 6 13 14
Round: 11 22
Softplus Softsign: 1 22

Celu: 12 28 | alpha
Clip: 6 11 12 13 | min max
Elu: 6 22 | alpha
Gelu: 20 | approximate
HardSigmoid: 6 22 | alpha beta
LeakyRelu: 6 16 | alpha
PRelu: 7 9 16
Selu: 6 22 | alpha gamma
Shrink: 9 | bias lambd
Swish: 24 | alpha
ThresholdedRelu: 10 22 | alpha

Add Div Mul Sub: 7 13 14
And Or Xor: 7
Equal: 7 11 13 19
Greater Less: 7 9 13
GreaterOrEqual LessOrEqual: 12 16
BitShift: 11 28 | direction
Max Min: 6 8 12 13
Mean Sum: 6 8 13
Mod: 10 13 28 | fmod
Pow: 7 12 13 15
Where: 9 16
Cast: 6 9 13 19 21 23 24 25 28 | to !saturate !round_mode
CastLike: 15 19 21 23 24 25 | !saturate !round_mode
Dropout: 6 7 10 12 13 22 | -is_test -ratio -seed

Hardmax LogSoftmax Softmax: 1 11 13 | axis
LpNormalization: 1 22 | axis p
LRN: 1 13 | alpha beta bias size
BatchNormalization: 7 9 14 15 | epsilon momentum !spatial training_mode
MeanVarianceNormalization: 9 13 | axes
InstanceNormalization: 6 22 | epsilon
LayerNormalization: 17 | axis epsilon -stash_type
GroupNormalization: 18 21 | epsilon num_groups -stash_type

ReduceL1 ReduceL2 ReduceMean ReduceProd ReduceSumSquare: 1 11 13 18 | axes keepdims noop_with_empty_axes
ReduceSum: 1 11 13 | axes keepdims noop_with_empty_axes
ReduceLogSum ReduceLogSumExp: 1 11 13 18 28 | axes keepdims noop_with_empty_axes
ReduceMax ReduceMin: 1 11 12 13 18 20 | axes keepdims noop_with_empty_axes
ArgMax ArgMin: 1 11 12 13 | axis keepdims select_last_index
CumSum: 11 14 | exclusive reverse
CumProd: 26 | exclusive reverse
TopK: 1 10 11 24 | axis k largest -sorted

Conv: 1 11 22 | auto_pad dilations group kernel_shape pads strides
ConvTranspose: 1 11 22 | auto_pad dilations group kernel_shape output_padding output_shape pads strides
AveragePool: 7 10 11 19 22 | auto_pad ceil_mode count_include_pad dilations kernel_shape pads strides
MaxPool: 1 8 10 11 12 22 | auto_pad ceil_mode dilations kernel_shape pads !storage_order strides
LpPool: 2 11 18 22 | auto_pad ceil_mode dilations kernel_shape p pads strides
GlobalAveragePool GlobalMaxPool: 1 22
GlobalLpPool: 2 22 | p
Resize: 10 11 13 18 19 | antialias axes coordinate_transformation_mode cubic_coeff_a exclude_outside \
extrapolation_value keep_aspect_ratio_policy mode nearest_mode
Upsample: 7 9 | mode scales
AffineGrid: 20 | align_corners
GridSample: 16 20 22 | align_corners mode padding_mode
DepthToSpace: 1 11 13 28 | blocksize mode
SpaceToDepth: 1 13 28 | blocksize mode
Col2Im: 18 | dilations pads strides

Einsum: 12 28 | equation
Gemm: 7 9 11 13 | alpha beta transA transB
MatMul: 1 9 13
Det: 11 22

Concat: 4 11 13 | axis
Compress: 9 11 28 | axis
ConstantOfShape: 9 20 21 23 24 25 | value
Expand: 8 13
Flatten: 1 9 11 13 21 23 24 25 | axis
Gather: 1 11 13 | axis
GatherElements: 11 13 | axis
GatherND: 11 12 13 | batch_dims
Pad: 2 11 13 18 19 21 23 24 25 | mode pads value
Range: 11 27 | -stash_type
Reshape: 5 13 14 19 21 23 24 25 | allowzero
ReverseSequence: 10 28 | batch_axis time_axis
Scatter: 9 | axis
ScatterElements: 11 13 16 18 | axis reduction
ScatterND: 11 13 16 18 | reduction
Shape: 1 13 15 19 21 23 24 25 | end start
Size: 1 13 19 21 23 24 25
Slice: 1 10 11 13 | axes ends starts
Split: 2 11 13 18 | axis num_outputs split
Squeeze Unsqueeze: 1 11 13 21 23 24 25 | axes
Tile: 6 13
Transpose: 1 13 21 23 24 25 | perm
Trilu: 14 | upper
OneHot: 9 11 28 | axis
EyeLike: 9 22 | dtype k

ConvInteger: 10 | auto_pad dilations group kernel_shape pads strides
MatMulInteger: 10
QLinearConv: 10 | auto_pad dilations group kernel_shape pads strides
QLinearMatMul: 10 21
QuantizeLinear: 10 13 19 21 23 24 25 28 | axis !block_size output_dtype -precision !saturate
DequantizeLinear: 10 13 19 21 23 24 25 28 | axis !block_size output_dtype
"""
RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}


class Row(NamedTuple):
    """What is known of an op.

    Attributes:
        versions: whose meaning the op's function knows.
        attributes: {name: mark}, a mark is "", "-" or "!".
    """

    versions: frozenset[int]
    attributes: dict[str, str]


@functools.cache
def table() -> dict[str, Row]:
    """The rows, by op."""
    found: dict[str, Row] = {}
    for line in ROWS.replace("\\\n", "").splitlines():
        if not line.strip():
            continue
        names, _, rest = line.partition(":")
        versions, _, given = rest.partition("|")
        attributes = {word.lstrip("-!"): word[0] if word[0] in "-!" else "" for word in given.split()}
        row = Row(frozenset(map(int, versions.split())), attributes)
        found.update(dict.fromkeys(names.split(), row))
    return found


@functools.cache
def schema_of(op: str, opset: int) -> Any:
    """ONNX's schema of a standard op at an opset; None where it has none."""
    from onnx import defs

    try:
        return defs.get_schema(op, min(opset, defs.onnx_opset_version()), "")
    except Exception:  # onnx.defs.SchemaError: no op of this name
        return None


def has_rule(op: str, schema: Any) -> bool:
    """Is this version of an op among the rows?"""
    return op in table() and schema.since_version in table()[op].versions


def refused(op: str, schema: Any, attributes: dict[str, Any]) -> str:
    """What is wrong with the attributes of a node that has a rule: `attribute NAME: expected …`; else nothing."""
    from onnx import helper

    row = table()[op]
    for name, value in attributes.items():
        known = schema.attributes.get(name)
        if known is None:
            return f"attribute {name}: {op} of version {schema.since_version} has none of this name"
        mark = row.attributes.get(name, "!")
        if mark != "!":
            continue
        default = known.default_value
        usual = helper.get_attribute_value(default) if default.name else None
        usual = usual.decode() if isinstance(usual, bytes) else usual
        if value != usual:
            what = "none" if usual is None else repr(usual)
            return f"attribute {name}: expected {what}, got {value!r}, which is not read"
    return ""
