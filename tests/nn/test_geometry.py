"""Sizes, paddings and grids of convolutions, and the hand-worked cases of the paper's release."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from sbnet import (
    ActiveBlocks,
    BlockGrid,
    conv_output_size,
    reduce_mask,
    same_padding,
    sparse_conv2d,
    sparse_gather,
    sparse_scatter,
)
from support.helpers import FLOATS, assert_as_accurate_as_torch, assert_bitwise, random_active


@pytest.mark.parametrize("size", range(1, 14))
def test_conv_output_size_is_torchs(size):
    for k, s, p, d in itertools.product((1, 2, 3, 5), (1, 2, 3), (0, 1, 2, 7), (1, 2, 3)):
        if size + 2 * p < d * (k - 1) + 1:
            continue
        x = torch.empty(1, 1, size, size + 20, device="meta")
        want = F.conv2d(x, torch.empty(1, 1, k, 3, device="meta"), None, (s, 1), (p, 0), (d, 2)).shape[2:]
        assert conv_output_size((size, size + 20), (k, 3), (s, 1), (p, 0), (d, 2)) == tuple(want)


@pytest.mark.parametrize(
    ("size", "k", "s", "d", "want"),
    [
        (5, 3, 1, 1, (1, 1)),
        (5, 3, 2, 1, (1, 1)),
        (6, 3, 2, 1, (0, 1)),  # the odd pixel goes after
        (8, 2, 1, 1, (0, 1)),
        (8, 4, 2, 1, (1, 1)),
        (7, 4, 2, 1, (1, 2)),
        (8, 1, 3, 1, (0, 0)),  # never negative
        (9, 3, 1, 4, (4, 4)),
        (10, 5, 3, 2, (4, 4)),
    ],
)
def test_same_padding(size, k, s, d, want):
    assert same_padding(size, k, s, d) == want


def test_same_padding_gives_ceil():
    for size, k, s, d in itertools.product(range(1, 20), range(1, 8), range(1, 5), range(1, 4)):
        before, after = same_padding(size, k, s, d)
        assert 0 <= before <= after <= before + 1
        reach = d * (k - 1) + 1
        assert (size + before + after - reach) // s + 1 == -(-size // s)


def test_block_grid_takes_ints_or_pairs():
    assert BlockGrid(3, (2, 1), -1, [4, 5]) == BlockGrid((3, 3), (2, 1), (-1, -1), (4, 5))
    assert BlockGrid(3, (2, 1), -1, [4, 5]).numbers() == [3, 3, 2, 1, -1, -1, 4, 5]
    assert hash(BlockGrid(3, 3, 0, 1)) == hash(BlockGrid((3, 3), (3, 3), (0, 0), (1, 1)))


@pytest.mark.parametrize(
    ("grid", "overlaps"),
    [
        (BlockGrid(3, 3, 0, 4), False),
        (BlockGrid(3, 2, 0, 4), True),
        (BlockGrid(3, (3, 2), 0, 4), True),
        (BlockGrid(3, (3, 2), 0, (4, 1)), False),  # one column: nothing to overlap with
        (BlockGrid(3, 5, 0, 4), False),
    ],
)
def test_overlaps(grid, overlaps):
    assert grid.overlaps is overlaps


def test_cover():
    assert BlockGrid.cover((400, 704), 16) == BlockGrid(16, 16, 0, (25, 44))
    assert BlockGrid.cover((50, 88), (16, 8)) == BlockGrid((16, 8), (16, 8), 0, (4, 11))
    for h, b in itertools.product(range(1, 30), range(1, 12)):
        grid = BlockGrid.cover((h, 1), b)
        assert (grid.bcount[0] - 1) * b < h <= grid.bcount[0] * b


def test_conv_input():
    out = BlockGrid.cover((8, 8), 3)
    assert out.bcount == (3, 3)  # k3 s1 b5 H8: all 8 rows, where the reference's count stops at 6
    assert out.conv_input(3, 1, 1) == BlockGrid(5, 3, -1, 3)
    assert BlockGrid(4, 4, 0, 5).conv_input((3, 5), (2, 1), (1, 2), (1, 3)) == BlockGrid((9, 16), (8, 4), (-1, -2), 5)
    assert BlockGrid((2, 3), (4, 5), (1, -2), 5).conv_input(1, 2) == BlockGrid((3, 5), (8, 10), (2, -4), 5)


def test_a_list_moves_to_another_device_whole(device):
    active = random_active(BlockGrid.cover((40, 56), 8), batch=2)
    moved = active.to(device)
    assert moved.grid == active.grid
    for name in ("indices", "count", "total", "block_map"):
        assert getattr(moved, name).device.type == device
        assert torch.equal(getattr(moved, name).cpu(), getattr(active, name))


def test_with_grid_wants_as_many_blocks():
    active = random_active(BlockGrid.cover((8, 8), 4))
    assert active.with_grid(BlockGrid(6, 4, -1, 2)).grid.bsize == (6, 6)
    with pytest.raises(ValueError, match=r"with_grid: grid: expected .*, got \(3, 2\)"):
        active.with_grid(BlockGrid(6, 4, -1, (3, 2)))


def test_pixel_mask(device):
    for grid in (BlockGrid.cover((13, 9), 4), BlockGrid((3, 2), (5, 1), (-2, 3), (3, 9)), BlockGrid(30, 30, -9, 1)):
        active = random_active(grid, 3, 0.4, device)
        ones = torch.ones(active.capacity, 1, *grid.bsize, device=device)
        base = torch.zeros(3, 1, 13, 9, device=device)
        want = sparse_scatter(ones, active, base, add=True) > 0
        assert_bitwise(active.pixel_mask((13, 9)), want)


# ---- by hand: an all-ones 5x5 image and 3x3 kernel, mask pixels (1,2) and (2,0)
HAND = {
    "b3 s1 SAME": (1, 1, 1, "06660/69990/69990/69000/00000"),
    "b4 s1 SAME": (2, 1, 1, "46660/69990/69990/69990/00000"),
    "b5 s2 SAME": (2, 2, 1, "460/690/000"),
    "b3 s1 VALID": (1, 1, 0, "999/999/900"),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", HAND)
def test_hand_cases(device, name, layout, dtype):
    block, stride, padding, text = HAND[name]
    want = torch.tensor([[float(v) for v in row] for row in text.split("/")], device=device, dtype=dtype)
    mask = torch.zeros(1, 5, 5, device=device)
    mask[0, 1, 2] = mask[0, 2, 0] = 1
    x = torch.ones(1, 1, 5, 5, device=device, dtype=dtype).to(memory_format=layout)
    weight = torch.ones(1, 1, 3, 3, device=device, dtype=dtype)
    out = BlockGrid.cover(want.shape, block)
    reads = out.conv_input(3, stride, padding)
    assert reads.bsize[0] == int(name[1])
    active = reduce_mask(mask, reads)
    y = F.conv2d(sparse_gather(x, active), weight, stride=stride)
    y = sparse_scatter(y, active, torch.zeros(1, 1, *want.shape, device=device, dtype=dtype), out)
    assert_bitwise(y[0, 0], want, "gather, convolution, scatter")
    y = sparse_conv2d(x, weight, None, active.with_grid(out), stride=stride, padding=padding)
    assert_bitwise(y[0, 0], want, "sparse_conv2d")


@pytest.mark.parametrize("size", [(8, 8), (17, 21), (6, 7)])
@pytest.mark.parametrize(("k", "s", "d"), [(3, 1, 1), (3, 2, 1), (4, 2, 1), (2, 1, 1), (5, 3, 1), (3, 1, 2), (1, 2, 1)])
def test_a_full_mask_reproduces_tf_same_convolution(device, size, k, s, d):
    """SAME's uneven padding: before goes into the grid, after is what the last blocks read past the plane."""
    x = torch.randn(2, 3, *size, device=device, dtype=torch.float32)
    weight = torch.randn(4, 3, k, k, device=device)
    pads = [same_padding(n, k, s, d) for n in size]
    dense = [
        F.conv2d(F.pad(x.to(t), (*pads[1], *pads[0])), weight.to(t), stride=s, dilation=d)
        for t in (torch.float32, torch.float64)
    ]
    out = BlockGrid.cover(dense[0].shape[2:], 3)
    active = random_active(out, 2, 1.0, device)
    blocks = sparse_gather(x, active, grid=out.conv_input(k, s, (pads[0][0], pads[1][0]), d))
    y = F.conv2d(blocks, weight, stride=s, dilation=d)
    got = sparse_scatter(y, active, torch.full_like(dense[0], float("nan")))
    assert_as_accurate_as_torch(got, *dense)


CHAINS = [  # (kernel, stride, padding, dilation) from input to output
    [(3, 1, 1, 1), (3, 1, 1, 1)],
    [(3, 2, 1, 1), (1, 1, 0, 1), (5, 1, 2, 1)],
    [(7, 2, 3, 1), (3, 2, 1, 1), (3, 1, 2, 2), (1, 2, 0, 1)],
    [(2, 2, 0, 1), (4, 2, 1, 1), (3, 1, 0, 1)],
]


@pytest.mark.parametrize("chain", CHAINS, ids=[f"chain{n}" for n in range(len(CHAINS))])
def test_chains_compose_from_the_output_backwards(device, chain):
    """Gather once, VALID convolutions on the stack, scatter once. Pixels of an intermediate plane that lie outside it
    are made zero again, as the dense chain's padding has them."""
    torch.manual_seed(1)
    sizes, weights = [(45, 61)], []
    for k, s, p, d in chain:
        weights.append(torch.randn(2, 2, k, k, device=device) / k)
        sizes.append(conv_output_size(sizes[-1], (k, k), (s, s), (p, p), (d, d)))
    grids = [BlockGrid.cover(sizes[-1], (4, 3))]
    for k, s, p, d in reversed(chain):
        grids.insert(0, grids[0].conv_input(k, s, p, d))
    active = random_active(grids[-1], 2, 0.5, device)
    x = torch.randn(2, 2, *sizes[0], device=device)

    def dense(dtype):
        y = x.to(dtype)
        for weight, (_, s, p, d) in zip(weights, chain, strict=True):
            y = F.conv2d(y, weight.to(dtype), None, s, p, d)
        return torch.where(active.pixel_mask(sizes[-1]), y, 0)

    y = sparse_gather(x, active, grid=grids[0])
    for weight, (_, s, _, d), grid, size in zip(weights, chain, grids[1:], sizes[1:], strict=True):
        y = F.conv2d(y, weight, None, s, 0, d)
        assert y.shape[2:] == grid.bsize
        y = y * sparse_gather(torch.ones(2, 1, *size, device=device), active, grid=grid)
    got = sparse_scatter(y, active, torch.zeros(2, 2, *sizes[-1], device=device))
    assert_as_accurate_as_torch(got, dense(torch.float32), dense(torch.float64))
    # and layer by layer with the fused op, every block computed: borders too
    y = x
    for weight, (_, s, p, d), size in zip(weights, chain, sizes[1:], strict=True):
        full = ActiveBlocks.from_indices(
            torch.cartesian_prod(*(torch.arange(n) for n in (2, -(-size[0] // 4), -(-size[1] // 3)))).int().to(device),
            BlockGrid.cover(size, (4, 3)),
            2,
        )
        y = sparse_conv2d(y, weight, None, full, stride=s, padding=p, dilation=d)
    got = torch.where(active.pixel_mask(sizes[-1]), y, 0)
    assert_as_accurate_as_torch(got, dense(torch.float32), dense(torch.float64))
