"""sparse_conv2d on the CPU: runs of pixels, squares, few outputs, threads. (Instruction sets: contracts/.)"""

import pytest
import torch

from sbnet import sparse_conv2d
from sbnet.select import conv2d_kernel
from support.conv_cases import check, make
from support.layer_checks import assert_same_bits_on_any_threads


@pytest.mark.parametrize("block", [8, 10, (4, 17), 64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_runs_of_pixels(dtype, block):
    """Matrix units take pixels of a row in runs and channels in whole products: sizes that fill neither."""
    for channels, filters, kernel, stride, dilation, groups in (
        (20, 16, 3, 1, 1, 1),
        (40, 33, 3, 2, 1, 1),
        (70, 48, 1, 2, 1, 1),
        (33, 7, 5, 1, 2, 1),
        (72, 66, 3, 1, 1, 3),
        (24, 20, 9, 1, 1, 1),
        (130, 16, 2, 3, 3, 1),
    ):
        case = {"channels": channels, "filters": filters, "kernel": kernel, "stride": stride, "dilation": dilation}
        case |= {"groups": groups, "padding": kernel // 2, "block": block, "size": (27, 35), "dtype": dtype}
        check("cpu", residual="channel_slice", **case)
        check("cpu", layout="contiguous", out_layout="channel_slice", **case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dilation", [1, 2, 3, 4, 5, (1, 3), (7, 2), 20], ids=str)
def test_dilated_squares(dilation, dtype):
    """Winograd's squares hold outputs that are as far apart as the taps: tiles that end within a run of neighbours."""
    case = {"channels": 24, "filters": 33, "dilation": dilation, "padding": dilation, "dtype": dtype}
    for size, block in (((21, 30), 16), ((40, 37), (8, 32)), ((19, 26), 7), ((33, 9), (64, 4))):
        check("cpu", **case, size=size, block=block, activation="relu", residual="channels_last")
        check("cpu", **case | {"padding": 1}, size=(45, 47), block=block, layout="contiguous")


@pytest.mark.parametrize("kernel", [5, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_squares_of_five_and_seven_taps(kernel, dtype):
    """Axes of two and three taps together; more channels than are transformed at once, more outputs than a panel."""
    case = {"kernel": kernel, "dtype": dtype, "size": (23, 30)}
    for channels, filters, block in ((24, 33, 16), (90, 80, (8, 32)), (16, 16, 7)):
        case |= {"channels": channels, "filters": filters, "block": block}
        check("cpu", **case, padding=kernel // 2, activation="relu", residual="channels_last")
        check("cpu", **case, padding=1, layout="contiguous", out_layout="plane_slice")
    check("cpu", **case, padding=kernel, dilation=2)


@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize("block", [2, (2, 3), (3, 4), (2, 9), (5, 2)], ids=str)
def test_squares_of_small_blocks(block, kernel):
    """Many blocks a tile, each of few squares; planes that end within a square."""
    case = {"kernel": kernel, "padding": kernel // 2, "block": block}
    assert conv2d_kernel((1, 24, 21, 35), 33, kernel, block, dtype=torch.float32, device="cpu").kernel.startswith("Win")
    for channels, filters, size in ((24, 33, (21, 35)), (70, 64, (9, 14)), (16, 16, (1, 3))):
        case |= {"channels": channels, "filters": filters, "size": size}
        check("cpu", **case, activation="relu", residual="channels_last")
        check("cpu", **case | {"padding": kernel - 1}, layout="contiguous", out_layout="channel_slice")
        check("cpu", **case, dtype=torch.float16, layout="channel_slice")


@pytest.mark.parametrize(
    ("channels", "filters"), [(64, 1), (37, 2), (64, 3), (9, 3), (37, 4), (48, 5), (37, 6), (16, 7), (64, 8)]
)
def test_few_outputs(channels, filters):
    """Heads, whose lanes are input channels: from x itself, whatever is read of it and wherever they go."""
    case = {"channels": channels, "filters": filters, "size": (21, 30)}
    for kernel, stride, dilation, padding in ((3, 1, 1, 1), (1, 1, 1, 0), ((5, 2), 2, 1, 2), (3, (1, 3), 7, 6)):
        case |= {"kernel": kernel, "stride": stride, "dilation": dilation, "padding": padding}
        check("cpu", **case, block=16, activation="relu", residual="channels_last")
        check("cpu", **case, block=(7, 9), activation="gelu", residual="contiguous", out_layout="contiguous")
        check("cpu", **case, block=8, layout="channel_slice", out_layout="channel_slice")
    check("cpu", **case, layout="contiguous")


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("channels", [32, 80, 192])
def test_depthwise_and_narrow_groups_without_patches(channels, width):
    """Whole vectors of channels are read where they lie, but for taps outside: planes that are all border, too."""
    case = {"channels": channels, "filters": channels, "groups": channels // width}
    for size, block in (((20, 33), 16), ((9, 5), 4), ((3, 2), 8)):
        for kernel, stride, dilation, padding in (
            (3, 1, 1, 1), (3, 2, 1, 1), (5, 1, 1, 2), (5, 2, 2, 4), ((1, 8), 1, 1, (0, 6)), (1, 1, 1, 0), (2, 3, 1, 1),
        ):  # fmt: skip
            geometry = {"kernel": kernel, "stride": stride, "dilation": dilation, "padding": padding}
            check("cpu", **case, **geometry, size=size, block=block, activation="relu6", residual="channels_last")
    check("cpu", **case, padding=1, layout="channel_slice", out_layout="channel_slice", residual="channel_slice")


def test_same_bits_with_any_number_of_cpu_threads():
    for channels, filters, groups in ((24, 24, 1), (24, 24, 24), (80, 80, 80), (64, 64, 16), (3, 5, 1)):
        *args, options = make("cpu", channels=channels, filters=filters, groups=groups)
        assert_same_bits_on_any_threads(lambda: sparse_conv2d(*args, **options))  # noqa: B023
