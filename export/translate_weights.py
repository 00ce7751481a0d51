"""torch.ops.sbnet.* of block-sparse weights and attention as nodes of the domain `sbnet`: see translate.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnxscript import opset18 as onnx_ops

from sbnet.export.translate import Value, first, grid_attributes, last, node


def blocksparse_matmul(
    x: Value,
    weight: Value,
    gate: Value | None,
    bias: Value | None,
    tables: Value,
    layout: Sequence[Any],
    transposed: bool,
    activation: str,
    activation_param: float,
    allow_tf32: bool,
) -> Value:
    return node("blocksparse_matmul")(
        x,
        weight,
        tables,  # blocksparse.py puts the coords there
        bias,
        gate,
        in_features=layout[3],
        out_features=layout[4],
        transposed=int(transposed),
        activation=activation,
        negative_slope=float(activation_param),
        allow_tf32=int(allow_tf32),
    )


def blocksparse_weight_grad(
    x: Sequence[Value], dy: Sequence[Value], tables: Value, layout: Sequence[Any], allow_tf32: bool, float32: bool
) -> Value:
    """One node: pairs are joined row by row, which is the same sum."""
    ops: Any = onnx_ops
    left, right = (side[0] if len(side) == 1 else ops.Concat(*side, axis=0) for side in (x, dy))
    if float32:
        left, right = (ops.Cast(side, to=1) for side in (left, right))
    return node("blocksparse_weight_grad")(left, right, tables, block_size=layout[5], allow_tf32=int(allow_tf32))


def blocksparse_conv1x1(
    x: Value,
    weight: Value,
    gate: Value | None,
    bias: Value | None,
    tables: Value,
    layout: Sequence[Any],
    indices: Value,
    count: Value,
    block_map: Value,
    grid: Sequence[Any],
    activation: str,
    activation_param: float,
    allow_tf32: bool,
) -> Value:
    """The product of the stack of active blocks, scattered into zeros."""
    ops: Any = onnx_ops
    nhwc, attributes = last(x), grid_attributes(grid, counted=False)
    stack = node("sparse_gather")(nhwc, indices, count, block_map, **attributes, zero_tail=1)
    factor = (weight, gate, bias, tables, layout, False, activation, activation_param, allow_tf32)
    plane = ops.Concat(ops.Shape(nhwc, end=3), ops.Constant(value_ints=[layout[4]]), axis=0)
    zeros = ops.Expand(ops.CastLike(ops.Constant(value_float=0.0), nhwc), plane)
    y = blocksparse_matmul(stack, *factor)
    return first(node("sparse_scatter")(y, indices, count, block_map, zeros, **attributes, add=0, atomic=0))


def blocksparse_conv(
    x: Value,
    weight: Value,
    bias: Value | None,
    tables: Value,
    layout: Sequence[Any],
    geometry: Sequence[int],
    output_size: Sequence[Any],
    transposed: bool,
    activation: str,
    activation_param: float,
    packed: Value | None = None,  # a runtime packs by itself
) -> Value:
    ops: Any = onnx_ops
    fixed = all(isinstance(v, int) for v in output_size)
    if transposed and not fixed:
        raise ValueError(
            "sbnet.export: blocksparse_deconv: expected an output of fixed size, got one that depends on a dynamic "
            "height or width"
        )
    names = ("kernel_size", "stride", "padding", "dilation")
    y = node(
        "blocksparse_conv"
    )(
        ops.Transpose(x, perm=[0, 2, 3, 4, 1]),
        weight,
        tables,  # blocksparse.py puts the lists there
        bias,
        in_channels=layout[1],
        out_channels=layout[0],
        **{name: list(geometry[3 * i : 3 * i + 3]) for i, name in enumerate(names)},
        **({"size": list(output_size)} if fixed else {}),
        transposed=int(transposed),
        activation=activation,
        negative_slope=float(activation_param),
    )
    return ops.Transpose(y, perm=[0, 4, 1, 2, 3])


def blocksparse_conv_active(
    x: Value,
    weight: Value,
    bias: Value | None,
    tables: Value,
    layout: Sequence[Any],
    geometry: Sequence[int],
    output_size: Sequence[Any],
    indices: Value,
    count: Value,
    block_map: Value,
    grid: Sequence[Any],
    activation: str,
    activation_param: float,
    packed: Value | None = None,
) -> Value:
    """The convolution of the whole plane, gathered and scattered into zeros."""
    ops: Any = onnx_ops
    dense = blocksparse_conv(
        x, weight, bias, tables, layout, geometry, output_size, False, activation, activation_param
    )
    nhwc, attributes = last(ops.Squeeze(dense, ops.Constant(value_ints=[2]))), grid_attributes(grid, counted=False)
    stack = node("sparse_gather")(nhwc, indices, count, block_map, **attributes, zero_tail=1)
    zeros = ops.Expand(ops.CastLike(ops.Constant(value_float=0.0), nhwc), ops.Shape(nhwc))
    y = node("sparse_scatter")(stack, indices, count, block_map, zeros, **attributes, add=0, atomic=0)
    return ops.Unsqueeze(first(y), ops.Constant(value_ints=[2]))


def pack_attention_blocks(blocks: Value) -> Any:
    return node("pack_attention_blocks")(blocks)


def block_attention(
    q: Value,
    k: Value,
    v: Value,
    rows: Value | None,
    columns: Value | None,
    mask_index: Value | None,
    masks: Value | None,
    q_lengths: Value | None,
    k_lengths: Value | None,
    seed: Value | None,
    rule: Sequence[int],
    scale: float,
    dropout: float,
    deterministic: bool,
) -> Any:
    if dropout:
        raise ValueError(
            f"sbnet.export: block_attention: expected no dropout, got {dropout}; export the model in eval()"
        )
    names = ("diagonal", "band", "prefix", "stride", "phases", "block_size")
    out, lse = node("block_attention")(
        q,
        k,
        v,
        rows,
        columns,
        mask_index,
        masks,
        q_lengths,
        k_lengths,
        **dict(zip(names, rule, strict=True)),
        scale=float(scale),
    )
    return out, lse, onnx_ops.Identity(lse)  # the third is the backward's alone: nothing reads it
