"""Shapes of what the ops of the domain `sbnet` give: what onnx.shape_inference is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx
from onnx.shape_inference import InferenceContext, InferenceError

from sbnet.geometry import conv_transpose_output_size, pool_output_size
from sbnet.ops.lists.pyramid import CONSUMER_NUMBERS

Dim = int | str | None
Dims = list[Dim]


class NodeView:
    """A node under shape inference; `op` is its schemas.Op."""

    def __init__(self, op: Any, context: InferenceContext) -> None:
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
            raise InferenceError(f"sbnet::{self.op.name}: {name}: expected {rank} dimensions, got {len(dims)}")
        return dims

    def attribute(self, name: str, otherwise: Any = None) -> Any:
        value = self.context.get_attribute(name)
        return otherwise if value is None else onnx.helper.get_attribute_value(value)

    def element_type(self, index: int) -> int:
        return self.context.get_input_type(index).tensor_type.elem_type


def scaled(dim: Dim, f: Callable[[int], int]) -> Dim:
    return f(dim) if isinstance(dim, int) else None


def reduce_mask(node: NodeView) -> list[Dims | None]:
    mask = node.shape(0, 3) or [None] * 3
    size, count = node.attribute("bsize"), node.attribute("bcount")
    blocks = count or [scaled(mask[1 + d], lambda v, d=d: -(-v // size[d])) for d in range(2)]  # type: ignore[misc]
    block_map = [mask[0], *blocks]
    rows: Dim = node.attribute("capacity", -1)
    if rows == -1:
        known = [d for d in block_map if isinstance(d, int)]
        rows = known[0] * known[1] * known[2] if len(known) == 3 else None
    return [[rows, 3], [1], [1], block_map]


def motion_mask(node: NodeView) -> list[Dims | None]:
    background = node.shape(1, 3)
    return [background, background]


def sparse_gather(node: NodeView) -> list[Dims | None]:
    x, indices = node.shape(0, 4) or [None] * 4, node.shape(1, 2) or [None] * 2
    bh, bw = node.attribute("bsize")
    return [[indices[0], x[3], bh, bw] if node.attribute("transpose", 0) else [indices[0], bh, bw, x[3]]]


def like(index: int) -> Callable[[NodeView], list[Dims | None]]:
    return lambda node: [node.shape(index, 4)]


def sparse_adaptive_pool2d(node: NodeView) -> list[Dims | None]:
    x = node.shape(0, 4) or [None] * 4
    return [[x[0], *node.attribute("size", [1, 1]), x[3]]]


def sparse_squeeze_excite2d(node: NodeView) -> list[Dims | None]:
    x = node.shape(0, 4) or [None] * 4
    return [[x[0], 1, 1, x[3]]]


def fringe(node: NodeView) -> list[Dims | None]:
    block_map, size = node.shape(0, 3), node.attribute("size")
    pixels: Dim = node.attribute("capacity", -1)
    if pixels == -1:
        batch = block_map[0] if block_map else None
        pixels = batch * size[0] * size[1] if isinstance(batch, int) and size else None
    return [[pixels], [1]]


def mask_pyramid(node: NodeView) -> list[Dims | None]:
    mask, bsizes = node.shape(0, 3), node.attribute("bsizes")
    sizes = node.attribute("sizes") or [None] * len(bsizes)
    batch = mask[0] if mask else None

    def product(*dims: Dim) -> Dim:
        numbers = [d for d in dims if isinstance(d, int)]
        return math.prod(numbers) if len(numbers) == len(dims) else None

    lists: list[Dims | None] = []
    for k in range(0, len(bsizes), 2):
        rows, columns = (scaled(sizes[k + d], lambda v, d=k + d: -(-v // bsizes[d])) for d in range(2))  # type: ignore[misc]
        lists += [[product(batch, rows, columns), 3], [1], [1], [batch, rows, columns]]
    fringes, at = node.attribute("fringes", []), 0
    while at + 1 < len(fringes):
        k = 2 * fringes[at]
        lists += [[product(batch, *sizes[k : k + 2])], [1]]
        at += 2 + CONSUMER_NUMBERS * fringes[at + 1]
    return lists


def sparse_conv2d(node: NodeView, first: int = 2) -> list[Dims | None]:
    """`first`: where the lists begin."""
    x, weight = node.shape(0, 4), node.shape(1, 4)
    like = node.shape(first + 8, 4) or node.shape(first + 4, 4) or [None] * 4
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


def sparse_conv2d_quantized(node: NodeView) -> list[Dims | None]:
    return sparse_conv2d(node, 3)


def sparse_conv_transpose2d(node: NodeView) -> list[Dims | None]:
    x, weight = node.shape(0, 4), node.shape(1, 4)
    like = node.shape(10, 4) or node.shape(6, 4) or [None] * 4
    window = [node.attribute(n, [v, v]) for n, v in (("stride", 1), ("padding", 0), ("output_padding", 0))]
    dilation, groups = node.attribute("dilation", [1, 1]), node.attribute("groups", 1)
    y: Dims = [x[0] if x else None, None, None, scaled(weight[3], lambda k: k * groups) if weight else None]
    for d in range(2):
        side, taps = (x[1 + d], weight[1 + d]) if x and weight else (None, None)
        if isinstance(side, int) and isinstance(taps, int):
            numbers = (*(v[d] for v in window), dilation[d])
            y[1 + d] = conv_transpose_output_size(side, taps, *numbers)[0]
    return [[have if isinstance(have, int) or other is None else other for have, other in zip(y, like, strict=True)]]


def sparse_pool2d(node: NodeView) -> list[Dims | None]:
    x, base = node.shape(0, 4) or [None] * 4, node.shape(6, 4) or [None] * 4
    kernel = node.attribute("kernel_size")
    stride, padding, dilation = (
        node.attribute(n, v) for n, v in (("stride", kernel), ("padding", [0, 0]), ("dilation", [1, 1]))
    )
    ceil = bool(node.attribute("ceil_mode", 0))
    y: Dims = [x[0], None, None, x[3]]
    for d in range(2):
        window = (kernel[d], stride[d], padding[d], dilation[d], ceil)
        y[1 + d] = scaled(x[1 + d], lambda side, w=window: pool_output_size(side, *w)[0])  # type: ignore[misc]
    return [[have if isinstance(have, int) or other is None else other for have, other in zip(y, base, strict=True)]]


def sparse_resize2d(node: NodeView) -> list[Dims | None]:
    x, base = node.shape(0, 4) or [None] * 4, node.shape(6, 4) or [None] * 4
    y: Dims = [x[0], *node.attribute("size", [None, None]), x[3]]
    for d, name in enumerate(("ratio_h", "ratio_w")):
        ratio = node.attribute(name, 0.0)
        if y[1 + d] is None and ratio > 0:
            y[1 + d] = scaled(x[1 + d], lambda side, r=ratio: math.floor(side / r * (1 + 2**-22)))  # type: ignore[misc]
    return [[have if isinstance(have, int) or other is None else other for have, other in zip(y, base, strict=True)]]


def sparse_rearrange(node: NodeView) -> list[Dims | None]:
    x, base = node.shape(0, 4) or [None] * 4, node.shape(6, 4) or [None] * 4
    up, down = (node.attribute(name, 1) for name in ("up", "down"))
    pad = node.attribute("pad", [0, 0, 0, 0])
    y: Dims = [x[0], None, None, scaled(x[3], lambda c: c // (up * up) * (down * down))]
    for d, more in enumerate((pad[2] + pad[3], pad[0] + pad[1])):
        y[1 + d] = scaled(x[1 + d], lambda side, m=more: side * up // down + m)  # type: ignore[misc]
    return [[have if isinstance(have, int) or other is None else other for have, other in zip(y, base, strict=True)]]


def blocksparse_matmul(node: NodeView) -> list[Dims | None]:
    x = node.any_shape(0)
    node.shape(1, 3)
    if not x:
        return [None]
    return [[*x[:-1], node.attribute("in_features" if node.attribute("transposed", 0) else "out_features")]]


def blocksparse_weight_grad(node: NodeView) -> list[Dims | None]:
    coords, size = node.shape(2, 2), node.attribute("block_size")
    return [[coords[0] if coords else None, size, size]]


def blocksparse_conv(node: NodeView) -> list[Dims | None]:
    x = node.shape(0, 5)
    node.shape(1, 1)
    node.shape(2, 1)
    if not x:
        return [None]
    sides: Dims = list(node.attribute("size", []))
    if not sides:
        numbers = zip(
            node.attribute("kernel_size"), node.attribute("stride", [1] * 3), node.attribute("padding", [0] * 3),
            node.attribute("dilation", [1] * 3), strict=True,
        )  # fmt: skip
        sides = [
            scaled(side, lambda v, n=n: (v + 2 * n[2] - (n[0] - 1) * n[3] - 1) // n[1] + 1)  # type: ignore[misc]
            for side, n in zip(x[1:4], numbers, strict=True)
        ]
    return [[x[0], *sides, node.attribute("in_channels" if node.attribute("transposed", 0) else "out_channels")]]


def pack_attention_blocks(node: NodeView) -> list[Dims | None]:
    batch, heads, rows, columns = node.shape(0, 4) or [None] * 4
    words = [scaled(n, lambda v: -(-v // 32)) for n in (columns, rows)]
    return [[batch, heads, rows, words[0]], [batch, heads, columns, words[1]]]


def block_attention(node: NodeView) -> list[Dims | None]:
    q = node.shape(0, 4)
    node.shape(1, 4)
    node.shape(2, 4)
    return [q, q[:3]] if q else [None, None]
