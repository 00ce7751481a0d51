"""What the passes make of a graph: Transposes at its boundary, zeros where they are read, fringes from pyramids."""

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnx
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import sbnet
from sbnet import BlockGrid, export
from support.export_cases import Chain, attributes_of, ops_of, plane_inputs, same_as_torch
from support.helpers import assert_as_accurate_as_torch, assert_bitwise, tensor
from support.ort_models import PROVIDER

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


# ---- layout
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_transposes_at_the_boundary_only(device, dense, dynamic, tmp_path):
    module = Chain(dense).to(device)
    inputs = plane_inputs(device)
    dims = None
    if dynamic:
        h, w = Dim("H2", min=4, max=512), Dim("W2", min=4, max=512)
        dims = {0: Dim("N"), 2: 2 * h, 3: 2 * w}, {0: Dim("N"), 1: 2 * h, 2: 2 * w}
    path = export.to_onnx(module, inputs, tmp_path / "m.onnx", dims)
    ops = ops_of(path)
    assert ops.count("sparse_conv2d") == 4
    assert ops.count("Transpose") == 2, ops  # x in; the last convolution's output out
    for density in (0.03, 0.2, 0.0, 1.0):
        inputs = plane_inputs(device, density=density)
        if dense:
            (got,) = export.run(export.session(path, [PROVIDER[device]]), inputs)
            exact = Chain(True).double().to(device)
            exact.load_state_dict(module.state_dict())
            with torch.no_grad():
                h = exact.head(Chain.forward(_body(module), *inputs).double().mean((2, 3)))
                assert_as_accurate_as_torch(got, module(*inputs), h, "dense head")
        else:
            same_as_torch(path, module, inputs, device)


def _body(module: Chain) -> Chain:
    body = Chain(False).to(module.a.device)
    body.load_state_dict(module.state_dict())
    return body


class Residual(nn.Module):
    """Two bottlenecks: 1x1, 3x3, 1x1 with the residual added in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            tensor((k, c, s, s)) / (c * s * s) ** 0.5
            for k, c, s in [(16, 8, 1), (4, 16, 1), (4, 4, 3), (16, 4, 1), (4, 16, 1), (4, 4, 3), (16, 4, 1)]
        )

    def forward(self, x, mask):
        active = sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8))

        def conv(t, k, residual=None):
            w = self.weights[k]
            return sbnet.sparse_conv2d(
                t, w, None, active, padding=w.shape[2] // 2, activation="relu", residual=residual
            )

        y = conv(x, 0)
        for k in (1, 4):
            y = conv(conv(conv(y, k), k + 1), k + 2, y)
        return y


def test_zeros_only_where_they_are_read(device, tmp_path):
    """Inside the graph nothing is filled: the 1x1s before a 3x3 clear its fringe, others nothing; the output is."""
    module = Residual().to(device)
    path = export.to_onnx(module, plane_inputs(device), tmp_path / "m.onnx")
    assert attributes_of(path, "sparse_conv2d", "zero_outside") == [0, 0, 0, 0, 0, 0, 1]
    convs = [n for n in onnx.load(path).graph.node if n.op_type == "sparse_conv2d"]
    assert [k for k, n in enumerate(convs) if len(n.input) > 8 and n.input[8]] == [1, 4]
    assert ops_of(path).count("fringe") == 1
    assert ops_of(path).count("Transpose") == 2
    s = export.session(path, [PROVIDER[device]])
    for density in (0.5, 0.03, 1.0, 0.01, 0.0):  # what a run leaves behind must not show in the next one
        inputs = plane_inputs(device, density=density)
        assert_bitwise(export.run(s, inputs)[0], module(*inputs).detach())


def test_bottlenecks_among_convolutions(device, tmp_path):
    """A bottleneck reads its active blocks alone: what feeds it on the same blocks needs neither fills nor fringes."""

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            shapes = (8, 8, 3, 3), (4, 8, 1, 1), (4, 4, 3, 3), (8, 4, 1, 1)
            self.weights = nn.ParameterList(tensor(s, torch.float32, "cpu") / 6 for s in shapes)

        def forward(self, x, mask, finer):
            active = sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8))
            other = sbnet.reduce_mask(finer, BlockGrid.cover(x.shape[2:], 4))
            conv, *three = self.weights
            y = sbnet.sparse_conv2d(x, conv, None, active, padding=1)
            y = sbnet.sparse_bottleneck2d(y, three, None, active)
            y = sbnet.sparse_bottleneck2d(y, three, None, active)
            y = sbnet.sparse_bottleneck2d(y, three, None, other)
            return sbnet.sparse_conv2d(y, conv, None, other, padding=1)

    def inputs(threshold):
        x = tensor((2, 8, 38, 51), torch.float32, device).to(memory_format=torch.channels_last)
        return x, *(torch.rand(2, 38, 51, device=device) > threshold for _ in range(2))

    module = Module().to(device)
    path = export.to_onnx(module, inputs(0.99), tmp_path / "m.onnx")
    assert attributes_of(path, "sparse_conv2d", "zero_outside") == [0, 1]
    assert attributes_of(path, "sparse_bottleneck2d", "zero_outside") == [0, 0, 0]
    nodes = [n for n in onnx.load(path).graph.node if n.op_type == "sparse_bottleneck2d"]
    assert [len(n.input) > 10 and bool(n.input[10]) for n in nodes] == [False, True, True]
    s = export.session(path, [PROVIDER[device]])
    for threshold in (-1.0, 0.99, 0.97, 2.0, 0.99):  # what a run leaves behind must not show in the next one
        given = inputs(threshold)
        assert_bitwise(export.run(s, given)[0], module(*given).detach())


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_pools_among_convolutions(device, ceil_mode, tmp_path):
    """A pool reads a halo of its input and is read with one: fringes, no fills."""

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(tensor((8, 8, 3, 3), torch.float32, "cpu") / 8 for _ in range(2))

        def forward(self, x, *masks):
            fine, coarse = (
                sbnet.reduce_mask(mask, BlockGrid.cover(mask.shape[1:], block))
                for mask, block in zip(masks, (8, 4), strict=True)
            )
            y = sbnet.sparse_conv2d(x, self.weights[0], None, fine, padding=1)
            y = sbnet.sparse_max_pool2d(y, coarse, 3, 2, 1, ceil_mode=ceil_mode)
            y = sbnet.sparse_avg_pool2d(y, coarse, 3, 1, 1)
            return sbnet.sparse_conv2d(y, self.weights[1], None, coarse, padding=1)

    x = tensor((2, 8, 38, 51), torch.float32, device).to(memory_format=torch.channels_last)
    planes = [(38, 51), sbnet.pool_output_size((38, 51), 3, 2, 1, 1, ceil_mode)]

    def inputs(threshold):
        return x, *(torch.rand(2, *size, device=device) > threshold for size in planes)

    module = Module().to(device)
    path = export.to_onnx(module, inputs(0.99), tmp_path / "m.onnx")
    assert ops_of(path).count("fringe") == 2  # both tensors of the coarse plane share one
    assert attributes_of(path, "sparse_conv2d", "zero_outside") == [0, 1]
    assert attributes_of(path, "sparse_max_pool2d", "zero_outside") == [0]
    assert attributes_of(path, "sparse_avg_pool2d", "zero_outside") == [0]
    s = export.session(path, [PROVIDER[device]])
    for threshold in (-1.0, 0.99, 0.97, 2.0, 0.99):  # what a run leaves behind must not show in the next one
        given = inputs(threshold)
        assert_bitwise(export.run(s, given)[0], module(*given).detach())


class TwoPlanes(nn.Module):
    """A tensor that a 3x3 and a 1x1 convolution of stride 2 read, and one that its own plane reads with a halo."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.weights = nn.ParameterList(tensor((8, 8, k, k), torch.float32, "cpu") / 8 for k in (3, 3, 3, 1))

    def forward(self, x, mask):
        (height, width), (first, second, down, short) = self.size, self.weights
        planes = [(height, width, 8), ((height + 1) // 2, (width + 1) // 2, 4)]
        fine, coarse = sbnet.mask_pyramid(mask, planes).planes
        y = sbnet.sparse_conv2d(x, first, None, fine, padding=1, activation="relu")
        y = sbnet.sparse_conv2d(y, second, None, fine, padding=1)
        z = sbnet.sparse_conv2d(y, down, None, coarse, stride=2, padding=1)
        return sbnet.sparse_conv2d(y, short, None, coarse, stride=2, residual=z)


def test_fringes_of_a_pyramid_are_listed_by_it(device, tmp_path):
    """One node lists all blocks and fringes, the union of two readers too."""
    size = (37, 50)
    module = TwoPlanes(size).to(device)
    x = tensor((2, 8, *size), torch.float32, device).to(memory_format=torch.channels_last)
    mask = torch.rand(2, *size, device=device) > 0.995
    path = export.to_onnx(module, (x, mask), tmp_path / "m.onnx")
    assert ops_of(path).count("mask_pyramid") == 1
    assert ops_of(path).count("fringe") == 0
    filled = [bool(z) for z in attributes_of(path, "sparse_conv2d", "zero_outside")]
    assert filled == [False, False, False, True]
    s = export.session(path, [PROVIDER[device]])
    for threshold in (-1.0, 0.995, 0.9, 2.0, 0.99):  # what a run leaves behind must not show in the next one
        inputs = x, torch.rand(2, *size, device=device) > threshold
        assert_bitwise(export.run(s, inputs)[0], module(*inputs).detach())


def test_a_mask_made_from_the_features_themselves(device, tmp_path):
    """The fringe of a tensor cannot be known before it, where its consumer's mask is made from it. Here layers
    alone read the tensor, which would else be cleared in its fringe alone."""

    class Module(Chain):
        def forward(self, x, mask):
            active = sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8))
            a = sbnet.sparse_conv2d(x, self.a, None, active, padding=1)
            size = sbnet.sparse_conv2d(a, torch.ones_like(self.b[:1, :, :1, :1]), None, active)
            again = sbnet.reduce_mask(size.abs().amax(1), BlockGrid.cover(x.shape[2:], 8), 3.0)
            return sbnet.sparse_conv2d(a, self.b, None, again, padding=1)

    module = Module().to(device)
    path = export.to_onnx(module, plane_inputs(device), tmp_path / "m.onnx")
    assert attributes_of(path, "sparse_conv2d", "zero_outside") == [1, 1, 1]
    assert "fringe" not in ops_of(path)
    same_as_torch(path, module, plane_inputs(device), device)


class PaperBlock(nn.Module):
    """SBNet's own: gather with the halo, VALID convolutions of the stack, scatter-add."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3)

    def forward(self, x, mask):
        grid = BlockGrid.cover(x.shape[2:], 8)
        active = sbnet.reduce_mask(mask, grid)
        stack = sbnet.sparse_gather(x, active, True, grid=grid.conv_input(3, 1, 1))
        return sbnet.sparse_scatter(F.relu(self.conv(stack)), active, x, grid, add=True)


def test_stacks_are_transposed_while_they_are_copied(device, tmp_path):
    module = PaperBlock().to(device)
    path = export.to_onnx(module, plane_inputs(device), tmp_path / "m.onnx")
    assert ops_of(path).count("Transpose") == 2
    assert attributes_of(path, "sparse_gather", "transpose") == [1]
    assert attributes_of(path, "sparse_scatter", "transpose") == [1]
    inputs = plane_inputs(device)
    (got,) = export.run(export.session(path, [PROVIDER[device]]), inputs)
    exact = PaperBlock().to(device)
    exact.load_state_dict(module.state_dict())
    with torch.no_grad():
        x64 = inputs[0].double()
        active = sbnet.reduce_mask(inputs[1], BlockGrid.cover((32, 40), 8))
        full = x64 + F.relu(F.conv2d(x64, module.conv.weight.double(), module.conv.bias.double(), padding=1))
        want = torch.where(active.pixel_mask((32, 40)), full, x64)
        assert_as_accurate_as_torch(got, module(*inputs), want)
