"""Graph pass on an exported model: zeros only where they are read, as `sbnet.graph` finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from sbnet.export import pyramid
from sbnet.export.planned import Planned, fixed, input_of, number, read, written
from sbnet.export.schemas import DOMAIN, OPS, VERSION
from sbnet.geometry import Window
from sbnet.graph.ir import Node
from sbnet.graph.kinds import ACTIVE, reads
from sbnet.graph.passes.storage import Consumer, consumers


def relax(graph: ir.Graph) -> None:
    """A layer fills its output only where an op that is not block-sparse reads it. Consumers that read their own
    blocks and a halo need zeros in the fringe alone, which the layer clears as it goes."""
    planned = read(graph)
    fringes: dict[Any, tuple[ir.Value, ir.Value]] = {}
    for own, layer in planned.layers.items():
        names = [name for name, _ in OPS[layer.op_type].inputs]
        at = names.index("fringe_pixels?") if "fringe_pixels?" in names else 0
        if not number(layer, "zero_outside") or len(layer.inputs) > at or planned.plan.graph.is_output(own.output):
            continue
        found = consumers(planned.plan, planned.plan.plane(own.output), [own.output])
        if found is None or layer.outputs[0].shape is None:
            continue
        if found:
            listed = _zeros(graph, planned, own, found, fringes)
            if listed is None:
                continue
            layer.resize_inputs(at + 2)
            for k, value in enumerate(listed):
                layer.replace_input_with(at + k, value)
        layer.attributes["zero_outside"] = ir.AttrInt64("zero_outside", 0)


def _zeros(
    graph: ir.Graph, planned: Planned, own: Node, found: Sequence[Consumer], made: dict[Any, tuple[ir.Value, ir.Value]]
) -> tuple[ir.Value, ir.Value] | None:
    """(pixels, count) of what consumers read of a layer's output beside its active blocks."""
    layer = planned.layers[own]
    map_, blocks = planned.planes[planned.plan.plane(own.output)]
    readers = [_reader(planned, own, consumer) for consumer in found]
    # A consumer's mask must not itself be made from this tensor.
    if any(id(layer) in _ancestors(input_of(reader, "block_map")) for reader in readers):
        return None
    sizes = [written(reader) for reader in readers]
    of = [(*planned.planes[plane], size, window) for (plane, window), size in zip(found, sizes, strict=True)]
    plane = written(layer)
    listed = pyramid.fringe(map_, blocks, plane, of)
    if listed is not None:
        return listed
    layers = [layer, *readers]
    sized = all(fixed(written(node)) for node in layers) or all(_follows(node) for node in layers)
    different = {str(size) for size in sizes}  # symbols and all
    alike = len(found) == 1 or (len(different) == 1 and "None" not in different.pop())
    together = _hull(found) if sized and alike else None
    if together is None:
        return None
    key = map_, blocks, str(plane), together
    if key not in made:
        windows = [reads(own, own.args[0])[-1], found[0][1]]
        made[key] = _fringe(graph, layer, readers[0], planned.planes[together[0]][1], together[1], windows)
    return made[key]


def _reader(planned: Planned, own: Node, consumer: Consumer) -> ir.Node:
    """The first node that reads a tensor so."""
    plane, window = consumer
    return next(
        planned.layers[user] for user in own.output.users
        if planned.plan.lists.get(user.output) == plane and window in reads(user, own.output)
    )  # fmt: skip


def _ancestors(value: ir.Value | None) -> set[int]:
    """ids of all nodes that a value is made from."""
    found: set[int] = set()
    todo = [value]
    while todo:
        v = todo.pop()
        producer = v.producer() if v is not None else None
        if producer is not None and id(producer) not in found:
            found.add(id(producer))
            todo += list(producer.inputs)
    return found


def _hull(found: Sequence[Consumer]) -> Consumer | None:
    """One consumer that reads what all of them do, or more: a 3x3 convolution of stride 2 and the 1x1 convolution of
    the shortcut beside it. None where their blocks are others, or their scales."""
    plane, first = found[0]
    windows = [window for _, window in found]
    if any(other != plane for other, _ in found) or any((w.num, w.den) != (first.num, first.den) for w in windows):
        return None
    if len(windows) == 1:
        return found[0]
    lo, hi = (tuple(pick(axis) for axis in zip(*ends, strict=True)) for pick, ends in
              ((min, [w.lo for w in windows]), (max, [w.hi for w in windows])))  # fmt: skip
    return plane, Window(first.num, first.den, lo, hi, (1, 1))


def _fringe(
    graph: ir.Graph, layer: ir.Node, reader: ir.Node, block: Sequence[int], window: Window, windows: Sequence[Any]
) -> tuple[ir.Value, ir.Value]:
    shape = layer.outputs[0].shape
    assert shape is not None
    plane, other = written(layer), written(reader)
    attributes: dict[str, Any] = {
        "producer_bsize": list(layer.attributes["bsize"].as_ints()),
        "consumer_bsize": list(block),
        "window": window.numbers(),
    }
    inputs = [input_of(layer, "block_map"), input_of(reader, "block_map")]
    if fixed([*plane, *other]):
        attributes["size"] = [*plane, *other]
    else:
        inputs.append(_plane_sizes(graph, layer, windows))
    node = ir.node(
        "fringe", inputs, attributes, domain=DOMAIN, version=VERSION, num_outputs=2, name=f"fringe_of_{layer.name}"
    )
    batch = shape[0]
    pixels = batch * plane[0] * plane[1] if fixed([batch, *plane]) else None
    for out, dim in zip(node.outputs, (pixels, 1), strict=True):
        out.dtype, out.shape = ir.DataType.INT32, ir.Shape([dim])
    graph.insert_before(layer, node)
    return node.outputs[0], node.outputs[1]


def _follows(layer: ir.Node) -> bool:
    """Can the plane that a layer writes be computed from the one that it reads?"""
    scaled = layer.op_type in ("sparse_conv_transpose2d", "sparse_resize2d", "sparse_rearrange")
    return not number(layer, "ceil_mode") and not scaled


def _plane_sizes(graph: ir.Graph, layer: ir.Node, windows: Sequence[Any]) -> ir.Value:
    """(height, width) of a layer's output and of its reader's, from the layer's input: known before it runs.

    windows: what the layer and its reader read.
    """
    x = layer.inputs[0]
    assert x is not None
    nodes = [ir.node("Shape", [x], {"start": 1, "end": 3})]

    def step(op: str, numbers: list[int]) -> None:
        constant = ir.node("Constant", [], {"value_ints": numbers})
        nodes.extend((constant, ir.node(op, [nodes[-1].outputs[0], constant.outputs[0]])))

    sizes = []
    for window in windows:
        if window == ACTIVE:  # it writes a plane of the same size
            window = Window.conv(1)
        # twice the padding less the kernel's reach: lo is minus the padding
        reach = [-lo - hi - 1 for lo, hi in zip(window.lo, window.hi, strict=True)]
        if window.num == (1, 1):
            if reach != [-1, -1]:
                step("Add", [r + 1 for r in reach])
        else:
            step("Add", reach)
            step("Div", list(window.num))
            step("Add", [1, 1])
        sizes.append(nodes[-1].outputs[0])
    nodes.append(ir.node("Concat", sizes, {"axis": 0}))
    for node in nodes:
        node.outputs[0].dtype, node.outputs[0].shape = ir.DataType.INT64, ir.Shape([4 if node is nodes[-1] else 2])
    graph.insert_before(layer, nodes)
    return nodes[-1].outputs[0]
