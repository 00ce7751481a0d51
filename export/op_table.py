"""The ONNX ops of the domain `sbnet`, as the library itself says what they are. schemas.py registers them.

csrc/ort_binding/describe.cpp tells names, inputs, outputs, attributes, types and shapes; here stands what they compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sbnet import _library

Argument = tuple[str, str]  # name, type


@dataclass(frozen=True)
class Op:
    """One op.

    Attributes:
        inputs: name, of which an optional one ends in ?, and type: a variable, or one of ONNX's, "tensor(float)".
        outputs: the same; a name that ends in * stands for any number of them.
        attributes: name -> "type", of int, ints, float and string; "default" where there is one; "required".
        types: what each variable stands for.
    """

    name: str
    doc: str
    inputs: Sequence[Argument]
    outputs: Sequence[Argument]
    attributes: Mapping[str, Mapping[str, Any]]
    types: Mapping[str, tuple[str, ...]]


DOCS = {
    "reduce_mask": "The blocks of a grid in which a mask [N,H,W] exceeds tol, as a list and as a map.",
    "motion_mask": (
        "Where the brightness of frame [N,H,W,C] (uint8 to 255, floats to 1), averaged over a box, left a "
        "running background, and the background that follows; where the mean distance over an image is "
        "greater than cut, all of it, and the background starts again."
    ),
    "sparse_gather": "The active blocks of x [N,H,W,C] as a stack [rows,bh,bw,C]; transpose=1: [rows,C,bh,bw].",
    "sparse_scatter": "base [N,H,W,C] with the active blocks overwritten by, or increased by, the stack's.",
    "sparse_fill": "where(active, x, value) of x [N,H,W,C].",
    "sparse_adaptive_pool2d": (
        "Averages or maxima of the active pixels of x [N,H,W,C] over size windows; all of y is written. "
        "Inactive pixels count as zeros, or with count_inactive=0 not at all."
    ),
    "sparse_squeeze_excite2d": (
        "The gate of squeeze and excitation, [N,1,1,C]: gate(weight2 activation(weight1 average + bias1) + "
        "bias2) of the average of where(active, x, 0), x [N,H,W,C]."
    ),
    "pack_tokens": (
        "Which pixels of a plane of `size` are active, in raster order, between prefix and suffix rows that always "
        "are: lengths [N], how many; order [N,capacity], which token each row holds; rows [N,tokens], the row of each "
        "active token; mask [N,tokens], active tokens; filled [N,capacity], rows that hold one."
    ),
    "move_rows": (
        "y [N,rows,C] of x [N or 1,rows,C]: row index[n,r] of it, or row r + start; beside a table, its first `start` "
        "rows, then those of x, then the rest of the table, which ends at lengths[n]. Zeros where mask [N,rows] is "
        "false, and from lengths[n] on."
    ),
    "pack_patches": (
        "y [N,rows,C * height * width]: the numbers of patch index[n,r] of x [N,C,H,W], in the order of a "
        "convolution's weight; zeros from lengths[n] on."
    ),
    "merge_pixels": (
        "y [N,H // factor,W // factor,offsets * C]: x [N,H,W,C] at (i, j) * factor + each offset, side by side; zeros "
        "where (i, j) is not active."
    ),
    "window_attention": (
        "softmax(scale q k^T scales + bias) v within windows of planes [N,H,W,C], among active pixels; zeros "
        "elsewhere. rows and keys [windows,...]: which pixel each is, from 1 on; 0: padding, which is a key of k_fill "
        "and v_fill or zeros. active_keys [N,H' * W']: where keys are of another plane. bias [1 or "
        "windows,heads,rows,keys], or q . (row_table[i,k] + column_table[j,l]) of row i C + j for key k C + l. "
        "normalize: queries and keys are divided by their length, or by this where that is more."
    ),
    "fringe": "Pixels of a tensor that a consumer's active blocks read and no active block of the producer writes.",
    "mask_pyramid": (
        "The active blocks of every plane of a network and the fringes of its tensors, from one mask [N,H,W]."
    ),
    "sparse_conv2d": (
        "activation(conv2d(x, weight) + bias + residual) on the active blocks of y [N,Ho,Wo,K]. slope: of "
        "leaky_relu, a number a channel. residual_after: the residual is added to what the activation gives."
    ),
    "sparse_conv2d_quantized": (
        "activation(scale * conv2d(x, weight) + bias + residual_scale * residual) of int8 or float8, times 1 "
        "/ out_scale and rounded, on the active blocks of y [N,Ho,Wo,K]. A float x is rounded first, times 1 "
        "/ x_scale. slope: of leaky_relu, a number a channel. residual_after: the residual is added to what "
        "the activation gives."
    ),
    "sparse_conv2d_dequantized": (
        "activation(scale * conv2d(x, weight) + bias + residual_scale * residual) of int8 or float8, as "
        "float, on the active blocks of y [N,Ho,Wo,K]. A float x is rounded first, times 1 / x_scale. slope: "
        "of leaky_relu, a number a channel. residual_after: the residual is added to what the activation "
        "gives."
    ),
    "sparse_conv_transpose2d": (
        "activation(conv_transpose2d(x, weight) + bias + residual) on the active blocks of y [N,Ho,Wo,K]. "
        "slope: of leaky_relu, a number a channel."
    ),
    "sparse_bottleneck2d": (
        "1x1, 3x3 and 1x1 convolution of x [N,H,W,C], an activation after each, the shortcut x before the "
        "last, on the active blocks."
    ),
    "sparse_max_pool2d": "max_pool2d(x) on the active blocks of y [N,Ho,Wo,C].",
    "sparse_avg_pool2d": "avg_pool2d(x) on the active blocks of y [N,Ho,Wo,C].",
    "sparse_resize2d": (
        "x interpolated to size, or by 1 / ratio, on the active blocks of y [N,Ho,Wo,C]; nearest, nearest- "
        "exact, bilinear or bicubic."
    ),
    "sparse_rearrange": (
        "pixel_shuffle by up, pixel_unshuffle by down, a channel shuffle by groups and padding by pad (left, "
        "right, top, bottom) with value, on the active blocks of y [N,Ho,Wo,K]."
    ),
    "sparse_norm2d": (
        "Normalises x [N,H,W,C] on the active blocks. mode: group (mean and variance of each image's active "
        "pixels), layer (of each pixel's channels), softmax, log_softmax."
    ),
    "sparse_pointwise": "The steps of a program on the active blocks of x [N,H,W,C]; a, b, c, d: sides of x or 1.",
    "blocksparse_matmul": (
        "activation(x W + bias), x [..., in_features], W [in_features, out_features] zero but for square "
        "blocks, weight [blocks,size,size] each [input, output], at (block row, block column) coords "
        "[blocks,2] (best a constant: its tables are made once). Each block is multiplied by its gate. "
        "transposed: x W^T."
    ),
    "blocksparse_weight_grad": (
        "x^T dy, x [..., C] and dy [..., K] of the same rows, for the blocks [blocks,block_size,block_size] "
        "at (block row, block column) coords [blocks,2] alone (best a constant)."
    ),
    "blocksparse_conv": (
        "activation(bias + the sum of the blocks' convolutions), x [N,D,H,W,in_channels]; lists: of each "
        "block, how many inputs and outputs, which; weight: their [outputs,inputs,T,R,S]. transposed: the "
        "transpose."
    ),
    "pack_attention_blocks": (
        "Active blocks [B,H,Q,K] as bits: of each row of blocks, 32 to a word, and of each column."
    ),
    "block_attention": (
        "softmax(scale q k^T) v over visible keys, q [B,H,T,D], k and v [B,H',S,D], H' a divisor of H; lse: "
        "the log of the sum of exponentials. Key k is visible to query q if k < prefix, or if k <= q + "
        "diagonal and either k > q + diagonal - band or (q + diagonal - k) % stride == 0, within each of "
        "`phases` interleaved sequences; in a block that rows and columns (of pack_attention_blocks; none: "
        "all blocks) have, where masks [masks,size,words] of bits, mask_index [H,Q,K] says which, show it; "
        "below the sequence's lengths."
    ),
}
LAYER = "Elsewhere y is base; without base: 0 in the fringe, with zero_outside=1 everywhere, else undefined."


def _op(told: Mapping[str, Any]) -> Op:
    def arguments(which: str) -> list[Argument]:
        return [
            (a["name"] + "?" * a.get("optional", False) + "*" * a.get("variadic", False), _type(a["type"]))
            for a in told[which]
        ]

    kinds = told["types"]
    variables = {name: tuple(dict.fromkeys(_type(kind[name]) for kind in kinds)) for name in kinds[0]}
    doc = f"{DOCS[told['name']]} {LAYER}" if "zero_outside" in told["attributes"] else DOCS[told["name"]]
    return Op(told["name"], doc, arguments("inputs"), arguments("outputs"), told["attributes"], variables)


def _type(name: str) -> str:
    return name if len(name) == 1 else f"tensor({name})"


OPS = {op["name"]: _op(op) for op in _library.ort_schemas()}
