"""A graph pass: three convolutions and a shortcut become one sparse_bottleneck2d, where `sbnet.graph` finds them."""

from __future__ import annotations

import onnx_ir as ir

from sbnet.export.planned import input_of, read
from sbnet.export.schemas import DOMAIN, OPS, VERSION
from sbnet.graph.passes.bottleneck import fuse_bottlenecks

LISTS = ("indices", "count", "block_map")


def fuse(graph: ir.Graph) -> None:
    """Bottleneck blocks that Hopper has one kernel for, without other consumers inside, each become one op.

    Only where the kernel gains with any number of blocks: up to 96 hidden channels (docs/kernels/bottleneck.md).
    """
    planned = read(graph)
    for made in fuse_bottlenecks(planned.plan, None).graph.nodes:
        if made.kind != "bottleneck" or made in planned.layers:
            continue
        last = _writer(planned.origin[made.output])
        middle = _writer(last.inputs[0])
        block = _writer(middle.inputs[0]), middle, last
        lists, biases = [input_of(last, name) for name in LISTS], [input_of(node, "bias") for node in block]
        inputs = [block[0].inputs[0], *(node.inputs[1] for node in block), *lists, *biases]
        known = OPS["sparse_bottleneck2d"].attributes
        attributes = {name: value for name, value in last.attributes.items() if name in known}
        node = ir.node(
            "sparse_bottleneck2d", inputs, attributes, domain=DOMAIN, version=VERSION, name=f"bottleneck_of_{last.name}"
        )  # fmt: skip
        gone = [last, middle, block[0]]
        ir.convenience.replace_nodes_and_values(graph, last, gone, [node], last.outputs, node.outputs)


def _writer(value: ir.Value | None) -> ir.Node:
    node = value.producer() if value is not None else None
    assert node is not None
    return node
