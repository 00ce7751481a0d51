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


GRID = (
    "Of a grid: bsize (height, width of a block), bstride (default: bsize), boffset (default: 0, 0), bcount (default: "
    "as many blocks as tile the plane)."
)
LAYER = (
    "On the active blocks of y's plane; elsewhere y is base; without base: 0 in the fringe, with zero_outside=1 "
    "everywhere, else undefined. base is like y, fringe_pixels [n], fringe_count [1]."
)
CONV = (
    "weight [K,R,S,C/groups], bias [K], residual like y. slope [K]: of leaky_relu, a number a channel instead of "
    "negative_slope. residual_after: the residual is added to what the activation gives."
)
COORDS = "coords [blocks,2] (block row, block column; best a constant: its tables are made once)"
DOCS = {
    "reduce_mask": (
        "The blocks of a grid in which a mask [N,H,W] exceeds tol, as a list (indices [capacity,3], count [1]) and as "
        "block_map [N,rows,columns]; total [1] counts those that the capacity (-1: all blocks) cut, too. avgpool: "
        "averages of the blocks instead of maxima."
    ),
    "motion_mask": (
        "mask [N,H,W]: where the brightness of frame [N,H,W,C] (uint8 to 255, floats to 1), averaged over a box of "
        "`smooth` pixels (odd, at most 31), left a running background [N,H,W] by more than threshold; next: the "
        "background that follows by rate. An image whose mean distance is greater than cut, or NaN, is all motion and "
        "starts it again. Before the first frame the background is infinities."
    ),
    "sparse_gather": (
        "The active blocks of x [N,H,W,C] as a stack [capacity,bh,bw,C], zeros outside the plane; transpose=1: "
        "[capacity,C,bh,bw]. Rows past the count are 0, with zero_tail=0 undefined."
    ),
    "sparse_scatter": (
        "base [N,H,W,C] with the active blocks overwritten by, or with add=1 increased by, the stack's (transpose as "
        "in sparse_gather). Overlapping blocks are summed in raster order, with atomic=1 in any."
    ),
    "sparse_fill": "where(active, x, value) of x [N,H,W,C].",
    "sparse_adaptive_pool2d": (
        "Averages or maxima (mode: avg, max) of the active pixels of x [N,H,W,C] over size windows; all of y "
        "[N,*size,C] is written. The blocks tile x's plane. Inactive pixels count as zeros; with count_inactive=0 not "
        "at all, and a window without active ones gives 0."
    ),
    "sparse_squeeze_excite2d": (
        "The gate of squeeze and excitation, [N,1,1,C]: gate(weight2 activation(weight1 average + bias1) + bias2) of "
        "the average of where(active, x, 0), x [N,H,W,C], weight1 [R,C], weight2 [C,R]. activation and gate: relu, "
        "silu, hardswish, sigmoid, hardsigmoid."
    ),
    "fringe": (
        "Pixels of a tensor that a consumer's active blocks read and no active block of the producer writes: linear "
        "indices (n*H + y)*W + x, ascending, then -1. size: height, width of the tensor, then of what the consumer "
        "writes (or dynamic_size [4]). window of the consumer: num, den, lo, hi, step as pairs: output o reads from "
        "floor((o num + lo) / den) to floor((o num + hi) / den), every step-th. capacity -1: all pixels."
    ),
    "pack_tokens": (
        "Which pixels of a plane of `size` are active, in raster order, between prefix and suffix rows that always "
        "are: lengths [N], how many; order [N,capacity], which token (of prefix, plane and suffix) each row holds, 0 "
        "behind them; rows [N,tokens], the row of each active token; mask [N,tokens], active tokens; filled "
        "[N,capacity], rows that hold one. capacity: as many as tokens if left out."
    ),
    "move_rows": (
        "y [N,rows,C] of x [N or 1,rows,C]: row index[n,r] of it, or row r + start; beside a table [N or 1,t,C], "
        "which takes no index, its first `start` rows, then those of x, then the rest of the table, which ends at "
        "lengths[n]. Zeros where mask [N,rows] is false, from lengths[n] on, and where x has no such row."
    ),
    "pack_patches": (
        "y [N,rows,C * height * width]: the numbers of patch (height, width) index[n,r] of x [N,C,H,W], in the order "
        "of a convolution's weight; zeros from lengths[n] on."
    ),
    "merge_pixels": (
        "y [N,H // factor,W // factor,offsets * C]: x [N,H,W,C] at (i, j) * factor + each offset (row and column, at "
        "most 16 pairs), side by side; zeros where (i, j) is not active."
    ),
    "window_attention": (
        "softmax(scale q k^T scales + bias) v within windows of planes, q [N,H,W,C], k and v [N,H',W',C'], among "
        "active pixels; zeros elsewhere, and in a row whose window has no key. rows and keys [windows,...]: which "
        "pixel each is, from 1 on; 0: padding, which is a key of k_fill and v_fill or zeros. active_keys [N,H' * W']: "
        "where keys are of another plane. bias [1 or windows,heads,rows,keys], or q . (row_table[i,k] + "
        "column_table[j,l]) of row i C + j for key k C + l, row_table [R,R,dim], column_table [C,C,dim]. scales "
        "[heads]. normalize > 0: queries and keys are divided by their length, or by this where that is more. starts: "
        "the first channels of q, k and v; dim, value_dim: 8 to 128, multiples of 8."
    ),
    "mask_pyramid": (
        "The active blocks of every plane of a network and the fringes of its tensors, from one mask [N,H,W]: "
        "indices, count, total, block_map of each plane, then pixels, count of each fringe. bsizes, sizes (or "
        "dynamic_sizes): height, width of each plane's blocks, of each plane. fringes, of each: plane, number of "
        "consumers, then of each consumer: plane of its output and the ten numbers of its window, as in fringe. "
        "margin: pixels by which the mask is grown."
    ),
    "sparse_conv2d": f"activation(conv2d(x, weight) + bias + residual), x [N,H,W,C], y [N,Ho,Wo,K]; {CONV}",
    "sparse_conv2d_quantized": (
        "activation(scale * conv2d(x, weight) + bias + residual_scale * residual) of int8 or float8, times 1 / "
        "out_scale, rounded to even and saturated; scale [K]. A float x is rounded first, times 1 / x_scale. float8 "
        f"has no groups. {CONV}"
    ),
    "sparse_conv2d_dequantized": (
        "activation(scale * conv2d(x, weight) + bias + residual_scale * residual) of int8 or float8, as float; scale "
        f"[K]. A float x is rounded first, times 1 / x_scale. float8 has no groups. {CONV}"
    ),
    "sparse_conv_transpose2d": (
        "activation(conv_transpose2d(x, weight) + bias + residual), x [N,H,W,C], weight [C,R,S,K/groups], y "
        "[N,Ho,Wo,K]. slope [K]: of leaky_relu, a number a channel instead of negative_slope."
    ),
    "sparse_bottleneck2d": (
        "1x1, 3x3 (padding 1) and 1x1 convolution of x [N,H,W,C], an activation after each, the shortcut x before the "
        "last; weight1 [B,1,1,C], weight2 [B,3,3,B], weight3 [C,1,1,B]. The 3x3 reads zeros outside the active "
        "blocks."
    ),
    "sparse_max_pool2d": "PyTorch's max_pool2d(x), x [N,H,W,C].",
    "sparse_avg_pool2d": "PyTorch's avg_pool2d(x), x [N,H,W,C]; divisor_override 0: none.",
    "sparse_resize2d": (
        "x [N,H,W,C] interpolated to size, or by 1 / ratio (ratio_h, ratio_w: pixels of x from an output to the next; "
        "0: as the sizes say), as PyTorch does. mode: nearest, nearest-exact, bilinear or bicubic."
    ),
    "sparse_rearrange": (
        "pixel_shuffle by up, pixel_unshuffle by down, a channel shuffle by groups and padding by pad (left, right, "
        "top, bottom) with value, of x [N,H,W,C]."
    ),
    "sparse_norm2d": (
        "Normalises x [N,H,W,C]; weight, bias [C]. mode: group (mean and variance of each image's active pixels in "
        "groups of channels), layer (of each pixel's channels), softmax, log_softmax (of each pixel's channels), "
        "response (ConvNeXtV2's, of each image's active pixels)."
    ),
    "sparse_pointwise": (
        "The steps of a program (those of sbnet.sparse_pointwise; none: a copy) on x [N,H,W,C], in float32; a, b, c, "
        "d: sides of x or 1."
    ),
    "blocksparse_matmul": (
        "activation(x W + bias), x [..., in_features], W [in_features, out_features] zero but for square blocks, "
        f"weight [blocks,size,size] each [input, output], at {COORDS}. Each block is multiplied by its gate [blocks]. "
        "transposed: x W^T, from out_features to in_features."
    ),
    "blocksparse_weight_grad": (
        "x^T dy, x [..., C] and dy [..., K] of the same rows, for the blocks [blocks,block_size,block_size] at "
        f"{COORDS} alone."
    ),
    "blocksparse_conv": (
        "activation(bias + the sum of the blocks' convolutions), x [N,D,H,W,in_channels]; lists (best a constant): of "
        "each block, how many inputs and outputs, which; weight: their [outputs,inputs,T,R,S], one after the other. "
        "transposed: the exact transpose, from out_channels to in_channels, which needs size (of y)."
    ),
    "pack_attention_blocks": (
        "Active blocks [B,H,Q,K] as bits: of each row of blocks, 32 to a word, and of each column. For masks that are "
        "inputs of the model; constant layouts are exported as bits."
    ),
    "block_attention": (
        "softmax(scale q k^T) v over visible keys, q [B,H,T,D], k and v [B,H',S,D], H' a divisor of H; lse: the log "
        "of the sum of exponentials. A query without keys gets zeros, and -inf. Key k is visible to query q if k < "
        "prefix, or if k <= q + diagonal and either k > q + diagonal - band or (q + diagonal - k) % stride == 0, "
        "within each of `phases` interleaved sequences; in a block that rows and columns (of pack_attention_blocks; "
        "none: all blocks) have, where masks [masks,size,words] of bits, mask_index [H,Q,K] says which, show it; "
        "below the sequence's lengths."
    ),
}


def _op(told: Mapping[str, Any]) -> Op:
    def arguments(which: str) -> list[Argument]:
        return [
            (a["name"] + "?" * a.get("optional", False) + "*" * a.get("variadic", False), _type(a["type"]))
            for a in told[which]
        ]

    kinds = told["types"]
    variables = {name: tuple(dict.fromkeys(_type(kind[name]) for kind in kinds)) for name in kinds[0]}
    own = told["attributes"]
    doc = " ".join(
        [DOCS[told["name"]], *([LAYER] if "zero_outside" in own else []), *([GRID] if "bstride" in own else [])]
    )
    return Op(told["name"], doc, arguments("inputs"), arguments("outputs"), told["attributes"], variables)


def _type(name: str) -> str:
    return name if len(name) == 1 else f"tensor({name})"


OPS = {op["name"]: _op(op) for op in _library.ort_schemas()}
