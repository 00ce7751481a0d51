"""Block-sparse products in an exported model: the layout as a file should say it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from sbnet.export.schemas import DOMAIN
from sbnet.ops.weights.conv_layout import HEADER


def name_coords(graph: ir.Graph) -> None:
    """torch's op takes the tables of a layout, which begin with the coords of its blocks; ONNX's takes coords alone,
    [blocks, 2]: every processor makes the tables that it needs. Layers of one layout share one initializer."""
    made: dict[tuple[int, int], ir.Value] = {}
    for node in list(graph):
        if node.domain != DOMAIN or node.op_type not in ("blocksparse_matmul", "blocksparse_weight_grad"):
            continue
        weight = node.inputs[1] if node.op_type == "blocksparse_matmul" else node.outputs[0]
        tables = node.inputs[2]
        assert weight is not None
        assert tables is not None
        assert weight.shape is not None
        if tables.const_value is None:
            raise ValueError(f"sbnet.export: {node.op_type}: expected a constant layout, got one that is computed")
        blocks = weight.shape[0]
        assert isinstance(blocks, int)
        key = id(tables), blocks
        if key not in made:
            coords = np.ascontiguousarray(tables.const_value.numpy()[: 2 * blocks].reshape(blocks, 2))
            name = f"coords_{len(made)}"
            value = ir.Value(name=name, const_value=ir.tensor(coords, name=name))
            value.type, value.shape = ir.TensorType(ir.DataType.INT32), ir.Shape([blocks, 2])
            graph.register_initializer(value)
            made[key] = value
        node.replace_input_with(2, made[key])


def name_lists(graph: ir.Graph) -> None:
    """The same for convolutions: of their tables, the channels of each block."""
    made: dict[int, ir.Value] = {}
    for node in list(graph):
        if node.domain != DOMAIN or node.op_type != "blocksparse_conv":
            continue
        tables = node.inputs[2]
        assert tables is not None
        if tables.const_value is None:
            raise ValueError("sbnet.export: blocksparse_conv: expected a constant layout, got one that is computed")
        if id(tables) not in made:
            words = tables.const_value.numpy()
            blocks = words[HEADER : HEADER + 5 * words[3]].reshape(-1, 5)
            channels = words[HEADER + blocks.size :]
            lists = [
                part
                for c, inputs, k, outputs, _ in blocks.tolist()
                for part in ([inputs, outputs], channels[c : c + inputs], channels[k : k + outputs])
            ]
            name = f"lists_{len(made)}"
            data = np.concatenate(lists).astype(np.int32)
            value = ir.Value(name=name, const_value=ir.tensor(data, name=name))
            value.type, value.shape = ir.TensorType(ir.DataType.INT32), ir.Shape([len(data)])
            graph.register_initializer(value)
            made[id(tables)] = value
        node.replace_input_with(2, made[id(tables)])
