"""nn.BlockSparseConv2d and its kin: against PyTorch's dense layers of the same values, states, patching, export."""

import copy
import pickle

import pytest
import torch
from torch import nn

import sbnet
from sbnet import ConvLayout
from sbnet.nn import BlockSparseConv2d, BlockSparseConv3d, BlockSparseConvTranspose2d
from sbnet.weights import patch, prune
from support.blockconv_cases import B8, UNEVEN
from support.helpers import assert_as_accurate_as_torch, assert_bitwise, random_active
from support.weight_cases import assert_trains_alike_compiled

LAYERS = {
    "2d": (BlockSparseConv2d, {"kernel_size": 3, "padding": 1, "density": 0.4}, (2, 20, 9, 7)),
    "2d_stride": (BlockSparseConv2d, {"kernel_size": (3, 2), "stride": 2, "padding": (2, 0)}, (2, 20, 9, 7)),
    "2d_dilated_same": (BlockSparseConv2d, {"kernel_size": 3, "padding": "SAME", "dilation": 2}, (1, 20, 9, 7)),
    "2d_no_bias": (BlockSparseConv2d, {"kernel_size": 1, "bias": False, "density": 1.0}, (2, 20, 9, 7)),
    "3d": (BlockSparseConv3d, {"kernel_size": (1, 3, 2), "padding": (0, 1, 1)}, (2, 20, 3, 4, 5)),
    "transposed": (BlockSparseConvTranspose2d, {"kernel_size": 4, "stride": 2, "padding": 1}, (2, 20, 5, 4)),
    "transposed_output_padding": (
        BlockSparseConvTranspose2d,
        {"kernel_size": 3, "stride": (2, 3), "padding": 1, "output_padding": (1, 2), "dilation": 2},
        (1, 20, 5, 4),
    ),
}  # fmt: skip


def made(name, device="cpu", **options):
    kind, own, shape = LAYERS[name]
    layer = kind(20, 30, block_size=8, device=device, **{**own, **options})
    return layer, torch.randn(shape, device=device)


@pytest.mark.parametrize("name", LAYERS)
def test_equals_the_dense_layer(device, name):
    """Values and every gradient, against the dense layer in float64."""
    layer, x = made(name, device)
    dense = layer.to_dense()
    direction = torch.randn(dense(x).shape, device=device)

    def run(module, x):
        x = x.detach().clone().requires_grad_()
        y = module(x)
        bias = [module.bias] if module.bias is not None else []
        dx, dw, *db = torch.autograd.grad(y, [x, module.weight, *bias], direction.to(y.dtype))
        if module is layer:
            return y, dx, dw, *db
        return y, dx, stored(dw), *db

    def stored(dw):
        return (layer.layout.swapped() if layer.transposed else layer.layout).from_dense(dw)

    exact = run(copy.deepcopy(dense).double(), x.double())
    for got, torchs, true in zip(run(layer, x), run(dense, x), exact, strict=True):
        assert_as_accurate_as_torch(got, torchs, true)


@pytest.mark.parametrize("name", LAYERS)
def test_from_dense_keeps_values(name):
    layer, x = made(name)
    dense = layer.to_dense()
    again = type(layer).from_dense(dense, layout=layer.layout)
    assert_bitwise(again.weight, layer.weight)
    torch.testing.assert_close(again(x), layer(x))
    whole = type(layer).from_dense(dense, 1.0, 8)
    assert whole.density == 1.0
    torch.testing.assert_close(whole(x), dense(x), rtol=1e-4, atol=1e-5)
    assert whole.training == dense.training


def test_magnitude_keeps_the_largest_and_covers_every_channel():
    conv = nn.Conv2d(32, 48, 3)
    with torch.no_grad():
        conv.weight[16:32, 8:16] *= 10  # inputs 8-15, outputs 16-31
        conv.weight[16:32, 0:8] *= 9
    layer = BlockSparseConv2d.from_dense(conv, density=0.4, block_size=8)
    kept = {(c[0] // 8, k[0] // 8) for c, k in layer.layout.BCK}
    assert len(kept) == 10  # of 24, rounded up
    assert {(1, 2), (1, 3), (0, 2), (0, 3)} <= kept
    assert {c for c, _ in kept} == set(range(4))
    assert {k for _, k in kept} == set(range(6))
    weight = layer.dense_weight()
    assert_bitwise(weight[weight != 0], conv.weight[weight != 0])
    assert 6 <= ConvLayout.from_magnitude(conv.weight, 8, 0.0).blocks < 10, "the largest of each row and column"
    with pytest.raises(ValueError, match="density: expected 0 to 1, got 2"):
        ConvLayout.from_magnitude(conv.weight, 8, 2)


@pytest.mark.parametrize("BCK", [B8, UNEVEN], ids=["overlap", "uneven"])
def test_overlapping_layouts(BCK):
    """Blocks that share a weight share its value: their sum is the dense layer's where there are blocks."""
    layout = ConvLayout(BCK, (3, 3))
    conv = nn.Conv2d(layout.in_channels, layout.out_channels, 3)
    layer = BlockSparseConv2d.from_dense(conv, layout=layout)
    there = layout.to_dense(torch.ones(layout.weights)) > 0
    torch.testing.assert_close(layer.dense_weight(), conv.weight * there)
    x = torch.randn(2, layout.in_channels, 6, 5)
    torch.testing.assert_close(layer(x), layer.to_dense()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["2d", "3d", "transposed"])
def test_state_of_other_blocks(device, name, tmp_path):
    source, x = made(name, device, density=0.4)
    for other in (made(name, device, density=0.9)[0], made(name, device, layout=torch.ones(3, 4))[0]):
        other.load_state_dict(source.state_dict())
        assert other.layout == source.layout
        assert_bitwise(other(x), source(x))
        other(x).sum().backward()
    assert set(source.state_dict()) == {"weight", "bias", "lists"}
    for twin in (copy.deepcopy(source), pickle.loads(pickle.dumps(source))):
        assert_bitwise(twin(x), source(x))
    torch.save(source.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    half = copy.deepcopy(source).half()
    assert (half(x.half()).dtype, half.lists.dtype) == (torch.float16, torch.int32)
    narrow = type(source)(16, 30, 3, block_size=8, device=device)
    with pytest.raises(RuntimeError, match="weight"):
        narrow.load_state_dict(source.state_dict())


@pytest.mark.parametrize("name", ["2d", "transposed"])
def test_set_layout(name):
    layer, x = made(name, density=1.0)
    before = layer.dense_weight()
    mask = torch.eye(3, 4)
    mask[0, 3] = 1
    few = ConvLayout.from_mask(mask, 20, 30, 8, layer.kernel_size)
    layer.set_layout(few)
    after = layer.dense_weight()
    assert layer.layout == few
    assert_bitwise(after[after != 0], before[after != 0])
    torch.testing.assert_close(layer(x), layer.to_dense()(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="set_layout: layout: expected kernel_size"):
        layer.set_layout(ConvLayout(few.BCK, (1, 1)))


def test_on_active_blocks(device):
    layer, x = made("2d", device)
    active = random_active(sbnet.BlockGrid.cover(x.shape[2:], 4), 2, 0.5, device)
    y, inside = layer(x, active, activation="relu"), active.pixel_mask(x.shape[2:])
    torch.testing.assert_close(y, layer(x, activation="relu") * inside)


def test_refuses():
    for conv, text in ((nn.Conv2d(8, 8, 3, groups=2), "groups=2"), (nn.Conv2d(8, 8, 3, padding="same"), "'same'")):
        with pytest.raises(ValueError, match=text):
            BlockSparseConv2d.from_dense(conv)
    with pytest.raises(TypeError, match=r"expected nn.Conv3d, got Conv2d"):
        BlockSparseConv3d.from_dense(nn.Conv2d(8, 8, 3))
    with pytest.raises(ValueError, match="by: expected"):
        BlockSparseConv2d.from_dense(nn.Conv2d(8, 8, 3), by="luck")
    with pytest.raises(ValueError, match="layout: expected inputs, outputs and kernel"):
        BlockSparseConv2d(6, 5, 3, layout=ConvLayout(UNEVEN, (1, 1)))
    with pytest.raises(ValueError, match="stride: expected 1 or 2 numbers, got 3"):
        BlockSparseConv2d(6, 5, 3, stride=(1, 1, 1))
    with pytest.raises(ValueError, match="padding: expected numbers"):
        BlockSparseConvTranspose2d(6, 5, 3, padding="SAME")


def network():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 48, 3, 2, 1), nn.ReLU(),
        nn.ConvTranspose2d(48, 16, 4, 2, 1), nn.Conv2d(16, 16, 3, groups=16), nn.Flatten(), nn.Linear(16 * 36, 10),
    )  # fmt: skip


def test_patch_and_prune():
    model = prune(network(), 0.5, 8, exclude="0", convolutions=True)
    names = [type(m).__name__ for m in model]
    assert names[::2] == ["Conv2d", "BlockSparseConv2d", "BlockSparseConvTranspose2d", "Flatten"]
    assert (names[5], names[7]) == ("Conv2d", "BlockSparseLinear")
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 10)
    assert isinstance(prune(network(), 0.5)[2], nn.Conv2d)
    assert patch(network(), {"[24]": {"density": 0.25, "block_size": 8}})[2].density < 0.4
    for name, options, text in (("5", {}, "one group, got 5, a Conv2d"), ("2", {"allow_tf32": True}, "allow_tf32")):
        with pytest.raises(ValueError, match=text):
            patch(network(), {name: options})


def test_compile_and_train(device):
    model = prune(network(), 0.5, 8, convolutions=True).to(device)
    assert_trains_alike_compiled(model, torch.randn(8, 3, 8, 8, device=device))


def test_exported_network_runs_in_onnx_runtime(device, tmp_path):
    pytest.importorskip("onnxruntime")
    from support.export_cases import ops_of
    from support.ort_models import PROVIDER, skip_without

    skip_without(device)

    model = prune(network(), 0.5, 8, convolutions=True).to(device).eval()
    x = torch.randn(2, 3, 8, 8, device=device)
    path = sbnet.export.to_onnx(model, (x,), tmp_path / "m.onnx")
    assert [ops_of(path).count(op) for op in ("blocksparse_conv", "blocksparse_matmul")] == [3, 1]
    (error,) = sbnet.export.verify(path, model, (x,), [PROVIDER[device]], quiet=True)
    assert error.rms < 1e-6 * error.rms_of_torch, "one convolution is ONNX Runtime's own"
