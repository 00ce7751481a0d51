"""sparse_conv2d of up to four input channels in 16 bits, which a kernel of tensor cores serves on every GPU."""

import pytest
import torch

from sbnet import sparse_conv2d
from sbnet.select import conv2d_kernel
from support.conv_cases import HALF, check, make
from support.helpers import ACTIVATIONS, LAYOUTS, assert_conv

KERNELS = {
    "3x3": {"kernel": 3, "padding": 1},
    "3x3 stride 2": {"kernel": 3, "padding": 1, "stride": 2},
    "1x1": {"kernel": 1, "padding": 0},
    "2x2 stride 2": {"kernel": 2, "padding": 0, "stride": 2},
    "4x3 dilation 3": {"kernel": (4, 3), "padding": 4, "dilation": 3},
    "4x4 stride 4": {"kernel": 4, "padding": 0, "stride": 4},
    "1x12 stride 3": {"kernel": (1, 12), "padding": 6, "stride": 3},
}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("block", [1, 4, 16, (7, 50)], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_and_blocks(device, kernel, block, dtype):
    for channels, filters in ((1, 64), (3, 16), (3, 17), (4, 40), (2, 1), (3, 96), (3, 104)):
        case = {"channels": channels, "filters": filters, "size": (29, 38), **KERNELS[kernel]}
        assert conv2d_kernel((2, channels, 29, 38), filters, case["kernel"], block).kernel == "few channels"
        check(device, dtype=dtype, block=block, activation="silu", **case)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, layout, activation):
    case = {"dtype": torch.float16, "channels": 3, "filters": 32, "stride": 2, "block": 6, "activation": activation}
    check(device, layout=layout, **case)
    check(device, out_layout=layout, bias=False, density=1.0, **case)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_slopes(device, dtype):
    slope = torch.rand(24, device=device).to(dtype)
    check(device, dtype=dtype, channels=3, filters=24, activation="leaky_relu", slope=slope)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_infinities_stay_with_the_pixels_that_read_them(device, dtype):
    """Missing channels and taps are multiplied, too: with zeros on both sides."""
    x, weight, bias, active, options = make(device, dtype=dtype, channels=3, filters=20, density=1.0)
    x[0, 1, 5, 6], x[1, 2, 20, 9], x[1, 0, 0, 25] = float("inf"), float("nan"), float("-inf")
    y = sparse_conv2d(x, weight, bias, active, **options)
    assert int(y.isfinite().all(1).logical_not().sum()) == 9 + 6 + 4
    assert_conv(y, x, weight, bias, active, torch.zeros((), dtype=dtype, device=device), **options)
