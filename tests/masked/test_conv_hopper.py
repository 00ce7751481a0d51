"""sparse_conv2d where Hopper has kernels of its own: shapes at their edges, and against the portable kernel."""

import pytest
import torch

from sbnet import ActiveBlocks, BlockGrid, fringe, reduce_mask, sparse_conv2d, sparse_conv2d_
from support.conv_cases import HALF, check, make, pair
from support.helpers import (
    ACTIVATIONS,
    assert_as_accurate_as_torch,
    assert_bitwise,
    assert_conv,
    dense_conv2d,
    poison,
    random_active,
)


# ---- the first fast case on Hopper: 3x3, stride 1, padding 1, sides and channels multiples of 8, fp16 and bf16
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("block", [8, 16, (8, 16), (16, 8), 24, 32, (8, 32), (64, 8)], ids=str)
@pytest.mark.parametrize("size", [(50, 88), (37, 45), (64, 64), (7, 5)], ids=str)
def test_hopper_planes_and_blocks(device, size, block, dtype):
    if device == "cpu" and (dtype == torch.bfloat16 or size == (64, 64)):
        pytest.skip("slow on a CPU, which treats all of these alike")
    for density in (0.3, 1.0):
        case = {"dtype": dtype, "size": size, "block": block, "density": density}
        check(device, **case, channels=64, filters=64, activation="relu")
    check(device, **case, channels=16, filters=40, residual="channels_last", activation="silu")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    ("channels", "filters"),
    [
        (8, 8),
        (8, 64),
        (64, 8),
        (16, 24),
        (24, 16),
        (32, 32),
        (40, 72),
        (56, 56),
        (64, 64),
        (72, 64),
        (96, 96),
        (128, 128),
    ]
    + [(136, 120), (128, 256), (256, 64)]
    + [
        pytest.param(*ck, marks=pytest.mark.gpu)
        for ck in ((256, 256), (512, 512), (512, 8), (8, 512), (384, 264), (200, 328))
    ],
    ids=str,
)
def test_hopper_channels(device, channels, filters, dtype):
    if device == "cpu" and channels * filters > 40_000:
        pytest.skip("large for a CPU")
    case = {"dtype": dtype, "size": (37, 45), "block": 16, "channels": channels, "filters": filters}
    check(device, **case, activation="relu", density=0.5)
    check(device, **case, residual="channels_last", density=0.2)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_hopper_views(device, batch, dtype):
    """TMA descriptors from real strides: slices, cat operands, clipped batches."""
    for layout in ("channel_slice", "odd_channel_slice", "plane_slice", "batch_slice"):
        case = {"dtype": dtype, "size": (37, 45), "block": 16, "batch": batch, "layout": layout}
        check(device, **case, channels=16, filters=64, out_layout="channel_slice", residual="channel_slice")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 400, 704, 64), (1, 200, 352, 128), (1, 100, 176, 256), (1, 50, 88, 512), (8, 128, 128, 256)], ids=str
)
def test_hopper_benchmark_shapes(shape, dtype):
    n, h, w, c = shape
    for density in (0.05, 1.0):
        x, weight, bias, active, options = make(
            "cuda", dtype=dtype, channels=c, filters=c, size=(h, w), block=16, batch=n, density=density
        )
        y = sparse_conv2d(x, weight, bias, active, activation="relu", **options)
        # float64 of the whole plane would take seconds: judge against float32 instead, 2,000 times finer than half
        mask = active.pixel_mask((h, w)).expand_as(y)
        exact = dense_conv2d(x, weight, bias, torch.float32, activation="relu", **options)
        torchs = dense_conv2d(x, weight, bias, dtype, activation="relu", **options)
        assert_as_accurate_as_torch(y[mask], torchs[mask], exact[mask])
        assert not bool(y[~mask].any())


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("block", [8, 16])
def test_hopper_lists_of_all_lengths(block, residual):
    """How tiles are dealt out, whole, shared or in halves, follows from their number: every way is right."""
    check_lists_of_all_lengths(192, block, residual, channels=128, filters=128)


def check_lists_of_all_lengths(side, block, residual, **case):
    case |= {"size": (side, side), "block": block, "batch": 1}
    x, weight, bias, _, options = make("cuda", dtype=torch.float16, **case)
    empty_out = torch.full_like(dense_conv2d(x, weight, bias, torch.float16, **options), float("nan"))
    options |= {"activation": "relu", "residual": torch.rand_like(empty_out) if residual else None}
    exact = dense_conv2d(x, weight, bias, torch.float32, **options)
    torchs = dense_conv2d(x, weight, bias, torch.float16, **options)
    grid = BlockGrid.cover((side, side), block)
    cells = BlockGrid((1, 1), (1, 1), (0, 0), grid.bcount)
    blocks = grid.bcount[0] * grid.bcount[1]
    for count in range(1, blocks + 1, max(blocks // 24 - 1, 1)):
        chosen = torch.zeros(blocks, dtype=torch.bool, device="cuda")
        chosen[torch.randperm(blocks, device="cuda")[:count]] = True
        active = reduce_mask(chosen.view(1, *grid.bcount), cells).with_grid(grid)
        y = empty_out.clone()
        sparse_conv2d_(x, weight, bias, active, y, **options)
        mask = active.pixel_mask((side, side)).expand_as(y)
        assert_as_accurate_as_torch(y[mask], torchs[mask], exact[mask])
        assert bool(y[~mask].isnan().all()), f"{count} blocks: others were written"


# ---- its other fast cases: 1x1 of stride 1 and 2, 3x3 of stride 2
FAST = {"1x1": (1, 1), "1x1 stride 2": (1, 2), "3x3 stride 2": (3, 2)}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("block", [8, 16, (8, 16), (16, 8), 24, 32, (64, 8), 4, (12, 20)], ids=str)
@pytest.mark.parametrize("size", [(50, 88), (37, 45), (7, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("case", FAST)
def test_fast_planes_and_blocks(device, case, size, block, dtype):
    if device == "cpu" and (dtype == torch.bfloat16 or pair(block)[0] > 8):
        pytest.skip("slow on a CPU, which treats all of these alike")
    kernel, stride = FAST[case]
    options = {"dtype": dtype, "size": size, "block": block, "kernel": kernel, "stride": stride, "padding": kernel // 2}
    for density in (0.3, 1.0):
        check(device, **options, density=density, channels=64, filters=64, activation="relu")
        check(device, **options, density=density, channels=16, filters=136, residual="channels_last", activation="silu")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    ("channels", "filters"),
    [(8, 8), (8, 64), (24, 96), (96, 24), (48, 48), (64, 64), (72, 200), (128, 128), (136, 320)]
    + [pytest.param(*ck, marks=pytest.mark.gpu) for ck in ((64, 256), (384, 96), (512, 64), (2048, 8), (1024, 264))],
    ids=str,
)
@pytest.mark.parametrize("case", FAST)
def test_fast_channels(device, case, channels, filters, dtype):
    if device == "cpu" and channels * filters > 10_000:
        pytest.skip("large for a CPU")
    kernel, stride = FAST[case]
    for batch, size in ((1, (37, 45)), (2, (150, 170))) if device == "cuda" else ((1, (19, 27)),):
        options = {"dtype": dtype, "kernel": kernel, "stride": stride, "padding": kernel // 2, "batch": batch}
        options |= {"size": size, "channels": channels, "filters": filters, "block": 16}
        check(device, **options, activation="relu", density=0.5)
        check(device, **options, residual="channels_last", density=0.2, bias=False)


@pytest.mark.gpu
@pytest.mark.parametrize("side", [190, 270])
@pytest.mark.parametrize("residual", [None, "channels_last"])
@pytest.mark.parametrize(("channels", "filters"), [(512, 2048), (1024, 256), (1024, 192), (512, 128), (256, 1024)])
def test_fast_1x1_of_many_channels_and_tiles(channels, filters, residual, side):
    """Where shared memory does not hold the weights they are streamed, and all fits only just."""
    case = {"dtype": torch.float16, "kernel": 1, "padding": 0, "size": (side, side), "block": 16, "batch": 1}
    check("cuda", **case, channels=channels, filters=filters, residual=residual, density=0.9, activation="relu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", FAST)
@pytest.mark.parametrize("residual", [False, True])
def test_fast_plans_of_all_widths(case, residual):
    """How a launch is cut follows from channels and room in the list: each cut is launched, on an empty list."""
    kernel, stride = FAST[case]
    widths = (2048, 1024, 512, 384, 320, 256, 192, 128, 64, 8)  # the largest first: its memory serves the others
    for blocks in (64, 24, 4):  # a side
        grid = BlockGrid.cover((blocks * 8, blocks * 8), 8)
        active = reduce_mask(torch.zeros(1, blocks * 8, blocks * 8, device="cuda"), grid)
        for channels in widths:
            x = empty(channels, blocks * 8 * stride)
            for filters in widths:
                weight, y = empty(channels, kernel, filters), empty(filters, blocks * 8).fill_(7)
                added = empty(filters, blocks * 8) if residual else None
                sparse_conv2d_(x, weight, None, active, y, stride=stride, padding=kernel // 2, residual=added)
                assert bool((y == 7).all()), f"{channels} to {filters} channels, {blocks}x{blocks} blocks"
                del y, added
            del x


def empty(channels, side, count=1):
    """[count, channels, side, side] of float16 on the GPU."""
    shape = (count, channels, side, side)
    return torch.empty(shape, dtype=torch.float16, device="cuda", memory_format=torch.channels_last)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("block", [16, (8, 24), 4, (12, 20)], ids=str)
@pytest.mark.parametrize(
    ("channels", "filters"),
    [
        *[(64, 256), (128, 512), (64, 1024), (256, 512), (320, 256), (512, 768), (1024, 256)],
        *[(384, 128), (512, 128), (576, 384)],
    ],
    ids=str,
)
def test_fast_1x1_of_wide_tiles(channels, filters, block, stride, dtype):
    """Planes that have room for many tiles, and lists that are long, short, of one block, empty."""
    case = {"dtype": dtype, "kernel": 1, "padding": 0, "stride": stride, "block": block, "batch": 1}
    case |= {"channels": channels, "filters": filters, "size": (stride * 260 - 1, stride * 275)}
    check("cuda", **case, density=0.6, activation="relu")
    check("cuda", **case, density=0.02, activation="silu", residual="channels_last", out_layout="channel_slice")
    check("cuda", **case, density="one", bias=False, layout="channel_slice")
    check("cuda", **case, density=0.0, activation="relu6")


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("block", "side"), [(8, 96), ((4, 8), 84), (16, 136)], ids=str)
@pytest.mark.parametrize(("channels", "filters"), [(1536, 384), (2048, 128)])
def test_fast_1x1_split_over_channels(channels, filters, block, side, residual):
    """Few tiles of many channels are split between two or four CTAs: that, too, follows from their number."""
    case = {"channels": channels, "filters": filters, "kernel": 1, "padding": 0}
    check_lists_of_all_lengths(side, block, residual, **case)


@pytest.mark.gpu
def test_fast_1x1_split_over_channels_same_bits_each_time():
    case = {"channels": 2048, "filters": 256, "kernel": 1, "padding": 0, "size": (40, 40), "block": 8}
    x, weight, bias, active, options = make("cuda", dtype=torch.float16, density=0.3, **case)
    want = sparse_conv2d(x, weight, bias, active, **options)
    for _ in range(20):
        assert torch.equal(sparse_conv2d(x, weight, bias, active, **options), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("block", [8, 4, (12, 20), (8, 16)], ids=str)
@pytest.mark.parametrize("size", [(50, 88), (37, 45)], ids=str)
@pytest.mark.parametrize(
    ("channels", "filters", "batch"),
    [(64, 64, 1), (384, 96, 3), (512, 128, 8), (256, 1024, 8), (320, 256, 8), (2048, 256, 2), (2048, 512, 8)],
    ids=str,
)
def test_fast_1x1_of_all_blocks_that_reach_over_the_plane(channels, filters, batch, size, block, dtype):
    """A full list is taken as one row of pixels there, if x, out and residual are one; one block less is not full."""
    case = {"dtype": dtype, "kernel": 1, "padding": 0, "block": block, "batch": batch, "size": size}
    case |= {"channels": channels, "filters": filters}
    check("cuda", **case, density=1.0, activation="relu")
    check("cuda", **case, density=1.0, activation="silu", residual="channels_last", out_layout="channel_slice")
    check("cuda", **case, density=1.0, layout="plane_slice")
    check("cuda", **case, density=0.98, residual="channels_last", bias=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("size", [(50, 88), (48, 96), (70, 80), (61, 93), (64, 96)], ids=str)
def test_fast_1x1_of_all_blocks_in_one_job_each(size, activation, dtype):
    """A full list of 4,400 to 6,144 pixels, 512 filters: jobs of 144 or 192 pixels. Shorter ones are cut otherwise."""
    case = {"dtype": dtype, "kernel": 1, "padding": 0, "block": 8, "batch": 1, "size": size, "activation": activation}
    case |= {"channels": 2048, "filters": 512}
    check("cuda", **case, density=1.0)
    check("cuda", **case, density=1.0, bias=False, out_layout="channel_slice")
    check("cuda", **case, density=0.98)


# 3x3 of stride 2 with so many tiles, of 16x8 pixels x 64 or 128 channels, that two warpgroups take them in turn.
MANY = {"kernel": 3, "stride": 2, "padding": 1, "batch": 3, "size": (259, 282)}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("block", [16, 8, (16, 8), (32, 24)], ids=str)
@pytest.mark.parametrize(
    ("channels", "filters"), [(64, 64), (8, 120), (72, 200), (128, 256), (192, 320), (320, 128)], ids=str
)
def test_fast_3x3_stride2_of_many_tiles(channels, filters, block, dtype):
    """Lists that are long, short, of one block, empty; rounds with a middle and without."""
    case = {"dtype": dtype, "block": block, "channels": channels, "filters": filters, **MANY}
    check("cuda", **case, density=0.6, activation="relu")
    check("cuda", **case, density=1.0, activation="relu", residual="channels_last")
    check("cuda", **case, density=0.02, activation="silu", residual="channels_last", out_layout="channel_slice")
    check("cuda", **case, density="one", bias=False, layout="channel_slice")
    check("cuda", **case, density=0.0, activation="relu6")


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [64, 128])
@pytest.mark.parametrize("block", [8, 16])
def test_fast_3x3_stride2_same_bits_each_time(block, filters):
    """The shortest products: a tile's epilogue soon meets the memory that the last one's is stored from."""
    case = {"dtype": torch.float16, "channels": 8, "filters": filters, "block": block, "density": 1.0, **MANY}
    x, weight, bias, active, options = make("cuda", **case)
    first = sparse_conv2d(x, weight, bias, active, **options)
    assert_conv(first, x, weight, bias, active, first.new_zeros(()), **options)
    for _ in range(30):
        assert_bitwise(sparse_conv2d(x, weight, bias, active, **options), first)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_fast_3x3_stride2_of_many_tiles_on_two_streams(dtype):
    """With a fringe, lists of three lengths, at once: what is wanted, and the bits of one call after the other."""
    calls = []
    for density in (0.01, 0.3, 1.0):
        case = {"dtype": dtype, "channels": 64, "filters": 256, "block": 16, "density": density, **MANY}
        x, weight, bias, active, options = make("cuda", **case)
        size = (130, 141)
        edge = fringe(active, random_active(active.grid, 3, 0.5, "cuda"), size, 3, 1, 1)
        out = [poison((3, 256, *size), dtype, "cuda", "channels_last") for _ in range(3)]
        calls.append((x, weight, bias, active, edge, out, options | {"activation": "relu"}))
    for stream in (streams := [torch.cuda.Stream() for _ in range(2)]):
        stream.wait_stream(torch.cuda.current_stream())
    for x, weight, bias, active, edge, out, options in calls:
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                sparse_conv2d_(x, weight, bias, active, out[i], fringe=edge, **options)
    torch.cuda.synchronize()
    for x, weight, bias, active, edge, out, options in calls:
        sparse_conv2d_(x, weight, bias, active, out[2], fringe=edge, **options)
        outside = torch.full((3, 1, 130, 141), float("nan"), device="cuda", dtype=dtype)
        outside.flatten()[edge.pixels[: int(edge.count)].long()] = 0
        assert_conv(out[2], x, weight, bias, active, outside, **options)
        for i in range(2):
            assert_bitwise(out[i], out[2])


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("layout", ["channel_slice", "odd_channel_slice", "plane_slice", "batch_slice"])
@pytest.mark.parametrize("case", FAST)
def test_fast_views(device, case, layout, dtype):
    kernel, stride = FAST[case]
    options = {"dtype": dtype, "kernel": kernel, "stride": stride, "padding": kernel // 2, "size": (37, 45)}
    check(device, **options, block=16, channels=16, filters=64, layout=layout, out_layout="channel_slice")
    check(device, **options, block=8, channels=72, filters=80, layout=layout, residual="channel_slice")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("block", [8, 16, (8, 16), 24, 32, 10], ids=str)
@pytest.mark.parametrize("filters", [8, 24, 64, 72])
@pytest.mark.parametrize("size", [(50, 88), (37, 48), (8, 7), (1, 8)], ids=str)
def test_fast_stem(device, size, filters, block, dtype):
    """7x7, stride 2, three channels; rows of x begin at multiples of 16 bytes or the portable kernel takes it."""
    if device == "cpu" and (dtype == torch.bfloat16 or filters > 8):
        pytest.skip("slow on a CPU, which treats all of these alike")
    options = {"dtype": dtype, "size": size, "block": block, "kernel": 7, "stride": 2, "padding": 3}
    for density in (0.3, 1.0):
        check(device, **options, density=density, channels=3, filters=filters, activation="relu")
    check(device, **options, channels=3, filters=filters, activation="gelu", bias=False, out_layout="channel_slice")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fast_stem_reads_no_pixel_too_many(device, activation, dtype):
    """NaN beside every receptive field, and in a pixel that 16 outputs read."""
    x, weight, bias, active, options = make(
        device, dtype=dtype, channels=3, filters=64, kernel=7, stride=2, padding=3, size=(64, 64), density=0.4
    )
    options["activation"] = activation
    reads = torch.nn.functional.conv_transpose2d(
        active.pixel_mask((32, 32)).float(), torch.ones(1, 1, 7, 7, device=device), None, 2, 3, 1
    )
    x[:, 1, 20, 21] = float("nan")
    clean = torch.where(reads > 0, x, 0).contiguous(memory_format=torch.channels_last)
    dirty = torch.where(reads > 0, x, float("nan")).to(dtype).contiguous(memory_format=torch.channels_last)
    y = sparse_conv2d(dirty, weight, bias, active, **options)
    assert_conv(y, clean, weight, bias, active, torch.zeros((), dtype=dtype, device=device), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("case", FAST)
def test_fast_cases_equal_the_portable_kernel(case, dtype):
    """The same list, whatever stands in it: rows that are no blocks, counts too large, NaN where nothing is read."""
    kernel, stride = FAST[case]
    for channels, filters, block, size in (
        (64, 64, 16, (75, 91)), (24, 96, 8, (75, 91)), (200, 136, 16, (75, 91)), (96, 256, 16, (259, 282))
    ):  # fmt: skip
        x, weight, bias, active, options = make(
            "cuda", dtype=dtype, kernel=kernel, stride=stride, padding=kernel // 2, block=block, density=0.5,
            channels=channels, filters=filters, size=size,
        )  # fmt: skip
        junk = active.indices.clone()
        junk[::3, 1] = 10**6
        junk[1::5, 0] = -1
        hostile = ActiveBlocks(
            junk, torch.full_like(active.count, 2**31 - 1), active.total, active.block_map, active.grid
        )
        x[0, :, 9, 9] = float("nan")
        fast = sparse_conv2d(x, weight, bias, hostile, **options)
        portable = sparse_conv2d(x.contiguous(), weight, bias, hostile, **options)  # takes channels that are apart
        assert_bitwise(fast.isnan(), portable.isnan())
        assert_bitwise(fast == 0, portable == 0)
        torch.testing.assert_close(fast, portable, equal_nan=True, rtol=0, atol=4 * torch.finfo(dtype).eps)
