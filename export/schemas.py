"""onnx.defs schemas of the domain `sbnet`: what onnx.checker and onnx.shape_inference know of op_table.py's ops."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

import onnx
from onnx import TensorProto
from onnx.defs import OpSchema
from onnx.shape_inference import InferenceContext, InferenceError

from sbnet import _library
from sbnet.export.op_table import OPS, Op

DOMAIN = "sbnet"
VERSION = 1
FORMAT = 1  # kFormat of csrc/ort_binding/common.h: what a node means, raised when an older library would misread it
TYPES = {
    "int": OpSchema.AttrType.INT, "ints": OpSchema.AttrType.INTS, "float": OpSchema.AttrType.FLOAT,
    "string": OpSchema.AttrType.STRING,
}  # fmt: skip


def _node(op: Op, context: InferenceContext) -> str:
    """A node under shape inference, as the library reads it."""
    lines: list[list[Any]] = [["op", op.name]]
    for name, attribute in op.attributes.items():
        given = context.get_attribute(name)
        if given is not None:
            kind, value = attribute["type"], onnx.helper.get_attribute_value(given)
            lines.append([kind, name, *(value if kind == "ints" else [value.decode() if kind == "string" else value])])
    for k in range(context.get_num_inputs()):
        kind = context.get_input_type(k) if context.has_input(k) else None
        if kind is not None and kind.tensor_type.HasField("shape"):
            dims = kind.tensor_type.shape.dim
            sizes = [
                d.dim_value if d.HasField("dim_value") else f"${d.dim_param}" if d.dim_param else "?" for d in dims
            ]
            lines.append(["input", k, *sizes])
    return "\n".join("\t".join(map(str, line)) for line in lines)


def _infer(op: Op) -> Callable[[InferenceContext], None]:
    variables = {kind: k for k, (_, kind) in reversed(list(enumerate(op.inputs)))}  # the first input of each

    def element(kind: str, context: InferenceContext) -> int:
        if kind in op.types:
            return context.get_input_type(variables[kind]).tensor_type.elem_type
        return TensorProto.DataType.Value(kind[len("tensor(") : -1].upper())

    def infer(context: InferenceContext) -> None:
        try:
            shapes = _library.ort_shapes(_node(op, context))
        except ValueError as wrong:
            raise InferenceError(str(wrong)) from None
        outputs = list(op.outputs)
        if outputs[0][0].endswith("*"):
            outputs *= context.get_num_outputs()
            if len(outputs) != len(shapes):
                raise InferenceError(f"sbnet::{op.name}: expected {len(shapes)} outputs, got {len(outputs)}")
        shapes += [None] * (len(outputs) - len(shapes))
        for k, ((_, kind), dims) in enumerate(zip(outputs, shapes, strict=True)):
            context.set_output_type(k, onnx.helper.make_tensor_type_proto(element(kind, context), dims))

    return infer


def _schema(op: Op) -> OpSchema:
    option = OpSchema.FormalParameterOption
    attributes = []
    for name, told in {**op.attributes, "format": {"type": "int", "default": FORMAT}}.items():
        if "default" in told:
            default = float(told["default"]) if told["type"] == "float" else told["default"]
            attributes.append(OpSchema.Attribute(name, onnx.helper.make_attribute(name, default)))
        else:
            attributes.append(OpSchema.Attribute(name, TYPES[told["type"]], required=told.get("required", False)))
    schema = OpSchema(
        op.name,
        DOMAIN,
        VERSION,
        op.doc,
        inputs=[
            OpSchema.FormalParameter(
                name.rstrip("?"), kind, param_option=option.Optional if name.endswith("?") else option.Single
            )
            for name, kind in op.inputs
        ],
        outputs=[
            OpSchema.FormalParameter(
                name.rstrip("*"), kind, param_option=option.Variadic if name.endswith("*") else option.Single
            )
            for name, kind in op.outputs
        ],
        type_constraints=[(name, list(kinds), "") for name, kinds in op.types.items()],
        attributes=attributes,
    )
    schema.set_type_and_shape_inference_function(_infer(op))
    return schema


def register() -> dict[str, OpSchema]:
    """Registers the schemas with onnx.defs, once a process, and returns them by name."""
    if not _registered:
        for op in OPS.values():
            schema = _schema(op)
            onnx.defs.register_schema(schema)
            _registered[op.name] = onnx.defs.get_schema(op.name, VERSION, DOMAIN)
        atexit.register(_deregister)
    return _registered


def _deregister() -> None:
    """onnx 1.19 would let go of `infer` when Python has ended, and wait for it for ever."""
    for schema in _registered.values():
        onnx.defs.deregister_schema(schema.name, schema.since_version, schema.domain)
    _registered.clear()


_registered: dict[str, OpSchema] = {}
