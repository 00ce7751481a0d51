"""Tokens packed, and their rows moved, against the same by indexing."""

import pytest
import torch
import torch.nn.functional as F

from sbnet import BlockGrid
from sbnet.ops.masked.token_rows import merge_pixels_, move_rows_, pack_patches_, pack_tokens
from support.helpers import FLOATS, assert_bitwise, poison, random_active

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)
GRIDS = {
    "cover": BlockGrid.cover((13, 21), 4),
    "overlapping": BlockGrid((6, 5), (4, 3), (-1, -2), (4, 8)),
    "apart": BlockGrid((2, 3), (4, 5), (1, 0), (3, 4)),
}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("prefix", "suffix"), [(0, 0), (5, 0), (1, 7)])
def test_packed_tokens_are_the_active_pixels_in_order(device, grid, prefix, suffix):
    size, capacity = (13, 21), 304
    active = random_active(GRIDS[grid], 3, 0.3, device)
    packed = pack_tokens(active, size, prefix, suffix, capacity)
    mask = F.pad(active.pixel_mask(size).flatten(1), (prefix, suffix), value=True)
    assert_bitwise(packed.mask, mask)
    for n, there in enumerate(mask):
        tokens = there.nonzero()[:, 0]
        assert packed.lengths[n] == len(tokens)
        assert_bitwise(packed.order[n, : len(tokens)], tokens)
        assert not packed.order[n, len(tokens) :].any()
        assert_bitwise(packed.rows[n, tokens], torch.arange(len(tokens), device=device))
        assert packed.rows[n].min() >= 0
        assert packed.rows[n].max() < max(len(tokens), 1)
        assert_bitwise(packed.filled[n], torch.arange(capacity, device=device) < len(tokens))


def test_a_plane_of_more_pixels_than_a_pass(device):
    size = (300, 260)
    active = random_active(BlockGrid.cover(size, 7), 1, 0.4, device)
    packed = pack_tokens(active, size, 2)
    tokens = F.pad(active.pixel_mask(size).flatten(1), (2, 0), value=True)[0].nonzero()[:, 0]
    assert_bitwise(packed.order[0, : len(tokens)], tokens)
    assert packed.lengths.tolist() == [len(tokens)]


def test_fewer_rows_than_tokens_are_refused(device):
    active = random_active(GRIDS["cover"], 1, 0.3, device)
    with pytest.raises(RuntimeError, match="capacity: expected at least the 274 tokens, got 273"):
        pack_tokens(active, (13, 21), 1, 0, 273)


def nans(shape, dtype, device):
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def rows(device, dtype, images, count, channels, wide=0):
    """Rows of a wider tensor."""
    x = torch.randn(images, count, channels + wide, device=device).to(dtype)
    return x[:, :, wide // 2 : wide // 2 + channels]


@dtypes
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize(("channels", "wide"), [(64, 0), (64, 16), (7, 3)])
def test_rows_by_index_up_to_each_length(device, dtype, images, channels, wide):
    x = rows(device, dtype, images, 20, channels, wide)
    index = torch.randint(20, (3, 31), device=device)
    lengths = torch.tensor([31, 0, 12], dtype=torch.int32, device=device)
    out = nans((3, 31, channels), dtype, device)
    before = out.clone()
    move_rows_(x, out, index=index, lengths=lengths)
    for n, length in enumerate(lengths.tolist()):
        assert_bitwise(out[n, :length], x[n if images > 1 else 0][index[n, :length]])
        assert_bitwise(out[n, length:], before[n, length:])


@dtypes
@pytest.mark.parametrize(("start", "count"), [(2, 2), (0, 3), (1, 4)])
def test_rows_between_those_of_a_table(device, dtype, start, count):
    x, table = rows(device, dtype, 2, 24, 32), rows(device, dtype, 1, count, 32)
    lengths = torch.tensor([20, count], dtype=torch.int32, device=device)
    out = nans((2, 24, 32), dtype, device)
    move_rows_(x, out, table=table, lengths=lengths, start=start)
    for n, length in enumerate(lengths.tolist()):
        want = torch.cat([table[0, :start], x[n, : length - count], table[0, start:]])
        assert_bitwise(out[n, :length], want)
        assert out[n, length:].isnan().all()


@dtypes
def test_rows_that_are_not_there_are_zero(device, dtype):
    x, out = rows(device, dtype, 2, 9, 24), nans((2, 14, 24), dtype, device)
    index, mask = torch.randint(9, (2, 14), device=device), torch.rand(2, 14, device=device) > 0.5
    move_rows_(x, out, index=index, mask=mask)
    picked = x.gather(1, index[:, :, None].expand(-1, -1, 24))
    assert_bitwise(out, torch.where(mask[:, :, None], picked, 0))


@dtypes
def test_rows_that_are_not_there_may_stay(device, dtype):
    x, out = rows(device, dtype, 2, 9, 24), rows(device, dtype, 2, 14, 24)
    index, mask = torch.randint(9, (2, 14), device=device), torch.rand(2, 14, device=device) > 0.5
    before = out.clone()
    move_rows_(x, out, index=index, mask=mask, keep=True)
    assert_bitwise(out, torch.where(mask[:, :, None], x.gather(1, index[:, :, None].expand(-1, -1, 24)), before))


def test_an_index_past_the_rows_is_not_followed(device):
    x, out = torch.ones(1, 4, 8, device=device), nans((1, 3, 8), torch.float32, device)
    move_rows_(x, out, index=torch.tensor([[4, -1, 2**40]], device=device))
    assert not out.any()


@dtypes
@pytest.mark.parametrize("last", [False, True])
def test_patches_in_the_order_of_a_weight(device, dtype, last):
    x = torch.randn(2, 3, 24, 40, device=device).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    index = torch.stack([torch.randperm(15, device=device) for _ in range(2)])
    lengths = torch.tensor([15, 4], dtype=torch.int32, device=device)
    out = nans((2, 15, 3 * 64), dtype, device)
    pack_patches_(x, index, lengths, (8, 8), out)
    want = F.unfold(x.float(), 8, stride=8).transpose(1, 2).to(dtype)
    for n, length in enumerate(lengths.tolist()):
        assert_bitwise(out[n, :length], want[n][index[n, :length]])
        assert out[n, length:].isnan().all()


@dtypes
@pytest.mark.parametrize("channels", [16, 5])
def test_merged_pixels_beside_each_other(device, dtype, channels):
    offsets = [(0, 0), (1, 0), (0, 1), (1, 1)]
    x = torch.randn(2, channels, 22, 18, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
    active = random_active(BlockGrid.cover((11, 9), 4), 2, 0.5, device)
    out = poison((2, 4 * channels, 11, 9), dtype, device, "channels_last")
    merge_pixels_(x, active, 2, offsets, out)
    want = torch.cat([x[:, :, a::2, e::2] for a, e in offsets], 1)
    there = active.pixel_mask((11, 9)).expand_as(out)
    assert_bitwise(out[there], want[there])
    assert out[~there].isnan().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, out: move_rows_(x[:, :, :4], out), "out: expected 4 channels"),
        (lambda x, out: move_rows_(x, out.half()), "out: expected the dtype of x"),
        (lambda x, out: move_rows_(x.double(), out.double()), "float32, float16 or bfloat16"),
        (lambda x, out: move_rows_(x, out, index=torch.zeros(2, 4, dtype=torch.int64)), "index: expected"),
        (lambda x, out: move_rows_(x, out, mask=torch.zeros(2, 4)), "mask: expected"),
        (lambda x, out: move_rows_(x, out, table=x[:1, :1], start=2), "table: expected at least 2 rows"),
        (lambda x, out: move_rows_(x, out, start=-1), "start: expected at least 0"),
        (lambda x, out: move_rows_(x[:1].expand(3, -1, -1), out), "x: expected 2 images or one, got 3"),
        (lambda x, out: move_rows_(x, out[:1].expand(2, -1, -1)), "out: expected rows of its own memory"),
    ],
)  # fmt: skip
def test_errors(call, message):
    with pytest.raises(RuntimeError, match=message):
        call(torch.zeros(2, 5, 8), torch.zeros(2, 5, 8))
