"""torch.ops.sbnet.* as nodes of the domain `sbnet`: by both schemas, or by a function of their own.

torch's ops are NCHW-shaped, ONNX's NHWC: each translation puts Transposes around its node. memory_format.py removes
those that meet.
"""

from __future__ import annotations

import inspect
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
    """Channels last; matrices, such as a gate's weights, stay."""
    if x is None or (x.shape is not None and len(x.shape) == 2):
        return x
    return onnx_ops.Transpose(x, perm=TO_NHWC)


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
            "sbnet.export: grid: expected ints, got block sizes, strides or offsets that depend on a dynamic dimension"
        )
    attributes = {prefix + "bsize": size}
    if stride != size or offset != [0, 0]:
        attributes |= {prefix + "bstride": stride, prefix + "boffset": offset}
        if counted:
            if not _fixed(count):
                raise ValueError(
                    f"sbnet.export: grid: expected a tiling one (BlockGrid.cover) "
                    f"where the count depends on a dynamic height or width, "
                    f"got block size {size}, stride {stride}, offset {offset}"
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


def mask_pyramid(
    mask: Value, planes: Sequence[Any], tol: float, fringes: Sequence[Any], margin: int = 0
) -> list[Value]:
    sizes = [v for k in range(0, len(planes), 4) for v in planes[k : k + 2]]
    bsizes = [v for k in range(0, len(planes), 4) for v in planes[k + 2 : k + 4]]
    if not _fixed([*bsizes, *fringes]):
        raise ValueError(
            "sbnet.export: mask_pyramid: expected ints, got blocks or fringes that depend on a dynamic dimension"
        )
    attributes: dict[str, Any] = {"bsizes": bsizes, "tol": float(tol)}
    if fringes:
        attributes["fringes"] = list(fringes)
    if margin:
        attributes["margin"] = margin
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
    kinds = {float: ir.AttributeType.FLOAT, int: ir.AttributeType.INT}
    return kinds.get(type(value), ir.AttributeType.INTS), value


def _shape(sizes: Sequence[Any]) -> Value:
    """One int64 tensor of numbers of which some are known at run time only."""
    parts: list[Any] = [onnx_ops.Constant(value_ints=[v] if isinstance(v, int) else [1]) for v in sizes]
    parts = [p if isinstance(v, int) else onnx_ops.Reshape(v, p) for v, p in zip(sizes, parts, strict=True)]
    return onnx_ops.Concat(*parts, axis=0)


MAPS = ("T", "W", "R")  # types of feature maps and weights of four dimensions
# What the schemas of PyTorch's and ONNX's op call otherwise.
ATTRIBUTES = {"output_size": "size", "method": "mode"}
OF_BYTES = ("sparse_conv2d_quantized", "sparse_conv2d_dequantized")
HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
TYPES = {"int": int, "bool": bool, "float": float, "str": str, "List[int]": Sequence[Any]}


def by_schema(name: str) -> Callable[..., Value]:
    """The translation of an op on feature maps: both schemas name the same things, in their own order.

    Feature maps and weights are [N,C,H,W] here and [N,H,W,C] there. A layer fills its output; zeros.py relaxes that.
    """
    op, arguments = schemas.OPS[name], getattr(torch.ops.sbnet, name).default._schema.arguments
    inputs = [(key.rstrip("?"), kind) for key, kind in op.inputs]
    counted = name not in ("sparse_gather", "sparse_scatter")

    def translated(*args: Any, **kwargs: Any) -> Value:
        given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        if name in OF_BYTES:
            for key in ("x", "residual"):
                given[key] = _as_float(given.get(key))
        tensors = [last(given.get(key)) if kind in MAPS else given.get(key) for key, kind in inputs]
        while tensors[-1] is None:
            tensors.pop()
        attributes: dict[str, Any] = grid_attributes(given["grid"], counted=counted)
        for argument in arguments:
            key, value = ATTRIBUTES.get(argument.name, argument.name), given.get(argument.name)
            if value is not None and key in op.attributes and key != "transpose":  # of memory formats, not of NHWC
                attributes[key] = _attribute(name, argument.name, value, given)
        attributes = {key: value for key, value in attributes.items() if value is not None}
        zeros = {"zero_outside": 1} if "zero_outside" in op.attributes else {}
        y = node(name)(*tensors, **attributes, **zeros)
        written = given.get("dtype")  # which the exporter gives as ONNX's
        return first(onnx_ops.Cast(y, to=written) if written in HALVES else y)

    kinds = {a.name: TYPES.get(str(a.type), Any) for a in arguments}  # by which the exporter tells tensors from numbers
    translated.__name__, translated.__annotations__ = name, kinds
    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=k) for n, k in kinds.items()]
    translated.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return translated


def _as_float(x: Value | None) -> Value | None:
    """Halves beside bytes: the ONNX ops of bytes read and write float32, which every half fits. What they compute, they
    compute in float32, and round once at the end: the bits are those of kernels that read and write halves."""
    return x if x is None or x.dtype not in HALVES else onnx_ops.Cast(x, to=ir.DataType.FLOAT)


def _attribute(name: str, argument: str, value: Any, given: dict[str, Any]) -> Any:
    """An argument's value as an attribute; None where it is left out."""
    if isinstance(value, (bool, int, float, str)):
        return int(value) if isinstance(value, bool) else value
    if _fixed(value):
        return list(value)
    if argument != "output_size":
        raise ValueError(f"sbnet.export: {name}: {argument}: expected ints, got one that depends on a dynamic size")
    if not (given["ratio_h"] > 0 and given["ratio_w"] > 0):
        raise ValueError(f"sbnet.export: {name}: expected a scale_factor, got a size that depends on a dynamic one")
    return None


def table() -> dict[Any, Callable[..., Any]]:
    """custom_translation_table of torch.onnx.export: every functional op of torch.ops.sbnet."""
    from sbnet.export import translate_tokens as tokens
    from sbnet.export import translate_weights as weights

    ops = torch.ops.sbnet
    own = (
        reduce_mask, fringe, mask_pyramid, motion_mask, weights.blocksparse_matmul, weights.blocksparse_weight_grad,
        weights.pack_attention_blocks, weights.block_attention, weights.blocksparse_conv1x1, weights.blocksparse_conv,
        weights.blocksparse_conv_active, tokens.pack_tokens, tokens.move_rows, tokens.pack_patches,
        tokens.merge_pixels, tokens.window_attention,
    )  # fmt: skip
    found: dict[Any, Callable[..., Any]] = {getattr(ops, f.__name__).default: f for f in own}
    others = [name for name in schemas.OPS if name.startswith("sparse_")]
    return found | {getattr(ops, name).default: by_schema(name) for name in others}
