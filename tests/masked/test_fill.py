"""sparse_fill and sparse_fill_: where(active, x, value)."""

import pytest
import torch

from sbnet import BlockGrid, reference, sparse_fill, sparse_fill_
from support.helpers import FLOATS, LAYOUTS, assert_bitwise, laid_out, one_block, poison, random_active, tensor


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("channels", [1, 7, 16])
def test_equals_reference(device, channels, dtype, layout):
    for size, block, density in (((21, 26), (8, 5), 0.4), ((16, 16), 16, 0.5), ((5, 7), 1, 0.3)):
        active = random_active(BlockGrid.cover(size, block), 2, density, device)
        x = laid_out(tensor((2, channels, *size), dtype, device), layout)
        for value in (0.0, -1.7, float("inf")):
            want = reference.sparse_fill(x, active, value)
            assert_bitwise(sparse_fill(x, active, value), want)
            y = laid_out(x, layout)
            assert sparse_fill_(y, active, value) is y
            assert_bitwise(y, want)
        nan = sparse_fill(x, active, float("nan"))  # which NaN is the device's choice
        assert torch.equal(nan.isnan(), ~active.pixel_mask(size).expand_as(x))


@pytest.mark.parametrize("density", [0.0, 1.0, "one"])
def test_inactive_pixels_are_not_read(device, density):
    grid = BlockGrid.cover((20, 27), 8)
    active = one_block(grid, 2, device) if density == "one" else random_active(grid, 2, density, device)
    x = poison((2, 16, 20, 27), torch.float16, device, "channels_last")
    mask = active.pixel_mask((20, 27)).expand_as(x)
    x[mask] = 3.0
    assert_bitwise(sparse_fill(x, active), torch.where(mask, 3.0, 0.0).half().to(x.device))


def test_gradient(device):
    active = random_active(BlockGrid.cover((9, 10), 4), 2, 0.5, device)
    x = tensor((2, 3, 9, 10), torch.float32, device).requires_grad_()
    grad = tensor((2, 3, 9, 10), torch.float32, device)
    sparse_fill(x, active, 5.0).backward(grad)
    assert_bitwise(x.grad, torch.where(active.pixel_mask((9, 10)), grad, 0.0))
    with pytest.raises(RuntimeError, match="use sparse_fill"):
        sparse_fill_(x, active)


def test_errors(device):
    active = random_active(BlockGrid.cover((16, 16), 8), 1, 0.5, device)
    x = torch.zeros(1, 4, 16, 16, device=device)
    with pytest.raises(RuntimeError, match="tiling grid"):
        sparse_fill(torch.zeros(1, 4, 17, 16, device=device), active)
    with pytest.raises(RuntimeError, match="block_map"):
        sparse_fill(torch.zeros(2, 4, 16, 16, device=device), active)
    with pytest.raises(RuntimeError, match="dtype: expected .*, got float64"):
        sparse_fill(x.double(), active)
    with pytest.raises(RuntimeError, match="expanded"):
        sparse_fill_(torch.zeros(1, 1, 16, 16, device=device).expand(1, 4, 16, 16), active)
    with pytest.raises(TypeError, match="ActiveBlocks"):
        sparse_fill(x, active.block_map)
