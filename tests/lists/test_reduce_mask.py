"""reduce_mask: masks to lists of active blocks."""

import pytest
import torch

import sbnet
from sbnet import BlockGrid, reduce_mask, reference
from support.helpers import assert_bitwise, assert_same_active

MASK_DTYPES = [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64]

GRIDS = {  # name: (plane, grid)
    "tiling": ((40, 70), BlockGrid.cover((40, 70), 16)),
    "tiling 8x16": ((40, 70), BlockGrid.cover((40, 70), (8, 16))),
    "1x1": ((9, 13), BlockGrid.cover((9, 13), 1)),
    "overlap": ((13, 12), BlockGrid((2, 3), (1, 2), (0, 0), (12, 5))),
    "gaps": ((30, 31), BlockGrid((3, 4), (7, 5), (1, 2), (4, 6))),
    "negative offset": ((20, 21), BlockGrid(6, 4, (-5, -3), (6, 6))),
    "beyond every side": ((5, 4), BlockGrid(3, 3, (-7, -6), (6, 6))),
    "one block larger than the plane": ((5, 7), BlockGrid(64, 64, (-20, -30), 1)),
    "more blocks than a word of ballot bits": ((64, 67), BlockGrid.cover((64, 67), 1)),
    "a column of blocks": ((33, 3), BlockGrid((1, 5), (1, 5), (0, -1), (33, 1))),
    "no blocks": ((8, 8), BlockGrid(4, 4, 0, (0, 2))),
}


def random_mask(shape, dtype, device, density=0.02):
    hits = torch.rand(shape, device=device) < density
    if not dtype.is_floating_point:
        return hits.to(dtype)
    return torch.where(hits, torch.rand(shape, device=device), 0.0).to(dtype)


@pytest.mark.parametrize("avgpool", [False, True])
@pytest.mark.parametrize("dtype", MASK_DTYPES, ids=str)
@pytest.mark.parametrize("name", GRIDS)
def test_equals_reference(device, name, dtype, avgpool):
    size, grid = GRIDS[name]
    mask = random_mask((3, *size), dtype, device)
    tol = 0.003 if avgpool else 0.4
    assert_same_active(reduce_mask(mask, grid, tol, avgpool), reference.reduce_mask(mask, grid, tol, avgpool))


@pytest.mark.parametrize("batch", [1, 3, 7])
@pytest.mark.parametrize("density", [0, 0.001, 0.1, 0.5, 1])
def test_densities_and_batches(device, batch, density):
    mask = torch.rand(batch, 50, 88, device=device) < density
    grid = BlockGrid.cover((50, 88), 8)
    got = reduce_mask(mask, grid)
    assert_same_active(got, reference.reduce_mask(mask, grid))
    assert density != 0 or (int(got.count) == 0 and bool((got.indices == -1).all()))
    assert density != 1 or int(got.count) == batch * 7 * 11


def test_ranks(device):
    mask = torch.rand(2, 20, 30, device=device)
    grid = BlockGrid.cover((20, 30), 8)
    want = reduce_mask(mask, grid, 0.97)
    assert 0 < int(want.count) < 24
    assert_same_active(reduce_mask(mask[:, None], grid, 0.97), want)
    assert_same_active(reduce_mask(mask[..., None], grid, 0.97), want)


def test_non_contiguous_masks(device):
    big = torch.rand(4, 30, 44, 3, device=device)
    big[:, ::9, ::7] = 1  # every view has something above the threshold
    views = {
        "crop": big[:, 3:23, 5:35, 0],
        "every other": big[::2, ::3, ::2, 1],
        "transposed": big[..., 2].transpose(1, 2),
        "flipped by index": big[..., 0][:, torch.arange(29, -1, -1, device=device)],
        "expanded": big[:1, :1, :, 0].expand(3, 17, 44),
        "channel of NHWC": big[..., 1:2],
    }
    for name, mask in views.items():
        size = mask.shape[1:3]
        grid = BlockGrid.cover(size, 7)
        got = reduce_mask(mask, grid, 0.95)
        assert_same_active(got, reduce_mask(mask.contiguous(), grid, 0.95))
        assert_same_active(got, reference.reduce_mask(mask, grid, 0.95))
        assert int(got.count) > 0, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_tol_is_strict(device, dtype):
    """A pixel that equals tol is not above it: 0.1 as float32 against tol = 0.1, as torch compares."""
    grid = BlockGrid.cover((4, 8), 4)
    mask = torch.full((1, 4, 8), 0.1, dtype=dtype, device=device)
    want = int(bool(mask[0, 0, 0].cpu() > torch.tensor(0.1, dtype=torch.promote_types(dtype, torch.float32))))
    assert int(reduce_mask(mask, grid, 0.1).count) == 2 * want
    for tol in (0.5, 0.25, 0.0):  # exact in every dtype
        mask = torch.full((1, 4, 8), tol, dtype=dtype, device=device)
        assert int(reduce_mask(mask, grid, tol).count) == 0
        mask[0, 3, 7] = torch.nextafter(mask[0, 3, 7].float(), torch.tensor(9.0, device=device)) + 2**-7
        got = reduce_mask(mask, grid, tol)
        assert got.indices.tolist() == [[0, 0, 1], [-1, -1, -1]]
        assert int(reduce_mask(torch.full_like(mask, tol), grid, tol, True).count) == 0


def test_float32_tenth_is_not_above_tenth(device):
    mask = torch.full((1, 4, 4), 0.1, device=device)
    assert int(reduce_mask(mask, BlockGrid.cover((4, 4), 4), 0.1).count) == 0
    assert int(reduce_mask(mask, BlockGrid.cover((4, 4), 4), 0.0999999).count) == 1


def test_a_float64_mask_is_compared_in_float64(device):
    """What float32 cannot tell from tol is above it."""
    mask = torch.full((1, 4, 4), 0.7 + 1e-10, dtype=torch.float64, device=device)
    assert int(reduce_mask(mask, BlockGrid.cover((4, 4), 4), 0.7).count) == 1
    assert int(sbnet.mask_pyramid(mask, [(4, 4, 4)], 0.7).planes[0].count) == 1
    assert int(reduce_mask(mask.float(), BlockGrid.cover((4, 4), 4), 0.7).count) == 0


def test_an_average_is_compared_in_float32(device):
    """The mean of two float32 tenths is one, and not above a tol of 0.1, whatever the sum is computed in."""
    mask = torch.full((1, 4, 4), 0.1, device=device)
    for dtype in (torch.float32, torch.float64):
        assert int(reduce_mask(mask.to(dtype), BlockGrid.cover((4, 4), (1, 2)), 0.1, True).count) == 0
        assert int(reduce_mask(mask.to(dtype), BlockGrid.cover((4, 4), (1, 2)), 0.0999999, True).count) == 8


def test_uint8_counts_in_its_own_units(device):
    mask = torch.tensor([[[0, 1, 127, 255]]], dtype=torch.uint8, device=device)
    grid = BlockGrid.cover((1, 4), 1)
    assert reduce_mask(mask, grid, 126.5).indices[:, 2].tolist() == [2, 3, -1, -1]
    assert int(reduce_mask(mask, grid, 255).count) == 0
    assert int(reduce_mask(mask, grid, -1).count) == 4


def test_negative_tol_leaves_blocks_off_the_plane_inactive(device):
    """Max pooling ignores pixels off the plane: they are not zeros that would exceed -1."""
    grid = BlockGrid(2, 2, (-4, -4), (5, 5))
    got = reduce_mask(torch.zeros(1, 4, 4, device=device), grid, -1.0)
    assert got.indices[: int(got.count)].tolist() == [[0, i, j] for i in (2, 3) for j in (2, 3)]


def test_average_divides_by_the_full_block(device):
    """4 of 16 pixels of the corner block lie on the plane: the mean of all-ones is 1/4, exactly, and not above it."""
    grid = BlockGrid(4, 4, (-2, -2), (2, 2))
    mask = torch.ones(1, 6, 6, device=device)
    assert int(reduce_mask(mask, grid, 0.25, avgpool=True).count) == 3
    assert int(reduce_mask(mask, grid, 0.249, avgpool=True).count) == 4
    assert int(reduce_mask(mask, grid, 0.5, avgpool=True).count) == 1
    assert int(reduce_mask(mask, grid, 1.0, avgpool=True).count) == 0


@pytest.mark.parametrize("dtype", MASK_DTYPES, ids=str)
def test_average_of_large_blocks(device, dtype):
    """The reference implementation's average is wrong past 1,024 pixels a block; half sums must not saturate."""
    mask = torch.ones(1, 300, 400, dtype=dtype, device=device)
    grid = BlockGrid.cover((300, 400), (150, 200))
    assert int(reduce_mask(mask, grid, 0.9999, avgpool=True).count) == 4
    assert int(reduce_mask(mask, grid, 1.0, avgpool=True).count) == 0


@pytest.mark.parametrize("avgpool", [False, True])
def test_huge_blocks(device, avgpool):
    """2048x2048 under 1500x490 blocks at stride 300x390."""
    grid = BlockGrid((1500, 490), (300, 390), 0, (3, 5))
    mask = torch.zeros(1, 2048, 2048, device=device)
    mask[0, 1499, 489] = mask[0, 2047, 2047] = 1.0
    tol = 1e-7 if avgpool else 0.5
    got = reduce_mask(mask, grid, tol, avgpool)
    assert_same_active(got, reference.reduce_mask(mask, grid, tol, avgpool))
    assert 0 < int(got.count) < 15


@pytest.mark.parametrize("capacity", [0, 1, 5, 24, 100])
def test_capacity(device, capacity):
    """Blocks past the capacity are dropped in raster order; total still counts them."""
    mask = torch.ones(2, 16, 24, device=device)
    mask[0, :8, :8] = 0
    grid = BlockGrid.cover((16, 24), 8)
    got = reduce_mask(mask, grid, capacity=capacity)
    assert_same_active(got, reference.reduce_mask(mask, grid, capacity=capacity))
    assert got.capacity == capacity
    assert int(got.total) == 11
    assert int(got.count) == min(capacity, 11)
    assert int((got.block_map >= 0).sum()) == min(capacity, 11)
    trimmed = got.trim()
    assert_bitwise(trimmed.indices, got.indices[: min(capacity, 11)])


@pytest.mark.parametrize(("n", "h", "w"), [(0, 16, 24), (2, 0, 24), (2, 16, 0), (0, 0, 0)])
def test_empty_planes(device, n, h, w):
    grid = BlockGrid.cover((16, 24), 8)
    got = reduce_mask(torch.ones(n, h, w, device=device), grid)
    assert got.block_map.shape == (n, 2, 3)
    assert (int(got.count), int(got.total)) == (0, 0)
    assert bool((got.indices == -1).all())
    assert bool((got.block_map == -1).all())


def test_nan_and_infinity(device):
    """NaN exceeds nothing; infinity exceeds every finite tol."""
    mask = torch.zeros(1, 4, 12, device=device)
    mask[0, :, :4] = float("nan")
    mask[0, 0, 8] = float("inf")
    grid = BlockGrid.cover((4, 12), 4)
    got = reduce_mask(mask, grid, 1e30)
    assert got.indices[: int(got.count)].tolist() == [[0, 0, 2]]
    mask[0, 1, 1] = 2e30  # a number beside NaN still counts
    assert int(reduce_mask(mask, grid, 1e30).count) == 2


def test_many_blocks_in_raster_order(device):
    """Enough blocks for several thread blocks: the numbering must run across their borders."""
    mask = torch.rand(5, 211, 307, device=device) < 0.3
    got = reduce_mask(mask, BlockGrid.cover((211, 307), 1))
    want = mask.nonzero().int()
    assert int(got.count) == len(want)
    assert_bitwise(got.indices[: len(want)], want)
    assert bool((got.indices[len(want) :] == -1).all())
    slots = torch.where(mask.flatten(), mask.flatten().cumsum(0) - 1, -1).int()
    assert_bitwise(got.block_map.flatten(), slots)


def test_same_bits_each_time(device):
    mask = torch.rand(2, 400, 704, device=device) > 0.99
    grid = BlockGrid.cover((400, 704), 16)
    first = reduce_mask(mask, grid)
    for _ in range(20):
        assert_same_active(reduce_mask(mask, grid), first)


def test_mask_that_requires_grad(device):
    mask = torch.rand(1, 16, 16, device=device, requires_grad=True)
    got = reduce_mask(mask, BlockGrid.cover((16, 16), 8))
    assert not got.indices.requires_grad
    assert_same_active(got, reduce_mask(mask.detach(), BlockGrid.cover((16, 16), 8)))


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_to_31_pixels():
    mask = torch.zeros(1, 65536, 40000, dtype=torch.uint8, device="cuda")
    mask[0, 65535, 39999] = mask[0, 60000, 12345] = 1
    grid = BlockGrid.cover((65536, 40000), 64)
    got = reduce_mask(mask, grid, capacity=100)
    assert got.indices[: int(got.count)].tolist() == [[0, 937, 192], [0, 1023, 624]]


@pytest.mark.parametrize("call", ["reduce_mask", "mask_pyramid"])
def test_a_mask_that_may_be_read_in_two_ways_is_refused(device, call):
    """[N,H,W,1] of one row and [N,1,H,W] of one column have the same shape, and other pixels."""
    grid = BlockGrid.cover((1, 40), 8)

    def listed(mask):
        if call == "reduce_mask":
            return reduce_mask(mask, grid)
        return sbnet.mask_pyramid(mask, [(1, 40, 8)]).planes[0]

    mask = torch.zeros(2, 1, 40, device=device)
    mask[1, 0, 39] = 1
    with pytest.raises(ValueError, match=r"mask: shape: expected \[N,H,W\], since \(2, 1, 40, 1\)"):
        listed(mask[..., None])
    assert listed(mask).indices[0].tolist() == [1, 0, 4]
    assert listed(mask[:, None]).indices[0].tolist() == [1, 0, 4]
