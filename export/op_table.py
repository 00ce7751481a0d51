"""The ONNX ops of the domain `sbnet`: names, inputs, outputs, attributes, types, shapes. schemas.py registers them.

The ops themselves are csrc/ort_binding/; names, order and types here are theirs (tests/export/test_export.py holds them
together).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from onnx.defs import OpSchema

from sbnet.export import shapes
from sbnet.export.shapes import Dims, NodeView
from sbnet.ops.masked.conv import ACTIVATIONS

FLOATS = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)")
MASKS = ("tensor(bool)", "tensor(uint8)", *FLOATS)
INT8, INT32, INT64 = "tensor(int8)", "tensor(int32)", "tensor(int64)"
FLOAT8 = "tensor(float8e4m3fn)"
REQUIRED = object()
Argument = tuple[str, str]  # name, type
Attribute = tuple[OpSchema.AttrType, Any]  # type, default


@dataclass(frozen=True)
class Op:
    """One op. Inputs whose name ends in ? are optional, an output whose name ends in * stands for any number of them;
    `infer` gets the node and returns the shapes of the outputs."""

    name: str
    doc: str
    inputs: Sequence[Argument]
    outputs: Sequence[Argument]
    attributes: Mapping[str, Attribute]
    types: Mapping[str, tuple[str, ...]]
    infer: Callable[[NodeView], list[Dims | None]] = field(repr=False)


_I, _Is, _F, _S = (OpSchema.AttrType.INT, OpSchema.AttrType.INTS, OpSchema.AttrType.FLOAT, OpSchema.AttrType.STRING)
_GRID: dict[str, Attribute] = {
    "bsize": (_Is, REQUIRED),
    "bstride": (_Is, None),
    "boffset": (_Is, None),
    "bcount": (_Is, None),
}
_LISTS = [("indices", INT32), ("count", INT32), ("block_map", INT32)]
_ACTIVATION = {"activation": (_S, ACTIVATIONS[0]), "negative_slope": (_F, 0.01)}
_GEOMETRY = {"stride": (_Is, None), "padding": (_Is, None), "dilation": (_Is, None)}
_WITH_BIAS = {"T": FLOATS, "B": FLOATS}
_ADDED = [("bias?", "B"), ("residual?", "T"), ("slope?", "B")]
_AFTER = "residual_after: the residual is added to what the activation gives."
_SLOPE = "slope: of leaky_relu, a number a channel."


def _layer(
    name: str,
    what: str,
    infer: Callable[[NodeView], list[Dims | None]],
    attributes: Mapping[str, Attribute],
    first: Sequence[Argument] = (("x", "T"),),
    further: Sequence[Argument] = (),
    types: Mapping[str, tuple[str, ...]] = MappingProxyType({"T": FLOATS}),
    y: str = "T",
) -> Op:
    """A layer on active blocks: its inputs before and after the lists; all the others have what is added here."""
    return Op(
        name,
        f"{what} Elsewhere y is base; without base: 0 in the fringe, with zero_outside=1 everywhere, else undefined.",
        [*first, *_LISTS, *further, ("fringe_pixels?", INT32), ("fringe_count?", INT32), ("base?", y)],
        [("y", y)],
        {**_GRID, **attributes, "zero_outside": (_I, 0)},
        types,
        infer,
    )


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
            shapes.reduce_mask,
        ),
        Op(
            "motion_mask",
            "Where the brightness of frame [N,H,W,C] (uint8 to 255, floats to 1), averaged over a box, left a running "
            "background, and the background that follows; where the mean distance over an image is greater than cut, "
            "all of it, and the background starts again.",
            [("frame", "T"), ("background", "tensor(float)")],
            [("mask", "tensor(bool)"), ("next", "tensor(float)")],
            {"threshold": (_F, 0.08), "rate": (_F, 0.5), "cut": (_F, 0.15), "smooth": (_I, 5)},
            {"T": ("tensor(uint8)", *FLOATS)},
            shapes.motion_mask,
        ),
        Op(
            "sparse_gather",
            "The active blocks of x [N,H,W,C] as a stack [rows,bh,bw,C]; transpose=1: [rows,C,bh,bw].",
            [("x", "T"), *_LISTS],
            [("blocks", "T")],
            {**_GRID, "transpose": (_I, 0), "zero_tail": (_I, 1)},
            {"T": FLOATS},
            shapes.sparse_gather,
        ),
        Op(
            "sparse_scatter",
            "base [N,H,W,C] with the active blocks overwritten by, or increased by, the stack's.",
            [("blocks", "T"), *_LISTS, ("base", "T")],
            [("y", "T")],
            {**_GRID, "add": (_I, 0), "atomic": (_I, 0), "transpose": (_I, 0)},
            {"T": FLOATS},
            shapes.like(4),
        ),
        Op(
            "sparse_fill",
            "where(active, x, value) of x [N,H,W,C].",
            [("x", "T"), ("block_map", INT32)],
            [("y", "T")],
            {**_GRID, "value": (_F, 0.0)},
            {"T": FLOATS},
            shapes.like(0),
        ),
        Op(
            "sparse_adaptive_pool2d",
            "Averages or maxima of the active pixels of x [N,H,W,C] over size windows; all of y is written. Inactive "
            "pixels count as zeros, or with count_inactive=0 not at all.",
            [("x", "T"), ("block_map", INT32)],
            [("y", "T")],
            {**_GRID, "size": (_Is, None), "mode": (_S, "avg"), "count_inactive": (_I, 1)},
            {"T": FLOATS},
            shapes.sparse_adaptive_pool2d,
        ),
        Op(
            "sparse_squeeze_excite2d",
            "The gate of squeeze and excitation, [N,1,1,C]: gate(weight2 activation(weight1 average + bias1) + bias2) "
            "of the average of where(active, x, 0), x [N,H,W,C].",
            [("x", "T"), ("weight1", "T"), ("weight2", "T"), ("bias1?", "B"), ("bias2?", "B"), ("block_map", INT32)],
            [("y", "T")],
            {**_GRID, "activation": (_S, "relu"), "gate": (_S, "sigmoid")},
            _WITH_BIAS,
            shapes.sparse_squeeze_excite2d,
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
            shapes.fringe,
        ),
        Op(
            "mask_pyramid",
            "The active blocks of every plane of a network and the fringes of its tensors, from one mask [N,H,W].",
            [("mask", "T"), ("dynamic_sizes?", INT64)],
            [("lists*", INT32)],
            {
                "bsizes": (_Is, REQUIRED),
                "sizes": (_Is, None),
                "tol": (_F, 0.5),
                "fringes": (_Is, None),
                "margin": (_I, 0),
            },
            {"T": MASKS},
            shapes.mask_pyramid,
        ),
        _layer(
            "sparse_conv2d",
            f"activation(conv2d(x, weight) + bias + residual) on the active blocks of y [N,Ho,Wo,K]. {_SLOPE} {_AFTER}",
            shapes.sparse_conv2d,
            {**_GEOMETRY, "groups": (_I, 1), **_ACTIVATION, "residual_after": (_I, 0), "allow_tf32": (_I, 0)},
            [("x", "T"), ("weight", "T")],
            _ADDED,
            _WITH_BIAS,
        ),
        *(
            _layer(
                name,
                f"activation(scale * conv2d(x, weight) + bias + residual_scale * residual) of int8 or float8, {what}, "
                "on the active blocks of y [N,Ho,Wo,K]. A float x is rounded first, times 1 / x_scale. "
                f"{_SLOPE} {_AFTER}",
                shapes.sparse_conv2d_quantized,
                {
                    **_GEOMETRY,
                    "groups": (_I, 1),
                    **_ACTIVATION,
                    "x_scale": (_F, 0.0),
                    "residual_scale": (_F, 1.0),
                    "residual_after": (_I, 0),
                    **scale,
                },
                [("x", "T"), ("weight", "W"), ("scale", FLOATS[0])],
                [("bias?", FLOATS[0]), ("residual?", "R"), ("slope?", FLOATS[0])],
                {
                    "T": (INT8, FLOAT8, FLOATS[0]),
                    "W": (INT8, FLOAT8),
                    "R": (INT8, FLOAT8, FLOATS[0]),
                    **({} if y == "W" else {y: FLOATS[:1]}),
                },
                y=y,
            )
            for name, y, what, scale in (
                ("sparse_conv2d_quantized", "W", "times 1 / out_scale and rounded", {"out_scale": (_F, REQUIRED)}),
                ("sparse_conv2d_dequantized", "Y", "as float", {}),
            )
        ),
        _layer(
            "sparse_conv_transpose2d",
            "activation(conv_transpose2d(x, weight) + bias + residual) on the active blocks of y [N,Ho,Wo,K]. "
            f"{_SLOPE}",
            shapes.sparse_conv_transpose2d,
            {**_GEOMETRY, "output_padding": (_Is, None), "groups": (_I, 1), **_ACTIVATION, "allow_tf32": (_I, 0)},
            [("x", "T"), ("weight", "T")],
            _ADDED,
            _WITH_BIAS,
        ),
        _layer(
            "sparse_bottleneck2d",
            "1x1, 3x3 and 1x1 convolution of x [N,H,W,C], an activation after each, the shortcut x before the last, on "
            "the active blocks.",
            shapes.like(0),
            {"activation": (_S, "relu"), "negative_slope": (_F, 0.01), "allow_tf32": (_I, 0)},
            [("x", "T"), *((f"weight{k}", "T") for k in (1, 2, 3))],
            [(f"bias{k}?", "B") for k in (1, 2, 3)],
            _WITH_BIAS,
        ),
        *(
            _layer(
                f"sparse_{kind}_pool2d",
                f"{kind}_pool2d(x) on the active blocks of y [N,Ho,Wo,C].",
                shapes.sparse_pool2d,
                {"kernel_size": (_Is, REQUIRED), "stride": (_Is, None), "padding": (_Is, None), **more}
                | {"ceil_mode": (_I, 0)},
            )
            for kind, more in (
                ("max", {"dilation": (_Is, None)}),
                ("avg", {"count_include_pad": (_I, 1), "divisor_override": (_I, 0)}),
            )
        ),
        _layer(
            "sparse_resize2d",
            "x interpolated to size, or by 1 / ratio, on the active blocks of y [N,Ho,Wo,C]; nearest, nearest-exact, "
            "bilinear or bicubic.",
            shapes.sparse_resize2d,
            {"size": (_Is, None), "mode": (_S, "nearest"), "align_corners": (_I, 0)}
            | dict.fromkeys(("ratio_h", "ratio_w"), (_F, 0.0)),
        ),
        _layer(
            "sparse_rearrange",
            "pixel_shuffle by up, pixel_unshuffle by down, a channel shuffle by groups and padding by pad (left, "
            "right, top, bottom) with value, on the active blocks of y [N,Ho,Wo,K].",
            shapes.sparse_rearrange,
            dict.fromkeys(("up", "down", "groups"), (_I, 1)) | {"pad": (_Is, None), "value": (_F, 0.0)},
        ),
        _layer(
            "sparse_norm2d",
            "Normalises x [N,H,W,C] on the active blocks. mode: group (mean and variance of each image's active "
            "pixels), layer (of each pixel's channels), softmax, log_softmax.",
            shapes.like(0),
            {"mode": (_S, "group"), "groups": (_I, 1), "eps": (_F, 1e-5)},
            further=[("weight?", "B"), ("bias?", "B")],
            types=_WITH_BIAS,
        ),
        _layer(
            "sparse_pointwise",
            "The steps of a program on the active blocks of x [N,H,W,C]; a, b, c, d: sides of x or 1.",
            shapes.like(0),
            {"program": (_S, "")},
            further=[(f"{name}?", "T") for name in "abcd"],
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
                **_ACTIVATION,
                "allow_tf32": (_I, 0),
            },
            {"T": FLOATS, "B": FLOATS},
            shapes.blocksparse_matmul,
        ),
        Op(
            "blocksparse_weight_grad",
            "x^T dy, x [..., C] and dy [..., K] of the same rows, for the blocks [blocks,block_size,block_size] at "
            "(block row, block column) coords [blocks,2] alone (best a constant).",
            [("x", "T"), ("dy", "T"), ("coords", INT32)],
            [("dw", "T")],
            {"block_size": (_I, REQUIRED), "allow_tf32": (_I, 0)},
            {"T": FLOATS},
            shapes.blocksparse_weight_grad,
        ),
        Op(
            "blocksparse_conv",
            "activation(bias + the sum of the blocks' convolutions), x [N,D,H,W,in_channels]; lists: of each block, "
            "how many inputs and outputs, which; weight: their [outputs,inputs,T,R,S]. transposed: the transpose.",
            [("x", "T"), ("weight", "T"), ("lists", INT32), ("bias?", "B")],
            [("y", "T")],
            {
                **dict.fromkeys(("in_channels", "out_channels"), (_I, REQUIRED)),
                **{"kernel_size": (_Is, REQUIRED), **_GEOMETRY, "size": (_Is, None), "transposed": (_I, 0)},
                **_ACTIVATION,
            },
            {"T": FLOATS, "B": FLOATS},
            shapes.blocksparse_conv,
        ),
        Op(
            "pack_attention_blocks",
            "Active blocks [B,H,Q,K] as bits: of each row of blocks, 32 to a word, and of each column.",
            [("blocks", "tensor(bool)")],
            [("rows", INT32), ("columns", INT32)],
            {},
            {},
            shapes.pack_attention_blocks,
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
            shapes.block_attention,
        ),
    )
}
