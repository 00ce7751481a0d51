"""sparse_conv2d and sparse_conv2d_: every convolution on active blocks, as accurate as PyTorch's dense one."""

import itertools

import pytest
import torch

from sbnet import BlockGrid, sparse_conv2d, sparse_conv2d_
from support.conv_cases import check, make, pair
from support.helpers import (
    ACTIVATIONS,
    FLOATS,
    LAYOUTS,
    assert_as_accurate_as_torch,
    assert_bitwise,
    assert_conv,
    assert_layout,
    dense_conv2d,
    laid_out,
    random_active,
    tensor,
)


# ---- geometry
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("stride", [1, 2, 3, (2, 1)], ids=str)
@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5, 7, (1, 7), (7, 1)], ids=str)
def test_kernels_and_strides(device, kernel, stride, dtype):
    padding = tuple(k // 2 for k in pair(kernel))
    check(
        device, dtype=dtype, kernel=kernel, stride=stride, padding=padding, channels=12, filters=10, activation="relu"
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("kernel", "padding", "dilation", "stride"),
    [
        (3, 0, 1, 1),
        (3, 2, 2, 1),
        (3, (4, 1), (4, 1), 1),
        (3, 5, 1, 1),  # padding larger than the kernel: whole output pixels of bias alone
        (1, 3, 1, 1),
        (2, (0, 3), (3, 2), 2),
        (5, 6, 3, 3),
        ((3, 1), (1, 0), 1, (1, 2)),
        ((1, 5), (2, 7), (1, 2), 1),
    ],
    ids=str,
)
def test_padding_and_dilation(device, kernel, padding, dilation, stride, dtype):
    check(device, dtype=dtype, kernel=kernel, padding=padding, dilation=dilation, stride=stride, filters=16)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("channels", "filters", "batch", "dilation", "density"),
    [(64, 256, 8, (4, 1), 0.4), (192, 128, 1, 12, 0.4), (256, 384, 1, (3, 36), 1.0), (192, 256, 24, 5, 1.0)],
    ids=str,
)
def test_taps_far_apart(device, channels, filters, batch, dilation, density, dtype):
    """Few tiles and many."""
    if device == "cpu":
        batch, channels = min(batch, 2), 64
    case = {"channels": channels, "filters": filters, "batch": batch, "dilation": dilation, "density": density}
    case |= {"kernel": 3, "padding": dilation, "size": (40, 44), "activation": "relu", "residual": "channels_last"}
    check(device, dtype=dtype, **case)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("kernel", "dilation", "stride"),
    [((11, 9), 1, 1), ((11, 3), 2, 1), ((3, 19), (1, 2), (2, 3)), ((17, 1), 3, 2), (9, 1, 2)],
    ids=str,
)
def test_kernels_of_many_taps(device, kernel, dilation, stride, dtype):
    """More taps on an axis than a CPU kernel takes at a time (8)."""
    padding = tuple((k - 1) * d // 2 for k, d in zip(pair(kernel), pair(dilation), strict=True))
    check(device, dtype=dtype, kernel=kernel, padding=padding, dilation=dilation, stride=stride, filters=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_kernel_larger_than_the_plane(device, dtype):
    check(device, dtype=dtype, size=(3, 4), kernel=7, padding=3, block=4, density=1.0)
    check(device, dtype=dtype, size=(3, 4), kernel=(3, 4), padding=0, block=4, density=1.0)  # one output pixel
    check(device, dtype=dtype, size=(1, 1), kernel=3, padding=1, block=8, density=1.0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "block", [4, 8, 10, 16, 17, 24, 32, 64, (8, 16), (16, 8), (5, 7), (4, 64), (1, 1), (1, 16), (3, 40)], ids=str
)
def test_block_sizes(device, block, dtype):
    size = (50, 88) if max(pair(block)) >= 24 else (37, 45)
    check(device, dtype=dtype, block=block, size=size, channels=16, filters=24, activation="relu")
    check(device, dtype=dtype, block=block, size=size, kernel=5, stride=2, padding=2, channels=3, filters=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("filters", [1, 3, 8, 17, 64, 96, 256])
@pytest.mark.parametrize("channels", [1, 3, 8, 17, 64, 96, 256])
def test_channels(device, channels, filters, kernel, dtype):
    check(device, dtype=dtype, channels=channels, filters=filters, kernel=kernel, padding=kernel // 2, size=(13, 19))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("channels", "filters", "groups"),
    [
        (8, 8, 2),
        (12, 18, 3),
        (64, 64, 4),
        (96, 32, 32),
        (10, 20, 5),
        (3, 3, 3),
        (16, 16, 16),
        (64, 64, 64),
        (40, 40, 40),
        (17, 34, 17),
        (8, 32, 8),
        (24, 72, 24),
    ],  # depthwise with a multiplier
    ids=str,
)
def test_groups_and_depthwise(device, channels, filters, groups, dtype):
    case = {"dtype": dtype, "channels": channels, "filters": filters, "groups": groups}
    check(device, **case, activation="relu6", residual="channels_last")
    check(device, **case, kernel=5, stride=2, padding=2, block=(4, 8))
    check(device, **case, kernel=(3, 2), dilation=2, padding=(2, 1), block=10, layout="contiguous")


def test_depthwise_of_large_strides(device):
    """No kernel made for one size and stride may serve another pair of them."""
    for kernel, stride in ((2, 11), (2, 12), (1, 21), (4, 11), (6, 11)):
        check(device, channels=16, filters=16, groups=16, kernel=kernel, stride=stride, padding=0, size=(60, 70))


# ---- how much is active
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("density", [0, "one", 0.1, 0.5, 1.0])
@pytest.mark.parametrize("batch", [1, 3])
def test_densities(device, batch, density, dtype):
    for channels, kernel in ((16, 3), (16, 1), (3, 3)):
        y = check(
            device, dtype=dtype, batch=batch, density=density, channels=channels, kernel=kernel, padding=kernel // 2
        )
        assert density != 0 or not y.any()


def test_a_full_mask_is_the_dense_convolution(device):
    x, weight, bias, active, options = make(device, size=(50, 88), density=1.0, channels=16, filters=16)
    y = sparse_conv2d(x, weight, bias, active, **options)
    dense = [dense_conv2d(x, weight, bias, t, **options) for t in (torch.float32, torch.float64)]
    assert_as_accurate_as_torch(y, *dense)


def test_empty_batch(device):
    for dtype in (torch.float32, torch.float16):
        x, weight, bias, active, options = make(device, dtype=dtype, batch=0)
        assert sparse_conv2d(x, weight, bias, active, **options).shape == (0, 8, 21, 26)
        sparse_conv2d_(x, weight, bias, active, torch.empty_like(x), **options)


# ---- layouts
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("out_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, layout, out_layout, dtype):
    y = check(device, dtype=dtype, channels=16, filters=16, layout=layout, out_layout=out_layout)
    assert_layout(y, layout not in ("contiguous", "plane_slice", "permuted"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_residual(device, layout, dtype):
    check(device, dtype=dtype, channels=16, filters=16, residual=layout, activation="relu")
    check(device, dtype=dtype, channels=5, filters=5, groups=5, residual=layout, activation="relu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("channels", "groups", "kernel"), [(16, 1, 3), (16, 16, 3), (12, 1, 1), (5, 1, 3), (8, 2, 5)])
def test_layouts_of_weight_and_bias(device, channels, groups, kernel, dtype):
    x, weight, _, active, options = make(
        device, dtype=dtype, channels=channels, filters=channels, groups=groups, kernel=kernel, padding=kernel // 2
    )
    bias = tensor((channels, 3), dtype, device)[:, 1]
    outside = torch.zeros((), dtype=dtype, device=device)
    assert_conv(sparse_conv2d(x, weight, bias, active, **options), x, weight, bias, active, outside, **options)
    want = sparse_conv2d(x, weight, bias.contiguous(), active, **options)
    for view in (
        weight.contiguous(memory_format=torch.channels_last),
        weight.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0),
        torch.stack([weight, weight * 9], -1)[..., 0],
        torch.cat([weight * 9, weight])[channels:],
    ):
        assert_bitwise(sparse_conv2d(x, view, bias, active, **options), want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("kernel", "groups"), [(3, 1), (1, 1), (3, 16)])
def test_x_and_out_are_channel_slices_of_one_buffer(device, kernel, groups, dtype):
    """A dense block that grows in place: channels [16:32] from [0:16], the rest of the buffer stays."""
    for channels_last in (True, False):
        shape = (2, 21, 26, 48) if channels_last else (2, 48, 21, 26)
        buffer = tensor(shape, dtype, device)
        buffer = buffer.permute(0, 3, 1, 2) if channels_last else buffer
        _, weight, bias, active, options = make(
            device, dtype=dtype, channels=16, filters=16, groups=groups, kernel=kernel, padding=kernel // 2
        )
        before = buffer.clone()
        sparse_conv2d_(buffer[:, :16], weight, bias, active, buffer[:, 16:32], activation="relu", **options)
        assert_bitwise(buffer[:, :16], before[:, :16])
        assert_bitwise(buffer[:, 32:], before[:, 32:])
        assert_conv(
            buffer[:, 16:32], before[:, :16], weight, bias, active, before[:, 16:32], activation="relu", **options
        )


def test_x_and_out_of_one_buffer_that_overlap_are_refused(device):
    buffer = torch.zeros(2, 21, 26, 48, device=device).permute(0, 3, 1, 2)
    _, weight, bias, active, options = make(device, channels=16, filters=16)
    for first, second in ((0, 8), (8, 0), (0, 0), (15, 0), (32, 17)):
        with pytest.raises(RuntimeError, match="sparse_conv2d.*out: expected memory of its own, got that of x"):
            sparse_conv2d_(
                buffer[:, first : first + 16], weight, bias, active, buffer[:, second : second + 16], **options
            )
    planes = torch.zeros(2, 16, 40, 26, device=device)
    with pytest.raises(RuntimeError, match="expected memory of its own|memory apart"):
        sparse_conv2d_(planes[:, :, :21], weight, bias, active, planes[:, :, 10:31], **options)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("kernel", "groups", "channels"), [(3, 1, 16), (1, 1, 16), (3, 16, 16), (3, 1, 5), (5, 2, 6), (3, 1, 64)]
)
def test_the_residual_may_be_out(device, kernel, groups, channels, dtype):
    """out += conv(x) in place, the last step of a residual block."""
    for layout, after in itertools.product(("channels_last", "contiguous", "channel_slice"), (False, True)):
        x, weight, bias, active, options = make(
            device, dtype=dtype, channels=channels, filters=channels, groups=groups, kernel=kernel, padding=kernel // 2
        )
        out = laid_out(tensor(x.shape, dtype, device), layout)
        before = out.clone()
        options |= {"activation": "silu" if after else "relu", "residual_after": after}
        sparse_conv2d_(x, weight, bias, active, out, residual=out, **options)
        assert_conv(out, x, weight, bias, active, before, residual=before, **options)


def test_an_expanded_residual(device):
    for dtype in (torch.float32, torch.float16):
        x, weight, bias, active, options = make(device, dtype=dtype, channels=16, filters=16)
        for residual in (tensor((1, 16, 1, 1), dtype, device), tensor((2, 1, 21, 26), dtype, device)):
            residual = residual.expand(2, 16, 21, 26)
            y = sparse_conv2d(x, weight, bias, active, residual=residual, **options)
            zero = torch.zeros((), dtype=dtype, device=device)
            assert_conv(y, x, weight, bias, active, zero, residual=residual, **options)


def test_a_residual_that_half_overlaps_out_is_refused(device):
    """out's pixels would be read after they were written, or before: neither is what anyone wants."""
    buffer = torch.zeros(2, 21, 27, 16, device=device).permute(0, 3, 1, 2)
    x, weight, bias, active, options = make(device, channels=16, filters=16)
    with pytest.raises(RuntimeError, match="sparse_conv2d.*residual: .*out"):
        sparse_conv2d_(x, weight, bias, active, buffer[..., 1:], residual=buffer[..., :-1], **options)


def test_an_expanded_out_is_refused(device):
    x, weight, bias, active, options = make(device, channels=16, filters=16)
    for shape in ((1, 16, 21, 26), (2, 1, 21, 26), (2, 16, 21, 1)):
        out = torch.zeros(shape, device=device).expand(2, 16, 21, 26)
        with pytest.raises(RuntimeError, match="sparse_conv2d.*out: .*an expanded one"):
            sparse_conv2d_(x, weight, bias, active, out, **options)


# ---- the epilogue
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("residual", [None, "channels_last"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("channels", "groups", "kernel", "stride", "block"),
    [(16, 1, 3, 1, 8), (16, 4, 3, 1, 8), (16, 16, 3, 1, 8), (16, 1, 1, 1, 8), (5, 1, 3, 2, 5)],
)
def test_activations(device, channels, groups, kernel, stride, block, dtype, activation, residual, after):
    """NaN in x must come out of every pixel that reads it, through every activation, and nowhere else."""
    torch.manual_seed(3)
    x, weight, bias, active, options = make(
        device, dtype=dtype, channels=channels, filters=channels, groups=groups, kernel=kernel, stride=stride,
        padding=kernel // 2, block=block, density=0.7,
    )  # fmt: skip
    x[0, 0, 3, 4] = x[1, channels - 1, 20, 25] = x[0, 2, 0, 13] = float("nan")
    bias = bias * 4  # reach relu6's and hardswish's upper branches
    options |= {"activation": activation, "residual_after": after}
    out = sparse_conv2d(x, weight, bias, active, **options)
    if residual is not None:
        options["residual"] = laid_out(tensor(out.shape, dtype, device), residual)
        options["residual"][1, 1, 5, 6] = float("nan")
        out = sparse_conv2d(x, weight, bias, active, **options)
    assert bool(out.isnan().any())
    assert not bool(out.isnan().all())
    assert_conv(out, x, weight, bias, active, torch.zeros((), dtype=dtype, device=device), **options)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_activations_far_from_zero(device, dtype):
    """A 1x1 identity: the activation alone, to where exp overflows."""
    x = torch.linspace(-120, 120, 16 * 16 * 8, device=device).reshape(1, 8, 16, 16).to(dtype)
    weight = torch.eye(8, device=device, dtype=dtype)[:, :, None, None]
    active = random_active(BlockGrid.cover((16, 16), 8), 1, 1.0, device)
    for activation in ACTIVATIONS:
        y = sparse_conv2d(x, weight, None, active, activation=activation)
        zero = torch.zeros((), dtype=dtype, device=device)
        assert_conv(y, x, weight, None, active, zero, activation=activation)
        assert bool(y.isfinite().all())


@pytest.mark.parametrize("slope", [0.0, 0.2, 1.0, 1.5, -0.5])
def test_negative_slope(device, slope):
    for dtype in (torch.float32, torch.float16):
        x, weight, bias, active, options = make(device, dtype=dtype, channels=16)
        options |= {"activation": "leaky_relu", "negative_slope": slope}
        y = sparse_conv2d(x, weight, bias, active, **options)
        assert_conv(y, x, weight, bias, active, torch.zeros((), dtype=dtype, device=device), **options)


@pytest.mark.parametrize("bias", ["none", "same", "float32"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("channels", "groups"), [(16, 1), (16, 16), (5, 1)])
def test_bias_dtypes(device, channels, groups, dtype, bias):
    x, weight, b, active, options = make(device, dtype=dtype, channels=channels, filters=channels, groups=groups)
    b = None if bias == "none" else b.float() + 1e-4 if bias == "float32" else b
    y = sparse_conv2d(x, weight, b, active, **options)
    assert_conv(y, x, weight, b, active, torch.zeros((), dtype=dtype, device=device), **options)


def test_a_float32_bias_is_not_rounded_to_half(device):
    """1 - 1 + 2**-13: with the bias rounded to float16 nothing of it is left."""
    x, weight = torch.ones(1, 8, 8, 8, device=device).half(), torch.zeros(8, 8, 3, 3, device=device).half()
    weight[:, 0, 1, 1] = -1
    active = random_active(BlockGrid.cover((8, 8), 8), 1, 1.0, device)
    y = sparse_conv2d(x, weight, torch.full((8,), 1 + 2**-13, device=device), active, padding=1)
    assert bool((y == 2**-13).all())


def test_float32_keeps_float32_accuracy(device):
    """Values that tf32 or bf16 would round away, with PyTorch's own switches at their defaults."""
    x, weight, _, active, options = make(device, channels=64, filters=64, size=(32, 32), bias=False)
    y = sparse_conv2d(x, weight, None, active, **options)
    exact = dense_conv2d(x, weight, None, torch.float64, **options)
    mask = active.pixel_mask((32, 32)).expand_as(y)
    error = (y.double() - exact)[mask].square().mean().sqrt()
    assert float(error) < 1e-6


@pytest.mark.gpu
def test_tf32_by_the_switch_only():
    x, weight, _, active, options = make("cuda", channels=64, filters=64, size=(32, 32), bias=False)
    exact = dense_conv2d(x, weight, None, torch.float64, **options)
    mask = active.pixel_mask((32, 32)).expand_as(exact)
    y = sparse_conv2d(x, weight, None, active, allow_tf32=True, **options)
    error = (y.double() - exact)[mask].square().mean().sqrt()
    assert float(error) < 2e-3
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True  # PyTorch's switches are not ours
    y = sparse_conv2d(x, weight, None, active, **options)
    error = (y.double() - exact)[mask].square().mean().sqrt()
    assert float(error) < 1e-6


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "groups"), [(64, 3, 1, 1), (24, 3, 2, 1), (24, 5, 1, 24), (24, 1, 1, 1)]
)
def test_same_bits_each_time(device, channels, kernel, stride, groups, dtype):
    case = {"kernel": kernel, "stride": stride, "groups": groups, "padding": kernel // 2, "size": (50, 88)}
    x, weight, bias, active, options = make(device, dtype=dtype, channels=channels, filters=channels, **case)
    first = sparse_conv2d(x, weight, bias, active, activation="silu", **options)
    for _ in range(10):
        assert_bitwise(sparse_conv2d(x, weight, bias, active, activation="silu", **options), first)
    # and whatever else is active: so for these layers, though docs/contracts.md does not promise it
    everything = random_active(active.grid, 2, 1.0, device)
    mask = active.pixel_mask(first.shape[2:]).expand_as(first)
    whole = sparse_conv2d(x, weight, bias, everything, activation="silu", **options)
    assert_bitwise(whole[mask], first[mask], "a block alone and among others")
