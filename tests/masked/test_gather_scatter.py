"""sparse_gather, sparse_scatter, sparse_scatter_: copies are bitwise, additions as accurate as PyTorch's."""

import pytest
import torch

from sbnet import BlockGrid, reduce_mask, reference, sparse_gather, sparse_scatter, sparse_scatter_
from support.helpers import (
    COPIES,
    FLOATS,
    LAYOUTS,
    assert_as_accurate_as_torch,
    assert_bitwise,
    assert_layout,
    laid_out,
    poison,
    random_active,
    tensor,
)


def covering(size, bsize, bstride, boffset=(0, 0)):
    """As many blocks as it takes to reach the far edges."""
    count = [max(-(-(n - o - b) // s), 0) + 1 for n, b, s, o in zip(size, bsize, bstride, boffset, strict=True)]
    return BlockGrid(bsize, bstride, boffset, tuple(count))


# (H, W, C), block size, stride, offset: the list that the reference release tests, then some of ours
SHAPES = [
    ((2, 3, 2), (2, 3), (3, 4), (0, 0)),
    ((5, 5, 1), (3, 3), (1, 1), (0, 0)),
    ((8, 10, 7), (3, 4), (3, 4), (0, 0)),
    ((8, 10, 7), (3, 4), (4, 5), (0, 0)),
    ((5, 3, 1), (2, 3), (2, 3), (0, 0)),
    ((5, 3, 1), (2, 3), (2, 3), (-1, -2)),
    ((3, 3, 1), (2, 2), (1, 1), (0, 0)),
    ((13, 12, 1), (2, 3), (1, 2), (0, 0)),
    ((6, 6, 1), (1, 1), (1, 1), (0, 0)),
    ((1, 1, 50176), (1, 1), (1, 1), (0, 0)),
    ((19, 23, 64), (16, 16), (16, 16), (0, 0)),  # vector paths: 16-byte multiples, then tails
    ((19, 23, 12), (8, 16), (8, 16), (-3, 5)),
    ((19, 23, 9), (18, 18), (16, 16), (-1, -1)),
    ((17, 40, 33), (5, 31), (6, 31), (2, -4)),
    ((4, 5, 3), (9, 8), (9, 8), (-2, -1)),
]
SEPARATE = [s for s in SHAPES if all(b <= t for b, t in zip(s[1], s[2], strict=True))]
IDS = [f"{s[0]} {s[1]} at {s[2]} from {s[3]}".replace(" ", "") for s in SHAPES]
SEPARATE_IDS = [i for s, i in zip(SHAPES, IDS, strict=True) if s in SEPARATE]


def is_nhwc(x):
    return x.stride(1) == 1 and not x.is_contiguous()


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_gather(device, shape, dtype, layout, transpose):
    (h, w, c), bsize, bstride, boffset = shape
    grid = covering((h, w), bsize, bstride, boffset)
    x = laid_out(tensor((3, c, h, w), dtype, device), layout)
    active = random_active(grid, 3, 0.6, device)
    got = sparse_gather(x, active, transpose)
    assert_bitwise(got, reference.sparse_gather(x, active))
    assert_layout(got, is_nhwc(x) != transpose)


@pytest.mark.parametrize("stack_layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SEPARATE, ids=SEPARATE_IDS)
def test_scatter_overwrites(device, shape, dtype, layout, stack_layout):
    (h, w, c), bsize, bstride, boffset = shape
    active = random_active(covering((h, w), bsize, bstride, boffset), 3, 0.6, device)
    blocks = laid_out(tensor((active.capacity, c, *bsize), dtype, device), stack_layout)
    base = laid_out(tensor((3, c, h, w), dtype, device), layout)
    before, want = base.clone(), reference.sparse_scatter(blocks, active, base)
    got = sparse_scatter(blocks, active, base, transpose=layout != stack_layout)
    assert_bitwise(got, want)
    assert_bitwise(base, before, "base of the functional form")
    poisoned = poison(base.shape, dtype, device, layout)
    assert sparse_scatter_(blocks, active, poisoned) is poisoned
    assert_bitwise(poisoned, reference.sparse_scatter(blocks, active, torch.full_like(base, float("nan"))), "in place")


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_scatter_adds(device, shape, dtype, layout, atomic):
    """Overlapping or not. Atomics round after every block, as PyTorch's own additions do."""
    (h, w, c), bsize, bstride, boffset = shape
    active = random_active(covering((h, w), bsize, bstride, boffset), 3, 0.6, device)
    blocks = laid_out(tensor((active.capacity, c, *bsize), dtype, device), layout)
    base = laid_out(tensor((3, c, h, w), dtype, device), "channels_last")
    exact = reference.sparse_scatter(blocks.double(), active, base.double(), add=True)
    torchs = reference.sparse_scatter(blocks, active, base, add=True)
    got = sparse_scatter(blocks, active, base, add=True, atomic=atomic)
    assert_as_accurate_as_torch(got, torchs, exact)
    untouched = ~active.pixel_mask((h, w)).expand_as(base)
    assert_bitwise(got[untouched], base[untouched], "inactive pixels")
    if not atomic:
        assert_bitwise(sparse_scatter(blocks, active, base, add=True), got, "the second run")
        # each pixel is summed in float32 and rounded once, whatever the order of memory
        other = sparse_scatter(blocks.contiguous(), active, base.contiguous(), add=True)
        assert_bitwise(other, got, "another layout")
    if not active.grid.overlaps:
        assert_bitwise(got, torchs, "blocks that do not overlap")


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(("dtype", "base"), [(torch.float16, 2048.0), (torch.bfloat16, 256.0)], ids=str)
def test_overlapping_blocks_are_rounded_once(device, dtype, base, layout):
    """A one that is added to `base` is lost in rounding; the four of an inner pixel together are not."""
    active = random_active(BlockGrid(2, 1, (0, 0), (4, 4)), 1, 1.0, device)
    blocks = laid_out(torch.ones(active.capacity, 3, 2, 2, dtype=dtype, device=device), layout)
    plane = laid_out(torch.full((1, 3, 5, 5), base, dtype=dtype, device=device), layout)
    got = sparse_scatter(blocks, active, plane, add=True)
    assert (got[:, :, 1:4, 1:4] == base + 4).all()
    assert (got[:, :, 0, 0] == base).all()


def test_overlapping_blocks_are_added_in_raster_order(device):
    """2^24 + 1 + 1 - 2^24 in float32 is 0 in this order alone: the ones are lost before the last block comes."""
    active = random_active(BlockGrid(2, 1, (0, 0), (2, 2)), 1, 1.0, device)
    values = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)], device=device)
    for order, want in (([0, 1, 2, 3], 0.0), ([0, 3, 1, 2], 2.0), ([0, 1, 3, 2], 1.0), ([1, 2, 0, 3], 2.0)):
        blocks = values[order].view(4, 1, 1, 1).expand(4, 1, 2, 2).contiguous()
        got = sparse_scatter(blocks, active, torch.zeros(1, 1, 3, 3, device=device), add=True)
        assert float(got[0, 0, 1, 1]) == want, order


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_spec_overlapping_add_200x300(device, layout, atomic):
    """200x300x32 under 3x4 blocks at 2x3."""
    active = random_active(covering((200, 300), (3, 4), (2, 3)), 1, 1.0, device)
    blocks = laid_out(tensor((active.capacity, 32, 3, 4), torch.float32, device), layout)
    base = laid_out(torch.zeros(1, 32, 200, 300, device=device), layout)
    got = sparse_scatter(blocks, active, base, add=True, atomic=atomic)
    # overlap-add is the transpose of unfold: fold
    rows, columns = active.grid.bcount
    size = [(rows - 1) * 2 + 3, (columns - 1) * 3 + 4]

    def fold(b):
        columns_of_blocks = b.reshape(rows * columns, -1).T[None]
        return torch.nn.functional.fold(columns_of_blocks, size, (3, 4), stride=(2, 3))[..., :200, :300]

    assert_as_accurate_as_torch(got, fold(blocks), fold(blocks.double()))


@pytest.mark.parametrize("channels", [15, 16, 24, 32, 48, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_spec_380x480_round_trip(device, channels, dtype):
    """380x480 under 18x18 blocks: scatter undoes gather, and writes no more than the active blocks."""
    x = laid_out(tensor((1, channels, 380, 480), dtype, device), "channels_last")
    active = random_active(BlockGrid.cover((380, 480), 18), 1, 0.5, device)
    mask = active.pixel_mask((380, 480))
    for transpose in (False, True):
        blocks = sparse_gather(x, active, transpose)
        assert_layout(blocks, not transpose)
        base = poison(x.shape, dtype, device, "channels_last")
        sparse_scatter_(blocks, active, base, transpose=transpose)
        assert_bitwise(base, torch.where(mask, x, torch.full_like(x, float("nan"))))


def check_neighbours(device):
    """Rows of neighbours, of which a CPU moves many at a time: halos, tilings, gaps, clipped ones."""
    torch.manual_seed(0)
    for bsize, bstride, boffset in ((18, 16, -1), (18, 18, -5), (10, 4, -4), (7, 9, 2), (25, 300, 0)):
        active = random_active(covering((19, 300), *[(v, v) for v in (bsize, bstride, boffset)]), 1, 0.9, device)
        for dtype, channels in ((torch.uint8, 70), (torch.float16, 40), (torch.float32, 21), (torch.float64, 9)):
            for layout in ("contiguous", "channels_last"):
                x = laid_out(tensor((1, channels, 19, 300), dtype, device), layout)
                for transpose in (False, True):
                    blocks = sparse_gather(x, active, transpose)
                    assert_bitwise(blocks, reference.sparse_gather(x, active))
                    if bstride >= bsize:
                        base = poison(x.shape, dtype, device, layout)
                        want = reference.sparse_scatter(blocks, active, base)
                        assert_bitwise(sparse_scatter_(blocks, active, base, transpose=transpose), want)


def test_neighbours(device):
    check_neighbours(device)


def test_spec_huge_blocks(device):
    """2048x2048x1 under 1500x490 blocks at 300x390."""
    grid = covering((2048, 2048), (1500, 490), (300, 390))
    x = tensor((1, 1, 2048, 2048), torch.float32, device)
    active = random_active(grid, 1, 0.5, device)
    blocks = sparse_gather(x, active)
    assert_bitwise(blocks, reference.sparse_gather(x, active))
    zeros = torch.zeros_like(x)
    torchs = reference.sparse_scatter(blocks, active, zeros, add=True)
    exact = reference.sparse_scatter(blocks.double(), active, zeros.double(), add=True)
    assert_as_accurate_as_torch(sparse_scatter(blocks, active, zeros, add=True), torchs, exact)


@pytest.mark.parametrize("density", [0, 0.01, 0.1, 0.5, 0.9, 1])
@pytest.mark.parametrize("batch", [1, 3, 7])
def test_densities_and_batches(device, batch, density):
    mask = torch.rand(batch, 50, 88, device=device)
    grid = BlockGrid.cover((50, 88), 16)
    active = reduce_mask(mask, grid, float(torch.quantile(mask, 1 - density)) if density < 1 else -1.0)
    x = laid_out(tensor((batch, 24, 50, 88), torch.float16, device), "channels_last")
    blocks = sparse_gather(x, active)
    assert_bitwise(blocks, reference.sparse_gather(x, active))
    assert_bitwise(
        sparse_scatter(blocks, active, torch.zeros_like(x)), torch.where(active.pixel_mask((50, 88)), x, 0.0).half()
    )


@pytest.mark.parametrize("dtype", COPIES, ids=str)
@pytest.mark.parametrize("transpose", [False, True])
def test_every_dtype_is_copied(device, dtype, transpose):
    grid = BlockGrid((6, 7), (6, 7), (-2, -3), (4, 4))
    active = random_active(grid, 2, 0.7, device)
    for layout in ("contiguous", "channels_last"):
        x = laid_out(tensor((2, 13, 20, 22), dtype, device), layout)
        blocks = sparse_gather(x, active, transpose)
        assert_bitwise(blocks, reference.sparse_gather(x, active))
        base = poison(x.shape, dtype, device, layout)
        want = reference.sparse_scatter(blocks, active, base)
        sparse_scatter_(blocks, active, base)
        assert_bitwise(base, want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_of_nan_and_negative_zero_survive(device, dtype):
    x = torch.zeros(1, 8, 4, 8, dtype=dtype, device=device)
    x[:, ::2] = float("nan")
    x[:, 1::2] = -0.0
    active = random_active(BlockGrid.cover((4, 8), 4), 1, 1.0, device)
    for layout in ("contiguous", "channels_last"):
        for transpose in (False, True):
            blocks = sparse_gather(laid_out(x, layout), active, transpose)
            assert_bitwise(sparse_scatter(blocks, active, torch.ones_like(x)), x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("channels", [1, 3, 8, 20, 64])
def test_views(device, layout, channels):
    """Slices of larger buffers on both sides; what lies around them in the buffer stays."""
    grid = BlockGrid((5, 8), (5, 8), (-1, -2), (5, 4))
    active = random_active(grid, 2, 0.6, device)
    for dtype in (torch.float16, torch.float32):
        x = laid_out(tensor((2, channels, 21, 26), dtype, device), layout)
        for transpose in (False, True):
            blocks = sparse_gather(x, active, transpose)
            assert_bitwise(blocks, reference.sparse_gather(x, active))
            base = laid_out(torch.full_like(x, float("nan")), layout)
            storage = torch.empty(0, dtype=dtype, device=device).set_(base.untyped_storage())
            around = storage.clone()
            sparse_scatter_(blocks, active, base)
            assert_bitwise(base, reference.sparse_scatter(blocks, active, torch.full_like(x, float("nan"))))
            base.fill_(float("nan"))
            assert_bitwise(storage, around, "the buffer around base")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_add(device, layout):
    grid = BlockGrid((5, 8), (3, 8), (-1, -2), (8, 4))
    active = random_active(grid, 2, 0.6, device)
    base = laid_out(tensor((2, 20, 21, 26), torch.float32, device), layout)
    blocks = tensor((active.capacity, 20, 5, 8), torch.float32, device)
    exact = reference.sparse_scatter(blocks.double(), active, base.double(), add=True)
    torchs = reference.sparse_scatter(blocks, active, base, add=True)
    sparse_scatter_(blocks, active, base, add=True)
    assert_as_accurate_as_torch(base, torchs, exact)


def test_misaligned_views(device):
    """A first element off every 16-byte boundary: vector loads must not be chosen by channel count alone."""
    active = random_active(BlockGrid.cover((12, 16), 4), 1, 0.7, device)
    for dtype in (torch.float16, torch.float32, torch.uint8):
        for shift in (1, 2, 3, 4):
            buffer = tensor((1, 12, 16, 40), dtype, device).permute(0, 3, 1, 2)
            x = buffer[:, shift : shift + 16]
            blocks = sparse_gather(x, active)
            assert_bitwise(blocks, reference.sparse_gather(x, active))
            want = buffer.clone()
            want[:, shift : shift + 16] = reference.sparse_scatter(blocks, active, torch.zeros_like(x))
            buffer[:, shift : shift + 16] = 0
            sparse_scatter_(blocks, active, x)
            assert_bitwise(buffer, want)
            flat = tensor((1 + 16 * 12 * 16,), dtype, device)[1:].view(1, 12, 16, 16).permute(0, 3, 1, 2)
            assert_bitwise(sparse_gather(flat, active), reference.sparse_gather(flat, active))


def test_expanded_input(device):
    active = random_active(BlockGrid.cover((9, 10), 4), 3, 0.7, device)
    one = tensor((1, 6, 1, 10), torch.float32, device)
    for x in (one.expand(3, 6, 9, 10), one[:, :1, :, :1].expand(3, 6, 9, 10), one.expand(3, -1, 9, -1)):
        for transpose in (False, True):
            assert_bitwise(sparse_gather(x, active, transpose), reference.sparse_gather(x, active))


def test_stack_that_is_a_view(device):
    """Rows of a larger stack, a slice of its channels, reversed axes: read as they are."""
    active = random_active(BlockGrid.cover((9, 10), (4, 5)), 2, 0.7, device)
    big = tensor((2 * active.capacity, 9, 5, 4), torch.float32, device).transpose(2, 3)
    for blocks in (big[::2, 1:7], big[active.capacity :, :6], big[:1, :6].expand(active.capacity, -1, -1, -1)):
        base = tensor((2, 6, 9, 10), torch.float32, device)
        assert_bitwise(sparse_scatter(blocks, active, base), reference.sparse_scatter(blocks, active, base))


def test_functional_scatter_onto_an_expanded_base(device):
    active = random_active(BlockGrid.cover((9, 10), (4, 5)), 2, 0.7, device)
    base = torch.arange(6.0, device=device)[None, :, None, None].expand(2, 6, 9, 10)
    blocks = tensor((active.capacity, 6, 4, 5), torch.float32, device)
    assert_bitwise(sparse_scatter(blocks, active, base), reference.sparse_scatter(blocks, active, base))
