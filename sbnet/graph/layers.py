"""Front end for networks that call the layers of `sbnet.nn` with lists of active blocks of their own choice."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from sbnet.geometry import conv_output_size, to_pair
from sbnet.graph.axes import Axes
from sbnet.graph.ir import Graph, Node, Value
from sbnet.graph.plan import Plan
from sbnet.nn.layers import SparseAvgPool2d, SparseConv2d, SparseMaxPool2d

Layer = SparseConv2d | SparseMaxPool2d | SparseAvgPool2d
KINDS = {SparseConv2d: "conv", SparseMaxPool2d: "max_pool", SparseAvgPool2d: "avg_pool"}
PAIRS = ("kernel_size", "stride", "padding", "dilation")


def read_layers(call: Callable[..., Any], module: nn.Module, example: Tensor, planes: Sequence[Any]) -> Plan:
    """The plan of `call(x, *active)`, a method of `module` (or the module), for x like the example, one list a plane.

    Args:
        planes: (height, width, block size) of each.

    Raises:
        ValueError: it does something else than call layers of sbnet.nn on active blocks.
    """
    return _Reader(call, module, example, planes).plan


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (*get_args(Layer), nn.BatchNorm2d))


class _Root(nn.Module):
    def __init__(self, call: Callable[..., Any], module: nn.Module, planes: int) -> None:
        super().__init__()
        self.module, self.call, self.planes = module, call, planes

    def forward(self, x: Any, active: Any) -> Any:
        return self.call(x, *(active[plane] for plane in range(self.planes)))


class _Reader:
    def __init__(self, call: Callable[..., Any], module: nn.Module, example: Tensor, planes: Sequence[Any]) -> None:
        self.root = _Root(call, module, len(planes))
        try:
            traced = _Tracer().trace(self.root)
        except (TypeError, fx.proxy.TraceError) as e:
            norms = any(isinstance(m, nn.BatchNorm2d) for m in module.modules())
            wanted = "normalisations folded (fold_batch_norm)" if norms else "nothing but calls of layers of sbnet.nn"
            raise ValueError(f"sbnet: plan: {type(module).__name__}: expected {wanted}: {e}") from e
        x = Value("x", tuple(example.shape), example.dtype, Axes.planes(example.shape))
        self.graph, self.constants = Graph([x], [], None, []), dict[tuple[nn.Module, str], Value]()
        self.plan = Plan(self.graph, [(h, w, to_pair(block, "plan: block size")) for h, w, block in planes])
        self.maps: dict[Any, Value] = {}  # nodes that are feature maps
        self.lists: dict[Any, int] = {}  # nodes that are a plane's active blocks
        for node in traced.nodes:
            if node.op == "placeholder":
                if not self.maps:
                    self.maps[node] = x
            elif node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[1], int):
                self.lists[node] = node.args[1]
            elif node.op == "call_module":
                self._layer(node, self.root.get_submodule(str(node.target)))
            elif node.op == "output":
                self._return(node.args[0])
            else:
                raise ValueError(
                    f"sbnet: plan: expected layers of sbnet.nn, got "
                    f"{node.format_node()}, which has no form on active blocks"
                )
        self.graph.link()

    def _return(self, result: Any) -> None:
        flat, self.graph.out_spec = pytree.tree_flatten(list(result) if isinstance(result, list) else result)
        self.graph.outputs = [self.maps.get(v) for v in flat]
        if any(v is None or v is self.graph.inputs[0] for v in self.graph.outputs):
            raise ValueError("sbnet: plan: the network returns something that no layer of sbnet.nn wrote")

    def _layer(self, node: fx.Node, layer: Any) -> None:
        name = str(node.target).removeprefix("module.")
        if isinstance(layer, nn.BatchNorm2d):
            raise ValueError(f"sbnet: plan: {name}: expected folded normalisations (fold_batch_norm), got {layer}")
        given = dict(zip(("x", "active"), node.args, strict=False)) | dict(node.kwargs)
        if given["x"] not in self.maps or given.get("active") not in self.lists:
            got = f"{given['x']} on {given.get('active')}"
            raise ValueError(f"sbnet: plan: {node.target}: expected the active blocks of a plane, got {got}")
        x, plane = self.maps[given["x"]], self.lists[given["active"]]
        options = {k: v for k, v in given.items() if k not in ("x", "active", "residual")}
        kind = next(kind for type_, kind in KINDS.items() if isinstance(layer, type_))
        made = Node(kind, [x], [], path=name, options={**_geometry(layer), **options})
        if isinstance(layer, SparseConv2d):
            o = made.options
            kernel = to_pair(layer.kernel_size, "plan: kernel_size")
            size = conv_output_size((x.shape[2], x.shape[3]), kernel, o["stride"], o["padding"], o["dilation"])
            shape = (x.shape[0], layer.out_channels, *size)
            made.params = {n: self._constant(layer, n, name) for n, _ in layer.named_parameters(recurse=False)}
            if given.get("residual") is not None:
                made.params["residual"] = self.maps[given["residual"]]
        else:
            shape = tuple(layer(torch.empty(x.shape, device="meta"), None).shape)
        height, width, _ = self.plan.planes[plane]
        if shape[2:] != (height, width):
            raise ValueError(
                f"sbnet: plan: {name}: active: expected blocks of the plane "
                f"that it writes, {shape[2:]}, got those of {(height, width)}"
            )
        value = Value(name, shape, x.dtype, Axes.planes(shape), producer=made)
        made.outputs.append(value)
        self.graph.nodes.append(made)
        self.maps[node], self.plan.lists[value] = value, plane

    def _constant(self, layer: nn.Module, name: str, path: str) -> Value:
        tensor, owner = getattr(layer, name), (layer, name)
        if owner not in self.constants:
            value = Value(f"{path}.{name}", tuple(tensor.shape), tensor.dtype, tensor=tensor, owner=owner)
            value.constant = True
            self.constants[owner] = value
        return self.constants[owner]


def _geometry(layer: Any) -> dict[str, Any]:
    """A layer's options, as nodes have them."""
    found = layer.geometry()
    if found["stride"] is None:
        found["stride"] = layer.kernel_size
    return {k: to_pair(v, f"plan: {k}") if k in PAIRS else v for k, v in found.items()}
