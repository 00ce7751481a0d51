"""An exported model as a plan of `sbnet.graph`, whose passes say what is fused and what a consumer reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch

from sbnet.export.schemas import DOMAIN, OPS
from sbnet.graph.axes import Axes
from sbnet.graph.ir import Graph, Node, Value
from sbnet.graph.plan import Plan

KINDS = {
    "sparse_conv2d": "conv", "sparse_conv_transpose2d": "conv_transpose", "sparse_bottleneck2d": "bottleneck",
    "sparse_conv2d_quantized": "conv_quantized", "sparse_conv2d_dequantized": "conv_quantized",
    "sparse_max_pool2d": "max_pool", "sparse_avg_pool2d": "avg_pool", "sparse_resize2d": "resize",
    "sparse_rearrange": "rearrange", "sparse_pointwise": "pointwise", "sparse_gather": "pointwise",
    "sparse_fill": "pointwise", "sparse_adaptive_pool2d": "adaptive_pool", "sparse_norm2d": "norm",
    "sparse_squeeze_excite2d": "squeeze_excite",
}  # fmt: skip
# Inputs that a node reads in its active blocks alone, beside x, and weights.
FEATURES = ("residual", *"abcd")
WEIGHTS = (*(name + k for name in ("weight", "bias") for k in ("", "1", "2", "3")), "slope")
DTYPES = {
    ir.DataType.FLOAT: torch.float32, ir.DataType.FLOAT16: torch.float16, ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.INT8: torch.int8, ir.DataType.FLOAT8E4M3FN: torch.float8_e4m3fn,
}  # fmt: skip


@dataclass
class Planned:
    """A plan, and what of the model its parts are.

    Attributes:
        values, nodes: of the plan, by value and node of the model.
        origin: of the plan's values, the model's.
        layers: of the plan's planned nodes, the model's.
        planes: (block map, block size) of each plane of the plan.
    """

    plan: Plan
    values: dict[ir.Value, Value]
    origin: dict[Value, ir.Value]
    layers: dict[Node, ir.Node]
    planes: list[tuple[ir.Value, tuple[int, ...]]]


def read(graph: ir.Graph) -> Planned:
    """Layers on active blocks as planned nodes, one plane a block map; all else as dense ones."""
    own = Graph([], [], None, [])
    found = Planned(Plan(own, []), {}, {}, {}, [])
    for node in graph:
        made = _layer(node, found)
        if made is None:
            # who asks for the shape alone reads no pixel
            reads = [] if node.domain == "" and node.op_type in ("Shape", "Size") else node.inputs
            made = Node("aten", [_value(v, found) for v in reads if v is not None], [])
        made.outputs = [_value(v, found) for v in node.outputs]
        for value in made.outputs:
            value.producer = made
        own.nodes.append(made)
    nodes = set(map(id, graph))
    inside = [v for v in found.values if v.is_graph_output() or any(id(user) not in nodes for user, _ in v.uses())]
    own.outputs = [found.values[v] for v in inside]  # and what the bodies of control flow read
    own.find_users()
    return found


def input_of(node: ir.Node, name: str) -> ir.Value | None:
    """An input by its schema's name; None where it is left out."""
    names = [given.rstrip("?") for given, _ in OPS[node.op_type].inputs]
    at = names.index(name) if name in names else len(node.inputs)
    return node.inputs[at] if at < len(node.inputs) else None


def ints(node: ir.Node, name: str, otherwise: Sequence[int] = ()) -> tuple[int, ...]:
    return tuple(node.attributes[name].as_ints()) if name in node.attributes else tuple(otherwise)


def number(node: ir.Node, name: str, otherwise: Any = 0) -> Any:
    """A number or a name."""
    return node.attributes[name].value if name in node.attributes else otherwise


def tiles(node: ir.Node) -> tuple[int, ...] | None:
    """bsize, where the node's blocks tile their plane."""
    size = ints(node, "bsize")
    return size if ints(node, "bstride", size) == size and ints(node, "boffset", (0, 0)) == (0, 0) else None


def sides(value: ir.Value | None) -> list[Any]:
    """Height and width of [N,H,W,C]."""
    known = value is not None and value.shape is not None and len(value.shape) == 4
    return list(value.shape)[1:3] if known else [None, None]  # type: ignore[union-attr, arg-type]


def written(node: ir.Node) -> list[Any]:
    """Height and width of the plane that a layer's blocks are of."""
    of_input = node.op_type in ("sparse_gather", "sparse_adaptive_pool2d", "sparse_squeeze_excite2d")
    return sides(node.inputs[0] if of_input else node.outputs[0])


def fixed(numbers: Sequence[Any]) -> bool:
    return all(isinstance(n, int) for n in numbers)


def _value(value: ir.Value, found: Planned) -> Value:
    """[N,H,W,C] as [N,C,H,W]; anything else as it is."""
    if value not in found.values:
        shape = tuple(d if isinstance(d, int) else str(d) for d in value.shape or ())
        shape = (shape[0], shape[3], shape[1], shape[2]) if len(shape) == 4 else shape
        axes = Axes.planes(shape) if len(shape) == 4 and fixed(shape) else None  # type: ignore[arg-type]
        dtype = DTYPES.get(value.dtype, torch.float64)  # type: ignore[arg-type]
        found.values[value] = Value(value.name or "", shape, dtype, axes)  # type: ignore[arg-type]
        found.origin[found.values[value]] = value
    return found.values[value]


def _layer(node: ir.Node, found: Planned) -> Node | None:
    """A planned node; None where what it reads is not known."""
    blocks = tiles(node) if node.domain == DOMAIN and node.op_type in KINDS else None
    if blocks is None or input_of(node, "base") is not None:
        return None
    x, map_, kind = node.inputs[0], input_of(node, "block_map"), KINDS[node.op_type]
    assert x is not None
    assert map_ is not None
    key, plane = (map_, blocks), written(node)
    made = Node(kind, [_value(x, found)], [], path=node.name or "")
    for name in (*FEATURES, *WEIGHTS):
        value = input_of(node, name)
        if value is not None:
            made.params[name] = operand = _value(value, found)
            same = found.planes[found.plan.lists[operand]] == key if operand in found.plan.lists else False
            if len(name) == 1 and not same and (str(sides(value)) != str(plane) or "None" in str(plane)):
                return None  # it may be broadcast
    options = _options(node, kind, sides(x), plane)
    if options is None or (kind.startswith("conv") and not fixed(made.params["weight"].shape[2:])):
        return None
    made.options = options
    if key not in found.planes:
        found.planes.append(key)
        found.plan.planes.append((plane[0], plane[1], blocks))  # type: ignore[arg-type]
    found.plan.lists[_value(node.outputs[0], found)] = found.planes.index(key)
    found.layers[made] = node
    return made


def _options(node: ir.Node, kind: str, read: list[Any], written: list[Any]) -> dict[str, Any] | None:
    if kind == "norm":
        return {"method": number(node, "mode", "group")}
    if kind in ("pointwise", "bottleneck", "adaptive_pool", "squeeze_excite"):
        return {}
    if kind == "rearrange":
        return {"up": number(node, "up", 1), "down": number(node, "down", 1), "pad": ints(node, "pad", (0, 0, 0, 0))}
    if kind == "resize":
        mode, ratios = number(node, "mode", "nearest"), (number(node, "ratio_h", 0.0), number(node, "ratio_w", 0.0))
        options = {"size": tuple(written), "mode": mode, "align_corners": number(node, "align_corners")}
        return {**options, "scale": None, "ratios": ratios} if fixed([*read, *written]) else None
    kernel = ints(node, "kernel_size")
    found = {name: ints(node, name, otherwise) for name, otherwise in
             (("stride", kernel or (1, 1)), ("padding", (0, 0)), ("dilation", (1, 1)))}  # fmt: skip
    if kernel:
        return {**found, "kernel_size": kernel}
    slope = number(node, "negative_slope", 0.01)
    return {**found, "groups": number(node, "groups", 1), "activation": number(node, "activation", "none"),
            "negative_slope": slope, "residual_after": bool(number(node, "residual_after"))}  # fmt: skip
