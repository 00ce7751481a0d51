"""A graph pass: three convolutions and a shortcut become one sparse_bottleneck2d."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from sbnet.export.schemas import DOMAIN, VERSION
from sbnet.select import bottleneck_in_one_kernel

_HALVES = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
_LIST = (2, 3, 4)  # a sparse_conv2d's inputs: indices, count, block_map
_SHARED = ("bsize", "bstride", "boffset", "bcount", "activation", "negative_slope", "allow_tf32", "zero_outside")


def fuse(graph: ir.Graph) -> None:
    """Bottleneck blocks that Hopper has one kernel for, and that nobody looks into, each become one op.

    Only where the kernel gains with any number of blocks: up to 96 hidden channels (docs/kernels/bottleneck.md).
    """
    for last in list(graph):
        block = _block(last)
        if block is None:
            continue
        first, middle, _ = block
        lists = [last.inputs[i] for i in _LIST]
        weights, biases = [node.inputs[1] for node in block], [_input(node, 5) for node in block]
        node = ir.node(
            "sparse_bottleneck2d",
            [first.inputs[0], *weights, *lists, *biases],
            {name: last.attributes[name] for name in _SHARED if name in last.attributes},
            domain=DOMAIN,
            version=VERSION,
            name=f"bottleneck_of_{last.name}",
        )
        ir.convenience.replace_nodes_and_values(graph, last, [last, middle, first], [node], last.outputs, node.outputs)


def _block(last: ir.Node) -> tuple[ir.Node, ir.Node, ir.Node] | None:
    """The convolutions of a bottleneck block that ends with `last`."""
    middle = _only_feeds(last)
    first = _only_feeds(middle) if middle is not None else None
    if middle is None or first is None or first.inputs[0] is not _input(last, 6):
        return None
    block = first, middle, last
    if any(_input(node, 6) is not None for node in (first, middle)) or any(len(node.inputs) > 7 for node in block):
        return None
    if [_geometry(node) for node in block] != [(1, 0), (3, 1), (1, 0)]:
        return None
    if any(node.inputs[i] is not last.inputs[i] for node in block for i in _LIST):
        return None
    if any(_value(node, name) != _value(last, name) for node in block for name in _SHARED):
        return None
    hidden, channels = _shape(first, 0), _shape(last, 0)
    halves = last.outputs[0].dtype in _HALVES
    if len({bias.dtype for bias in (_input(node, 5) for node in block) if bias is not None}) > 1:
        return None
    return (
        block if halves and hidden <= 96 and bottleneck_in_one_kernel(channels, hidden, _value(last, "bsize")) else None
    )


def _only_feeds(node: ir.Node) -> ir.Node | None:
    """The convolution that node, a convolution, alone reads."""
    if not _is_convolution(node) or node.inputs[0] is None:
        return None
    producer = node.inputs[0].producer()
    if producer is None or not _is_convolution(producer) or node.inputs[0].is_graph_output():
        return None
    return producer if len(list(node.inputs[0].uses())) == 1 else None


def _is_convolution(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type == "sparse_conv2d"


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _value(node: ir.Node, name: str) -> Any:
    return node.attributes[name].value if name in node.attributes else None


def _shape(node: ir.Node, dim: int) -> int:
    """Of the weight; 0 where it is not known."""
    weight = node.inputs[1]
    known = weight is not None and weight.shape is not None and isinstance(weight.shape[dim], int)
    return weight.shape[dim] if known else 0  # type: ignore[union-attr, index, return-value]


def _geometry(node: ir.Node) -> tuple[int, int] | None:
    """Side of the window and padding of an ordinary convolution of stride 1; None: another."""
    side, padding = _shape(node, 1), list(_value(node, "padding") or (0, 0))
    ordinary = all(list(_value(node, name) or (1, 1)) == [1, 1] for name in ("stride", "dilation"))
    if not ordinary or (_value(node, "groups") or 1) != 1 or _shape(node, 2) != side or padding[0] != padding[1]:
        return None
    return side, padding[0]
