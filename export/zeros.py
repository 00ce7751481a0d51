"""Graph pass on an exported model: zeros only where somebody reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from sbnet.export import pyramid
from sbnet.export.schemas import DOMAIN, VERSION
from sbnet.geometry import Window


def _ints(node: ir.Node, name: str, otherwise: Sequence[int]) -> list[int]:
    return list(node.attributes[name].as_ints()) if name in node.attributes else list(otherwise)


def _int(node: ir.Node, name: str) -> int:
    return node.attributes[name].as_int() if name in node.attributes else 0


def _tiles(node: ir.Node) -> list[int] | None:
    """bsize, where the node's blocks tile their plane."""
    size = _ints(node, "bsize", ())
    return size if _ints(node, "bstride", size) == size and _ints(node, "boffset", (0, 0)) == [0, 0] else None


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


# Layers: where they have their block map and take fringe_pixels (fringe_count follows).
_LAYERS = {
    "sparse_conv2d": (4, 7),
    "sparse_conv_transpose2d": (4, 7),
    "sparse_bottleneck2d": (6, 10),
    "sparse_max_pool2d": (3, 4),
    "sparse_avg_pool2d": (3, 4),
    "sparse_resize2d": (3, 4),
    "sparse_rearrange": (3, 4),
    "sparse_pointwise": (3, 8),
}
_PIXEL = Window.conv(1)


def _block_map(layer: ir.Node) -> ir.Value | None:
    return layer.inputs[_LAYERS[layer.op_type][0]]


def _window(layer: ir.Node) -> Window | None:
    """What a layer's active blocks read of its first input; None where that is not known."""
    if layer.op_type == "sparse_pointwise":
        return _PIXEL
    if layer.op_type == "sparse_bottleneck2d":  # its 3x3 convolution reads zeros outside the active blocks, not x
        return _PIXEL
    if layer.op_type == "sparse_resize2d":
        return _resize_window(layer)
    if layer.op_type == "sparse_rearrange":
        up, down = (layer.attributes[n].as_int() if n in layer.attributes else 1 for n in ("up", "down"))
        return Window.rearrange(up, down, _ints(layer, "pad", (0, 0, 0, 0)))
    if layer.op_type in ("sparse_conv2d", "sparse_conv_transpose2d"):
        shape = layer.inputs[1].shape if layer.inputs[1] is not None else None
        if shape is None or not isinstance(shape[1], int) or not isinstance(shape[2], int):
            return None
        kernel, default_stride = [shape[1], shape[2]], [1, 1]
    else:
        kernel = default_stride = list(_ints(layer, "kernel_size", ()))
    geometry = _ints(layer, "stride", default_stride), _ints(layer, "padding", (0, 0)), _ints(layer, "dilation", (1, 1))
    transposed = layer.op_type == "sparse_conv_transpose2d"
    return Window.conv_transpose(kernel, *geometry) if transposed else Window.conv(kernel, *geometry)


def _resize_window(layer: ir.Node) -> Window | None:
    x = layer.inputs[0]
    size = [] if x is None or x.shape is None else list(x.shape)[1:3]
    if len(size) != 2 or not _fixed([*size, *_plane(layer)]):
        return None
    ratios = tuple(layer.attributes[n].as_float() if n in layer.attributes else 0.0 for n in ("ratio_h", "ratio_w"))
    mode = layer.attributes["mode"].as_string() if "mode" in layer.attributes else "nearest"
    align_corners = bool(_int(layer, "align_corners"))
    return Window.resize((size[0], size[1]), tuple(_plane(layer)), mode, align_corners, ratios)


def _reader(node: ir.Node, index: int, layer: ir.Node) -> Any:
    """What a user of a layer's output reads of it: None (its active blocks alone), a fringe's key, or "all"."""
    # op: where it has its block map, which inputs it reads inside active blocks alone
    at: dict[str, tuple[int, tuple[int, ...]]] = {op: (block_map, ()) for op, (block_map, _) in _LAYERS.items()}
    at |= {op: (4, (6,)) for op in ("sparse_conv2d", "sparse_conv_transpose2d")}
    at |= {"sparse_pointwise": (3, (4, 5, 6, 7)), "sparse_gather": (3, (0,)), "sparse_fill": (1, (0,))}
    if node.domain != DOMAIN or node.op_type not in at:
        return "all"
    block_map, inside = at[node.op_type]
    tiles = _tiles(node)
    same_blocks = node.inputs[block_map] is _block_map(layer) and tiles is not None and tiles == _tiles(layer)
    if index in inside:
        return None if same_blocks else "all"
    window = _window(node) if node.op_type in _LAYERS and index == 0 else None
    if window is None:
        return "all"
    if same_blocks and window == _PIXEL:
        return None
    return (id(node.inputs[block_map]), tuple(tiles or ()), window)


def relax(graph: ir.Graph) -> None:
    """A layer fills its output only where an op that is not block-sparse reads it. Consumers that read their own
    blocks and a halo need zeros in the fringe alone, which the layer clears as it goes."""
    fringes: dict[Any, tuple[ir.Value, ir.Value]] = {}
    for layer in list(graph):
        if layer.domain != DOMAIN or layer.op_type not in _LAYERS or "zero_outside" not in layer.attributes:
            continue
        out, at = layer.outputs[0], _LAYERS[layer.op_type][1]
        if not layer.attributes["zero_outside"].as_int() or out.is_graph_output() or len(layer.inputs) > at:
            continue
        readers = {_reader(user, index, layer): user for user, index in out.uses() if not _shape_only(user)}
        keys = [k for k in readers if k is not None]
        if "all" in keys or out.shape is None:
            continue
        if keys:
            # A consumer's mask must not itself be made from this tensor.
            if any(id(layer) in _ancestors(_block_map(readers[key])) for key in keys):
                continue
            plane = list(out.shape)[1:3]
            windows = [(_block_map(readers[key]), key[1], _plane(readers[key]), key[2]) for key in keys]
            found = pyramid.fringe(_block_map(layer), _tiles(layer) or (), plane, windows)
            layers = [layer, *(readers[key] for key in keys)]
            sized = all(_fixed(_plane(node)) for node in layers) or all(_follows(node) for node in layers)
            written = {str(_plane(readers[key])) for key in keys}  # symbols and all
            alike = len(keys) == 1 or (len(written) == 1 and "None" not in written.pop())
            together = _hull(keys) if sized and alike else None
            if found is None and together is None:
                continue
            pixels, count = found or _fringe(graph, layer, readers[keys[0]], together, fringes)
            layer.resize_inputs(at + 2)
            layer.replace_input_with(at, pixels)
            layer.replace_input_with(at + 1, count)
        layer.attributes["zero_outside"] = ir.AttrInt64("zero_outside", 0)


def _shape_only(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in ("Shape", "Size")


def _hull(keys: Sequence[Any]) -> Any:
    """The key of one reader that reads what all of them do, or more: a 3x3 convolution of stride 2 and the 1x1
    convolution of the shortcut beside it. None where their blocks are others, or their scales."""
    map_, tiles, first = keys[0]
    windows = [key[2] for key in keys]
    if any(key[:2] != (map_, tiles) for key in keys) or any((w.num, w.den) != (first.num, first.den) for w in windows):
        return None
    if all(w == first for w in windows):
        return keys[0]
    lo, hi = (tuple(pick(sides) for sides in zip(*ends, strict=True)) for pick, ends in
              ((min, [w.lo for w in windows]), (max, [w.hi for w in windows])))  # fmt: skip
    return map_, tiles, Window(first.num, first.den, lo, hi, (1, 1))


def _fringe(
    graph: ir.Graph, layer: ir.Node, reader: ir.Node, key: Any, made: dict[Any, tuple[ir.Value, ir.Value]]
) -> tuple[ir.Value, ir.Value]:
    shape = layer.outputs[0].shape
    assert shape is not None
    plane, written = _plane(layer), _plane(reader)
    key = (id(_block_map(layer)), tuple(_tiles(layer) or ()), tuple(map(str, plane)), key)
    if key in made:
        return made[key]
    _, consumer_bsize, window = key[3]
    attributes: dict[str, Any] = {
        "producer_bsize": _tiles(layer),
        "consumer_bsize": list(consumer_bsize),
        "window": window.numbers(),
    }
    inputs = [_block_map(layer), _block_map(reader)]
    if _fixed([*plane, *written]):
        attributes["size"] = [*plane, *written]
    else:
        inputs.append(_plane_sizes(graph, layer, reader))
    node = ir.node(
        "fringe", inputs, attributes, domain=DOMAIN, version=VERSION, num_outputs=2, name=f"fringe_of_{layer.name}"
    )
    batch = shape[0]
    pixels = batch * plane[0] * plane[1] if _fixed([batch, *plane]) else None
    for out, dim in zip(node.outputs, (pixels, 1), strict=True):
        out.dtype, out.shape = ir.DataType.INT32, ir.Shape([dim])
    graph.insert_before(layer, node)
    made[key] = node.outputs[0], node.outputs[1]
    return made[key]


def _plane(layer: ir.Node) -> list[Any]:
    """Height and width of what a layer writes."""
    shape = layer.outputs[0].shape
    return [None, None] if shape is None else list(shape)[1:3]


def _fixed(sides: Sequence[Any]) -> bool:
    return all(isinstance(side, int) for side in sides)


def _follows(layer: ir.Node) -> bool:
    """Can the plane that a layer writes be computed from the one that it reads?"""
    scaled = layer.op_type in ("sparse_conv_transpose2d", "sparse_resize2d", "sparse_rearrange")
    return _window(layer) is not None and not _int(layer, "ceil_mode") and not scaled


def _plane_sizes(graph: ir.Graph, layer: ir.Node, reader: ir.Node) -> ir.Value:
    """(height, width) of a layer's output and of its reader's, from the layer's input: known before it runs."""
    x = layer.inputs[0]
    assert x is not None
    nodes = [ir.node("Shape", [x], {"start": 1, "end": 3})]

    def step(op: str, numbers: list[int]) -> None:
        constant = ir.node("Constant", [], {"value_ints": numbers})
        nodes.extend((constant, ir.node(op, [nodes[-1].outputs[0], constant.outputs[0]])))

    sizes = []
    for node in (layer, reader):
        window = _window(node)
        assert window is not None
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
