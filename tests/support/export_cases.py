"""What tests of exported models share."""

import onnx
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import sbnet
from sbnet import BlockGrid, export
from support.helpers import tensor
from support.ort_models import PROVIDER


def ops_of(path) -> list[str]:
    return [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]


def attributes_of(path, op: str, name: str) -> list:
    nodes = [n for n in onnx.load(path).graph.node if n.op_type == op]
    found = [{a.name: onnx.helper.get_attribute_value(a) for a in n.attribute} for n in nodes]
    return [a.get(name) for a in found]


def same_as_torch(path, module, inputs, device="cpu"):
    for error in export.verify(path, module, inputs, [PROVIDER[device]], quiet=True):
        assert error.equal, error


def plane_inputs(device, dtype=torch.float32, n=2, height=32, width=40, density=0.03):
    x = tensor((n, 8, height, width), dtype, device).contiguous(memory_format=torch.channels_last)
    return x, torch.rand(n, height, width, device=device) < density


def planes():
    n, h, w = Dim("N"), Dim("H", min=2, max=4096), Dim("W", min=2, max=4096)
    return {0: n, 2: h, 3: w}, {0: n, 1: h, 2: w}


class Chain(nn.Module):
    """Convolutions with what stands between them in networks; `dense`: ends in ops that know nothing of blocks."""

    def __init__(self, dense: bool = False) -> None:
        super().__init__()
        self.dense = dense
        self.a, self.b, self.c, self.d = (
            nn.Parameter(tensor(s) / (s[1] * s[2] * s[3]) ** 0.5)
            for s in ((16, 8, 3, 3), (16, 16, 3, 3), (16, 32, 1, 1), (24, 16, 3, 3))
        )
        self.head = nn.Linear(24, 5)

    def forward(self, x, mask):
        active = sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8))
        half = sbnet.reduce_mask(
            F.max_pool2d(mask[:, None].float(), 2)[:, 0], BlockGrid.cover((x.shape[2] // 2, x.shape[3] // 2), 8)
        )
        a = sbnet.sparse_conv2d(x, self.a, None, active, padding=1, activation="relu")
        b = F.relu(sbnet.sparse_conv2d(a, self.b, None, active, padding=1) * 0.5 + a)
        c = sbnet.sparse_conv2d(torch.cat([a, b], 1), self.c, None, active, activation="silu")
        d = sbnet.sparse_conv2d(c, self.d, None, half, stride=2, padding=1, activation="relu")
        return self.head(d.mean((2, 3))) if self.dense else d
