"""sparse_conv2d of float32 in tf32, which the switch allows on a GPU: by the general kernel on Hopper."""

import pytest
import torch

from sbnet import ActiveBlocks, conv_output_size, fringe, sparse_conv2d, sparse_conv2d_, sparse_conv_transpose2d
from sbnet.select import conv2d_kernel
from support.conv_cases import make, pair
from support.helpers import (
    ACTIVATIONS,
    assert_as_accurate_as_torch,
    assert_bitwise,
    dense_conv2d,
    laid_out,
    poison,
    random_active,
    tensor,
    to_tf32,
)

KINDS = {
    "3x3": {},
    "5x5": {"kernel": 5, "padding": 2},
    "1x3": {"kernel": (1, 3), "padding": 1},
    "1x1": {"kernel": 1, "padding": 0},
    "dilation 6": {"padding": 6, "dilation": 6},
    "stride 2": {"stride": 2},
    "dilation 3 stride 2": {"padding": 3, "dilation": 3, "stride": 2},
}


def judge(y, x, weight, bias, active, outside, **options):
    """On active pixels as accurate as operands rounded to the nearest tf32 allow; elsewhere the bits of `outside`."""
    exact = dense_conv2d(x, weight, bias, torch.float64, **options)
    rounded = dense_conv2d(to_tf32(x), to_tf32(weight), bias, torch.float64, **options).float()
    mask = active.pixel_mask(exact.shape[2:]).expand_as(exact)
    assert_bitwise(y[~mask], outside.expand_as(y)[~mask], "outside the active blocks")
    assert_as_accurate_as_torch(y[mask], rounded[mask], exact[mask], "on the active blocks")


def check(*, activation=None, residual=None, slope=False, out_layout="channels_last", **case):
    x, weight, bias, active, options = make("cuda", **case)
    geometry = (pair(options[name]) for name in ("stride", "padding", "dilation"))
    shape = (x.shape[0], weight.shape[0], *conv_output_size(x.shape[2:], weight.shape[2:], *geometry))
    options["activation"] = activation
    if residual:
        options["residual"] = laid_out(tensor(shape, x.dtype, "cuda"), residual)
    if slope:
        options["slope"] = tensor(shape[1:2], x.dtype, "cuda")
    y = sparse_conv2d(x, weight, bias, active, allow_tf32=True, **options)
    judge(y, x, weight, bias, active, y.new_zeros(()), **options)
    into = poison(shape, x.dtype, "cuda", out_layout)
    sparse_conv2d_(x, weight, bias, active, into, allow_tf32=True, **options)
    judge(into, x, weight, bias, active, y.new_full((), float("nan")), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [8, 16, 10, 12, 24, (8, 16), (7, 50)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_and_blocks(kind, block):
    case = {"block": block, "size": (50, 61), **KINDS[kind]}
    check(**case, channels=20, filters=36, activation="relu", density=1.0)
    check(**case, channels=64, filters=64, activation="silu", residual="channels_last")
    check(**case, channels=32, filters=24, activation="leaky_relu", slope=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("channels", "filters"),
    [(1, 1), (1, 64), (3, 16), (64, 3), (60, 60), (61, 7), (4, 100), (24, 24), (96, 96), (160, 160), (322, 320)],
    ids=str,
)
def test_channels(channels, filters):
    case = {"channels": channels, "filters": filters}
    check(**case, size=(37, 45), block=16, activation="relu", density=0.6)
    check(**case, size=(30, 33), block=10, residual="channels_last", bias=False)
    check(**case, size=(30, 33), block=12, layout="odd_channel_slice", out_layout="odd_channel_slice")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("groups", "inputs", "outputs"),
    [(32, 4, 4), (16, 16, 16), (5, 24, 24), (7, 12, 20), (2, 72, 40), (9, 5, 3), (4, 64, 1)],
    ids=str,
)
def test_groups(groups, inputs, outputs):
    case = {"groups": groups, "channels": groups * inputs, "filters": groups * outputs, "size": (33, 30)}
    check(**case, block=16, activation="relu", density=1.0)
    check(**case, block=8, residual="channels_last", stride=2)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_infinities_and_nan(activation):
    """They reach what reads them, rounded as they are, and no other group."""
    for groups in (1, 8):
        x, weight, bias, active, options = make(
            "cuda", groups=groups, channels=64, filters=64, size=(32, 32), block=16, density=1.0
        )
        options |= {"activation": activation, "residual": tensor((2, 64, 32, 32), x.dtype, "cuda")}
        x[0, 3, 5, 6], x[1, 17, 20, 9], x[1, 40, 20, 9] = float("inf"), float("-inf"), float("nan")
        x[1, 41, 2, 2].view(torch.int32).fill_(0x7F800001)  # NaN whose payload is in bits that tf32 does not have
        weight[9, 0, 0, 0] = float("nan")
        y = sparse_conv2d(x, weight, bias, active, allow_tf32=True, **options)
        judge(y, x, weight, bias, active, y.new_zeros(()), **options)


@pytest.mark.gpu
@pytest.mark.parametrize(("channels", "stride"), [(64, 1), (64, 2), (61, 1)])
def test_operands_are_rounded_to_the_nearest(channels, stride):
    """Sums of positive numbers: cut off instead, they would all be too small. And what tf32 holds is exact."""
    x, weight, _, active, options = make(
        "cuda", channels=channels, filters=64, size=(40, 40), stride=stride, bias=False, density=1.0
    )
    x, weight = x.abs_(), weight.abs_()
    y = sparse_conv2d(x, weight, None, active, allow_tf32=True, **options)
    exact = dense_conv2d(x, weight, None, torch.float64, **options)
    assert abs(float(((y - exact) / exact).mean())) < 2e-5  # 2**-11 is 5e-4
    whole_x, whole_weight = (x * 100).round(), (weight * 100).round()
    y = sparse_conv2d(whole_x, whole_weight, None, active, allow_tf32=True, **options)
    assert_bitwise(y.double(), dense_conv2d(whole_x, whole_weight, None, torch.float64, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [10, 16])
@pytest.mark.parametrize(("channels", "filters"), [(60, 60), (64, 64), (80, 30)])
def test_fringe_and_hostile_lists(channels, filters, block):
    x, weight, bias, active, options = make("cuda", channels=channels, filters=filters, size=(43, 47), block=block)
    junk, keep = active.indices.clone(), torch.ones(len(active.indices), dtype=torch.bool, device="cuda")
    junk[::3, 1], keep[::3] = 10**6, False
    keep[int(active.count) :] = False
    hostile = ActiveBlocks(junk, torch.full_like(active.count, 2**31 - 1), active.total, active.block_map, active.grid)
    fair = ActiveBlocks.from_indices(active.indices[keep], active.grid, 2)
    edge = fringe(fair, random_active(active.grid, 2, 0.5, "cuda"), (43, 47), 3, 1, 1)
    y = poison((2, filters, 43, 47), x.dtype, "cuda", "channels_last")
    sparse_conv2d_(x, weight, bias, hostile, y, fringe=edge, activation="relu", allow_tf32=True, **options)
    outside = torch.full((2, 1, 43, 47), float("nan"), device="cuda")
    outside.flatten()[edge.pixels[: int(edge.count)].long()] = 0
    judge(y, x, weight, bias, fair, outside, activation="relu", **options)


@pytest.mark.gpu
def test_phases_of_a_transposed_convolution():
    x = tensor((1, 64, 24, 28), torch.float32, "cuda").contiguous(memory_format=torch.channels_last)
    weight = tensor((64, 48, 4, 4), torch.float32, "cuda") / 16
    _, _, _, active, _ = make("cuda", size=(48, 56), batch=1, block=16)
    options = {"stride": 2, "padding": 1}
    y = sparse_conv_transpose2d(x, weight, None, active, allow_tf32=True, **options)
    full = [torch.nn.functional.conv_transpose2d(t.double(), w.double(), **options)
            for t, w in ((x, weight), (to_tf32(x), to_tf32(weight)))]  # fmt: skip
    mask = active.pixel_mask((48, 56)).expand_as(y)
    assert_as_accurate_as_torch(y[mask], full[1].float()[mask], full[0][mask])


@pytest.mark.gpu
@pytest.mark.parametrize(("channels", "filters"), [(64, 64), (256, 256), (60, 3)])
def test_same_bits_each_time(channels, filters):
    x, weight, bias, active, options = make("cuda", channels=channels, filters=filters, size=(400, 300), block=16)
    first = sparse_conv2d(x, weight, bias, active, allow_tf32=True, **options)
    judge(first, x, weight, bias, active, first.new_zeros(()), **options)
    for _ in range(20):
        assert_bitwise(sparse_conv2d(x, weight, bias, active, allow_tf32=True, **options), first)


@pytest.mark.parametrize("block", [8, 10, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_general_kernel(kind, block):
    """By the switch only, and without a stride."""
    options = {name: v for name, v in KINDS[kind].items() if name != "kernel"}
    layer = ((1, 60, 64, 64), 64, KINDS[kind].get("kernel", 3), block)
    chosen = [conv2d_kernel(*layer, dtype=torch.float32, allow_tf32=allowed, **options) for allowed in (True, False)]
    allowed = "implicit GEMM" if "stride" in options else "Hopper general"
    assert [c.kernel for c in chosen] == [allowed, "float32 in words"]
