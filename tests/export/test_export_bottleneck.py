"""sbnet.export: bottleneck blocks that become one op, and those that may not."""

import copy

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnx
import torch
from torch import nn

import sbnet
from sbnet import BlockGrid, export
from support.helpers import assert_as_accurate_as_torch, tensor
from support.ort_models import PROVIDER

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


class Blocks(nn.Module):
    """A 1x1 convolution and two bottlenecks; `change` may spoil the second one."""

    def __init__(self, channels=24, hidden=8, change=""):
        super().__init__()
        shapes = [(channels, 8, 1), *[(hidden, channels, 1), (hidden, hidden, 3), (channels, hidden, 1)] * 2]
        self.weights = nn.ParameterList(tensor((k, c, s, s)) / (c * s * s) ** 0.5 for k, c, s in shapes)
        self.biases = nn.ParameterList(tensor(s[:1]) for s in shapes)
        self.change = change

    def forward(self, x, mask):
        active = sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8))

        def conv(t, k, residual=None, activation="relu", **more):
            w = self.weights[k]
            more = {"padding": w.shape[2] // 2, "activation": activation, "residual": residual, **more}
            return sbnet.sparse_conv2d(t, w, self.biases[k], more.pop("active", active), **more)

        y = conv(x, 0)
        y = conv(conv(conv(y, 1), 2), 3, y)
        match self.change:
            case "another activation":
                return conv(conv(conv(y, 4, activation="silu"), 5), 6, y)
            case "another shortcut":
                return conv(conv(conv(y, 4), 5), 6, torch.relu(y))
            case "slope":
                slope = {"activation": "leaky_relu", "negative_slope": 0.3}
                return conv(conv(conv(y, 4, **slope), 5, **slope), 6, y, **slope)
            case "another slope":
                slopes = [{"activation": "leaky_relu", "negative_slope": s} for s in (0.3, 0.2, 0.3)]
                return conv(conv(conv(y, 4, **slopes[0]), 5, **slopes[1]), 6, y, **slopes[2])
            case "dilation":
                return conv(conv(conv(y, 4), 5, padding=2, dilation=2), 6, y)
            case "other blocks":
                other = sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], 16))
                return conv(conv(conv(y, 4), 5, active=other), 6, y)
            case "read twice":
                middle = conv(y, 4)
                return conv(conv(middle, 5), 6, y), middle
        return conv(conv(conv(y, 4), 5), 6, y)


def ops(path) -> list[str]:
    return [n.op_type for n in onnx.load(path).graph.node if n.op_type in ("sparse_conv2d", "sparse_bottleneck2d")]


def inputs(device="cpu", density=0.05, dtype=torch.float16):
    x = tensor((2, 8, 40, 52), dtype, device).contiguous(memory_format=torch.channels_last)
    return x, torch.rand(2, 40, 52, device=device) < density


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_blocks(device, tmp_path):
    if device == "cuda" and "CUDAExecutionProvider" not in export.default_providers():
        pytest.skip("needs onnxruntime-gpu and a libsbnet.so with CUDA")
    module = Blocks().half().to(device)
    path = export.to_onnx(module, inputs(device), tmp_path / "m.onnx", fuse_bottlenecks=True)
    assert ops(path) == ["sparse_conv2d", "sparse_bottleneck2d", "sparse_bottleneck2d"]
    nodes = [n for n in onnx.load(path).graph.node if n.op_type != "sparse_conv2d"]
    assert "fringe" not in [n.op_type for n in nodes]  # between such blocks none is read
    s, exact = export.session(path, [PROVIDER[device]]), copy.deepcopy(module).float()
    for density in (0.5, 0.03, 1.0, 0.0, 0.01):  # what a run leaves behind must not show in the next one
        x, mask = inputs(device, density)
        got, want = export.run(s, (x, mask))[0], module(x, mask).detach()
        inside = sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8)).pixel_mask(x.shape[2:])
        assert not bool(torch.where(inside, 0, got).any())
        assert_as_accurate_as_torch(got, want, exact(x.float(), mask).detach())


def test_the_slope_goes_into_the_block(tmp_path):
    module = Blocks(change="slope").half()
    path = export.to_onnx(module, inputs(), tmp_path / "m.onnx", fuse_bottlenecks=True)
    assert ops(path) == ["sparse_conv2d", "sparse_bottleneck2d", "sparse_bottleneck2d"]
    x, mask = inputs()
    (got,) = export.run(export.session(path, [PROVIDER["cpu"]]), (x, mask))
    exact = copy.deepcopy(module).float()
    assert_as_accurate_as_torch(got, module(x, mask).detach(), exact(x.float(), mask).detach())


def test_only_where_it_is_asked_for(tmp_path):
    path = export.to_onnx(Blocks().half(), inputs(), tmp_path / "m.onnx")
    assert ops(path) == ["sparse_conv2d"] * 7


@pytest.mark.parametrize(
    "change", ["another activation", "another shortcut", "another slope", "dilation", "other blocks", "read twice"]
)
def test_blocks_that_are_none(change, tmp_path):
    """The block before the one that is spoilt still becomes one op."""
    path = export.to_onnx(Blocks(change=change).half(), inputs(), tmp_path / "m.onnx", fuse_bottlenecks=True)
    assert ops(path) == ["sparse_conv2d", "sparse_bottleneck2d", *["sparse_conv2d"] * 3]


@pytest.mark.parametrize(("channels", "hidden"), [(520, 8), (24, 104), (20, 8)])
def test_sizes_without_a_kernel(channels, hidden, tmp_path):
    module = Blocks(channels, hidden).half()
    assert ops(export.to_onnx(module, inputs(), tmp_path / "m.onnx", fuse_bottlenecks=True)) == ["sparse_conv2d"] * 7


def test_float32_has_no_kernel(tmp_path):
    path = export.to_onnx(Blocks(), inputs(dtype=torch.float32), tmp_path / "m.onnx", fuse_bottlenecks=True)
    assert ops(path) == ["sparse_conv2d"] * 7
