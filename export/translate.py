"""torch.ops.sbnet.* as nodes of the domain `sbnet`, one function an op.

torch's ops are NCHW-shaped, ONNX's NHWC: each function puts Transposes around its node. memory_format.py removes those
that meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import evaluator, ir, values
from onnxscript import opset18 as onnx_ops

from sbnet.export import schemas
from sbnet.ops.lists.pyramid import CONSUMER_NUMBERS

TO_NHWC, TO_NCHW = [0, 2, 3, 1], [0, 3, 1, 2]

Value = Any  # an onnxscript tensor under construction


def node(name: str) -> Callable[..., Any]:
    opset = values.Opset(schemas.DOMAIN, schemas.VERSION)
    return values.Op(opset, name, schemas.register()[name])


def last(x: Value | None) -> Value | None:
    return None if x is None else onnx_ops.Transpose(x, perm=TO_NHWC)


def first(x: Value) -> Value:
    return onnx_ops.Transpose(x, perm=TO_NCHW)


def _fixed(numbers: Sequence[Any]) -> bool:
    return all(isinstance(v, int) for v in numbers)


def grid_attributes(grid: Sequence[Any], prefix: str = "", counted: bool = True) -> dict[str, list[int]]:
    """Attributes of a grid. A grid that tiles its plane needs no more than bsize: where the count depends on a dynamic
    height or width, it must be one (or `counted`: the op reads the count off its block map)."""
    size, stride, offset, count = (list(grid[2 * k : 2 * k + 2]) for k in range(4))
    if not _fixed([*size, *stride, *offset]):
        raise ValueError(
            "sbnet.export: block sizes, strides and offsets that depend on a dynamic dimension; ints wanted"
        )
    attributes = {prefix + "bsize": size}
    if stride != size or offset != [0, 0]:
        attributes |= {prefix + "bstride": stride, prefix + "boffset": offset}
        if counted:
            if not _fixed(count):
                raise ValueError(
                    f"sbnet.export: a grid of block size {size}, stride {stride} and offset {offset} whose count "
                    "depends on a dynamic height or width; a tiling grid (BlockGrid.cover) is wanted there"
                )
            attributes[prefix + "bcount"] = count
    return attributes


def reduce_mask(mask: Value, grid: Sequence[Any], tol: float, avgpool: bool, capacity: Any) -> Any:
    attributes = grid_attributes(grid)
    if isinstance(capacity, int) and not (_fixed(grid) and _is_all(mask, grid, capacity)):
        attributes["capacity"] = capacity  # type: ignore[assignment]
    if _fixed(grid):
        attributes["bcount"] = list(grid[6:])
    return node("reduce_mask")(mask, **attributes, tol=float(tol), avgpool=int(avgpool))


def _is_all(mask: Value, grid: Sequence[int], capacity: int) -> bool:
    shape = getattr(mask, "shape", None)
    batch = shape[0] if shape is not None else None
    return isinstance(batch, int) and capacity == batch * grid[6] * grid[7]


def sparse_gather(
    x: Value, indices: Value, count: Value, block_map: Value, grid: Sequence[Any], transpose: bool, zero_tail: bool
) -> Value:
    attributes = grid_attributes(grid, counted=False)
    return first(node("sparse_gather")(last(x), indices, count, block_map, **attributes, zero_tail=int(zero_tail)))


def sparse_scatter(
    blocks: Value,
    indices: Value,
    count: Value,
    block_map: Value,
    base: Value,
    grid: Sequence[Any],
    add: bool,
    atomic: bool,
    transpose: bool,
) -> Value:
    attributes = {**grid_attributes(grid, counted=False), "add": int(add), "atomic": int(atomic)}
    return first(node("sparse_scatter")(last(blocks), indices, count, block_map, last(base), **attributes))


def sparse_fill(x: Value, block_map: Value, grid: Sequence[Any], value: float) -> Value:
    return first(node("sparse_fill")(last(x), block_map, **grid_attributes(grid), value=float(value)))


def motion_mask(frame: Value, background: Value, threshold: float, rate: float, cut: float, smooth: int) -> Any:
    numbers = {"threshold": float(threshold), "rate": float(rate), "cut": float(cut), "smooth": int(smooth)}
    return node("motion_mask")(last(frame), background, **numbers)


def fringe(
    producer_map: Value,
    consumer_map: Value,
    size: Sequence[Any],
    producer_grid: Sequence[Any],
    consumer_size: Sequence[Any],
    consumer_grid: Sequence[Any],
    window: Sequence[int],
    capacity: Any,
) -> Any:
    if not _fixed(window):
        raise ValueError("sbnet.export: fringe: expected a window of ints, got one that depends on a dynamic dimension")
    attributes: dict[str, Any] = {
        **grid_attributes(producer_grid, "producer_"),
        **grid_attributes(consumer_grid, "consumer_"),
        "window": list(window),
    }
    if isinstance(capacity, int):
        attributes["capacity"] = capacity
    sides = [*size, *consumer_size]
    if _fixed(sides):
        return node("fringe")(producer_map, consumer_map, **attributes, size=sides)
    return node("fringe")(producer_map, consumer_map, _shape(sides), **attributes)


def mask_pyramid(mask: Value, planes: Sequence[Any], tol: float, fringes: Sequence[Any]) -> list[Value]:
    sizes = [v for k in range(0, len(planes), 4) for v in planes[k : k + 2]]
    bsizes = [v for k in range(0, len(planes), 4) for v in planes[k + 2 : k + 4]]
    if not _fixed([*bsizes, *fringes]):
        raise ValueError(
            "sbnet.export: mask_pyramid: blocks or fringes that depend on a dynamic dimension; ints wanted"
        )
    attributes: dict[str, Any] = {"bsizes": bsizes, "tol": float(tol)}
    if fringes:
        attributes["fringes"] = list(fringes)
    inputs = [mask]
    if _fixed(sizes):
        attributes["sizes"] = sizes
    else:
        inputs.append(_shape(sizes))
    count, at = len(bsizes) // 2 * 4, 0
    while at < len(fringes):
        count, at = count + 2, at + 2 + CONSUMER_NUMBERS * fringes[at + 1]
    # values.Op knows no variadic outputs: the node is made by hand, on the list that the exporter's recorder keeps
    recorder: Any = evaluator.default()
    made = [ir.Attr(k, *_typed(v)) for k, v in attributes.items()]
    node = ir.Node(schemas.DOMAIN, "mask_pyramid", inputs, made, num_outputs=count, version=schemas.VERSION)
    recorder.nodes.append(node)
    return list(node.outputs)


def _typed(value: Any) -> tuple[ir.AttributeType, Any]:
    return (ir.AttributeType.FLOAT if isinstance(value, float) else ir.AttributeType.INTS), value


def _shape(sizes: Sequence[Any]) -> Value:
    """One int64 tensor of numbers of which some are known at run time only."""
    parts: list[Any] = [onnx_ops.Constant(value_ints=[v] if isinstance(v, int) else [1]) for v in sizes]
    parts = [p if isinstance(v, int) else onnx_ops.Reshape(v, p) for v, p in zip(sizes, parts, strict=True)]
    return onnx_ops.Concat(*parts, axis=0)


def sparse_conv2d(
    x: Value,
    weight: Value,
    bias: Value | None,
    residual: Value | None,
    indices: Value,
    count: Value,
    block_map: Value,
    grid: Sequence[Any],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
    activation_param: float,
    allow_tf32: bool,
) -> Value:
    return first(
        node("sparse_conv2d")(
            last(x),
            last(weight),
            indices,
            count,
            block_map,
            bias,
            last(residual),
            **grid_attributes(grid),
            stride=list(stride),
            padding=list(padding),
            dilation=list(dilation),
            groups=groups,
            activation=activation,
            negative_slope=float(activation_param),
            allow_tf32=int(allow_tf32),
            zero_outside=1,  # memory_format.py relaxes it where nothing reads outside the active blocks
        )
    )


def sparse_conv_transpose2d(
    x: Value,
    weight: Value,
    bias: Value | None,
    residual: Value | None,
    indices: Value,
    count: Value,
    block_map: Value,
    grid: Sequence[Any],
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
    activation_param: float,
    allow_tf32: bool,
) -> Value:
    window = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
    return first(
        node("sparse_conv_transpose2d")(
            last(x),
            last(weight),
            indices,
            count,
            block_map,
            bias,
            last(residual),
            **grid_attributes(grid),
            **{name: list(pair) for name, pair in window.items()},
            groups=groups,
            activation=activation,
            negative_slope=float(activation_param),
            allow_tf32=int(allow_tf32),
            zero_outside=1,  # memory_format.py relaxes it where nothing reads outside the active blocks
        )
    )


def sparse_bottleneck2d(
    x: Value,
    weight1: Value,
    weight2: Value,
    weight3: Value,
    bias1: Value | None,
    bias2: Value | None,
    bias3: Value | None,
    indices: Value,
    count: Value,
    block_map: Value,
    grid: Sequence[Any],
    activation: str,
    activation_param: float,
    allow_tf32: bool,
) -> Value:
    return first(
        node("sparse_bottleneck2d")(
            last(x),
            last(weight1),
            last(weight2),
            last(weight3),
            indices,
            count,
            block_map,
            bias1,
            bias2,
            bias3,
            **grid_attributes(grid),
            activation=activation,
            negative_slope=float(activation_param),
            allow_tf32=int(allow_tf32),
            zero_outside=1,  # memory_format.py relaxes it where nothing reads outside the active blocks
        )
    )


def sparse_max_pool2d(
    x: Value,
    indices: Value,
    count: Value,
    block_map: Value,
    grid: Sequence[Any],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Value:
    window = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
    return _pool("sparse_max_pool2d", x, (indices, count, block_map), grid, window, ceil_mode)


def sparse_avg_pool2d(
    x: Value,
    indices: Value,
    count: Value,
    block_map: Value,
    grid: Sequence[Any],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Value:
    window = {"kernel_size": kernel_size, "stride": stride, "padding": padding}
    divisor = {"count_include_pad": int(count_include_pad), "divisor_override": divisor_override or 0}
    return _pool("sparse_avg_pool2d", x, (indices, count, block_map), grid, window, ceil_mode, **divisor)


def _pool(
    name: str,
    x: Value,
    lists: Sequence[Value],
    grid: Sequence[Any],
    window: dict[str, Sequence[int]],
    ceil_mode: bool,
    **attributes: int,
) -> Value:
    return first(
        node(name)(
            last(x),
            *lists,
            **grid_attributes(grid),
            **{k: list(v) for k, v in window.items()},
            ceil_mode=int(ceil_mode),
            **attributes,
            zero_outside=1,  # memory_format.py relaxes it where nothing reads outside the active blocks
        )
    )


def sparse_resize2d(
    x: Value,
    indices: Value,
    count: Value,
    block_map: Value,
    grid: Sequence[Any],
    output_size: Sequence[Any],
    method: str,
    align_corners: bool,
    ratio_h: float,
    ratio_w: float,
) -> Value:
    if not _fixed(output_size) and not (ratio_h > 0 and ratio_w > 0):
        raise ValueError(
            "sbnet.export: sparse_resize2d: a size that depends on a dynamic one; a scale_factor is wanted"
        )
    return first(
        node("sparse_resize2d")(
            last(x), indices, count, block_map,
            **grid_attributes(grid),
            **({"size": list(output_size)} if _fixed(output_size) else {}),
            mode=method, align_corners=int(align_corners), ratio_h=float(ratio_h), ratio_w=float(ratio_w),
            zero_outside=1,  # memory_format.py relaxes it where nothing reads outside the active blocks
        )
    )  # fmt: skip


def sparse_rearrange(
    x: Value,
    indices: Value,
    count: Value,
    block_map: Value,
    grid: Sequence[Any],
    up: int,
    down: int,
    groups: int,
    pad: Sequence[Any],
    value: float,
) -> Value:
    if not _fixed(pad):
        raise ValueError("sbnet.export: sparse_rearrange: pad: expected numbers that depend on no dynamic size")
    return first(
        node("sparse_rearrange")(
            last(x), indices, count, block_map, **grid_attributes(grid), up=up, down=down, groups=groups,
            pad=list(pad), value=float(value), zero_outside=1,
        )
    )  # fmt: skip


def sparse_pointwise(
    x: Value,
    a: Value | None,
    b: Value | None,
    c: Value | None,
    d: Value | None,
    indices: Value,
    count: Value,
    block_map: Value,
    grid: Sequence[Any],
    program: str,
) -> Value:
    others = [last(v) for v in (a, b, c, d)]
    while others and others[-1] is None:
        others.pop()
    attributes: dict[str, Any] = {**grid_attributes(grid), "program": program, "zero_outside": 1}
    return first(node("sparse_pointwise")(last(x), indices, count, block_map, *others, **attributes))


def table() -> dict[Any, Callable[..., Any]]:
    """custom_translation_table of torch.onnx.export: every functional op of torch.ops.sbnet."""
    from sbnet.export import translate_weights as weights

    ops = torch.ops.sbnet
    functions = (
        reduce_mask,
        sparse_gather,
        sparse_scatter,
        sparse_fill,
        fringe,
        mask_pyramid,
        motion_mask,
        sparse_conv2d,
        sparse_conv_transpose2d,
        sparse_bottleneck2d,
        sparse_max_pool2d,
        sparse_avg_pool2d,
        sparse_resize2d,
        sparse_pointwise,
        sparse_rearrange,
        weights.blocksparse_matmul,
        weights.pack_attention_blocks,
        weights.block_attention,
        weights.blocksparse_conv1x1,
        weights.blocksparse_conv,
        weights.blocksparse_conv_active,
    )
    return {getattr(ops, f.__name__).default: f for f in functions}
