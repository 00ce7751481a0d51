"""Graph passes of an export where they must not, or only just, do something: blocks of another size under one block
map, constants by channel, planes whose sides are computed."""

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnx
import torch
from torch import nn
from torch.export import Dim

import sbnet
from sbnet import BlockGrid, export
from support.helpers import tensor

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
PROVIDERS = ["CPUExecutionProvider"]


class Net(nn.Module):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(tensor((channels, channels, 3, 3)) / 9) for _ in range(2))
        self.scale = nn.Parameter(tensor((channels, 1, 1)))


class OtherBlocks(Net):
    """15x15 is 2x2 blocks of 8 as of 9: one list, other pixels."""

    def forward(self, x, mask):
        size = tuple(x.shape[2:])
        active = sbnet.reduce_mask(mask, BlockGrid.cover(size, 8))
        y = sbnet.sparse_conv2d(x, self.a, None, active, padding=1)
        return sbnet.sparse_conv2d(y, self.b[:, :, :1, :1], None, active.with_grid(BlockGrid.cover(size, 9)))


class OtherBlocksOfASum(OtherBlocks):
    def forward(self, x, mask):
        size = tuple(x.shape[2:])
        active = sbnet.reduce_mask(mask, BlockGrid.cover(size, 8))
        y = sbnet.sparse_conv2d(x, self.a, None, active, padding=1)
        other = active.with_grid(BlockGrid.cover(size, 9))
        return sbnet.sparse_conv2d(x, self.b, None, other, padding=1, residual=y)


class SameBlocksWider(OtherBlocks):
    """The same blocks, and a halo around them."""

    def forward(self, x, mask):
        active = sbnet.reduce_mask(mask, BlockGrid.cover(tuple(x.shape[2:]), 8))
        y = sbnet.sparse_conv2d(x, self.a, None, active, padding=1)
        return sbnet.sparse_conv2d(y, self.b, None, active, padding=1)


class ByChannel(Net):
    """Numbers by channel stay where channels come second."""

    def forward(self, x, mask):
        active = sbnet.reduce_mask(mask, BlockGrid.cover(tuple(x.shape[2:]), 8))
        y = sbnet.sparse_conv2d(x, self.a, None, active, padding=1) * self.scale
        return sbnet.sparse_conv2d(y, self.b, None, active, padding=1)


class Clipped(Net):
    def forward(self, x, mask):
        active = sbnet.reduce_mask(mask, BlockGrid.cover(tuple(x.shape[2:]), 8))
        y = torch.clamp(sbnet.sparse_conv2d(x, self.a, None, active, padding=1), self.scale.abs() - 1, self.scale.abs())
        return sbnet.sparse_conv2d(y, self.b, None, active, padding=1)


class Joined(Net):
    """Concatenated channels, of which there are as many as columns."""

    def __init__(self) -> None:
        super().__init__(15)
        self.c = nn.Parameter(tensor((15, 30, 3, 3)) / 16)

    def forward(self, x, mask):
        active = sbnet.reduce_mask(mask, BlockGrid.cover(tuple(x.shape[2:]), 8))
        y, z = (sbnet.sparse_conv2d(x, w, None, active, padding=1) for w in (self.a, self.b))
        return sbnet.sparse_conv2d(torch.cat([y, z], 1), self.c, None, active, padding=1)


@pytest.mark.parametrize(
    ("kind", "channels", "fringes"),
    [(OtherBlocks, 8, 1), (OtherBlocksOfASum, 8, 1), (SameBlocksWider, 8, 1), (ByChannel, 8, None),
     (Clipped, 8, None), (Joined, 15, None), (ByChannel, 15, None)],
)  # fmt: skip
def test_what_is_moved_and_what_is_left(kind, channels, fringes, tmp_path):
    module = kind() if kind is Joined else kind(channels)
    path, results = tmp_path / "m.onnx", []
    x = tensor((1, channels, 15, 15)).contiguous(memory_format=torch.channels_last)
    mask = torch.zeros(1, 15, 15, dtype=torch.bool)
    mask[0, 2, 3] = True
    export.to_onnx(module, (x, mask), path)
    if fringes is not None:
        nodes = onnx.load(path).graph.node
        assert sum(n.op_type == "fringe" for n in nodes) == fringes
    session = export.session(path, PROVIDERS)
    for given in (~mask, mask, mask.flip(1), mask):  # what a run leaves behind must not show in the next
        (got,) = export.run(session, (x, given))
        want = module(x, given).detach()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        results.append(got)
    assert torch.equal(results[1], results[3])


@pytest.mark.parametrize(
    ("stride", "padding", "kernel"),
    [((2, 1), (1, 1), (3, 3)), ((1, 2), (0, 1), (1, 3)), ((1, 1), (0, 1), (2, 3)), ((1, 1), (1, 0), (3, 1)),
     ((3, 2), (0, 1), (2, 3)), ((1, 1), (1, 2), (3, 3))],
)  # fmt: skip
def test_sides_that_are_computed_each_in_its_own_way(stride, padding, kernel, tmp_path):
    """A fringe of a plane whose height and width depend on the input's, differently."""

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(tensor((8, 8, *kernel)) / 9), nn.Parameter(tensor((8, 8, 3, 3)) / 9)

        def forward(self, x, mask):
            size = sbnet.conv_output_size(x.shape[2:], kernel, stride, padding)
            lists = sbnet.mask_pyramid(mask, [(*size, 4)]).planes[0]
            y = sbnet.sparse_conv2d(x, self.a, None, lists, stride=stride, padding=padding)
            return sbnet.sparse_conv2d(y, self.b, None, lists, padding=1)

    module, path = Uneven(), tmp_path / "m.onnx"
    height, width = Dim("height", min=16, max=64), Dim("width", min=16, max=64)
    sizes = {2: height, 3: width}, {1: height, 2: width}
    x = tensor((1, 8, 24, 32)).contiguous(memory_format=torch.channels_last)
    export.to_onnx(module, (x, torch.ones(1, 24, 32, dtype=torch.bool)), path, sizes)
    session = export.session(path, PROVIDERS)
    assert any(n.op_type == "fringe" for n in onnx.load(path).graph.node)
    for plane in ((24, 32), (31, 18), (17, 50)):
        x = tensor((1, 8, *plane)).contiguous(memory_format=torch.channels_last)
        for density in (1.0, 0.01, 0.005):
            mask = torch.rand(1, *plane) < density
            (got,) = export.run(session, (x, mask))
            torch.testing.assert_close(got, module(x, mask).detach(), rtol=1e-4, atol=1e-5)
