"""pack_blocksparse_filters: results do not depend on when filters were packed, and no pack goes stale."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import sbnet
from sbnet import BlockGrid, ConvLayout, blocksparse_conv, blocksparse_conv_active, blocksparse_deconv
from sbnet._library import kernel_capability
from sbnet.nn import BlockSparseConv2d, BlockSparseConv3d, BlockSparseConvTranspose2d
from sbnet.ops.weights import conv_pack
from support.helpers import assert_as_accurate_as_torch, assert_bitwise, captured, random_active, tensor
from support.refusals import refused

MASK = torch.tensor([[1, 0, 1], [0, 1, 1]])
SIZES = (16, 32, 64)


def sample(size, device, dtype=torch.float16):
    layout = ConvLayout.from_mask(MASK, 2 * size, 3 * size, size, (3, 3))
    x = tensor((2, 2 * size, 9, 12), dtype, device).contiguous(memory_format=torch.channels_last)
    filters = (torch.randn(layout.filter_shape, device=device) / 16).to(dtype)
    return x, filters, layout


@pytest.mark.parametrize("size", SIZES)
def test_the_bits_are_the_same(device, size):
    torch.manual_seed(size)
    x, filters, layout = sample(size, device)
    active = random_active(BlockGrid.cover((9, 12), 4), 2, 0.5, device)
    pack = sbnet.pack_blocksparse_filters(filters, layout)
    hopper = device == "cuda" and kernel_capability(0) == 90
    assert bool(pack.numel()) == hopper
    plain = blocksparse_conv(x, filters, layout), blocksparse_conv_active(x, filters, layout, active, padding=1)
    packed = (
        blocksparse_conv(x, filters, layout, packed=pack),
        blocksparse_conv_active(x, filters, layout, active, padding=1, packed=pack),
    )
    for got, want in zip(packed, plain, strict=True):
        assert_bitwise(got, want)
    back, into = layout.swapped(), x.new_empty(2, 3 * size, 9, 12).normal_()
    into = into.contiguous(memory_format=torch.channels_last)
    turned = sbnet.pack_blocksparse_filters(filters, back, transposed=True)
    assert_bitwise(blocksparse_deconv(into, filters, back, packed=turned), blocksparse_deconv(into, filters, back))


def test_gradients_do_not_know_of_packs(device):
    torch.manual_seed(1)
    x, filters, layout = sample(16, device)
    pack = sbnet.pack_blocksparse_filters(filters, layout)
    x, filters = x.requires_grad_(), filters.requires_grad_()
    got = torch.autograd.grad(blocksparse_conv(x, filters, layout, packed=pack).sum(), [x, filters])
    for one, other in zip(
        got, torch.autograd.grad(blocksparse_conv(x, filters, layout).sum(), [x, filters]), strict=True
    ):
        assert_bitwise(one, other)


def test_what_is_refused(device):
    x, filters, layout = sample(16, device)
    wanted = r"blocksparse_conv: packed: expected pack_blocksparse_filters\(filters, layout\)"
    pack = sbnet.pack_blocksparse_filters(filters, layout)
    refused(wanted, blocksparse_conv, x, filters, layout, packed=pack.new_zeros(pack.numel() + 1))
    refused(wanted, blocksparse_conv, x, filters, layout, packed=pack.new_zeros(pack.numel(), dtype=torch.int8))
    with pytest.raises(ValueError, match="pack_blocksparse_filters: filters: expected"):
        sbnet.pack_blocksparse_filters(filters[1:], layout)
    # A volume, which a GPU convolves by a product: it needs no pack, and refuses what is none all the same.
    layout = ConvLayout.from_mask(MASK, 32, 48, 16, (1, 3, 3))
    x, filters = x[:, :, None], tensor(layout.filter_shape, torch.float16, device)
    pack = sbnet.pack_blocksparse_filters(filters, layout)
    refused(wanted, blocksparse_conv, x, filters, layout, packed=pack.new_zeros(pack.numel() + 1))
    blocksparse_conv(x, filters, layout, packed=pack)


@pytest.fixture
def made(monkeypatch):
    """The packs that layers make, on any device."""
    packs, plain = [], conv_pack.pack_blocksparse_filters

    def pack(filters, layout, transposed):
        packs.append(plain(filters, layout, transposed))
        return packs[-1]

    monkeypatch.setattr(conv_pack, "pack_blocksparse_filters", pack)
    monkeypatch.setattr(conv_pack, "_packs", lambda filters: True)
    return packs


@torch.no_grad()
@pytest.mark.parametrize("kind", [BlockSparseConv2d, BlockSparseConvTranspose2d])
def test_a_layer_packs_once_and_again_after_a_write(device, made, kind):
    torch.manual_seed(2)
    layer = kind(64, 96, 3, padding=1, block_size=32, device=device, dtype=torch.float16)
    x = sample(32, device)[0]
    dense = copy.deepcopy(layer)
    for write in (lambda w: None, lambda w: w.mul_(2), lambda w: w.copy_(torch.randn_like(w) / 16)):
        count = len(made)
        torch.manual_seed(3)
        write(layer.weight)
        torch.manual_seed(3)
        write(dense.weight)
        y = layer(x)
        assert_bitwise(layer(x), y)
        assert len(made) == count + 1
        assert_bitwise(y, blocks(dense, x))
    layer.weight.data = layer.weight.data.clone()
    layer(x)
    assert len(made) == 4
    layer.set_layout(layer.layout)
    layer(x)
    assert len(made) == 5


def blocks(layer, x):
    """The layer's result without its pack."""
    convolve = blocksparse_deconv if layer.transposed else blocksparse_conv
    more = {"output_size": x.shape[2:]} if layer.transposed else {}
    return convolve(x, layer.weight, layer.layout, layer.bias, padding=1, **more)


@pytest.mark.usefixtures("made")
def test_who_does_not_keep_a_pack(made):
    """Gradients, layers that no kernel reads packs of, compiled programs; states and copies have none."""
    layer, x = BlockSparseConv2d(64, 96, 3, padding=1, block_size=32), torch.randn(1, 64, 6, 6)
    layer(x)
    with torch.no_grad():
        BlockSparseConv3d(64, 96, 1, block_size=32)(x[:, :, None])
        BlockSparseConvTranspose2d(64, 96, 3, stride=2, block_size=32)(x)
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
        with torch.inference_mode():
            BlockSparseConv2d(64, 96, 3, block_size=32)(x)
        assert not made
        layer(x)
        assert len(made) == 1
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert twin._pack._packed is None
            assert_bitwise(twin(x), layer(x))
    assert list(layer.state_dict()) == ["weight", "bias", "lists"]


@torch.no_grad()
def test_compiled_and_exported_programs_follow_writes(device):
    torch.manual_seed(4)
    layer = BlockSparseConv2d(64, 96, 3, padding=1, block_size=32, device=device, dtype=torch.float16).eval()
    x = sample(32, device)[0]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    exported = torch.export.export(layer, (x,)).module()

    def same(got):
        if device == "cpu" or kernel_capability(0) == 90:
            return assert_bitwise(got, layer(x))
        # Programs call the convolution, whose sums have another order than the product that a call is elsewhere.
        dense = [
            F.conv2d(x.to(t), layer.dense_weight().to(t), layer.bias.to(t), padding=1) for t in (x.dtype, torch.double)
        ]
        assert_as_accurate_as_torch(got, *dense)

    same(compiled(x))
    for program in (layer, exported):
        program.weight.mul_(2)
    for got in (compiled(x), exported(x)):
        same(got)


@pytest.mark.gpu
@torch.no_grad()
def test_a_cuda_graph_packs_by_itself():
    """It follows a write; with a pack of the caller's it does not."""
    torch.manual_seed(5)
    layer = BlockSparseConv2d(64, 96, 3, padding=1, block_size=32, device="cuda", dtype=torch.float16)
    x = sample(32, "cuda")[0]
    graph, y = captured(lambda: layer(x))
    layer.weight.mul_(2)
    graph.replay()
    assert_bitwise(y, layer(x))
