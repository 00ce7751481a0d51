"""sparse_conv2d and sparse_conv2d_: every convolution on active blocks, as accurate as PyTorch's dense one."""

import pytest
import torch
from helpers import (
    ACTIVATIONS,
    FLOATS,
    LAYOUTS,
    assert_as_accurate_as_torch,
    assert_bitwise,
    assert_conv,
    assert_layout,
    dense_conv2d,
    laid_out,
    one_block,
    poison,
    random_active,
    run_python,
    tensor,
)

from sbnet import ActiveBlocks, BlockGrid, conv_output_size, reduce_mask, sparse_conv2d, sparse_conv2d_

HALF = [torch.float16, torch.bfloat16]


def pair(v):
    return (v, v) if isinstance(v, int) else tuple(v)


def make(
    device,
    dtype=torch.float32,
    channels=8,
    filters=8,
    size=(21, 26),
    block=8,
    kernel=3,
    batch=2,
    density=0.4,
    bias=True,
    layout="channels_last",
    stride=1,
    padding=1,
    dilation=1,
    groups=1,
):
    """x, weight, bias, active, conv options: unit-variance outputs, so that an error has a scale."""
    r, s = pair(kernel)
    x = laid_out(tensor((batch, channels, *size), dtype, device), layout)
    weight = tensor((filters, channels // groups, r, s), torch.float32, device) / (channels // groups * r * s) ** 0.5
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    out = conv_output_size(size, (r, s), pair(stride), pair(padding), pair(dilation))
    grid = BlockGrid.cover(out, block)
    active = one_block(grid, batch, device) if density == "one" else random_active(grid, batch, density, device)
    return x, weight.to(dtype), tensor((filters,), dtype, device) if bias else None, active, options


def check(device, *, out_layout="channels_last", activation=None, residual=None, **case):
    """Both forms: zeros outside, and NaN kept outside. Returns the functional result."""
    x, weight, bias, active, options = make(device, **case)
    out = conv_output_size(
        x.shape[2:], weight.shape[2:], *(pair(options[k]) for k in ("stride", "padding", "dilation"))
    )
    shape = (x.shape[0], weight.shape[0], *out)
    options["activation"] = activation
    if residual is not None:
        options["residual"] = laid_out(tensor(shape, x.dtype, device), residual)
    y = sparse_conv2d(x, weight, bias, active, **options)
    assert_conv(y, x, weight, bias, active, torch.zeros((), dtype=x.dtype, device=device), **options)
    into = poison(shape, x.dtype, device, out_layout)
    assert sparse_conv2d_(x, weight, bias, active, into, **options) is None
    nan = torch.full((), float("nan"), dtype=x.dtype, device=device)
    assert_conv(into, x, weight, bias, active, nan, **options)
    mask = active.pixel_mask(out).expand(shape)
    assert_bitwise(into[mask], y[mask], "the two forms")
    return y


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
        with pytest.raises(RuntimeError, match="sparse_conv2d.*out: shares memory with x"):
            sparse_conv2d_(
                buffer[:, first : first + 16], weight, bias, active, buffer[:, second : second + 16], **options
            )
    planes = torch.zeros(2, 16, 40, 26, device=device)
    with pytest.raises(RuntimeError, match="shares memory"):
        sparse_conv2d_(planes[:, :, :21], weight, bias, active, planes[:, :, 10:31], **options)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("kernel", "groups", "channels"), [(3, 1, 16), (1, 1, 16), (3, 16, 16), (3, 1, 5), (5, 2, 6), (3, 1, 64)]
)
def test_the_residual_may_be_out(device, kernel, groups, channels, dtype):
    """out += conv(x) in place, the last step of a residual block."""
    for layout in ("channels_last", "contiguous", "channel_slice"):
        x, weight, bias, active, options = make(
            device, dtype=dtype, channels=channels, filters=channels, groups=groups, kernel=kernel, padding=kernel // 2
        )
        out = laid_out(tensor(x.shape, dtype, device), layout)
        before = out.clone()
        sparse_conv2d_(x, weight, bias, active, out, residual=out, activation="relu", **options)
        assert_conv(out, x, weight, bias, active, before, residual=before, activation="relu", **options)


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
        with pytest.raises(RuntimeError, match="sparse_conv2d.*out: an expanded tensor"):
            sparse_conv2d_(x, weight, bias, active, out, **options)


# ---- the epilogue
@pytest.mark.parametrize("residual", [None, "channels_last"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("channels", "groups", "kernel", "stride", "block"),
    [(16, 1, 3, 1, 8), (16, 4, 3, 1, 8), (16, 16, 3, 1, 8), (16, 1, 1, 1, 8), (5, 1, 3, 2, 5)],
)
def test_activations(device, channels, groups, kernel, stride, block, dtype, activation, residual):
    """NaN in x must come out of every pixel that reads it, through every activation, and nowhere else."""
    torch.manual_seed(3)
    x, weight, bias, active, options = make(
        device,
        dtype=dtype,
        channels=channels,
        filters=channels,
        groups=groups,
        kernel=kernel,
        stride=stride,
        padding=kernel // 2,
        block=block,
        density=0.7,
    )
    x[0, 0, 3, 4] = x[1, channels - 1, 20, 25] = x[0, 2, 0, 13] = float("nan")
    bias = bias * 4  # reach relu6's and hardswish's upper branches
    options["activation"] = activation
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


# ---- the first fast case on Hopper: 3x3, stride 1, padding 1, sides and channels multiples of 8, fp16 and bf16
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("block", [8, 16, (8, 16), (16, 8), 24, 32, (8, 32), (64, 8)], ids=str)
@pytest.mark.parametrize("size", [(50, 88), (37, 45), (64, 64), (7, 5)], ids=str)
def test_hopper_planes_and_blocks(device, size, block, dtype):
    if device == "cpu" and (dtype == torch.bfloat16 or size == (64, 64)):
        pytest.skip("slow on a CPU, which treats all of these alike")
    for density in (0.3, 1.0):
        case = {"dtype": dtype, "size": size, "block": block, "density": density}
        check(device, **case, channels=64, filters=64, activation="relu")
    check(device, **case, channels=16, filters=40, residual="channels_last", activation="silu")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    ("channels", "filters"),
    [
        (8, 8),
        (8, 64),
        (64, 8),
        (16, 24),
        (24, 16),
        (32, 32),
        (40, 72),
        (56, 56),
        (64, 64),
        (72, 64),
        (96, 96),
        (128, 128),
    ]
    + [(136, 120), (128, 256), (256, 64)]
    + [
        pytest.param(*ck, marks=pytest.mark.gpu)
        for ck in ((256, 256), (512, 512), (512, 8), (8, 512), (384, 264), (200, 328))
    ],
    ids=str,
)
def test_hopper_channels(device, channels, filters, dtype):
    if device == "cpu" and channels * filters > 40_000:
        pytest.skip("large for a CPU")
    case = {"dtype": dtype, "size": (37, 45), "block": 16, "channels": channels, "filters": filters}
    check(device, **case, activation="relu", density=0.5)
    check(device, **case, residual="channels_last", density=0.2)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_hopper_views(device, batch, dtype):
    """TMA descriptors from real strides: slices, cat operands, clipped batches."""
    for layout in ("channel_slice", "odd_channel_slice", "plane_slice", "batch_slice"):
        case = {"dtype": dtype, "size": (37, 45), "block": 16, "batch": batch, "layout": layout}
        check(device, **case, channels=16, filters=64, out_layout="channel_slice", residual="channel_slice")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 400, 704, 64), (1, 200, 352, 128), (1, 100, 176, 256), (1, 50, 88, 512), (8, 128, 128, 256)], ids=str
)
def test_hopper_benchmark_shapes(shape, dtype):
    n, h, w, c = shape
    for density in (0.05, 1.0):
        x, weight, bias, active, options = make(
            "cuda", dtype=dtype, channels=c, filters=c, size=(h, w), block=16, batch=n, density=density
        )
        y = sparse_conv2d(x, weight, bias, active, activation="relu", **options)
        # float64 of the whole plane would take seconds: judge against float32 instead, 2,000 times finer than half
        mask = active.pixel_mask((h, w)).expand_as(y)
        exact = dense_conv2d(x, weight, bias, torch.float32, activation="relu", **options)
        torchs = dense_conv2d(x, weight, bias, dtype, activation="relu", **options)
        assert_as_accurate_as_torch(y[mask], torchs[mask], exact[mask])
        assert not bool(y[~mask].any())


# ---- its other fast cases: 1x1 of stride 1 and 2, 3x3 of stride 2
FAST = {"1x1": (1, 1), "1x1 stride 2": (1, 2), "3x3 stride 2": (3, 2)}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("block", [8, 16, (8, 16), (16, 8), 24, 32, (64, 8), 4, (12, 20)], ids=str)
@pytest.mark.parametrize("size", [(50, 88), (37, 45), (7, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("case", FAST)
def test_fast_planes_and_blocks(device, case, size, block, dtype):
    if device == "cpu" and (dtype == torch.bfloat16 or pair(block)[0] > 8):
        pytest.skip("slow on a CPU, which treats all of these alike")
    kernel, stride = FAST[case]
    options = {"dtype": dtype, "size": size, "block": block, "kernel": kernel, "stride": stride, "padding": kernel // 2}
    for density in (0.3, 1.0):
        check(device, **options, density=density, channels=64, filters=64, activation="relu")
        check(device, **options, density=density, channels=16, filters=136, residual="channels_last", activation="silu")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    ("channels", "filters"),
    [(8, 8), (8, 64), (24, 96), (96, 24), (48, 48), (64, 64), (72, 200), (128, 128), (136, 320)]
    + [pytest.param(*ck, marks=pytest.mark.gpu) for ck in ((64, 256), (384, 96), (512, 64), (2048, 8), (1024, 264))],
    ids=str,
)
@pytest.mark.parametrize("case", FAST)
def test_fast_channels(device, case, channels, filters, dtype):
    if device == "cpu" and channels * filters > 10_000:
        pytest.skip("large for a CPU")
    kernel, stride = FAST[case]
    for batch, size in ((1, (37, 45)), (2, (150, 170))) if device == "cuda" else ((1, (19, 27)),):
        options = {"dtype": dtype, "kernel": kernel, "stride": stride, "padding": kernel // 2, "batch": batch}
        options |= {"size": size, "channels": channels, "filters": filters, "block": 16}
        check(device, **options, activation="relu", density=0.5)
        check(device, **options, residual="channels_last", density=0.2, bias=False)


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [None, "channels_last"])
@pytest.mark.parametrize(("channels", "filters"), [(512, 2048), (1024, 256), (1024, 192), (512, 128), (256, 1024)])
def test_fast_1x1_of_many_channels_and_tiles(channels, filters, residual):
    """Where shared memory does not hold the weights they are streamed, and all fits only just."""
    case = {"dtype": torch.float16, "kernel": 1, "padding": 0, "size": (190, 190), "block": 16, "batch": 1}
    check("cuda", **case, channels=channels, filters=filters, residual=residual, density=0.9, activation="relu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("block", [16, (8, 24), 4, (12, 20)], ids=str)
@pytest.mark.parametrize(("channels", "filters"), [(64, 256), (256, 512), (320, 256), (512, 768), (1024, 256)], ids=str)
def test_fast_1x1_of_256_channels_at_a_time(channels, filters, block, stride, dtype):
    """Planes that have room for many tiles, and lists that are long, short, of one block, empty."""
    case = {"dtype": dtype, "kernel": 1, "padding": 0, "stride": stride, "block": block, "batch": 1}
    case |= {"channels": channels, "filters": filters, "size": (stride * 260 - 1, stride * 275)}
    check("cuda", **case, density=0.6, activation="relu")
    check("cuda", **case, density=0.02, activation="silu", residual="channels_last", out_layout="channel_slice")
    check("cuda", **case, density="one", bias=False, layout="channel_slice")
    check("cuda", **case, density=0.0, activation="relu6")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("layout", ["channel_slice", "odd_channel_slice", "plane_slice", "batch_slice"])
@pytest.mark.parametrize("case", FAST)
def test_fast_views(device, case, layout, dtype):
    kernel, stride = FAST[case]
    options = {"dtype": dtype, "kernel": kernel, "stride": stride, "padding": kernel // 2, "size": (37, 45)}
    check(device, **options, block=16, channels=16, filters=64, layout=layout, out_layout="channel_slice")
    check(device, **options, block=8, channels=72, filters=80, layout=layout, residual="channel_slice")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("block", [8, 16, (8, 16), 24, 32, 10], ids=str)
@pytest.mark.parametrize("filters", [8, 24, 64, 72])
@pytest.mark.parametrize("size", [(50, 88), (37, 48), (8, 7), (1, 8)], ids=str)
def test_fast_stem(device, size, filters, block, dtype):
    """7x7, stride 2, three channels; rows of x begin at multiples of 16 bytes or the portable kernel takes it."""
    if device == "cpu" and (dtype == torch.bfloat16 or filters > 8):
        pytest.skip("slow on a CPU, which treats all of these alike")
    options = {"dtype": dtype, "size": size, "block": block, "kernel": 7, "stride": 2, "padding": 3}
    for density in (0.3, 1.0):
        check(device, **options, density=density, channels=3, filters=filters, activation="relu")
    check(device, **options, channels=3, filters=filters, activation="gelu", bias=False, out_layout="channel_slice")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fast_stem_reads_no_pixel_too_many(device, activation, dtype):
    """NaN beside every receptive field, and in a pixel that 16 outputs read."""
    x, weight, bias, active, options = make(
        device, dtype=dtype, channels=3, filters=64, kernel=7, stride=2, padding=3, size=(64, 64), density=0.4
    )
    options["activation"] = activation
    reads = torch.nn.functional.conv_transpose2d(
        active.pixel_mask((32, 32)).float(), torch.ones(1, 1, 7, 7, device=device), None, 2, 3, 1
    )
    x[:, 1, 20, 21] = float("nan")
    clean = torch.where(reads > 0, x, 0).contiguous(memory_format=torch.channels_last)
    dirty = torch.where(reads > 0, x, float("nan")).to(dtype).contiguous(memory_format=torch.channels_last)
    y = sparse_conv2d(dirty, weight, bias, active, **options)
    assert_conv(y, clean, weight, bias, active, torch.zeros((), dtype=dtype, device=device), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("case", FAST)
def test_fast_cases_equal_the_portable_kernel(case, dtype):
    """The same list, whatever stands in it: rows that are no blocks, counts too large, NaN where nobody looks."""
    kernel, stride = FAST[case]
    for channels, filters, block in ((64, 64, 16), (24, 96, 8), (200, 136, 16)):
        x, weight, bias, active, options = make(
            "cuda", dtype=dtype, kernel=kernel, stride=stride, padding=kernel // 2, block=block, density=0.5,
            channels=channels, filters=filters, size=(75, 91),
        )  # fmt: skip
        junk = active.indices.clone()
        junk[::3, 1] = 10**6
        junk[1::5, 0] = -1
        hostile = ActiveBlocks(
            junk, torch.full_like(active.count, 2**31 - 1), active.total, active.block_map, active.grid
        )
        x[0, :, 9, 9] = float("nan")
        fast = sparse_conv2d(x, weight, bias, hostile, **options)
        # the portable kernel takes what TMA cannot: an offset of one element
        other = torch.empty(x.numel() + 1, dtype=dtype, device="cuda")[1:].view(x.permute(0, 2, 3, 1).shape)
        portable = sparse_conv2d(
            other.copy_(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), weight, bias, hostile, **options
        )
        assert_bitwise(fast.isnan(), portable.isnan())
        assert_bitwise(fast == 0, portable == 0)
        torch.testing.assert_close(fast, portable, equal_nan=True, rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "groups"), [(64, 3, 1, 1), (24, 3, 2, 1), (24, 5, 1, 24), (24, 1, 1, 1)]
)
def test_same_bits_each_time(device, channels, kernel, stride, groups, dtype):
    x, weight, bias, active, options = make(
        device,
        dtype=dtype,
        channels=channels,
        filters=channels,
        kernel=kernel,
        stride=stride,
        groups=groups,
        padding=kernel // 2,
        size=(50, 88),
    )
    first = sparse_conv2d(x, weight, bias, active, activation="silu", **options)
    for _ in range(10):
        assert_bitwise(sparse_conv2d(x, weight, bias, active, activation="silu", **options), first)
    # and whatever else is active, whatever its place in the list
    everything = random_active(active.grid, 2, 1.0, device)
    mask = active.pixel_mask(first.shape[2:]).expand_as(first)
    whole = sparse_conv2d(x, weight, bias, everything, activation="silu", **options)
    assert_bitwise(whole[mask], first[mask], "a block alone and among others")


# ---- what stands in the lists
CASES = [(16, 16, 3, 1, 1, torch.float16), (16, 16, 3, 1, 1, torch.float32), (16, 16, 3, 1, 16, torch.float32)]
CASES += [(5, 7, 3, 2, 1, torch.float16), (16, 16, 3, 1, 16, torch.bfloat16), (24, 24, 1, 1, 1, torch.bfloat16)]
CASES += [
    (3, 64, 7, 2, 1, torch.float16),
    (16, 80, 1, 2, 1, torch.float16),
    (16, 16, 3, 2, 1, torch.bfloat16),
    (72, 72, 3, 2, 1, torch.float16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("count", [-(2**31), -1, 0, 5, 24, 25, 2**31 - 1])
def test_any_count_on_the_device(device, count, case):
    channels, filters, kernel, stride, groups, dtype = case
    x, weight, bias, active, options = make(
        device,
        dtype=dtype,
        channels=channels,
        filters=filters,
        kernel=kernel,
        stride=stride,
        groups=groups,
        padding=kernel // 2,
        density=1.0,
    )
    kept = min(max(count, 0), active.capacity)
    active.count.fill_(count)
    clean = ActiveBlocks.from_indices(active.indices[:kept], active.grid, 2)
    want = sparse_conv2d(x, weight, bias, clean, **options)
    assert_bitwise(sparse_conv2d(x, weight, bias, active, **options), want)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_indices_that_name_no_block_are_skipped(device, case):
    channels, filters, kernel, stride, groups, dtype = case
    x, weight, bias, active, options = make(
        device,
        dtype=dtype,
        channels=channels,
        filters=filters,
        kernel=kernel,
        stride=stride,
        groups=groups,
        padding=kernel // 2,
        density=1.0,
    )
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


# ---- instruction sets of the CPU
@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512", "amx"])
def test_instruction_sets(isa):
    """SBNET_ISA lowers the choice that the processor allows."""
    code = """
import itertools, os, torch
import test_conv as t
from sbnet import _library
levels = ["generic", "avx2", "avx512", "amx", "amx-fp16"]
used, wanted = (levels.index(v) for v in (_library.cpu_isa(), os.environ["SBNET_ISA"]))
assert used <= wanted + (wanted == 3), (used, wanted)
torch.manual_seed(0)
for dtype, (c, k, r, s, g) in itertools.product(
    [torch.float32, torch.float16, torch.bfloat16],
    [(16, 16, 3, 1, 1), (64, 40, 3, 1, 1), (17, 33, 3, 2, 1), (3, 5, 5, 1, 1), (64, 64, 1, 1, 1), (1, 1, 3, 1, 1),
     (24, 24, 3, 1, 24), (9, 18, 5, 2, 9), (12, 20, 3, 1, 4)]):
    for activation in ("relu", "silu", "gelu"):
        t.check("cpu", dtype=dtype, channels=c, filters=k, kernel=r, stride=s, groups=g, padding=r // 2,
                activation=activation, residual="channel_slice", layout="channel_slice")
        t.check("cpu", dtype=dtype, channels=c, filters=k, kernel=r, stride=s, groups=g, padding=r // 2, block=(5, 7),
                activation=activation, layout="contiguous", out_layout="plane_slice")
print("done")
"""
    result = run_python(code, SBNET_ISA=isa)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == "done"


def test_depthwise_of_large_strides(device):
    """No kernel made for one size and stride may serve another pair of them."""
    for kernel, stride in ((2, 11), (2, 12), (1, 21), (4, 11), (6, 11)):
        check(device, channels=16, filters=16, groups=16, kernel=kernel, stride=stride, padding=0, size=(60, 70))


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


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_same_bits_with_any_number_of_cpu_threads(threads):
    before = torch.get_num_threads()
    try:
        for channels, groups in ((24, 1), (24, 24), (3, 1)):
            x, weight, bias, active, options = make(
                "cpu", channels=channels, filters=24 if channels == 24 else 5, groups=groups
            )
            torch.set_num_threads(2)
            want = sparse_conv2d(x, weight, bias, active, **options)
            torch.set_num_threads(threads)
            assert_bitwise(sparse_conv2d(x, weight, bias, active, **options), want)
    finally:
        torch.set_num_threads(before)
