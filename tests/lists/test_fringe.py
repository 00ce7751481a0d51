"""The fringe of a tensor, and sparse_conv2d_ that zeroes it."""

import pytest
import torch

from sbnet import BlockGrid, Fringe, conv_output_size, fringe, reference, sparse_conv2d, sparse_conv2d_
from support.helpers import FLOATS, assert_bitwise, assert_conv, laid_out, poison, random_active, tensor

GEOMETRIES = [
    (k, s, p, d) for k in (1, 2, 3, 5, 7) for s in (1, 2, 3) for d in (1, 2) for p in sorted({0, 1, k // 2 * d, k + 1})
]


def actives(size, block, consumer_block, k, s, p, d, density, device, batch=2):
    out = conv_output_size(size, *((v, v) if isinstance(v, int) else v for v in (k, s, p, d)))
    producer = random_active(BlockGrid.cover(size, block), batch, density, device)
    consumer = random_active(BlockGrid.cover(out, consumer_block), batch, density, device)
    return producer, consumer


def assert_same_fringe(got: Fringe, want: Fringe) -> None:
    assert_bitwise(got.count, want.count, "count")
    assert_bitwise(got.pixels, want.pixels, "pixels")


@pytest.mark.parametrize(("k", "s", "p", "d"), GEOMETRIES)
def test_equals_reference(device, k, s, p, d):
    size = (23, 31)
    for density, block, consumer_block in ((0.4, 4, 4), (0.2, (8, 5), (3, 16)), (0.7, 16, 8)):
        producer, consumer = actives(size, block, consumer_block, k, s, p, d, density, device)
        got = fringe(producer, consumer, size, k, s, p, d)
        assert_same_fringe(got, reference.fringe(producer, consumer, size, k, s, p, d))


@pytest.mark.parametrize(
    ("k", "s", "p", "d"), [((1, 7), 1, (0, 3), 1), ((3, 2), (2, 1), (1, 0), (1, 3)), (3, (1, 3), (5, 0), 1)]
)
def test_uneven_geometry(device, k, s, p, d):
    producer, consumer = actives((23, 31), 4, 4, k, s, p, d, 0.4, device)
    got = fringe(producer, consumer, (23, 31), k, s, p, d)
    assert_same_fringe(got, reference.fringe(producer, consumer, (23, 31), k, s, p, d))


@pytest.mark.parametrize("size", [(200, 352), (720, 1290)])  # the second: more words than one warp lists eight of
def test_large_plane(device, size):
    """Several thread blocks' worth of pixels: ascending, complete, across their borders."""
    producer = random_active(BlockGrid.cover(size, 16), 3, 0.3, device)
    got = fringe(producer, producer, size, 3, 1, 1)
    assert_same_fringe(got, reference.fringe(producer, producer, size, 3, 1, 1))
    assert int(got.count) > 10_000


def test_a_stride_2_consumer_reads_inactive_producer_blocks(device):
    """One consumer block covers 2x2 producer blocks, three of them inactive: a ring of one pixel is not enough."""
    producer = random_active(BlockGrid.cover((16, 16), 8), 1, 0.0, device)
    producer.block_map[0, 0, 0] = 0
    consumer = random_active(BlockGrid.cover((8, 8), 8), 1, 1.0, device)
    got = fringe(producer, consumer, (16, 16), 3, 2, 1)
    assert int(got.count) == 16 * 16 - 8 * 8
    assert_same_fringe(got, reference.fringe(producer, consumer, (16, 16), 3, 2, 1))


@pytest.mark.parametrize(("k", "p", "d"), [((1, 71), (0, 35), 1), ((71, 71), 35, 1), ((1, 24), (0, 34), (1, 3))])
def test_words_with_more_than_32_readers(device, k, p, d):
    """Blocks of one column: over a hundred of them read the same 32 pixels."""
    size = (9, 150) if k[0] == 1 else (80, 110)
    producer, consumer = actives(size, (4, 4), (3, 1), k, 1, p, d, 0.02, device, batch=1)
    got = fringe(producer, consumer, size, k, 1, p, d)
    assert_same_fringe(got, reference.fringe(producer, consumer, size, k, 1, p, d))
    assert int(got.count)


@pytest.mark.parametrize(("producer_density", "consumer_density"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_all_and_nothing(device, producer_density, consumer_density):
    size = (20, 24)
    producer = random_active(BlockGrid.cover(size, 8), 2, producer_density, device)
    consumer = random_active(BlockGrid.cover(size, 8), 2, consumer_density, device)
    got = fringe(producer, consumer, size, 3, 1, 1)
    assert int(got.count) == (2 * 20 * 24 if (producer_density, consumer_density) == (0, 1) else 0)
    assert_same_fringe(got, reference.fringe(producer, consumer, size, 3, 1, 1))


@pytest.mark.parametrize("capacity", [0, 1, 50, 2 * 20 * 24, 5000])
def test_capacity(device, capacity):
    size = (20, 24)
    producer = random_active(BlockGrid.cover(size, 8), 2, 0.5, device)
    got = fringe(producer, producer, size, 3, 1, 1, capacity=capacity)
    assert got.pixels.shape == (capacity,)
    assert_same_fringe(got, reference.fringe(producer, producer, size, 3, 1, 1, capacity=capacity))


def test_empty_batch(device):
    producer = random_active(BlockGrid.cover((20, 24), 8), 0, 1.0, device)
    got = fringe(producer, producer, (20, 24), 3, 1, 1)
    assert got.pixels.shape == (0,)
    assert int(got.count) == 0


def test_needs_only_the_maps(device):
    """The lists may be cut or garbled: who is active is what the block map says."""
    size = (20, 24)
    producer = random_active(BlockGrid.cover(size, 8), 2, 0.5, device)
    want = fringe(producer, producer, size, 3, 1, 1)
    producer.indices.fill_(-7)
    producer.count.fill_(2**31 - 1)
    assert_same_fringe(fringe(producer, producer, size, 3, 1, 1), want)


LAYERS = [  # C, K, kernel, stride, padding, dilation, groups, block
    (8, 8, 3, 1, 1, 1, 1, 8),  # the Hopper kernel, with fp16 and bf16
    (64, 64, 3, 1, 1, 1, 1, 16),
    (3, 17, 3, 1, 1, 1, 1, 8),
    (16, 16, 3, 2, 1, 1, 16, (8, 4)),
    (16, 8, 1, 1, 0, 1, 1, 10),
    (6, 9, 5, 1, 2, 1, 3, (5, 7)),
]


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "channel_slice", "plane_slice"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_conv_zeroes_the_fringe_and_nothing_else(device, layer, dtype, layout):
    channels, filters, k, s, p, d, groups, block = layer
    x = laid_out(tensor((2, channels, 37, 45), dtype, device), "channels_last")
    weight = tensor((filters, channels // groups, k, k), dtype, device) / 4
    size = conv_output_size((37, 45), (k, k), (s, s), (p, p), (d, d))
    grid = BlockGrid.cover(size, block)
    active, consumer = random_active(grid, 2, 0.3, device), random_active(grid, 2, 0.3, device)
    edge = fringe(active, consumer, size, 3, 1, 1)
    assert 0 < int(edge.count) < edge.pixels.numel()
    out = poison((2, filters, *size), dtype, device, layout)
    sparse_conv2d_(x, weight, None, active, out, stride=s, padding=p, dilation=d, groups=groups, fringe=edge)
    outside = torch.full((2, 1, *size), float("nan"), device=device, dtype=dtype)
    outside.flatten()[edge.pixels[: int(edge.count)].long()] = 0
    assert_conv(out, x, weight, None, active, outside, stride=s, padding=p, dilation=d, groups=groups)


def test_a_consumer_that_respects_the_fringe_sees_zeros(device):
    """The point of it: with a dirty buffer between two layers, the second one's active blocks equal those over a clean
    buffer, bit for bit."""
    size = (50, 88)
    grid = BlockGrid.cover(size, 8)
    first, second = random_active(grid, 1, 0.3, device), random_active(grid, 1, 0.3, device)
    for dtype in (torch.float32, torch.float16):
        x = laid_out(tensor((1, 16, *size), dtype, device), "channels_last")
        weights = [tensor((16, 16, 3, 3), dtype, device) / 12 for _ in range(2)]
        clean = sparse_conv2d(x, weights[0], None, first, padding=1)
        dirty = poison(clean.shape, dtype, device, "channels_last")
        sparse_conv2d_(x, weights[0], None, first, dirty, padding=1, fringe=fringe(first, second, size, 3, 1, 1))
        want = sparse_conv2d(clean, weights[1], None, second, padding=1)
        assert_bitwise(sparse_conv2d(dirty, weights[1], None, second, padding=1), want)


@pytest.mark.parametrize("count", [-5, 0, 7, 2**31 - 1])
def test_any_fringe_count_on_the_device(device, count):
    active = random_active(BlockGrid.cover((16, 16), 8), 1, 0.0, device)
    x = torch.ones(1, 8, 16, 16, device=device)
    pixels = torch.tensor([3, 255, 17, -1, 256, 2**31 - 1, -(2**31), 0, 100], dtype=torch.int32, device=device)
    out = poison((1, 8, 16, 16), torch.float32, device)
    edge = Fringe(pixels, torch.tensor([count], dtype=torch.int32, device=device))
    sparse_conv2d_(x, torch.ones(8, 8, 3, 3, device=device), None, active, out, padding=1, fringe=edge)
    listed = [v for v in pixels[: min(max(count, 0), 9)].tolist() if 0 <= v < 256]
    want = poison((1, 8, 16, 16), torch.float32, device)
    want.flatten(2)[..., listed] = 0
    assert_bitwise(out, want)


def test_the_fringe_is_zeroed_with_no_active_block(device):
    producer = random_active(BlockGrid.cover((24, 24), 8), 1, 0.0, device)
    consumer = random_active(BlockGrid.cover((24, 24), 8), 1, 1.0, device)
    for dtype in (torch.float32, torch.float16):
        out = poison((1, 8, 24, 24), dtype, device, "channels_last")
        x = laid_out(torch.ones(1, 8, 24, 24, dtype=dtype, device=device), "channels_last")
        edge = fringe(producer, consumer, (24, 24), 3, 1, 1)
        sparse_conv2d_(x, tensor((8, 8, 3, 3), dtype, device), None, producer, out, padding=1, fringe=edge)
        assert_bitwise(out, torch.zeros_like(out))
        sparse_conv2d_(
            x, tensor((8, 8, 3, 3), dtype, device), None, producer.trim(), out.fill_(9), padding=1, fringe=edge
        )
        assert_bitwise(out, torch.zeros_like(out), "capacity 0")
