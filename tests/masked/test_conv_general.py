"""sparse_conv2d of all other kinds, which one Hopper kernel serves: any kernel, dilation, groups, channels, blocks."""

import pytest
import torch

from sbnet import ActiveBlocks, fringe, sparse_conv2d, sparse_conv2d_
from sbnet.select import conv2d_kernel
from support.conv_cases import HALF, check, make
from support.helpers import ACTIVATIONS, assert_bitwise, assert_conv, dense_conv2d, poison, random_active

KINDS = {
    "5x5": {"kernel": 5, "padding": 2}, "7x7": {"kernel": 7, "padding": 3}, "1x3": {"kernel": (1, 3), "padding": 1},
    "3x1": {"kernel": (3, 1), "padding": 0}, "1x1": {"kernel": 1, "padding": 0}, "2x2": {"kernel": 2, "padding": 0},
    "dilation 2": {"padding": 2, "dilation": 2}, "dilation 6": {"padding": 6, "dilation": 6},
    "dilation 12": {"padding": 12, "dilation": 12}, "5x5 stride 2": {"kernel": 5, "padding": 2, "stride": 2},
    "stride 3": {"padding": 1, "stride": 3},
    "dilation 2 stride 2": {"kernel": 5, "padding": 4, "dilation": 2, "stride": 2},
    "dilation 3 stride 2": {"padding": 3, "dilation": 3, "stride": 2},
}  # fmt: skip


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("block", [8, 16, 10, 12, 20, 24, 32, (8, 16), (16, 8), (7, 50)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_and_blocks(device, kind, block, dtype):
    if device == "cpu" and (dtype == torch.bfloat16 or block not in (8, 10)):
        pytest.skip("slow on a CPU, which treats all of these alike")
    case = {"dtype": dtype, "block": block, "size": (50, 61), **KINDS[kind]}
    check(device, **case, channels=20, filters=36, activation="relu", density=1.0)
    check(device, **case, channels=64, filters=64, activation="silu", residual="channels_last")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    ("channels", "filters"),
    [(1, 1), (1, 64), (3, 16), (64, 3), (60, 60), (61, 7), (2, 2), (4, 100), (24, 24), (72, 88), (80, 80), (90, 90)]
    + [pytest.param(*ck, marks=pytest.mark.gpu) for ck in ((96, 96), (160, 160), (322, 320), (256, 258), (129, 128))],
    ids=str,
)
def test_channels(device, channels, filters, dtype):
    if device == "cpu" and channels * filters > 5_000:
        pytest.skip("large for a CPU")
    case = {"dtype": dtype, "channels": channels, "filters": filters}
    check(device, **case, size=(37, 45), block=16, activation="relu", density=0.6)
    check(device, **case, size=(30, 33), block=10, residual="channels_last", bias=False)
    check(device, **case, size=(30, 33), block=12, layout="odd_channel_slice", out_layout="odd_channel_slice")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    ("groups", "inputs", "outputs"),
    [(32, 4, 4), (32, 8, 8), (16, 16, 16), (5, 24, 24), (3, 48, 48), (7, 12, 20), (2, 72, 40), (9, 5, 3), (4, 64, 1)],
    ids=str,
)
def test_groups(device, groups, inputs, outputs, dtype):
    if device == "cpu" and (dtype == torch.bfloat16 or groups * inputs > 100):
        pytest.skip("slow on a CPU, which treats all of these alike")
    case = {"dtype": dtype, "groups": groups, "channels": groups * inputs, "filters": groups * outputs}
    check(device, **case, size=(33, 30), block=16, activation="relu", density=1.0)
    check(device, **case, size=(33, 30), block=8, residual="channels_last", stride=2)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_groups_keep_infinities_to_themselves(device, activation, dtype):
    """Groups that are computed side by side meet the inputs of each other, times zero."""
    x, weight, bias, active, options = make(
        device, dtype=dtype, groups=8, channels=64, filters=64, size=(32, 32), block=16, density=1.0
    )
    options |= {"activation": activation, "residual": torch.randn_like(dense_conv2d(x, weight, bias, dtype, **options))}
    x[0, 3, 5, 6] = float("inf")
    x[1, 17, 20, 9] = float("-inf")
    x[1, 40, 20, 9] = float("nan")
    y = sparse_conv2d(x, weight, bias, active, **options)
    assert_conv(y, x, weight, bias, active, torch.zeros((), dtype=dtype, device=device), **options)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_an_output_of_every_other_pixel(device, dtype):
    """As the phases of a transposed convolution write: strides of out that leave room between its pixels."""
    for channels, filters, kind in ((64, 64, "2x2"), (24, 40, "1x1"), (8, 3, "1x3")):
        x, weight, bias, active, options = make(
            device, dtype=dtype, channels=channels, filters=filters, size=(21, 26), block=8, **KINDS[kind]
        )
        exact = dense_conv2d(x, weight, bias, dtype, **options)
        n, k, h, w = exact.shape
        whole = torch.full((n, 2 * h, 2 * w, k), float("nan"), dtype=dtype, device=device).permute(0, 3, 1, 2)
        sparse_conv2d_(x, weight, bias, active, whole[:, :, 1::2, ::2], **options)
        nan = torch.full((), float("nan"), dtype=dtype, device=device)
        assert_conv(whole[:, :, 1::2, ::2], x, weight, bias, active, nan, **options)
        assert bool(whole[:, :, ::2].isnan().all())
        assert bool(whole[:, :, :, 1::2].isnan().all())


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("block", [10, 16])
@pytest.mark.parametrize(("channels", "filters"), [(60, 60), (64, 64), (80, 96)])
def test_fringe_and_hostile_lists(device, channels, filters, block, dtype):
    """Rows that are no blocks, a count too large; the fringe's pixels become zero, whatever their alignment."""
    x, weight, bias, active, options = make(
        device, dtype=dtype, channels=channels, filters=filters, size=(43, 47), kernel=5, padding=2, block=block
    )
    junk, keep = active.indices.clone(), torch.ones(len(active.indices), dtype=torch.bool, device=device)
    junk[::3, 1], keep[::3] = 10**6, False
    junk[1::5, 0], keep[1::5] = -1, False
    keep[int(active.count) :] = False
    hostile = ActiveBlocks(junk, torch.full_like(active.count, 2**31 - 1), active.total, active.block_map, active.grid)
    fair = ActiveBlocks.from_indices(active.indices[keep], active.grid, 2)
    edge = fringe(fair, random_active(active.grid, 2, 0.5, device), (43, 47), 3, 1, 1)
    y = poison((2, filters, 43, 47), dtype, device, "channels_last")
    sparse_conv2d_(x, weight, bias, hostile, y, fringe=edge, activation="relu", **options)
    outside = torch.full((2, 1, 43, 47), float("nan"), device=device, dtype=dtype)
    outside.flatten()[edge.pixels[: int(edge.count)].long()] = 0
    assert_conv(y, x, weight, bias, fair, outside, activation="relu", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [10, 16])
@pytest.mark.parametrize(("channels", "filters", "kernel"), [(60, 3, 3), (64, 64, 5), (96, 96, 3), (128, 128, 5)])
def test_same_bits_each_time(channels, filters, kernel, block):
    case = {"channels": channels, "filters": filters, "size": (400, 300), "block": block, "kernel": kernel}
    x, weight, bias, active, options = make("cuda", dtype=torch.float16, density=0.7, padding=kernel // 2, **case)
    first = sparse_conv2d(x, weight, bias, active, **options)
    assert_conv(first, x, weight, bias, active, first.new_zeros(()), **options)
    for _ in range(30):
        assert_bitwise(sparse_conv2d(x, weight, bias, active, **options), first)


@pytest.mark.gpu
@pytest.mark.parametrize("density", [0.02, 0.1, 1.0])
@pytest.mark.parametrize(("channels", "filters", "dilation"), [(256, 256, 2), (320, 96, 6), (2048, 64, 12)])
def test_tiles_that_are_shared(channels, filters, dilation, density):
    """Few tiles of many channels, whose sums CTAs of a cluster exchange: right, NaN passes, the same bits each time."""
    case = {"channels": channels, "filters": filters, "size": (100, 90), "block": 16, "density": density}
    x, weight, bias, active, options = make("cuda", dtype=torch.float16, padding=dilation, dilation=dilation, **case)
    options |= {"activation": "silu"}
    options["residual"] = torch.randn_like(dense_conv2d(x, weight, bias, torch.float16, **options))
    x[0, channels - 1, 40, 41], x[0, 3, 60, 20] = float("nan"), float("inf")
    first = sparse_conv2d(x, weight, bias, active, **options)
    assert_conv(first, x, weight, bias, active, first.new_zeros(()), **options)
    for _ in range(30):
        assert_bitwise(sparse_conv2d(x, weight, bias, active, **options), first)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [8, 10, 16, 64])
def test_it_is_the_general_kernel(kind, block):
    options = KINDS[kind] | ({"stride": 1} if "stride" not in KINDS[kind] else {})
    shape = {name: options[name] for name in ("stride", "padding", "dilation") if name in options}
    kernel = options.get("kernel", 3)
    assert conv2d_kernel((1, 60, 64, 64), 64, kernel, block, **shape).kernel == "Hopper general"
