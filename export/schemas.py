"""onnx.defs schemas of the domain `sbnet`: what onnx.checker and onnx.shape_inference know of op_table.py's ops."""

from __future__ import annotations

import atexit
from collections.abc import Callable

import onnx
from onnx import TensorProto
from onnx.defs import OpSchema
from onnx.shape_inference import InferenceContext, InferenceError

from sbnet.export.op_table import FLOATS, INT8, INT32, MASKS, OPS, REQUIRED, Op
from sbnet.export.shapes import NodeView

DOMAIN = "sbnet"
VERSION = 1
FORMAT = 1  # kFormat of csrc/ort_binding/common.h: what a node means, raised when an older library would misread it


def _infer(op: Op) -> Callable[[InferenceContext], None]:
    def infer(context: InferenceContext) -> None:
        node = NodeView(op, context)
        shapes = op.infer(node)
        fixed = {INT8: TensorProto.INT8, INT32: TensorProto.INT32}
        fixed |= {FLOATS[0]: TensorProto.FLOAT, MASKS[0]: TensorProto.BOOL}
        outputs = list(op.outputs)
        if outputs[0][0].endswith("*"):
            outputs *= context.get_num_outputs()
        if len(outputs) != len(shapes):
            raise InferenceError(f"sbnet::{op.name}: expected {len(shapes)} outputs, got {len(outputs)}")
        for k, ((_, kind), dims) in enumerate(zip(outputs, shapes, strict=True)):
            kind = op.types[kind][0] if kind == "Y" else kind  # an output's own: it is one type
            element = fixed[kind] if kind in fixed else node.element_type(1 if kind == "W" else 0)
            context.set_output_type(k, onnx.helper.make_tensor_type_proto(element, dims))

    return infer


def _schema(op: Op) -> OpSchema:
    option = OpSchema.FormalParameterOption
    attributes = []
    for name, (kind, default) in {**op.attributes, "format": (OpSchema.AttrType.INT, FORMAT)}.items():
        if default is None or default is REQUIRED:
            attributes.append(OpSchema.Attribute(name, kind, required=default is REQUIRED))
        else:
            attributes.append(OpSchema.Attribute(name, onnx.helper.make_attribute(name, default)))
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
