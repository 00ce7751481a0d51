"""sparse_conv2d: whatever stands in the lists."""

import pytest
import torch

from sbnet import ActiveBlocks, reduce_mask, sparse_conv2d
from support.conv_cases import make
from support.helpers import FLOATS, assert_bitwise, assert_conv, laid_out

# ---- what stands in the lists
CASES = [(16, 16, 3, 1, 1, torch.float16), (16, 16, 3, 1, 1, torch.float32), (16, 16, 3, 1, 16, torch.float32)]
CASES += [(5, 7, 3, 2, 1, torch.float16), (16, 16, 3, 1, 16, torch.bfloat16), (24, 24, 1, 1, 1, torch.bfloat16)]
CASES += [
    (3, 64, 7, 2, 1, torch.float16),
    (16, 80, 1, 2, 1, torch.float16),
    (16, 16, 3, 2, 1, torch.bfloat16),
    (72, 72, 3, 2, 1, torch.float16),
]


def make_case(device, channels, filters, kernel, stride, groups, dtype):
    """One of CASES, every block active."""
    case = {"channels": channels, "filters": filters, "kernel": kernel, "stride": stride, "groups": groups}
    return make(device, dtype=dtype, padding=kernel // 2, density=1.0, **case)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("count", [-(2**31), -1, 0, 5, 24, 25, 2**31 - 1])
def test_any_count_on_the_device(device, count, case):
    x, weight, bias, active, options = make_case(device, *case)
    kept = min(max(count, 0), active.capacity)
    active.count.fill_(count)
    clean = ActiveBlocks.from_indices(active.indices[:kept], active.grid, 2)
    want = sparse_conv2d(x, weight, bias, clean, **options)
    assert_bitwise(sparse_conv2d(x, weight, bias, active, **options), want)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_indices_that_name_no_block_are_skipped(device, case):
    x, weight, bias, active, options = make_case(device, *case)
    ch, cw = active.grid.bcount
    top = 2**31 - 1
    bad = [(2, 0, 0), (0, ch, 0), (0, 0, cw), (-1, 0, 0), (0, -1, 0), (0, 0, -1), (top,) * 3, (-top - 1,) * 3]
    good = [row for r, row in enumerate(active.indices.tolist()) if r % 3 == 0]
    mixed = [row for two in zip(good, bad * 9, strict=False) for row in two]
    clean = ActiveBlocks.from_indices(torch.tensor(good, dtype=torch.int32, device=device), active.grid, 2)
    junk = torch.tensor(mixed, dtype=torch.int32, device=device)
    hostile = ActiveBlocks(
        junk, torch.tensor([len(mixed)]).int().to(device), active.total, active.block_map, active.grid
    )
    want = sparse_conv2d(x, weight, bias, clean, **options)
    assert_bitwise(sparse_conv2d(x, weight, bias, hostile, **options), want)


def test_capacity_overflow(device):
    for dtype in FLOATS:
        x, weight, bias, active, options = make(device, dtype=dtype, channels=16)
        cut = reduce_mask(torch.ones(2, 21, 26, device=device), active.grid, capacity=5)
        y = sparse_conv2d(x, weight, bias, cut, **options)
        assert_conv(y, x, weight, bias, cut, torch.zeros((), dtype=dtype, device=device), **options)


def test_x_may_hold_nan_where_no_active_block_reads(device):
    """The unread part of a persistent buffer is dirty: not a bit of it may come through."""
    for dtype in FLOATS:
        for block in (8, 16, 5):
            x, weight, bias, active, options = make(device, dtype=dtype, channels=16, block=block, density=0.2)
            reads = torch.nn.functional.max_pool2d(active.pixel_mask((21, 26)).float(), 3, 1, 1) > 0
            clean = torch.where(reads, x, 0)
            dirty = laid_out(torch.where(reads, x, float("nan")).to(dtype), "channel_slice")
            want = sparse_conv2d(clean, weight, bias, active, **options)
            assert_bitwise(sparse_conv2d(dirty, weight, bias, active, **options), want)
