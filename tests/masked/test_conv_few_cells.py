"""sparse_conv2d of 3x3 where several CTAs of a Hopper GPU share the sums of a few cells."""

import pytest

from support.conv_cases import HALF, check


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("channels", "filters"), [(128, 128), (256, 256), (512, 512), (256, 64), (128, 512)], ids=str)
def test_few_cells_of_many_channels(device, channels, filters, dtype):
    """Up to so many cells several CTAs share a tile's channels; bits may not depend on what ran before."""
    for density in ("one", 0.05, 0.15, 0.3, 0.6):
        case = {"dtype": dtype, "size": (61, 64), "block": 8, "density": density, "batch": 1}
        first = check(device, **case, channels=channels, filters=filters, activation="relu", residual="channels_last")
        assert bool(first.isfinite().all())
    for density, activation in ((0.05, "silu"), (0.1, None)):
        check(device, **case | {"density": density}, channels=channels, filters=filters, activation=activation)
