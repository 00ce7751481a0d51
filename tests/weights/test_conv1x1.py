"""1x1 convolution with block-sparse weights on active blocks: op, argument of sparse_conv2d, layer, export."""

import pytest
import torch
from torch import nn

from sbnet import (
    ActiveBlocks,
    BlockGrid,
    blocksparse_conv1x1,
    blocksparse_matmul,
    reduce_mask,
    reference,
    sparse_conv2d,
)
from sbnet.nn import BlockSparseConv1x1
from support.helpers import (
    ACTIVATIONS,
    FLOATS,
    LAYOUTS,
    assert_as_accurate_as_torch,
    assert_bitwise,
    assert_layout,
    assert_same_gradients,
    captured,
    laid_out,
    one_block,
    random_active,
    tensor,
)
from support.refusals import OPS, refused
from support.weight_cases import BLOCK_SIZES, random_layout, weights_of


def check(layout, x, weight, active, gate=None, bias=None, activation=None):
    got = blocksparse_conv1x1(x, weight, layout, active, gate, bias, activation)
    weight = weight.nan_to_num(0.0)
    results = [
        reference.blocksparse_conv1x1(
            x.to(d), weight.to(d), layout, active, gate, None if bias is None else bias.to(d), activation
        )
        for d in (x.dtype, torch.float64)
    ]
    assert_as_accurate_as_torch(got, *results, activation or "")
    mask = active.pixel_mask(x.shape[2:]).expand_as(got)
    assert_bitwise(got[~mask], torch.zeros_like(got[~mask]), "outside the active blocks")
    return got


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_against_the_dense_convolution(device, size, dtype):
    """Every size and dtype, channels that fill no block, clipped blocks, lists from empty to full."""
    for ragged, density, block in ((0, 0.5, 8), (3, 0.3, (4, 5)), (8 if size > 8 else 0, 1.0, 16)):
        layout = random_layout(3, 4, size, 0.6, ragged=ragged)
        x = laid_out(tensor((2, layout.in_features, 19, 21), dtype, device), "channels_last")
        active = random_active(BlockGrid.cover((19, 21), block), 2, density, device)
        gate, bias = torch.rand(layout.blocks, device=device) + 0.5, tensor((layout.out_features,), dtype, device)
        assert_layout(check(layout, x, weights_of(layout, dtype, device), active, None, bias), channels_last=True)
        check(layout, x, weights_of(layout, dtype, device).nan_to_num(0.0), active, gate, None, "relu")


@pytest.mark.parametrize("memory", LAYOUTS)
def test_memory_layouts(device, memory):
    layout = random_layout(2, 3, 16, 0.8)
    for dtype in FLOATS:
        x = laid_out(tensor((2, 32, 9, 10), dtype, device), memory)
        active = random_active(BlockGrid.cover((9, 10), 4), 2, 0.5, device)
        check(layout, x, weights_of(layout, dtype, device), active)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_few_blocks(device, activation):
    layout = random_layout(2, 3, 32, 0.8)
    x, weight = tensor((3, 64, 12, 20), torch.float32, device), weights_of(layout, torch.float32, device)
    grid = BlockGrid.cover((12, 20), 8)
    for active in (
        one_block(grid, 3, device),
        random_active(grid, 3, 0.0, device),
        random_active(grid, 3, 1.0, device),
    ):
        check(layout, x, weight, active, bias=tensor((96,), torch.float32, device), activation=activation)


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_gradients_and_their_gradients(device, activation):
    layout = random_layout(3, 4, 8, 0.6, ragged=3)
    active = random_active(BlockGrid.cover((7, 9), 4), 2, 0.5, device)
    x = torch.randn(2, 21, 7, 9, device=device)
    w, g = torch.randn(layout.weight_shape, device=device), torch.rand(layout.blocks, device=device) + 0.1
    leaves = [t.requires_grad_() for t in (x, w, g, torch.randn(29, device=device))]

    def dense(x, w, g, b):
        y = x.permute(0, 2, 3, 1) @ layout.to_dense(w * g[:, None, None]) + b
        y = reference.activate(y, activation, 0.01).permute(0, 3, 1, 2)
        return torch.where(active.pixel_mask((7, 9)), y, torch.zeros_like(y))

    def ours(x, w, g, b):
        return blocksparse_conv1x1(x, w, layout, active, g, b, activation)

    assert_same_gradients(ours, dense, leaves)


def test_argument_of_sparse_conv2d(device):
    layout = random_layout(2, 3, 16, 0.8)
    x, weight = torch.randn(1, 32, 8, 8, device=device), torch.randn(layout.weight_shape, device=device)
    active = random_active(BlockGrid.cover((8, 8), 4), 1, 0.5, device)
    got = sparse_conv2d(x, weight, None, active, activation="relu", layout=layout)
    assert_bitwise(got, blocksparse_conv1x1(x, weight, layout, active, activation="relu"))
    dense = layout.to_dense(weight).t()[:, :, None, None].contiguous()
    torch.testing.assert_close(got, sparse_conv2d(x, dense, None, active, activation="relu"), rtol=1e-4, atol=1e-4)
    for options in ({"stride": 2}, {"padding": 1}, {"dilation": 2}, {"groups": 2}, {"residual": got}):
        refused("layout: expected a 1x1 convolution", sparse_conv2d, x, weight, None, active, layout=layout, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_many_blocks(size):
    """Several tiles for each CTA, blocks of pixels that lie in a tile in several ways, odd planes, slices of x."""
    layout = random_layout(1024 // size, 512 // size, size, 0.3)
    weight = weights_of(layout, torch.float16, "cuda")
    x = laid_out(tensor((2, 1032, 130, 150), torch.float16, "cuda"), "channels_last")
    bias = tensor((512,), torch.float16, "cuda")
    for block, density in ((16, 0.5), (8, 0.3), ((4, 32), 0.5), ((16, 8), 1.0), ((2, 64), 0.2)):
        active = random_active(BlockGrid.cover((130, 150), block), 2, density, "cuda")
        y = check(layout, x[:, 8:], weight, active, None, bias, "relu")
        assert_bitwise(blocksparse_conv1x1(x[:, 8:], weight, layout, active, None, bias, "relu"), y)


@pytest.mark.gpu
def test_captured_in_a_graph():
    """The list's count is read on the device: a new mask counts in the next replay."""
    layout = random_layout(2, 3, 32, 0.8)
    x = laid_out(tensor((1, 64, 32, 32), torch.float16, "cuda"), "channels_last")
    weight, mask = weights_of(layout, torch.float16, "cuda"), torch.zeros(1, 32, 32, device="cuda")

    def run():
        return blocksparse_conv1x1(x, weight, layout, reduce_mask(mask, BlockGrid.cover((32, 32), 8)))

    graph, y = captured(run)
    for at in (5, 30):
        mask.zero_()[0, at, at] = 1
        graph.replay()
        assert_bitwise(y, run())


# ---- the layer
def test_layer(device):
    conv = nn.Conv2d(48, 80, 1).to(device)
    layer = BlockSparseConv1x1.from_conv(conv, 1.0, 16)
    x = torch.randn(2, 48, 9, 11, device=device)
    active = random_active(BlockGrid.cover((9, 11), 4), 2, 0.5, device)
    want = conv(x)
    torch.testing.assert_close(layer(x, None), want, rtol=1e-4, atol=1e-5)
    masked = torch.where(active.pixel_mask((9, 11)), want.relu(), torch.zeros_like(want))
    torch.testing.assert_close(layer(x, active, activation="relu"), masked, rtol=1e-4, atol=1e-5)
    assert BlockSparseConv1x1.from_conv(conv, 0.25, 16).density == pytest.approx(0.25, abs=0.05)
    other = BlockSparseConv1x1(48, 80, density=0.3, block_size=16).to(device)
    other.load_state_dict(layer.state_dict())
    assert_bitwise(other(x, active), layer(x, active))
    with pytest.warns(UserWarning, match="without active blocks"):
        layer(x)
    for wrong in (nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1, stride=2), nn.Conv2d(8, 8, 1, groups=2)):
        with pytest.raises(ValueError, match="1x1 convolution"):
            BlockSparseConv1x1.from_conv(wrong)


def test_compiled(device):
    torch._dynamo.reset()
    layer = BlockSparseConv1x1(32, 48, density=0.5, block_size=16, device=device)
    x = torch.randn(1, 32, 16, 16, device=device)
    active = random_active(BlockGrid.cover((16, 16), 8), 1, 0.5, device)
    compiled = torch.compile(lambda x, a: layer(x, a, activation="silu"), fullgraph=True, backend="aot_eager")
    assert_bitwise(compiled(x, active), layer(x, active, activation="silu"))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_export(tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    from sbnet import export

    layer = BlockSparseConv1x1(32, 48, density=0.5, block_size=16)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, mask):
            active = reduce_mask(mask, BlockGrid.cover(tuple(mask.shape[1:]), 8))
            return self.layer(x, active, activation="relu")

    net = Net().eval()
    x, mask = torch.randn(2, 32, 16, 24), torch.rand(2, 16, 24) > 0.98
    sizes = {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    dynamic = (sizes, {0: sizes[0], 1: sizes[2], 2: sizes[3]})
    path = export.to_onnx(net, (x, mask), tmp_path / "net.onnx", dynamic=dynamic)
    session = export.session(path, ["CPUExecutionProvider"])
    for shape in ((2, 16, 24), (1, 19, 9)):
        x, mask = torch.randn(shape[0], 32, *shape[1:]), torch.rand(shape) > 0.98
        with torch.no_grad():
            torch.testing.assert_close(export.run(session, [x, mask])[0], net(x, mask), rtol=1e-4, atol=1e-5)


# ---- bad input
def test_bad_arguments(device):
    layout = random_layout(2, 3, 8, 1.0)
    x, w = torch.zeros(1, 16, 8, 8, device=device), torch.zeros(6, 8, 8, device=device)
    active = random_active(BlockGrid.cover((8, 8), 4), 1, 0.5, device)
    two, aside = random_active(active.grid, 2, 0.5, device), random_active(BlockGrid.cover((9, 8), 4), 1, 0.5, device)
    bad = [
        ("active", (x, w, layout, None)),
        ("layout", (x, w, None, active)),
        ("x: expected", (x[:, :15], w, layout, active)),
        ("x: ", (x[0], w, layout, active)),
        ("weight: expected", (x, w[:5], layout, active)),
        ("weight: expected", (x, w.half(), layout, active)),
        ("gate: expected", (x, w, layout, active, w[:5, 0, 0])),
        ("bias: expected", (x, w, layout, active, None, w[:, 0, 0])),
        ("activation", (x, w, layout, active, None, None, "tanh")),
        ("block_map|images", (x, w, layout, two)),
        ("grid|plane|tiling", (x, w, layout, aside)),
    ]
    for match, arguments in bad:
        refused(match, blocksparse_conv1x1, *arguments)
    tables, numbers = layout.on(torch.device(device))
    lists, rest = (active.indices, active.count, active.block_map), ("none", 0.0, False)
    for grid in ([4, 4], [0, 4, 4, 4, 0, 0, 2, 2], [4, 4, 2, 2, 0, 0, 2, 2], [2**40] * 8):
        refused("grid|active", OPS.blocksparse_conv1x1, x, w, None, None, tables, numbers, *lists, grid, *rest)
    refused(
        "tables", OPS.blocksparse_conv1x1, x, w, None, None, tables[1:], numbers, *lists, active.grid.numbers(), *rest
    )


def test_lists_of_garbage(device):
    """Blocks that are none are skipped, a count beyond the list is clamped: nothing is written out of bounds."""
    layout = random_layout(2, 3, 16, 1.0)
    grid = BlockGrid.cover((8, 8), 4)
    good = random_active(grid, 1, 1.0, device)
    for dtype in FLOATS:
        x, w = torch.ones(1, 32, 8, 8, dtype=dtype, device=device), torch.ones(6, 16, 16, dtype=dtype, device=device)
        for value in (-1, 7, 2**31 - 1, -(2**31)):
            indices, count = torch.full_like(good.indices, value), torch.full_like(good.count, 10**6)
            active = ActiveBlocks(indices, count, good.total, good.block_map, grid)
            assert blocksparse_conv1x1(x, w, layout, active).abs().sum() == 0
    dense = blocksparse_matmul(x.permute(0, 2, 3, 1), w, layout).permute(0, 3, 1, 2)
    torch.testing.assert_close(blocksparse_conv1x1(x, w, layout, good), dense)
