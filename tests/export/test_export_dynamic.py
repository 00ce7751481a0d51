"""Fringes of planes whose sizes are known at each call only: one list for several readers of a tensor."""

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import torch
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


# ---- a run of sparsify
class Flat(nn.Module):
    """Layers that keep the plane's size, of most kinds that a plan has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU())
        self.side = nn.Sequential(nn.Conv2d(8, 8, 3, padding=2, dilation=2), nn.GroupNorm(2, 8), nn.MaxPool2d(3, 1, 1))
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x):
        x = self.first(x)
        return self.last(torch.cat([x, x + torch.tanh(self.side(x))], 1))


@pytest.mark.parametrize("margin", [0, 5])
def test_a_run_of_one_plane_exports_for_every_size(device, margin, tmp_path):
    net = Flat().eval().to(device)
    run = sbnet.sparsify(net, torch.rand(1, 8, 32, 48, device=device), block=8, margin=margin)
    path = run.export(tmp_path / "m.onnx", dynamic=True, block_maps=True)
    session = export.session(path, [PROVIDER[device]])
    assert [v.name for v in session.get_outputs()] == ["y0", "block_map0"]
    # After all blocks few: what was there before must not show where a fringe is missing.
    for n, height, width, density in [(2, 32, 40, 1.0), (2, 32, 40, 0.005), (1, 17, 50, 0.01), (1, 17, 50, 0.0)]:
        x, mask = plane_inputs(device, n=n, height=height, width=width, density=density)
        y, block_map = export.run(session, [x, mask])
        own = sbnet.sparsify(net, x, block=8, margin=margin)
        want = own(x, mask)
        assert_bitwise(block_map, own.active[0].block_map)
        assert (y - want).norm() <= 1e-5 * want.norm()


def test_every_plane_has_its_block_map(device, tmp_path):
    net = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 4, 1)).eval().to(device)
    x, mask = plane_inputs(device, density=0.01)
    run = sbnet.sparsify(net, x, block=8)
    path = run.export(tmp_path / "m.onnx", block_maps=True)
    y, *block_maps = export.run(export.session(path, [PROVIDER[device]]), [x, mask])
    want = run(x, mask)
    assert (y - want).norm() <= 1e-5 * want.norm()
    assert len(block_maps) == len(run.planes) == 2
    for block_map, active in zip(block_maps, run.active, strict=True):
        assert_bitwise(block_map, active.block_map)


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (nn.Conv2d(8, 4, 3, 2, 1), {}, "got 2 planes in masked mode"),
        (nn.AdaptiveAvgPool2d(1), {}, "got 1, which is of one size"),
        (nn.Conv2d(8, 4, 1), {"mode": "exact"}, "got 1 planes in exact mode"),
        (nn.Conv2d(8, 4, 1), {"mode": "cached"}, "got 1 planes in cached mode"),
    ],
)
def test_a_plan_of_one_size_is_refused(layer, options, message, tmp_path):
    run = sbnet.sparsify(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), layer), torch.rand(1, 3, 32, 48), **options)
    with pytest.raises(ValueError, match=f"expected a masked network whose .*{message}"):
        run.export(tmp_path / "m.onnx", dynamic=True)
