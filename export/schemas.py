"""onnx.defs schemas of the domain `sbnet`: what onnx.checker and onnx.shape_inference know of the ops.

The ops themselves are csrc/ort_binding/; names, order and types here are theirs (tests/export/test_export.py holds them
together).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnx import TensorProto
from onnx.defs import OpSchema
from onnx.shape_inference import InferenceContext, InferenceError

from sbnet.geometry import conv_transpose_output_size, pool_output_size
from sbnet.ops.lists.pyramid import CONSUMER_NUMBERS
from sbnet.ops.masked.conv import ACTIVATIONS

DOMAIN = "sbnet"
VERSION = 1
FORMAT = 1  # kFormat of csrc/ort_binding/common.h: what a node means, raised when an older library would misread it

Dim = int | str | None
Dims = list[Dim]

FLOATS = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)")
MASKS = ("tensor(bool)", "tensor(uint8)", *FLOATS)
INT32, INT64 = "tensor(int32)", "tensor(int64)"
REQUIRED = object()


@dataclass(frozen=True)
class Op:
    """One op. Inputs whose name ends in ? are optional, an output whose name ends in * stands for any number of them;
    `infer` gets the node and returns the shapes of the outputs."""

    name: str
    doc: str
    inputs: Sequence[tuple[str, str]]
    outputs: Sequence[tuple[str, str]]
    attributes: dict[str, tuple[OpSchema.AttrType, Any]]
    types: dict[str, tuple[str, ...]]
    infer: Callable[[NodeView], list[Dims | None]] = field(repr=False)


class NodeView:
    """A node under shape inference."""

    def __init__(self, op: Op, context: InferenceContext) -> None:
        self.op, self.context = op, context

    def any_shape(self, index: int) -> Dims | None:
        """Dimensions of an input, None where not even the rank is known."""
        if index >= self.context.get_num_inputs() or not self.context.has_input(index):
            return None
        kind = self.context.get_input_type(index)
        if kind is None or not kind.tensor_type.HasField("shape"):
            return None
        return [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in kind.tensor_type.shape.dim]

    def shape(self, index: int, rank: int) -> Dims | None:
        """As any_shape. A wrong rank is an error."""
        dims = self.any_shape(index)
        if dims is not None and len(dims) != rank:
            name = self.op.inputs[index][0].rstrip("?")
            raise InferenceError(f"sbnet::{self.op.name}: {name}: {len(dims)} dimensions; {rank} are wanted")
        return dims

    def attribute(self, name: str, otherwise: Any = None) -> Any:
        value = self.context.get_attribute(name)
        return otherwise if value is None else onnx.helper.get_attribute_value(value)

    def element_type(self, index: int) -> int:
        return self.context.get_input_type(index).tensor_type.elem_type


def _scaled(dim: Dim, f: Callable[[int], int]) -> Dim:
    return f(dim) if isinstance(dim, int) else None


def _reduce_mask(node: NodeView) -> list[Dims | None]:
    mask = node.shape(0, 3) or [None] * 3
    size, count = node.attribute("bsize"), node.attribute("bcount")
    blocks = count or [_scaled(mask[1 + d], lambda v, d=d: -(-v // size[d])) for d in range(2)]  # type: ignore[misc]
    block_map = [mask[0], *blocks]
    rows: Dim = node.attribute("capacity", -1)
    if rows == -1:
        known = [d for d in block_map if isinstance(d, int)]
        rows = known[0] * known[1] * known[2] if len(known) == 3 else None
    return [[rows, 3], [1], [1], block_map]


def _sparse_gather(node: NodeView) -> list[Dims | None]:
    x, indices = node.shape(0, 4) or [None] * 4, node.shape(1, 2) or [None] * 2
    bh, bw = node.attribute("bsize")
    return [[indices[0], x[3], bh, bw] if node.attribute("transpose", 0) else [indices[0], bh, bw, x[3]]]


def _like(index: int) -> Callable[[NodeView], list[Dims | None]]:
    return lambda node: [node.shape(index, 4)]


def _fringe(node: NodeView) -> list[Dims | None]:
    block_map, size = node.shape(0, 3), node.attribute("size")
    pixels: Dim = node.attribute("capacity", -1)
    if pixels == -1:
        batch = block_map[0] if block_map else None
        pixels = batch * size[0] * size[1] if isinstance(batch, int) and size else None
    return [[pixels], [1]]


def _mask_pyramid(node: NodeView) -> list[Dims | None]:
    mask, bsizes = node.shape(0, 3), node.attribute("bsizes")
    sizes = node.attribute("sizes") or [None] * len(bsizes)
    batch = mask[0] if mask else None

    def product(*dims: Dim) -> Dim:
        numbers = [d for d in dims if isinstance(d, int)]
        return math.prod(numbers) if len(numbers) == len(dims) else None

    lists: list[Dims | None] = []
    for k in range(0, len(bsizes), 2):
        rows, columns = (_scaled(sizes[k + d], lambda v, d=k + d: -(-v // bsizes[d])) for d in range(2))  # type: ignore[misc]
        lists += [[product(batch, rows, columns), 3], [1], [1], [batch, rows, columns]]
    fringes, at = node.attribute("fringes", []), 0
    while at + 1 < len(fringes):
        k = 2 * fringes[at]
        lists += [[product(batch, *sizes[k : k + 2])], [1]]
        at += 2 + CONSUMER_NUMBERS * fringes[at + 1]
    return lists


def _sparse_conv2d(node: NodeView) -> list[Dims | None]:
    x, weight = node.shape(0, 4), node.shape(1, 4)
    like = node.shape(9, 4) or node.shape(6, 4) or [None] * 4
    stride, padding, dilation = (node.attribute(n, [v, v]) for n, v in (("stride", 1), ("padding", 0), ("dilation", 1)))
    y: Dims = [x[0] if x else None, None, None, weight[0] if weight else None]
    for d in range(2):
        side, taps = (x[1 + d], weight[1 + d]) if x and weight else (None, None)
        if isinstance(taps, int):
            reach = dilation[d] * (taps - 1)
            same = stride[d] == 1 and 2 * padding[d] == reach
            extra, step = 2 * padding[d] - reach, stride[d]
            y[1 + d] = side if same else (side + extra - 1) // step + 1 if isinstance(side, int) else None
    return [[have if isinstance(have, int) or other is None else other for have, other in zip(y, like, strict=True)]]


def _sparse_conv_transpose2d(node: NodeView) -> list[Dims | None]:
    x, weight = node.shape(0, 4), node.shape(1, 4)
    like = node.shape(9, 4) or node.shape(6, 4) or [None] * 4
    window = [node.attribute(n, [v, v]) for n, v in (("stride", 1), ("padding", 0), ("output_padding", 0))]
    dilation, groups = node.attribute("dilation", [1, 1]), node.attribute("groups", 1)
    y: Dims = [x[0] if x else None, None, None, _scaled(weight[3], lambda k: k * groups) if weight else None]
    for d in range(2):
        side, taps = (x[1 + d], weight[1 + d]) if x and weight else (None, None)
        if isinstance(side, int) and isinstance(taps, int):
            numbers = (*(v[d] for v in window), dilation[d])
            y[1 + d] = conv_transpose_output_size(side, taps, *numbers)[0]
    return [[have if isinstance(have, int) or other is None else other for have, other in zip(y, like, strict=True)]]


def _sparse_pool2d(node: NodeView) -> list[Dims | None]:
    x, base = node.shape(0, 4) or [None] * 4, node.shape(6, 4) or [None] * 4
    kernel = node.attribute("kernel_size")
    stride, padding, dilation = (
        node.attribute(n, v) for n, v in (("stride", kernel), ("padding", [0, 0]), ("dilation", [1, 1]))
    )
    ceil = bool(node.attribute("ceil_mode", 0))
    y: Dims = [x[0], None, None, x[3]]
    for d in range(2):
        window = (kernel[d], stride[d], padding[d], dilation[d], ceil)
        y[1 + d] = _scaled(x[1 + d], lambda side, w=window: pool_output_size(side, *w)[0])  # type: ignore[misc]
    return [[have if isinstance(have, int) or other is None else other for have, other in zip(y, base, strict=True)]]


def _sparse_resize2d(node: NodeView) -> list[Dims | None]:
    x, base = node.shape(0, 4) or [None] * 4, node.shape(6, 4) or [None] * 4
    y: Dims = [x[0], *node.attribute("size", [None, None]), x[3]]
    for d, name in enumerate(("ratio_h", "ratio_w")):
        ratio = node.attribute(name, 0.0)
        if y[1 + d] is None and ratio > 0:
            y[1 + d] = _scaled(x[1 + d], lambda side, r=ratio: math.floor(side / r * (1 + 2**-22)))  # type: ignore[misc]
    return [[have if isinstance(have, int) or other is None else other for have, other in zip(y, base, strict=True)]]


def _blocksparse_matmul(node: NodeView) -> list[Dims | None]:
    x = node.any_shape(0)
    node.shape(1, 3)
    if not x:
        return [None]
    return [[*x[:-1], node.attribute("in_features" if node.attribute("transposed", 0) else "out_features")]]


def _pack_attention_blocks(node: NodeView) -> list[Dims | None]:
    batch, heads, rows, columns = node.shape(0, 4) or [None] * 4
    words = [_scaled(n, lambda v: -(-v // 32)) for n in (columns, rows)]
    return [[batch, heads, rows, words[0]], [batch, heads, columns, words[1]]]


def _block_attention(node: NodeView) -> list[Dims | None]:
    q = node.shape(0, 4)
    node.shape(1, 4)
    node.shape(2, 4)
    return [q, q[:3]] if q else [None, None]


_I, _Is, _F, _S = (OpSchema.AttrType.INT, OpSchema.AttrType.INTS, OpSchema.AttrType.FLOAT, OpSchema.AttrType.STRING)
_GRID: dict[str, tuple[OpSchema.AttrType, Any]] = {
    "bsize": (_Is, REQUIRED),
    "bstride": (_Is, None),
    "boffset": (_Is, None),
    "bcount": (_Is, None),
}
_LISTS = [("indices", INT32), ("count", INT32), ("block_map", INT32)]
_GEOMETRY = {"stride": (_Is, None), "padding": (_Is, None), "dilation": (_Is, None)}

OPS = {
    op.name: op
    for op in (
        Op(
            "reduce_mask",
            "The blocks of a grid in which a mask [N,H,W] exceeds tol, as a list and as a map.",
            [("mask", "T")],
            [("indices", INT32), ("count", INT32), ("total", INT32), ("block_map", INT32)],
            {**_GRID, "tol": (_F, 0.5), "avgpool": (_I, 0), "capacity": (_I, -1)},
            {"T": MASKS},
            _reduce_mask,
        ),
        Op(
            "sparse_gather",
            "The active blocks of x [N,H,W,C] as a stack [rows,bh,bw,C]; transpose=1: [rows,C,bh,bw].",
            [("x", "T"), *_LISTS],
            [("blocks", "T")],
            {**_GRID, "transpose": (_I, 0), "zero_tail": (_I, 1)},
            {"T": FLOATS},
            _sparse_gather,
        ),
        Op(
            "sparse_scatter",
            "base [N,H,W,C] with the active blocks overwritten by, or increased by, the stack's.",
            [("blocks", "T"), *_LISTS, ("base", "T")],
            [("y", "T")],
            {**_GRID, "add": (_I, 0), "atomic": (_I, 0), "transpose": (_I, 0)},
            {"T": FLOATS},
            _like(4),
        ),
        Op(
            "sparse_fill",
            "where(active, x, value) of x [N,H,W,C].",
            [("x", "T"), ("block_map", INT32)],
            [("y", "T")],
            {**_GRID, "value": (_F, 0.0)},
            {"T": FLOATS},
            _like(0),
        ),
        Op(
            "fringe",
            "Pixels of a tensor that a consumer's active blocks read and no active block of the producer writes.",
            [("producer_map", INT32), ("consumer_map", INT32), ("dynamic_size?", INT64)],
            [("pixels", INT32), ("count", INT32)],
            {
                **{f"producer_{name}": value for name, value in _GRID.items()},
                **{f"consumer_{name}": value for name, value in _GRID.items()},
                "window": (_Is, REQUIRED),
                "size": (_Is, None),
                "capacity": (_I, -1),
            },
            {},
            _fringe,
        ),
        Op(
            "mask_pyramid",
            "The active blocks of every plane of a network and the fringes of its tensors, from one mask [N,H,W].",
            [("mask", "T"), ("dynamic_sizes?", INT64)],
            [("lists*", INT32)],
            {"bsizes": (_Is, REQUIRED), "sizes": (_Is, None), "tol": (_F, 0.5), "fringes": (_Is, None)},
            {"T": MASKS},
            _mask_pyramid,
        ),
        Op(
            "sparse_conv2d",
            "activation(conv2d(x, weight) + bias + residual) on the active blocks of y [N,Ho,Wo,K]. Elsewhere y is "
            "base; without base: 0 in the fringe, with zero_outside=1 everywhere, else undefined.",
            [
                ("x", "T"),
                ("weight", "T"),
                *_LISTS,
                ("bias?", "B"),
                ("residual?", "T"),
                ("fringe_pixels?", INT32),
                ("fringe_count?", INT32),
                ("base?", "T"),
            ],
            [("y", "T")],
            {
                **_GRID,
                **_GEOMETRY,
                "groups": (_I, 1),
                "activation": (_S, ACTIVATIONS[0]),
                "negative_slope": (_F, 0.01),
                "allow_tf32": (_I, 0),
                "zero_outside": (_I, 0),
            },
            {"T": FLOATS, "B": FLOATS},
            _sparse_conv2d,
        ),
        Op(
            "sparse_conv_transpose2d",
            "activation(conv_transpose2d(x, weight) + bias + residual) on the active blocks of y [N,Ho,Wo,K]. "
            "Elsewhere y is base; without base: 0 in the fringe, with zero_outside=1 everywhere, else undefined.",
            [
                ("x", "T"),
                ("weight", "T"),
                *_LISTS,
                ("bias?", "B"),
                ("residual?", "T"),
                ("fringe_pixels?", INT32),
                ("fringe_count?", INT32),
                ("base?", "T"),
            ],
            [("y", "T")],
            {
                **_GRID,
                **_GEOMETRY,
                "output_padding": (_Is, None),
                "groups": (_I, 1),
                "activation": (_S, ACTIVATIONS[0]),
                "negative_slope": (_F, 0.01),
                "allow_tf32": (_I, 0),
                "zero_outside": (_I, 0),
            },
            {"T": FLOATS, "B": FLOATS},
            _sparse_conv_transpose2d,
        ),
        Op(
            "sparse_bottleneck2d",
            "1x1, 3x3 and 1x1 convolution of x [N,H,W,C], an activation after each, the shortcut x before the last, on "
            "the active blocks. Elsewhere y is base; without base: 0 in the fringe, with zero_outside=1 everywhere, "
            "else undefined.",
            [
                ("x", "T"),
                *((f"weight{k}", "T") for k in (1, 2, 3)),
                *_LISTS,
                *((f"bias{k}?", "B") for k in (1, 2, 3)),
                ("fringe_pixels?", INT32),
                ("fringe_count?", INT32),
                ("base?", "T"),
            ],
            [("y", "T")],
            {
                **_GRID,
                "activation": (_S, "relu"),
                "negative_slope": (_F, 0.01),
                "allow_tf32": (_I, 0),
                "zero_outside": (_I, 0),
            },
            {"T": FLOATS, "B": FLOATS},
            _like(0),
        ),
        *(
            Op(
                f"sparse_{kind}_pool2d",
                f"{kind}_pool2d(x) on the active blocks of y [N,Ho,Wo,C]. Elsewhere y is base; without base: 0 in the "
                "fringe, with zero_outside=1 everywhere, else undefined.",
                [("x", "T"), *_LISTS, ("fringe_pixels?", INT32), ("fringe_count?", INT32), ("base?", "T")],
                [("y", "T")],
                {
                    **_GRID,
                    "kernel_size": (_Is, REQUIRED),
                    "stride": (_Is, None),
                    "padding": (_Is, None),
                    **more,
                    "ceil_mode": (_I, 0),
                    "zero_outside": (_I, 0),
                },
                {"T": FLOATS},
                _sparse_pool2d,
            )
            for kind, more in (
                ("max", {"dilation": (_Is, None)}),
                ("avg", {"count_include_pad": (_I, 1), "divisor_override": (_I, 0)}),
            )
        ),
        Op(
            "sparse_resize2d",
            "x interpolated to size, or by 1 / ratio, on the active blocks of y [N,Ho,Wo,C]; nearest, nearest-exact, "
            "bilinear or bicubic. Elsewhere y is base; without base: 0 in the fringe, with zero_outside=1 everywhere, "
            "else undefined.",
            [("x", "T"), *_LISTS, ("fringe_pixels?", INT32), ("fringe_count?", INT32), ("base?", "T")],
            [("y", "T")],
            {
                **_GRID,
                "size": (_Is, None),
                "mode": (_S, "nearest"),
                "align_corners": (_I, 0),
                "ratio_h": (_F, 0.0),
                "ratio_w": (_F, 0.0),
                "zero_outside": (_I, 0),
            },
            {"T": FLOATS},
            _sparse_resize2d,
        ),
        Op(
            "blocksparse_matmul",
            "activation(x W + bias), x [..., in_features], W [in_features, out_features] zero but for square blocks, "
            "weight [blocks,size,size] each [input, output], at (block row, block column) coords [blocks,2] "
            "(best a constant: its tables are made once). Each block is multiplied by its gate. transposed: x W^T.",
            [("x", "T"), ("weight", "T"), ("coords", INT32), ("bias?", "B"), ("gate?", "tensor(float)")],
            [("y", "T")],
            {
                "in_features": (_I, REQUIRED),
                "out_features": (_I, REQUIRED),
                "transposed": (_I, 0),
                "activation": (_S, ACTIVATIONS[0]),
                "negative_slope": (_F, 0.01),
                "allow_tf32": (_I, 0),
            },
            {"T": FLOATS, "B": FLOATS},
            _blocksparse_matmul,
        ),
        Op(
            "pack_attention_blocks",
            "Active blocks [B,H,Q,K] as bits: of each row of blocks, 32 to a word, and of each column.",
            [("blocks", "tensor(bool)")],
            [("rows", INT32), ("columns", INT32)],
            {},
            {},
            _pack_attention_blocks,
        ),
        Op(
            "block_attention",
            "softmax(scale q k^T) v over visible keys, q [B,H,T,D], k and v [B,H',S,D], H' a divisor of H; lse: the "
            "log of the sum of exponentials. Key k is visible to query q if k < prefix, or if k <= q + diagonal and "
            "either k > q + diagonal - band or (q + diagonal - k) % stride == 0, within each of `phases` interleaved "
            "sequences; in a block that rows and columns (of pack_attention_blocks; none: all blocks) have, where "
            "masks [masks,size,words] of bits, mask_index [H,Q,K] says which, show it; below the sequence's lengths.",
            [
                ("q", "T"),
                ("k", "T"),
                ("v", "T"),
                ("rows?", INT32),
                ("columns?", INT32),
                ("mask_index?", INT32),
                ("masks?", INT32),
                ("q_lengths?", INT32),
                ("k_lengths?", INT32),
            ],
            [("out", "T"), ("lse", "tensor(float)")],
            {
                "scale": (_F, REQUIRED),
                "diagonal": (_I, 1 << 30),
                "band": (_I, 2**31 - 1),
                "prefix": (_I, 0),
                "stride": (_I, 0),
                "phases": (_I, 1),
                "block_size": (_I, 64),
            },
            {"T": FLOATS},
            _block_attention,
        ),
    )
}


def _infer(op: Op) -> Callable[[InferenceContext], None]:
    def infer(context: InferenceContext) -> None:
        node = NodeView(op, context)
        shapes = op.infer(node)
        outputs, fixed = list(op.outputs), {INT32: TensorProto.INT32, FLOATS[0]: TensorProto.FLOAT}
        if outputs[0][0].endswith("*"):
            outputs *= context.get_num_outputs()
        if len(outputs) != len(shapes):
            raise InferenceError(f"sbnet::{op.name}: {len(outputs)} outputs; {len(shapes)} are wanted")
        for k, ((_, kind), dims) in enumerate(zip(outputs, shapes, strict=True)):
            element = fixed[kind] if kind in fixed else node.element_type(0)
            context.set_output_type(k, onnx.helper.make_tensor_type_proto(element, dims))

    return infer


def _schema(op: Op) -> OpSchema:
    option = OpSchema.FormalParameterOption
    attributes = []
    for name, (kind, default) in (op.attributes | {"format": (_I, FORMAT)}).items():
        if default is None or default is REQUIRED:
            attributes.append(OpSchema.Attribute(name, kind, required=default is REQUIRED))
        else:
            attributes.append(OpSchema.Attribute(name, onnx.helper.make_attribute(name, default)))
    schema = OpSchema(
        op.name,
        DOMAIN,
        VERSION,
        op.doc,
        inputs=[
            OpSchema.FormalParameter(
                name.rstrip("?"), kind, param_option=option.Optional if name.endswith("?") else option.Single
            )
            for name, kind in op.inputs
        ],
        outputs=[
            OpSchema.FormalParameter(
                name.rstrip("*"), kind, param_option=option.Variadic if name.endswith("*") else option.Single
            )
            for name, kind in op.outputs
        ],
        type_constraints=[(name, list(kinds), "") for name, kinds in op.types.items()],
        attributes=attributes,
    )
    schema.set_type_and_shape_inference_function(_infer(op))
    return schema


def register() -> dict[str, OpSchema]:
    """Registers the schemas with onnx.defs, once a process, and returns them by name."""
    if not _registered:
        for op in OPS.values():
            schema = _schema(op)
            onnx.defs.register_schema(schema)
            _registered[op.name] = onnx.defs.get_schema(op.name, VERSION, DOMAIN)
    return _registered


_registered: dict[str, OpSchema] = {}
