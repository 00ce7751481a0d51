"""Fringes in an exported graph: where all masks come from one mask_pyramid, that node lists the fringes as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from sbnet.export.schemas import DOMAIN
from sbnet.geometry import Window
from sbnet.ops.lists.pyramid import CONSUMER_NUMBERS

# Block map, block size and (height, width) of what it writes, what it reads
Reader = tuple[ir.Value | None, Sequence[int], Sequence[Any], Window]


def fringe(
    block_map: ir.Value | None, tiles: Sequence[int], size: Sequence[Any], readers: Sequence[Reader]
) -> tuple[ir.Value, ir.Value] | None:
    """(pixels, count) of the fringe of a tensor, listed by the mask_pyramid that made its block map; None where the
    readers' masks come from elsewhere or a size is dynamic.

    Args:
        block_map: of the tensor.
        tiles: block size of the tensor's plane.
        size: height and width of the plane.
        readers: who reads the tensor beside its active blocks: their union is listed.
    """
    node = _pyramid_of(block_map)
    if node is None or any(_pyramid_of(map_) is not node for map_, *_ in readers):
        return None
    assert block_map is not None
    plane = _plane(node, block_map)
    if _facts(node, plane) != (tuple(size), tuple(tiles)):
        return None
    consumers = []
    for map_, block, written, window in readers:
        assert map_ is not None
        at = _plane(node, map_)
        if _facts(node, at) != (tuple(written), tuple(block)):
            return None
        consumers.append([at, *window.numbers()])
    wanted = [plane, len(consumers), *(number for consumer in sorted(consumers) for number in consumer)]
    return _listed(node, wanted)


def _pyramid_of(block_map: ir.Value | None) -> ir.Node | None:
    node = block_map.producer() if block_map is not None else None
    fixed = node is not None and node.domain == DOMAIN and node.op_type == "mask_pyramid" and "sizes" in node.attributes
    return node if fixed else None


def _plane(node: ir.Node, block_map: ir.Value) -> int:
    """A plane's outputs are indices, count, total, block_map."""
    return list(node.outputs).index(block_map) // 4


def _facts(node: ir.Node, plane: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """((height, width), block size) of a plane."""
    at = slice(2 * plane, 2 * plane + 2)
    return tuple(node.attributes["sizes"].as_ints()[at]), tuple(node.attributes["bsizes"].as_ints()[at])


def _listed(node: ir.Node, wanted: list[int]) -> tuple[ir.Value, ir.Value]:
    """The outputs of a fringe; added to the node if it does not list it yet."""
    numbers = list(node.attributes["fringes"].as_ints()) if "fringes" in node.attributes else []
    output, at = 2 * len(node.attributes["bsizes"].as_ints()), 0
    while at < len(numbers):
        length = 2 + CONSUMER_NUMBERS * numbers[at + 1]
        if numbers[at : at + length] == wanted:
            return node.outputs[output], node.outputs[output + 1]
        output, at = output + 2, at + length
    node.attributes["fringes"] = ir.AttrInt64s("fringes", numbers + wanted)
    node.resize_outputs(output + 2)
    batch = node.inputs[0].shape[0] if node.inputs[0] is not None and node.inputs[0].shape is not None else None
    height, width = _facts(node, wanted[0])[0]
    for value, dim in zip(
        node.outputs[output:], (batch * height * width if isinstance(batch, int) else None, 1), strict=True
    ):
        value.dtype, value.shape = ir.DataType.INT32, ir.Shape([dim])
    return node.outputs[output], node.outputs[output + 1]
