"""sparse_conv2d whose windows lie side by side: a product of patches on Hopper."""

import pytest
import torch

from support.conv_cases import HALF, check


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("block", [4, 8, 16, (8, 12)], ids=str)
@pytest.mark.parametrize(
    ("side", "channels", "filters"), [(2, 96, 192), (4, 16, 72), (3, 64, 256), (8, 8, 8), (2, 768, 256)]
)
def test_patches_as_products(device, side, channels, filters, block, dtype):
    """Kernel = stride; the plane has a rest of rows and columns that no window reads."""
    if device == "cpu" and (dtype == torch.bfloat16 or channels > 96):
        pytest.skip("slow on a CPU, which treats all of these alike")
    case = {"dtype": dtype, "channels": channels, "filters": filters, "block": block, "kernel": side, "stride": side}
    for density, residual in ((0.3, None), (1.0, "channels_last")):
        size = (side * 21 + side - 1, side * 28 + 1)
        check(device, **case, size=size, padding=0, density=density, residual=residual, activation="gelu")
    check(device, **case, size=(side * 9, side * 8), padding=0, layout="channel_slice", bias=False)
