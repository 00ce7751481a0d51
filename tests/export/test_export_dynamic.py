"""Fringes of planes whose sizes are known at each call only: one list for several readers of a tensor."""

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import torch.nn.functional as F
from torch import nn

import sbnet
from sbnet import BlockGrid, export
from support.export_cases import attributes_of, ops_of, plane_inputs, planes
from support.helpers import assert_bitwise, tensor
from support.ort_models import PROVIDER

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


class Stage(nn.Module):
    """A tensor, then a residual block of stride 2 on it: its 3x3 convolution, and the 1x1 one of the shortcut."""

    def __init__(self, other: bool) -> None:
        super().__init__()
        self.other = other  # the shortcut is on blocks of another mask
        shapes = (8, 8, 3, 3), (16, 8, 3, 3), (16, 8, 1, 1), (16, 16, 3, 3)
        self.weights = nn.ParameterList(tensor(s) / (s[1] * s[2] * s[3]) ** 0.5 for s in shapes)

    def forward(self, x, mask):
        stem, first, short, second = self.weights
        active = sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8))
        size = (x.shape[2] + 1) // 2, (x.shape[3] + 1) // 2
        halved = F.max_pool2d(mask[:, None].float(), 2, ceil_mode=True)[:, 0]
        half = sbnet.reduce_mask(halved, BlockGrid.cover(size, 8))
        beside = sbnet.reduce_mask(halved, BlockGrid.cover(size, 4)) if self.other else half
        y = sbnet.sparse_conv2d(x, stem, None, active, padding=1, activation="relu")
        residual = sbnet.sparse_conv2d(y, short, None, beside, stride=2)
        y = sbnet.sparse_conv2d(y, first, None, half, stride=2, padding=1, activation="relu")
        return sbnet.sparse_conv2d(y, second, None, half, padding=1, residual=residual)


@pytest.mark.parametrize("other", [False, True])
def test_two_readers_of_a_tensor(device, other, tmp_path):
    """The convolution of stride 2 reads what the shortcut reads and more: one fringe, and the output alone is filled.
    On other blocks the shortcut reads other pixels; of a residual on other blocks the blocks that add it are read."""
    module = Stage(other).to(device)
    path = export.to_onnx(module, plane_inputs(device), tmp_path / "m.onnx", planes())
    filled = attributes_of(path, "sparse_conv2d", "zero_outside")
    assert sum(filled) == (2 if other else 1), filled
    assert ops_of(path).count("fringe") == 2
    session = export.session(path, [PROVIDER[device]])
    # After all blocks few: what was there before must not show where a reader's window alone reaches.
    few = [(2, 32, 40, 1.0), (2, 32, 40, 0.005), (1, 33, 47, 1.0), (1, 33, 47, 0.002)]
    for n, height, width, density in [(2, 32, 40, 0.5), (3, 18, 64, 1.0), *few * 3, (2, 32, 40, 0.0)]:
        inputs = plane_inputs(device, n=n, height=height, width=width, density=density)
        assert_bitwise(export.run(session, inputs)[0], module(*inputs).detach())


class Beside(nn.Module):
    """A tensor that two 1x1 convolutions read, the second on larger blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            tensor(s) / (s[1] * s[2] * s[3]) ** 0.5 for s in ((8, 8, 3, 3), *[(8, 8, 1, 1)] * 2)
        )

    def forward(self, x, mask):
        first, own, other = self.weights
        active, larger = (sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], block)) for block in (8, 16))
        y = sbnet.sparse_conv2d(x, first, None, active, padding=1)
        return sbnet.sparse_conv2d(y, own, None, active), sbnet.sparse_conv2d(y, other, None, larger)


def test_a_reader_is_known_by_its_blocks_and_its_window(device, tmp_path):
    """Both read pixel by pixel: the fringe is of the one whose blocks are others."""
    module = Beside().to(device)
    path = export.to_onnx(module, plane_inputs(device), tmp_path / "m.onnx", planes())
    assert sorted(attributes_of(path, "sparse_conv2d", "zero_outside")) == [0, 1, 1]
    session = export.session(path, [PROVIDER[device]])
    for n, height, width, density in [(2, 32, 40, 1.0), (2, 32, 40, 0.002), (1, 33, 47, 1.0), (1, 33, 47, 0.002)] * 2:
        inputs = plane_inputs(device, n=n, height=height, width=width, density=density)
        for got, want in zip(export.run(session, inputs), module(*inputs), strict=True):
            assert_bitwise(got, want.detach())
