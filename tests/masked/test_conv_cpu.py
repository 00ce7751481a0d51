"""sparse_conv2d on the CPU: instruction sets, runs of pixels, threads."""

import pytest
import torch

from sbnet import sparse_conv2d
from sbnet.select import conv2d_kernel
from support.conv_cases import check, make
from support.helpers import run_python
from support.instruction_sets import HERE, instruction_sets
from support.layer_checks import assert_same_bits_on_any_threads


# ---- instruction sets of the CPU
def test_what_the_processor_lacks_is_not_chosen():
    """SBNET_ISA lowers the choice that the processor allows."""
    found = run_python("from sbnet import _library; print(_library.cpu_isa())", SBNET_ISA="amx")
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.strip() == HERE[-1]


@pytest.mark.parametrize("isa", instruction_sets("generic", "avx2", "avx512", "amx"))
def test_instruction_sets(isa):
    code = """
import itertools, os, torch
import support.conv_cases as t
from sbnet import _library
levels = ["generic", "avx2", "avx512", "amx", "amx-fp16"]
used, wanted = (levels.index(v) for v in (_library.cpu_isa(), os.environ["SBNET_ISA"]))
assert used <= wanted + (wanted == 3), (used, wanted)
torch.manual_seed(0)
for dtype, (c, k, r, s, g) in itertools.product(
    [torch.float32, torch.float16, torch.bfloat16],
    [(16, 16, 3, 1, 1), (64, 40, 3, 1, 1), (17, 33, 3, 2, 1), (3, 5, 5, 1, 1), (64, 64, 1, 1, 1), (1, 1, 3, 1, 1),
     (24, 24, 3, 1, 24), (96, 96, 3, 2, 96), (9, 18, 5, 2, 9), (12, 20, 3, 1, 4),
     (40, 40, 3, 1, 20), (36, 36, 5, 2, 9), (64, 64, 3, 1, 8), (18, 20, 5, 1, 1), (40, 17, 7, 1, 1),
     (64, 3, 3, 1, 1), (37, 2, 5, 2, 1)]):
    for activation in (None, "relu", "relu6", "silu", "gelu"):
        t.check("cpu", dtype=dtype, channels=c, filters=k, kernel=r, stride=s, groups=g, padding=r // 2,
                activation=activation, residual="channel_slice", layout="channel_slice")
        t.check("cpu", dtype=dtype, channels=c, filters=k, kernel=r, stride=s, groups=g, padding=r // 2, block=(5, 7),
                activation=activation, layout="contiguous", out_layout="plane_slice")
for c, k, s, g in (1030, 72, 1, 1), (520, 64, 2, 1), (96, 80, 3, 2):  # 1x1: inputs are read where they are
    t.check("cpu", channels=c, filters=k, kernel=1, stride=s, groups=g, padding=0, size=(17, 23), block=(5, 7),
            activation="relu", residual="channels_last")
print("done")
"""
    result = run_python(code, SBNET_ISA=isa)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == "done"


@pytest.mark.parametrize("isa", instruction_sets("generic", "avx2", "avx512"))
def test_channels_that_fill_no_vector_leave_their_neighbours_alone(isa):
    """Of a pixel's channels in a wider feature map, those behind y's are others', and what is added has no more."""
    code = """
import itertools, torch, sbnet
from sbnet.reference import sparse_conv2d
active = sbnet.reduce_mask(torch.rand(1, 17, 23) < 0.3, sbnet.BlockGrid.cover((17, 23), (5, 7)))
mask = active.pixel_mask((17, 23))
for k, activation, kernel in itertools.product((5, 24, 70), (None, "relu6", "silu"), (1, 3)):
    x, weight = torch.randn(1, 20, 17, 23), torch.randn(k, 20, kernel, kernel)
    x = x.contiguous(memory_format=torch.channels_last)
    wide = torch.full((1, k + 9, 17, 23), 7.0).contiguous(memory_format=torch.channels_last)
    added = torch.full((1, k + 3, 17, 23), float("nan")).contiguous(memory_format=torch.channels_last)
    added[:, :k] = torch.randn(1, k, 17, 23)
    options = {"padding": kernel // 2, "activation": activation, "residual": added[:, :k]}
    sbnet.sparse_conv2d_(x, weight, None, active, wide[:, 2 : 2 + k], **options)
    wanted = torch.full_like(wide, 7.0)
    wanted[:, 2 : 2 + k] = torch.where(mask, sparse_conv2d(x, weight, None, active, **options), 7.0)
    torch.testing.assert_close(wide, wanted, rtol=1e-4, atol=1e-4)
    inside = torch.zeros_like(wide, dtype=torch.bool)
    inside[:, 2 : 2 + k] = mask
    assert bool((wide[~inside] == 7).all())
print("done")
"""
    result = run_python(code, SBNET_ISA=isa)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == "done"


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


@pytest.mark.parametrize("isa", instruction_sets("avx2", "avx512"))
def test_infinities_reach_the_outputs_that_read_them_and_no_others(isa):
    """3x3 layers are computed from differences of inputs, in which an infinity must not become NaN."""
    code = """
import torch, torch.nn.functional as F
import sbnet
torch.manual_seed(0)
x = torch.randn(1, 24, 21, 30)
for value, (c, row, column) in zip([torch.inf, -torch.inf, torch.nan, 3e38, torch.inf, -torch.inf],
                                   [(0, 0, 0), (7, 5, 6), (3, 10, 20), (4, 15, 3), (9, 18, 27), (10, 19, 28)]):
    x[0, c, row, column] = value
active = sbnet.reduce_mask(torch.ones(1, 21, 30, dtype=torch.bool), sbnet.BlockGrid.cover((21, 30), (7, 8)))
for filters, kernel, dilation in (33, 3, 1), (33, 3, 2), (33, 3, (1, 3)), (33, 5, 1), (33, 7, 1), (3, 3, 1), (2, 5, 2):
    weight, bias = torch.randn(filters, 24, kernel, kernel), torch.randn(filters)
    options = {"padding": [d * (kernel // 2) for d in (dilation if dilation == (1, 3) else (dilation,) * 2)]}
    options["dilation"] = dilation
    for given in x, x.contiguous(memory_format=torch.channels_last):
        got, want = sbnet.sparse_conv2d(given, weight, bias, active, **options), F.conv2d(x, weight, bias, **options)
        assert want.isnan().any() and want.isposinf().any() and want.isneginf().any() and want.isfinite().any()
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(kind(got), kind(want)), (filters, kernel, dilation, kind)
print("done")
"""
    result = run_python(code, SBNET_ISA=isa)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == "done"


@pytest.mark.parametrize("isa", instruction_sets("generic", "avx2", "avx512"))
def test_bounds_keep_nan(isa):
    """Where sums leave from registers: one slice of whole vectors, and depthwise."""
    code = """
import torch, torch.nn.functional as F
import sbnet
torch.manual_seed(0)
active = sbnet.reduce_mask(torch.ones(1, 9, 10, dtype=torch.bool), sbnet.BlockGrid.cover((9, 10), (4, 5)))
for groups in (1, 32):
    x = torch.randn(1, 32, 9, 10).contiguous(memory_format=torch.channels_last) * 9
    x[0, :, 3, 4], x[0, :, 5, 5], x[0, :, 6, 6] = torch.nan, torch.inf, -torch.inf
    weight, bias = torch.rand(64 if groups == 1 else 32, 32 // groups, 1, 1) + 0.1, torch.randn(64 // min(groups, 2))
    residual = torch.randn(1, len(weight), 9, 10).contiguous(memory_format=torch.channels_last)
    for name, activation in ((None, lambda v: v), ("relu", F.relu), ("relu6", F.relu6)):
        got = sbnet.sparse_conv2d(x, weight, bias, active, groups=groups, activation=name, residual=residual)
        want = activation(F.conv2d(x, weight, bias, groups=groups) + residual)
        assert want.isnan().sum() == want.shape[1], want.isnan().sum()
        assert torch.equal(got.isnan(), want.isnan())
        torch.testing.assert_close(got, want, equal_nan=True)
print("done")
"""
    result = run_python(code, SBNET_ISA=isa)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == "done"


@pytest.mark.parametrize("isa", instruction_sets("avx2", "avx512"))
def test_narrow_groups_keep_infinities_to_themselves(isa):
    """Lanes of one vector read inputs of their own group alone."""
    code = """
import torch, torch.nn.functional as F
import sbnet
torch.manual_seed(0)
for width in (2, 4, 8):
    x = torch.randn(1, 48, 21, 30).contiguous(memory_format=torch.channels_last)
    x[0, 5, 5, 6], x[0, 17, 20, 9], x[0, 40, 0, 0] = torch.inf, -torch.inf, torch.nan
    weight, bias = torch.randn(48, width, 3, 3), torch.randn(48)
    active = sbnet.reduce_mask(torch.ones(1, 21, 30, dtype=torch.bool), sbnet.BlockGrid.cover((21, 30), (7, 8)))
    got = sbnet.sparse_conv2d(x, weight, bias, active, padding=1, groups=48 // width)
    want = F.conv2d(x, weight, bias, padding=1, groups=48 // width)
    assert want.isnan().any() and want.isposinf().any() and want.isneginf().any()
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(got), kind(want)), (width, kind)
print("done")
"""
    result = run_python(code, SBNET_ISA=isa)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == "done"


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


@pytest.mark.parametrize("isa", instruction_sets("generic", "avx2", "avx512"))
def test_exp_and_erf_keep_their_last_places(isa):
    """Through a convolution that multiplies by 1: silu shows exp, gelu shows erf, over all magnitudes."""
    code = """
import torch, sbnet
x = torch.cat([torch.linspace(-87, 100, 400_001), torch.logspace(-30, 2, 50_001), -torch.logspace(-30, 1.9, 50_001)])
x = torch.cat([x, torch.tensor([0.0, -0.0, 1.0, -1.0, 4.0, 1e30, -1e30])])
plane = torch.nn.functional.pad(x, (0, -len(x) % 1024)).view(1, 1, -1, 1024)
active = sbnet.reduce_mask(torch.ones(1, *plane.shape[2:]), sbnet.BlockGrid.cover(plane.shape[2:], 64))
eps = torch.finfo(torch.float32).eps
for name, function, scale in (
    ("silu", torch.nn.functional.silu, lambda v, y: y.abs()),
    ("gelu", torch.nn.functional.gelu, lambda v, y: torch.maximum(y.abs(), v.abs() / 2)),
):
    y = sbnet.sparse_conv2d(plane, torch.ones(1, 1, 1, 1), None, active, activation=name).flatten()[: len(x)].double()
    want = function(x.double())
    inside = (x > -80) & (x < 1e29) if name == "silu" else x.abs() < 1e29
    worst = ((y - want).abs() / (scale(x.double(), want) + 1e-38))[inside].max() / eps
    assert worst < 3, (name, float(worst))
    assert y[-2] == float(x[-2]) and y[-1] == 0, name
print("done")
"""
    result = run_python(code, SBNET_ISA=isa)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == "done"
