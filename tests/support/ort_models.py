"""Models of one sbnet node, and what torch says they should return. Shared by test_ort*.py and fuzz_ort.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from torch import Tensor

import sbnet
from sbnet import ActiveBlocks, BlockGrid, BlockLayout, ConvLayout, export
from sbnet.export.runtime import ELEMENT_TYPES
from support.helpers import random_active, tensor
from support.plain_layers import PLAIN

PROVIDER = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


MASKS = [torch.bool, torch.uint8, torch.float32, torch.float16, torch.bfloat16]


def lists(active: ActiveBlocks) -> list[Tensor]:
    return [active.indices, active.count, active.block_map]


def nhwc(x: Tensor) -> Tensor:
    """[N,C,H,W] -> [N,H,W,C], packed: what ONNX ops take."""
    return x.permute(0, 2, 3, 1).contiguous()


def nchw(x: Tensor) -> Tensor:
    """[N,H,W,C] -> [N,C,H,W] in channels_last memory."""
    return x.permute(0, 3, 1, 2)


def grid_attributes(grid: BlockGrid, count: bool = True) -> dict[str, Any]:
    values = {"bsize": grid.bsize, "bstride": grid.bstride, "boffset": grid.boffset}
    return {k: list(v) for k, v in ({**values, "bcount": grid.bcount} if count else values).items()}


@dataclass
class Node:
    """One sbnet node: inputs (None: not given) and attributes."""

    op: str
    inputs: list[Tensor | None]
    attributes: dict[str, Any] = field(default_factory=dict)
    dropped: int | None = None  # an output without a name

    def outputs(self) -> list[int]:
        """Element types of the outputs."""
        if self.op == "mask_pyramid":
            return [onnx.TensorProto.INT32] * (4 * 2 + 2)  # of the sample below
        if self.op == "sparse_conv2d_dequantized":
            return [onnx.TensorProto.FLOAT]
        if self.op == "motion_mask":
            return [onnx.TensorProto.BOOL, onnx.TensorProto.FLOAT]
        if self.op == "pack_tokens":
            return [ELEMENT_TYPES[t] for t in (torch.int32, torch.int64, torch.int64, torch.bool, torch.bool)]
        if self.op in ("reduce_mask", "fringe", "pack_attention_blocks"):
            return [onnx.TensorProto.INT32] * (4 if self.op == "reduce_mask" else 2)
        first = self.inputs[0] if self.inputs else None
        made = ELEMENT_TYPES[torch.float32 if first is None else first.dtype]
        return [made, onnx.TensorProto.FLOAT] if self.op == "block_attention" else [made]

    def proto(self, names: Sequence[str] | None = None, outputs: Sequence[str] | None = None) -> onnx.NodeProto:
        names = names or [f"x{k}" if t is not None else "" for k, t in enumerate(self.inputs)]
        outputs = outputs or ["" if k == self.dropped else f"y{k}" for k in range(len(self.outputs()))]
        node = helper.make_node(self.op, names, outputs, domain="sbnet")
        for name, value in self.attributes.items():
            ints = onnx.AttributeProto.INTS if value == [] else None  # an empty list has no type of its own
            node.attribute.append(helper.make_attribute(name, value, attr_type=ints))
        return node

    def model(self, dynamic: bool = False, constants: Sequence[int] = ()) -> bytes:
        """Every given input is a graph input but the `constants`; `dynamic`: of unknown sizes."""
        given = [
            value_info(f"x{k}", ELEMENT_TYPES[t.dtype], [f"d{k}_{d}" for d in range(t.dim())] if dynamic else t.shape)
            for k, t in enumerate(self.inputs)
            if t is not None and k not in constants
        ]
        fixed = [onnx.numpy_helper.from_array(self.inputs[k].numpy(), f"x{k}") for k in constants]
        made = [value_info(f"y{k}", e, None) for k, e in enumerate(self.outputs()) if k != self.dropped]
        return model([self.proto()], given, made, fixed)

    def run(self, device: str = "cpu", dynamic: bool = False) -> list[Tensor]:
        return export.run(session(self.model(dynamic), device), [t for t in self.inputs if t is not None])


def value_info(name: str, element_type: int, shape: Sequence[int | str] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element_type, shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Sequence[onnx.TensorProto] = (),
) -> bytes:
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), list(initializers))
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("sbnet", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


def session(model: bytes, device: str = "cpu") -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 4  # the errors that tests provoke are exceptions as well
    return export.session(model, [PROVIDER[device]], options=options)


def skip_without(device: str) -> None:
    """Ends a test where this ONNX Runtime has no such provider."""
    if PROVIDER[device] not in export.default_providers():
        pytest.skip("needs onnxruntime-gpu and a libsbnet.so with CUDA")


def is_ort_error(e: BaseException) -> bool:
    """Did ORT refuse or fail the model? (Runs with I/O binding raise a plain RuntimeError.)"""
    return type(e).__module__.startswith("onnxruntime") or str(e).startswith("Error in execution: ")


def samples(device: str = "cpu") -> dict[str, Node]:
    """One small, valid node of every op."""
    grid = BlockGrid.cover((12, 15), 4)
    active = random_active(grid, 2, 0.5, device)
    lists = [active.indices, active.count, active.block_map]
    x = nhwc(tensor((2, 8, 12, 15), torch.float32, device))
    weight = nhwc(tensor((8, 8, 3, 3), torch.float32, device))
    narrow = [nhwc(tensor(s, torch.float32, device)) / 4 for s in ((4, 8, 1, 1), (4, 4, 3, 3), (8, 4, 1, 1))]
    edge = sbnet.fringe(active, active, (12, 15), 3, 1, 1)
    bias, like = tensor((8,), torch.float32, device), tensor((2, 12, 15, 8), torch.float32, device)
    blocks = tensor((active.capacity, 4, 4, 8), torch.float32, device)
    mask = torch.rand(2, 12, 15, device=device) > 0.9
    maps = {"producer_bsize": [4, 4], "consumer_bsize": [4, 4], "window": sbnet.Window.conv(3, 1, 1).numbers()}
    layout = BlockLayout(torch.rand(4, 3) < 0.6, 8, in_features=29, out_features=21)
    blocks_of_conv = ConvLayout([([0, 1, 5], [0, 1]), ([2, 3, 4, 1], [1, 2, 3, 4])], (2, 1, 3))
    volume = tensor((2, 5, 4, 6, 6), torch.float32, device)
    convolved = tensor((blocks_of_conv.weights,), torch.float32, device)
    matrix, gates = tensor((2, 5, 29), torch.float32, device), torch.rand(layout.blocks, device=device)
    blocks_of_weights = tensor(layout.weight_shape, torch.float32, device)
    conv = [x, weight, *lists, bias, like, bias / 2, edge.pixels, edge.count, like.clone()]
    integers = [
        torch.randint(-128, 128, shape, dtype=torch.int8, device=device)
        for shape in ((2, 12, 15, 8), (8, 3, 3, 8), (2, 12, 15, 8))
    ]
    nodes = [
        Node("reduce_mask", [mask], {"bsize": [4, 4], "tol": 0.5, "avgpool": 0, "capacity": 9}),
        Node("sparse_gather", [x, *lists], {**grid_attributes(grid), "transpose": 1, "zero_tail": 1}),
        Node("sparse_scatter", [blocks, *lists, x], {**grid_attributes(grid), "add": 1, "atomic": 0, "transpose": 0}),
        Node("sparse_fill", [x, active.block_map], {"bsize": [4, 4], "value": 2.5}),
        Node(
            "sparse_adaptive_pool2d",
            [x, active.block_map],
            {"bsize": [4, 4], "size": [2, 3], "mode": "avg", "count_inactive": 0},
        ),
        Node(
            "sparse_squeeze_excite2d",
            [x, weight[:4, 0, 0].contiguous(), weight[:, 0, 0, :4].contiguous(), bias[:4], bias, active.block_map],
            {"bsize": [4, 4], "activation": "silu", "gate": "hardsigmoid"},
        ),
        Node("fringe", [active.block_map, active.block_map], {**maps, "size": [12, 15, 12, 15], "capacity": 40}),
        Node(
            "motion_mask",
            [nhwc(torch.rand(2, 3, 12, 15, device=device)), torch.rand(2, 12, 15, device=device)],
            {"threshold": 0.1, "rate": 0.25, "cut": 0.5, "smooth": 3},
        ),
        Node(
            "mask_pyramid",
            [mask],
            {
                "bsizes": [4, 4, 4, 2],
                "sizes": [12, 15, 6, 8],
                "tol": 0.5,
                "margin": 2,
                "fringes": [0, 2, *(v for k in (1, 2) for v in (k - 1, *sbnet.Window.conv(3, k, 1).numbers()))],
            },
        ),
        Node(
            "sparse_conv2d",
            conv,
            {"bsize": [4, 4], "padding": [1, 1], "stride": [1, 1], "groups": 1, "activation": "leaky_relu"},
        ),
        *(
            Node(
                name,
                [
                    *first,
                    torch.rand(8, device=device) / 1000,
                    *lists,
                    bias,
                    rest[0],
                    slope,
                    edge.pixels,
                    edge.count,
                    rest[0].clone(),
                ],
                {"bsize": [4, 4], "padding": [1, 1], "stride": [1, 1], "activation": "leaky_relu", **more},
            )
            for name, first, rest, slope, more in (
                (
                    "sparse_conv2d_quantized",
                    [integers[0], integers[1][..., :4].contiguous()],
                    integers[2:],
                    bias / 2,
                    {"out_scale": 0.02, "residual_scale": 0.01, "groups": 2},
                ),
                ("sparse_conv2d_dequantized", [like, integers[1]], [like], bias / 2, {"x_scale": 0.05}),
            )
        ),
        Node(
            "sparse_conv_transpose2d",
            conv,
            {
                "bsize": [4, 4],
                "padding": [1, 1],
                "stride": [1, 1],
                "output_padding": [0, 0],
                "groups": 1,
                "activation": "leaky_relu",
            },
        ),
        Node(
            "sparse_bottleneck2d",
            [x, *narrow, *lists, bias[:4], bias[4:], bias, edge.pixels, edge.count, like.clone()],
            {"bsize": [4, 4], "activation": "leaky_relu", "negative_slope": 0.2, "allow_tf32": 0},
        ),
        *(plain_node(op, device) for op in PLAIN),
        Node(
            "sparse_resize2d",
            [nhwc(tensor((2, 8, 6, 5), torch.float32, device)), *lists, edge.pixels, edge.count, like.clone()],
            {"bsize": [4, 4], "size": [12, 15], "mode": "bilinear", "align_corners": 0, "ratio_h": 0.5, "ratio_w": 0.0},
        ),
        Node(
            "sparse_norm2d",
            [x, *lists, bias, bias + 1, edge.pixels, edge.count, like.clone()],
            {"bsize": [4, 4], "mode": "group", "groups": 2, "eps": 1e-3},
        ),
        Node(
            "sparse_pointwise",
            [x, *lists, like, like[:1, :1, :1], like[:, :1, :1], like[..., :1], edge.pixels, edge.count, like.clone()],
            {"bsize": [4, 4], "program": "mul a; add b; silu; mul c; sub d"},
        ),
        Node(
            "blocksparse_matmul",
            [matrix, blocks_of_weights, layout.coords, tensor((21,), torch.float32, device), gates],
            {"in_features": 29, "out_features": 21, "activation": "leaky_relu", "negative_slope": 0.2},
        ),
        Node(
            "blocksparse_weight_grad",
            [matrix, tensor((*matrix.shape[:-1], 21), torch.float32, device), layout.coords],
            {"block_size": layout.block_size, "allow_tf32": 0},
        ),
        Node(
            "blocksparse_conv",
            [volume, convolved, blocks_of_conv.lists, tensor((5,), torch.float32, device)],
            {
                "in_channels": 6,
                "out_channels": 5,
                "kernel_size": [2, 1, 3],
                "stride": [1, 2, 1],
                "padding": [0, 1, 2],
                "dilation": [1, 1, 2],
                "size": [4, 3, 6],
                "activation": "leaky_relu",
                "negative_slope": 0.2,
            },
        ),
        Node("pack_attention_blocks", [torch.rand(2, 1, 3, 40, device=device) < 0.5]),
        attention_node(device),
        *token_nodes(device),
    ]
    return {node.op: node for node in nodes}


def plain_node(op: str, device: str) -> Node:
    """A layer that reads x and numbers alone, with the last of its numbers."""
    plain, x = PLAIN[op], tensor((2, 8, 12, 14), torch.float32, device)
    others = plain.further(x)
    y = nhwc(plain.whole(x, *others, **plain.numbers[-1]))
    size = (y.shape[1], y.shape[2])
    active = random_active(BlockGrid.cover(size, 4), 2, 0.5, device)
    edge = sbnet.fringe(active, active, size, 3, 1, 1)
    lists = [active.indices, active.count, active.block_map]
    inputs = [nhwc(x), *lists, *map(nhwc, others), edge.pixels, edge.count, y]
    numbers = {name: int(n) if isinstance(n, bool) else n for name, n in plain.numbers[-1].items()}
    return Node(op, inputs, {"bsize": [4, 4], **numbers})


def attention_node(device: str) -> Node:
    """Every input of block_attention, no number its default."""
    q, k, v = (tensor((2, h, t, 16), torch.float32, device) for h, t in ((4, 24), (2, 40), (2, 40)))
    mask = torch.rand(4, 24, 40) < 0.4
    layout = sbnet.AttentionLayout.from_mask(mask, 8).tensors(q.device, 4, 24, 40)
    lengths = [torch.tensor(n, dtype=torch.int32, device=device) for n in ([24, 9], [33, 40])]
    rule = {"diagonal": 20, "band": 12, "prefix": 0, "stride": 3, "phases": 1, "block_size": 8, "scale": 0.3}
    return Node("block_attention", [q, k, v, *layout, *lengths], rule)


def token_nodes(device: str) -> list[Node]:
    """Ops of tokens, with every input."""
    grid = BlockGrid((5, 4), (4, 3), (-1, 2), (3, 5))
    active, few = random_active(grid, 2, 0.5, device), random_active(BlockGrid.cover((12, 16), 4), 2, 0.5, device)
    x = tensor((2, 20, 8), torch.float32, device)
    order, there = torch.randint(20, (2, 9), device=device), torch.rand(2, 9, device=device) > 0.5
    lengths = torch.tensor([9, 5], dtype=torch.int32, device=device)
    image, plane = tensor((2, 3, 24, 32), torch.float32, device), tensor((2, 24, 32, 8), torch.float32, device)
    qkv = tensor((2, 12, 16, 48), torch.float32, device)
    rows = torch.arange(1, 193, device=device).view(3, 64)
    keys = torch.where(rows % 7 == 0, 0, rows)
    fills = [tensor((16,), torch.float32, device) for _ in range(2)]
    return [
        Node(
            "pack_tokens",
            [active.block_map],
            {**grid_attributes(grid), "size": [12, 16], "prefix": 1, "suffix": 2, "capacity": 200},
        ),
        Node("move_rows", [x, None, order, lengths, there], {"rows": 9, "start": 0}),
        Node("pack_patches", [image, order, lengths], {"patch": [8, 4]}),
        Node("merge_pixels", [plane, few.block_map], {"bsize": [4, 4], "factor": 2, "offsets": [0, 0, 1, 0, 0, 1]}),
        Node(
            "window_attention",
            [
                qkv, qkv, qkv, rows, keys, few.block_map, torch.rand(2, 192, device=device) > 0.4,
                tensor((3, 2, 64, 64), torch.float32, device), None, None, fills[0][:2].contiguous(), *fills,
            ],
            {
                "bsize": [4, 4], "starts": [0, 16, 32], "heads": 2, "dim": 8, "value_dim": 8, "scale": 0.3,
                "normalize": 1e-5,
            },
        ),
    ]  # fmt: skip


def torch_ops() -> set[str]:
    """Names of torch.ops.sbnet, without those that ORT does by itself (in-place twins by MayInplace, packing weights,
    tables of layouts), gradients, and what becomes several nodes."""
    names = {n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if n.startswith("sbnet::")}
    return {n for n in names if not (n.endswith("_") and n[:-1] in names)} - {
        "pack_conv_weight",
        "pack_blocksparse_filters",
        "block_layout_tables",
        "blocksparse_plan",
        "blocksparse_conv_tables",
        "blocksparse_conv_weight_grad",
        "blocksparse_conv_active",  # convolution, gather and scatter
        "block_attention_backward",
        "blocksparse_conv1x1",  # gather, product and scatter
        "connected_components",  # of what came out of a network
        "yuv_to_rgb_",  # a decoder's frame on its way into a network, never part of one
        # of training
        "activate_blocks_",
        "batch_norm_follow_",
        "sparse_activation_grad",
        "sparse_batch_norm2d",
        "sparse_batch_norm2d_backward",
        "sparse_conv2d_weight_grad",
        "sparse_conv2d_weight_grads",
        "sparse_norm2d_backward",
        "sparse_pool2d_grad",
        "sparse_resize2d_grad",
        "turn_conv_weights",
    }
