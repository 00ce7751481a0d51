"""What a model file says beside its graph: names by module path, a format on each node, facts for who runs it, and
nothing of the machine that wrote it."""

from __future__ import annotations

import ast
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from sbnet.export.schemas import DOMAIN, FORMAT
from sbnet.version import __version__

SCOPES = "pkg.torch.onnx.name_scopes"  # of a node: the names of the modules around it, and its own


def clean(model: ir.Model, facts: Mapping[str, str]) -> None:
    """The last pass, in place. facts: what else the file is to say, as `sbnet.NAME`."""
    graph = model.graph
    name_nodes(graph)
    for node in graph:
        if node.domain == DOMAIN:
            node.attributes["format"] = ir.AttrInt64("format", FORMAT)
        if node.domain == "" and node.op_type == "Constant":
            _as_tensor(node)
    # Exporters leave stack traces with paths in all of these. A described initializer breaks quantisation tools.
    for part in (model, graph, *graph, *(v for node in graph for v in node.outputs), *graph.inputs):
        part.metadata_props.clear()
        part.doc_string = None
    for value in graph.initializers.values():
        value.metadata_props.clear()
        value.doc_string = None
        if not value.is_graph_output():
            value.type = value.shape = None
    model.producer_name, model.producer_version = "sbnet", __version__
    for name, fact in {"version": __version__, **facts_of(graph), **facts}.items():
        model.metadata_props[f"sbnet.{name}"] = fact


def name_nodes(graph: ir.Graph) -> None:
    """module.path/op, numbered where a module does it again."""
    taken: dict[str, int] = {}
    for node in graph:
        scopes = [s for s in ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))[:-1] if s]
        name = "/".join([*scopes[-1:], node.op_type])
        taken[name] = taken.get(name, 0) + 1
        node.name = name if taken[name] == 1 else f"{name}_{taken[name]}"


def _as_tensor(node: ir.Node) -> None:
    """A constant given as numbers, which symbolic shape inference does not know, as the tensor that it is."""
    kinds = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}
    for name, kind in kinds.items():
        if name in node.attributes:
            tensor = ir.tensor(np.array(node.attributes.pop(name).value, dtype=kind))
            node.attributes["value"] = ir.AttrTensor("value", tensor)


def facts_of(graph: ir.Graph) -> dict[str, str]:
    """Block sizes and the threshold of the masks: what a mask is turned into blocks by."""
    sizes: dict[str, None] = {}
    thresholds: dict[str, None] = {}
    for node in graph:
        if node.domain == DOMAIN and node.op_type in ("reduce_mask", "mask_pyramid"):
            name = "bsize" if node.op_type == "reduce_mask" else "bsizes"
            numbers = list(node.attributes[name].as_ints())
            sizes |= {f"{numbers[k]}x{numbers[k + 1]}": None for k in range(0, len(numbers), 2)}
            thresholds[f"{node.attributes['tol'].as_float():g}"] = None
    found = {"blocks": ", ".join(sizes), "threshold": ", ".join(thresholds)}
    return {name: fact for name, fact in found.items() if fact}
