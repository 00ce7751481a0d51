"""sparse_conv2d of 1x1 and 3x3 where several CTAs of a Hopper GPU share the sums of a few tiles."""

import os

import pytest
import torch

from sbnet import BlockGrid, fringe, sparse_conv2d_
from support.conv_cases import HALF, check, make
from support.helpers import assert_bitwise, poison, random_active


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("channels", "filters", "kernel"),
    [
        *((128, 128, 3), (256, 256, 3), (512, 512, 3), (96, 32, 3), (128, 512, 3), (64, 72, 3)),
        *((1024, 256, 1), (2048, 512, 1), (256, 1024, 1), (992, 128, 1), (72, 200, 1), (64, 8, 1)),
    ],
    ids=str,
)
def test_few_tiles(device, channels, filters, kernel, stride, dtype):
    """Reductions of one chunk to seventy-two, tiles of 32 and 64 channels, lists of one cell to all."""
    size, block = (61 if stride == 1 else 122, 40 * stride), 8 if kernel == 3 else 4
    case = {"dtype": dtype, "size": size, "batch": 1, "kernel": kernel, "padding": kernel // 2, "stride": stride}
    case |= {"channels": channels, "filters": filters, "block": block}
    for density in ("one", 0.05, 0.3, 1.0):
        first = check(device, **case, density=density, activation="relu", residual="channels_last")
        assert bool(first.isfinite().all())
    for density, activation, after in ((0.05, "silu", True), (0.1, None, False), (0.2, "gelu", False)):
        check(device, **case, density=density, activation=activation, residual="channels_last", after=after)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [1, 3])
def test_bits_do_not_depend_on_the_rest_of_the_list(device, kernel):
    """A block's sums are cut by what the list has room for, not by what it holds. (Those of other GPUs' kernels may be
    by what it holds: docs/contracts.md.)"""
    if os.environ.get("SBNET_GPU") == "portable":
        pytest.skip("needs Hopper's kernels")
    case = {"dtype": torch.float16, "size": (40, 40), "channels": 256, "filters": 256, "kernel": kernel, "batch": 1}
    x, weight, bias, every, options = make(device, **case, padding=kernel // 2, density=1.0)
    grid = BlockGrid.cover((40, 40), 8)
    ys = []
    for active in (every, random_active(grid, 1, 0.2, device)):
        y = poison((1, 256, 40, 40), torch.float16, device, "channels_last")
        edge = fringe(active, active, (40, 40), 3, 1, 1)
        sparse_conv2d_(x, weight, bias, active, y, fringe=edge, **options)
        ys.append(y)
    mask = active.pixel_mask((40, 40)).expand_as(y)
    assert_bitwise(ys[0][mask], ys[1][mask])
