"""sparse_gather and sparse_scatter: whatever stands in the lists, and tensors of more than 2^31 elements."""

import dataclasses

import pytest
import torch

from sbnet import ActiveBlocks, BlockGrid, reduce_mask, reference, sparse_gather, sparse_scatter, sparse_scatter_
from support.helpers import (
    assert_as_accurate_as_torch,
    assert_bitwise,
    assert_same_active,
    laid_out,
    poison,
    random_active,
    tensor,
)


def test_tail(device):
    """Rows past the count are zero, or not written at all."""
    x = tensor((1, 8, 16, 16), torch.float32, device)
    active = random_active(BlockGrid.cover((16, 16), 4), 1, 0.4, device)
    count = int(active.count)
    assert 0 < count < 16
    blocks = sparse_gather(x, active)
    assert blocks.shape[0] == 16
    assert not blocks[count:].any()
    undefined = sparse_gather(x, active, tail="undefined")
    assert undefined.shape == blocks.shape
    assert_bitwise(undefined[:count], blocks[:count])
    trimmed = sparse_gather(x, active.trim())
    assert_bitwise(trimmed, blocks[:count])
    assert_bitwise(sparse_scatter(trimmed, active.trim(), x * 0), sparse_scatter(blocks, active, x * 0))


def test_capacity_overflow(device):
    """Blocks that the capacity dropped are not gathered, scattered or added."""
    x = tensor((2, 8, 16, 16), torch.float32, device)
    grid = BlockGrid.cover((16, 16), 4)
    active = reduce_mask(torch.ones(2, 16, 16, device=device), grid, capacity=9)
    assert (int(active.count), int(active.total)) == (9, 32)
    blocks = sparse_gather(x, active)
    assert_bitwise(blocks, reference.sparse_gather(x, active))
    base = torch.full_like(x, float("nan"))
    assert_bitwise(sparse_scatter(blocks, active, base), reference.sparse_scatter(blocks, active, base))
    wide = BlockGrid((6, 6), (4, 4), (-1, -1), grid.bcount)
    blocks = sparse_gather(x, active, grid=wide)
    torchs = reference.sparse_scatter(blocks, active, x, wide, add=True)
    exact = reference.sparse_scatter(blocks.double(), active, x.double(), wide, add=True)
    assert_as_accurate_as_torch(sparse_scatter(blocks, active, x, wide, add=True), torchs, exact)


@pytest.mark.parametrize("add", [False, True])
def test_fewer_rows_than_capacity(device, add):
    """A stack shorter than the list serves its rows; the other blocks keep base."""
    active = random_active(BlockGrid.cover((16, 16), 4), 1, 1.0, device)
    base = tensor((1, 8, 16, 16), torch.float32, device)
    blocks = tensor((7, 8, 4, 4), torch.float32, device)
    assert_bitwise(
        sparse_scatter(blocks, active, base, add=add), reference.sparse_scatter(blocks, active, base, add=add)
    )
    wide = BlockGrid((6, 6), (4, 4), (-1, -1), (4, 4))
    blocks = tensor((7, 8, 6, 6), torch.float32, device)
    torchs = reference.sparse_scatter(blocks, active, base, wide, add=True)
    exact = reference.sparse_scatter(blocks.double(), active, base.double(), wide, add=True)
    assert_as_accurate_as_torch(sparse_scatter(blocks, active, base, wide, add=True), torchs, exact)


@pytest.mark.parametrize("count", [-(2**31), -1, 0, 3, 16, 17, 2**31 - 1])
def test_any_count_on_the_device(device, count):
    """Nobody can check the count without a sync: kernels clamp it to 0 ... capacity."""
    active = random_active(BlockGrid.cover((16, 16), 4), 1, 1.0, device)
    active.count.fill_(count)
    x = tensor((1, 8, 16, 16), torch.float32, device)
    blocks = sparse_gather(x, active)
    assert_bitwise(blocks, reference.sparse_gather(x, active))
    base = torch.full_like(x, float("nan"))
    assert_bitwise(sparse_scatter(blocks, active, base), reference.sparse_scatter(blocks, active, base))
    assert_bitwise(sparse_scatter(blocks, active, x, add=True), reference.sparse_scatter(blocks, active, x, add=True))
    kept = active.trim()
    assert_bitwise(kept.indices, active.indices[: min(max(count, 0), 16)])


@pytest.mark.parametrize("bad", [(0, 0, 4), (0, 4, 0), (2, 0, 0), (-1, 0, 0), (0, -1, 0), (0, 0, -1), (2**31 - 1,) * 3])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_indices_that_name_no_block_are_skipped(device, bad, layout):
    active = random_active(BlockGrid.cover((16, 16), 4), 2, 1.0, device)
    active.indices[3] = torch.tensor(bad, dtype=torch.int32)
    x = laid_out(tensor((2, 8, 16, 16), torch.float32, device), layout)
    blocks = sparse_gather(x, active)
    assert_bitwise(blocks, reference.sparse_gather(x, active))
    stack = tensor(blocks.shape, torch.float32, device)
    base = torch.full_like(x, float("nan"))
    assert_bitwise(sparse_scatter(stack, active, base), reference.sparse_scatter(stack, active, base))
    for atomic in (False, True):
        got = sparse_scatter(stack, active, x, add=True, atomic=atomic)
        assert_bitwise(got, reference.sparse_scatter(stack, active, x, add=True))


def test_random_bytes_as_lists(device):
    """Whatever stands in the lists, no access out of bounds (compute-sanitizer and ASan look on) and no hang."""
    grid = BlockGrid((6, 6), (4, 4), (-1, -1), (4, 4))
    whole = random_active(grid, 2, 1.0, device)
    x = tensor((2, 8, 16, 16), torch.float32, device)
    for _ in range(20):
        junk = dataclasses.replace(
            whole,
            indices=tensor((32, 3), torch.int32, device),
            count=tensor((1,), torch.int32, device),
            block_map=tensor((2, 4, 4), torch.int32, device),
        )
        blocks = sparse_gather(x, junk)
        assert not blocks.any()
        for atomic in (False, True):
            sparse_scatter(torch.ones_like(blocks), junk, x, add=True, atomic=atomic)


def test_count_zero_and_empty_batch(device):
    grid = BlockGrid.cover((16, 16), 4)
    for batch, density in ((0, 1.0), (2, 0.0)):
        active = random_active(grid, batch, density, device)
        x = tensor((batch, 8, 16, 16), torch.float32, device)
        blocks = sparse_gather(x, active)
        assert blocks.shape == (batch * 16, 8, 4, 4)
        assert not blocks.any()
        for add in (False, True):
            assert_bitwise(sparse_scatter(blocks + 1, active, x, add=add), x)
        other = laid_out(x, "channels_last")
        assert_bitwise(sparse_scatter(blocks + 1, active, other, transpose=True), x)
        assert_bitwise(sparse_scatter(laid_out(blocks + 1, "channels_last"), active, x, transpose=True), x)
        trimmed = active.trim()
        assert trimmed.capacity == 0
        assert sparse_gather(x, trimmed).shape == (0, 8, 4, 4)
        assert_bitwise(sparse_scatter(blocks[:0], trimmed, x), x)
    for batch, count in ((0, (4, 4)), (2, (4, 0)), (2, (0, 4))):  # overlapping blocks, were there any
        active = random_active(BlockGrid(6, 4, -1, count), batch, 1.0, device)
        x = tensor((batch, 8, 16, 16), torch.float32, device).requires_grad_()
        blocks = sparse_gather(x, active)
        assert_bitwise(sparse_scatter(blocks.detach(), active, x.detach(), add=True), x)
        blocks.sum().backward()
        assert_bitwise(x.grad, torch.zeros_like(x))
    none = ActiveBlocks.from_indices(torch.empty(0, 3, dtype=torch.int32, device=device), BlockGrid(4, 4, 0, 0), 2)
    assert sparse_gather(tensor((2, 8, 16, 16), torch.float32, device), none).shape == (0, 8, 4, 4)


def test_empty_channels_and_planes(device):
    active = random_active(BlockGrid.cover((16, 16), 4), 2, 0.5, device)
    for shape in ((2, 0, 16, 16), (2, 8, 0, 16), (2, 8, 16, 0)):
        x = torch.ones(shape, device=device)
        blocks = sparse_gather(x, active)
        assert_bitwise(blocks, reference.sparse_gather(x, active))
        assert_bitwise(sparse_scatter(blocks, active, x), x)
        assert_bitwise(sparse_scatter(blocks, active, x, add=True), x)


def test_another_grid(device):
    """grid=: the same blocks where another plane has them, twice the resolution with a halo."""
    mask = torch.rand(2, 16, 24, device=device)
    active = reduce_mask(mask, BlockGrid.cover((16, 24), 8), 0.99)
    halo = active.grid.conv_input(3, 2, 1)
    x = tensor((2, 5, 32, 48), torch.float32, device)
    blocks = sparse_gather(x, active, grid=halo)
    assert blocks.shape[2:] == (17, 17)
    assert_bitwise(blocks, reference.sparse_gather(x, active.with_grid(halo)))
    assert_bitwise(blocks, sparse_gather(x, active.with_grid(halo)))
    twice = BlockGrid(16, 16, 0, active.grid.bcount)
    stack = tensor((active.capacity, 5, 16, 16), torch.float32, device)
    assert_bitwise(sparse_scatter(stack, active, x, twice), reference.sparse_scatter(stack, active, x, twice))


def test_a_list_of_ones_own(device):
    """from_indices in any order: row r is block indices[r]."""
    grid = BlockGrid.cover((16, 24), 8)
    order = torch.tensor([[1, 1, 2], [0, 0, 1], [1, 0, 0]], dtype=torch.int32, device=device)
    active = ActiveBlocks.from_indices(order, grid, 2)
    x = tensor((2, 3, 16, 24), torch.float32, device)
    assert_bitwise(sparse_gather(x, active), torch.stack([x[1, :, 8:, 16:], x[0, :, :8, 8:16], x[1, :, :8, :8]]))
    sorted_again = ActiveBlocks.from_indices(active.indices[[1, 2, 0]], grid, 2)
    mask = torch.zeros(2, 16, 24, device=device)
    mask[0, 3, 9] = mask[1, 0, 0] = mask[1, 15, 23] = 1
    made = reduce_mask(mask, grid, capacity=3)
    assert_same_active(sorted_again, made)


def test_same_bits_each_time(device):
    grid = BlockGrid((6, 6), (4, 4), (-1, -1), (16, 16))
    active = random_active(grid, 2, 0.7, device)
    blocks = tensor((active.capacity, 24, 6, 6), torch.float16, device)
    base = laid_out(tensor((2, 24, 64, 64), torch.float16, device), "channels_last")
    first = sparse_scatter(blocks, active, base, add=True)
    for _ in range(10):
        assert_bitwise(sparse_scatter(blocks, active, base, add=True), first)


def large_or_skip(gigabytes):
    if torch.cuda.mem_get_info()[0] < gigabytes * 2**30:
        pytest.skip(f"needs {gigabytes} GiB of device memory")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16], ids=str)
def test_more_than_2_to_32_elements(dtype, layout):
    """4.5e9 elements: offsets must be 64-bit in the plane ..."""
    large_or_skip(24)
    shape = (1, 1040, 2080, 2080)
    x = torch.zeros((1, 2080, 2080, 1040) if layout == "channels_last" else shape, dtype=dtype, device="cuda")
    if layout == "channels_last":
        x = x.permute(0, 3, 1, 2)
    grid = BlockGrid.cover((2080, 2080), 16)
    active = ActiveBlocks.from_indices(
        torch.tensor([[0, 0, 0], [0, 66, 3], [0, 129, 129]], dtype=torch.int32, device="cuda"), grid, 1
    )
    blocks = tensor((3, 1040, 16, 16), torch.uint8, "cuda").to(dtype)
    sparse_scatter_(blocks, active, x)
    assert_bitwise(x[..., :16, :16], blocks[:1])
    assert_bitwise(x[..., 1056:1072, 48:64], blocks[1:2])
    assert_bitwise(x[..., 2064:, 2064:], blocks[2:])
    for transpose in (False, True):
        assert_bitwise(sparse_gather(x, active, transpose), blocks)
    if dtype == torch.float16:
        sparse_scatter_(blocks, active, x, add=True)
        assert_bitwise(sparse_gather(x, active), blocks * 2)
    del x
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.slow
def test_stack_of_more_than_2_to_32_elements():
    """... and in the stack."""
    large_or_skip(24)
    grid = BlockGrid(64, 1, 0, (270, 270))  # 72,900 blocks of 65,536 elements
    x = tensor((1, 16, 333, 333), torch.uint8, "cuda")
    active = reduce_mask(torch.ones(1, 333, 333, device="cuda"), grid)
    for transpose in (False, True):
        blocks = sparse_gather(x, active, transpose)
        assert blocks.numel() > 2**32
        for row in (0, 32767, 32768, 65535, 65536, 72899):
            i, j = divmod(row, 270)
            assert_bitwise(blocks[row], x[0, :, i : i + 64, j : j + 64], f"row {row}")
        del blocks
    torch.cuda.empty_cache()


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "channel_slice", "plane_slice"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8], ids=str)
def test_large_scatter(device, dtype, layout, transpose):
    """Enough bytes for the CPU to write past its caches: whole lines, parts of lines, neighbours on one line."""
    channels = 72 * 4 // torch.empty(0, dtype=dtype).element_size()
    x = laid_out(tensor((1, channels, 212, 600), dtype, device), layout)
    for block in (16, (18, 18), (7, 21), (3, 530), (40, 26)):
        active = random_active(BlockGrid.cover((212, 600), block), 1, 0.97, device)
        stack = sparse_gather(x, active, transpose)
        base = poison(x.shape, dtype, device, layout)
        want = torch.where(active.pixel_mask((212, 600)), x, base)
        sparse_scatter_(stack, active, base, transpose=transpose)
        assert_bitwise(base, want, f"block {block}")
