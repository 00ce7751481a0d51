"""sparse_max_pool2d and sparse_avg_pool2d in both forms: PyTorch's pools on active blocks."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import sbnet
from sbnet import ActiveBlocks, BlockGrid, pool_output_size, reference
from support.helpers import (
    FLOATS,
    LAYOUTS,
    assert_as_accurate_as_torch,
    assert_bitwise,
    assert_layout,
    laid_out,
    one_block,
    poison,
    random_active,
    run_python,
    tensor,
)

NAN = float("nan")
KINDS = ["max", "avg"]


def ops(kind):
    return getattr(sbnet, f"sparse_{kind}_pool2d"), getattr(sbnet, f"sparse_{kind}_pool2d_")


def dense(kind, x, window):
    """PyTorch's pool of the whole plane. (Its CPU kernels differ in what they support: float32 holds every half.)"""
    wide = x.float() if x.dtype.itemsize == 2 and x.device.type == "cpu" else x
    return getattr(F, f"{kind}_pool2d")(wide, **window).to(x.dtype)


def output_size(size, window):
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    return pool_output_size(size, **{k: window[k] for k in names if k in window})


def assert_values(got, want):
    """Equal, NaN where NaN: a maximum is one of the inputs."""
    assert got.dtype == want.dtype
    same = (got == want) | (got.isnan() & want.isnan())
    assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} differ"


def assert_pool(kind, got, x, active, outside, window):
    torchs = dense(kind, x, window)
    assert got.shape == torchs.shape, f"shape {tuple(got.shape)}, PyTorch's is {tuple(torchs.shape)}"
    mask = active.pixel_mask(torchs.shape[2:]).expand_as(torchs)
    assert_bitwise(got[~mask], outside.expand_as(torchs)[~mask], "outside the active blocks")
    if kind == "max":
        assert_values(got[mask], torchs[mask])
    else:
        exact = F.avg_pool2d(x.double(), **window)
        assert_as_accurate_as_torch(got[mask], torchs[mask], exact[mask], "on the active blocks")


def check(
    device,
    kind,
    window,
    *,
    dtype=torch.float32,
    channels=8,
    size=(21, 26),
    block=8,
    batch=2,
    density=0.5,
    layout="channels_last",
    out_layout="channels_last",
    x=None,
):
    """Both forms: zeros outside, and NaN kept outside. Returns the functional result."""
    if x is None:
        x = tensor((batch, channels, *size), dtype, device)
    x = laid_out(x, layout)
    batch, channels = x.shape[:2]
    out = output_size(x.shape[2:], window)
    grid = BlockGrid.cover(out, block)
    active = one_block(grid, batch, device) if density == "one" else random_active(grid, batch, density, device)
    functional, mutating = ops(kind)
    y = functional(x, active, **window)
    assert_pool(kind, y, x, active, torch.zeros((), dtype=x.dtype, device=device), window)
    into = poison((batch, channels, *out), x.dtype, device, out_layout)
    assert mutating(x, active, into, **window) is None
    assert_pool(kind, into, x, active, torch.full((), NAN, dtype=x.dtype, device=device), window)
    mask = active.pixel_mask(out).expand(y.shape)
    assert_bitwise(into[mask], y[mask], "the two forms")
    return y


def window(kernel, stride=None, padding=0, **more):
    return {"kernel_size": kernel, "stride": stride, "padding": padding, **more}


# ---- geometry
WINDOWS = [
    window(3, 2, 1),
    window(2, 2),
    window(2),
    window(3, 1, 1),
    window(3, 1),
    window(3, 2),
    window(1),
    window(1, 2),
    window(5, 1, 2),
    window(4, 3, 2),
    window((1, 7), (2, 1), (0, 3)),
    window((3, 2), (1, 2), (1, 0)),
    window(2, 12),
    window(13, 1, 6),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("pool", WINDOWS, ids=lambda w: "-".join(map(str, w.values())))
@pytest.mark.parametrize("kind", KINDS)
def test_windows(device, kind, pool, ceil_mode, dtype):
    size, block = ((22, 27), (5, 7)) if ceil_mode else ((21, 26), 8)
    check(device, kind, {**pool, "ceil_mode": ceil_mode}, dtype=dtype, size=size, block=block, channels=16)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "pool",
    [
        window(3, 1, 1, dilation=2),
        window(5, 2, 2, dilation=(2, 1)),
        window((2, 3), 1, (1, 1), dilation=(2, 3), ceil_mode=True),
        window(2, 2, 0, dilation=5),
    ],
    ids=str,
)
def test_dilation(device, pool, dtype):
    check(device, "max", pool, dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("divisor", [None, 1, 7, -3])
@pytest.mark.parametrize("count_include_pad", [False, True])
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_divisors(device, ceil_mode, count_include_pad, divisor, dtype):
    more = {"ceil_mode": ceil_mode, "count_include_pad": count_include_pad, "divisor_override": divisor}
    for pool in (window(3, 2, 1), window(2, 2, 1), window(3, 1, 1), window(4, 3, 2), window((3, 5), 2, (1, 2))):
        check(device, "avg", {**pool, **more}, dtype=dtype, density=1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_larger_than_the_plane(device, kind):
    check(device, kind, window(7, 1, 3), size=(4, 5), density=1.0)
    check(device, kind, window((4, 5)), size=(4, 5), density=1.0)  # one output pixel
    check(device, kind, window(7, 3, ceil_mode=True), size=(6, 5), density=1.0)  # clipped on the far side
    check(device, kind, window(3, 2, 1), size=(1, 1), density=1.0)


def test_output_sizes_are_pytorchs():
    sides, kernels = (1, 2, 5, 6, 7, 12), (1, 2, 3, 4, 6)
    for h, k, s, d, ceil in itertools.product(sides, kernels, (1, 2, 3, 5), (1, 2), (False, True)):
        for p in range(k // 2 + 1):
            try:
                y = F.max_pool2d(torch.zeros(1, 1, h, h), k, s, p, d, ceil)
            except RuntimeError:  # the plane is too small
                continue
            assert pool_output_size((h, h), k, s, p, d, ceil) == tuple(y.shape[2:]), (h, k, s, p, d, ceil)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("block", [1, 3, 4, 8, 16, 17, 40, (8, 16), (5, 2), (1, 40)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_block_sizes(device, kind, block, dtype):
    for pool in (window(3, 2, 1), window(3, 1, 1), window(2)):
        check(device, kind, pool, dtype=dtype, block=block, size=(37, 45))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("channels", "block", "size", "batch"),
    [
        (64, 8, (420, 410), 3),  # whole blocks
        (72, (16, 32), (420, 410), 2),  # blocks cut, and words of channels: 9 or 18 into parts of 8 at most
        (1024, 7, (45, 38), 1),
        (64, 61, (420, 410), 2),
        (256, 1, (45, 38), 2),
        (24, (3, 200), (420, 410), 3),
        (8, (1, 33), (420, 410), 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_tiles(kind, channels, block, size, batch, dtype):
    """CUDA cuts blocks into tiles, more of them where the list is short."""
    for pool in (window(3, 2, 1), window(3, 1, 1), window(2), window(3, 2, (0, 1), ceil_mode=True)):
        check("cuda", kind, pool, dtype=dtype, channels=channels, block=block, size=size, batch=batch)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("channels", [1, 3, 4, 8, 17, 24, 35, 64, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_channels(device, kind, channels, dtype):
    for layout in ("channels_last", "contiguous"):
        check(device, kind, window(3, 2, 1), dtype=dtype, channels=channels, layout=layout, out_layout=layout)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("density", [0, "one", 0.1, 1.0])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_densities(device, kind, batch, density, dtype):
    y = check(device, kind, window(3, 2, 1), dtype=dtype, batch=batch, density=density)
    assert density != 0 or not y.any()


def test_empty_batch(device):
    x = torch.empty(0, 8, 20, 20, device=device)
    active = random_active(BlockGrid.cover((10, 10), 4), 0, 1.0, device)
    for kind in KINDS:
        functional, mutating = ops(kind)
        assert functional(x, active, 2).shape == (0, 8, 10, 10)
        mutating(x, active, x[:, :, :10, :10], 2)


# ---- layouts
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("out_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_layouts(device, kind, layout, out_layout, dtype):
    y = check(device, kind, window(3, 2, 1), dtype=dtype, channels=16, layout=layout, out_layout=out_layout)
    assert_layout(y, layout not in ("contiguous", "plane_slice", "permuted"))


@pytest.mark.parametrize("kind", KINDS)
def test_x_and_out_of_one_buffer(device, kind):
    _, mutating = ops(kind)
    buffer = tensor((2, 21, 26, 48), torch.float32, device).permute(0, 3, 1, 2)
    active = random_active(BlockGrid.cover((21, 26), 8), 2, 0.5, device)
    before = buffer.clone()
    mutating(buffer[:, :16], active, buffer[:, 16:32], 3, 1, 1)
    assert_bitwise(buffer[:, :16], before[:, :16])
    assert_bitwise(buffer[:, 32:], before[:, 32:])
    assert_pool(kind, buffer[:, 16:32], before[:, :16], active, before[:, 16:32], window(3, 1, 1))
    with pytest.raises(RuntimeError, match="pool2d.*out: shares memory with x"):
        mutating(buffer[:, :16], active, buffer[:, 8:24], 3, 1, 1)


# ---- values
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("kind", KINDS)
def test_special_values(device, kind, layout, dtype):
    """NaN spreads to the windows that see it and no further; the border of a maximum is below every number."""
    x = tensor((2, 16, 21, 26), dtype, device)
    x[torch.rand(x.shape, device=device) < 0.02] = NAN
    x[torch.rand(x.shape, device=device) < 0.05] = -float("inf")
    x[:, :8] = -x[:, :8].abs() - 1  # no maximum of these is 0 or more
    for pool in (window(3, 2, 1), window(2), window(3, 1, 1), window(5, 1, 2)):
        if kind == "max":
            y = check(device, kind, pool, x=x, layout=layout, density=1.0)
            assert not (y[:, :8] >= 0).any()
        else:
            x = x.nan_to_num(neginf=0.5).masked_fill(x.isnan(), NAN)
            check(device, kind, pool, x=x, layout=layout, density=1.0)


def test_a_float32_sum_of_halves(device):
    """169 values of 2048 overflow no float16 sum, and the mean is exact."""
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.full((1, 8, 13, 13), 2048.0, dtype=dtype, device=device).to(memory_format=torch.channels_last)
        active = random_active(BlockGrid.cover((1, 1), 4), 1, 1.0, device)
        assert bool((sbnet.sparse_avg_pool2d(x, active, 13) == 2048).all())


def test_hand_case(device):
    x = torch.arange(16.0, device=device).view(1, 1, 4, 4)
    active = ActiveBlocks.from_indices(torch.tensor([[0, 0, 1]], dtype=torch.int32), BlockGrid.cover((2, 2), 1), 1)
    active = ActiveBlocks(*(t.to(device) for t in (active.indices, active.count, active.total, active.block_map)),
                          active.grid)  # fmt: skip
    assert sbnet.sparse_max_pool2d(x, active, 2).flatten().tolist() == [0, 7, 0, 0]
    assert sbnet.sparse_avg_pool2d(x, active, 2).flatten().tolist() == [0, 4.5, 0, 0]


# ---- fringe, lists
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", ["channels_last", "contiguous", "odd_channel_slice"])
@pytest.mark.parametrize("kind", KINDS)
def test_fringe(device, kind, layout, dtype):
    """Blocks written, fringe zeroed, all else as it was."""
    x = laid_out(tensor((2, 8, 40, 52), dtype, device), layout)
    out = (20, 26)
    active = random_active(BlockGrid.cover(out, 8), 2, 0.4, device)
    edge = sbnet.fringe(active, active, out, 3, 1, 1)
    into = poison((2, 8, *out), dtype, device, layout)
    ops(kind)[1](x, active, into, 3, 2, 1, fringe=edge)
    zero = torch.zeros(2 * 20 * 26, dtype=torch.bool, device=device)
    zero[edge.pixels[: int(edge.count)].long()] = True
    assert zero.any()
    zero = zero.view(2, 1, *out)
    outside = torch.full(zero.shape, NAN, dtype=dtype, device=device).masked_fill(zero, 0)
    assert_pool(kind, into, x, active, outside, window(3, 2, 1))


def test_rows_that_name_no_block_are_skipped(device):
    x = tensor((2, 8, 20, 26), torch.float32, device)
    grid = BlockGrid.cover((20, 26), 8)
    rows = [[0, 0, 0], [-1, -1, -1], [2, 0, 0], [0, 3, 0], [0, 0, 4], [1, 2, 3], [2**31 - 1] * 3, [-(2**31)] * 3]
    indices = torch.tensor(rows, dtype=torch.int32, device=device)
    good = ActiveBlocks.from_indices(torch.tensor([[0, 0, 0], [1, 2, 3]], dtype=torch.int32, device=device), grid, 2)
    for count in (8, 9, 2**31 - 1, -5):
        counts = torch.tensor([count], dtype=torch.int32, device=device)
        active = ActiveBlocks(indices, counts, counts, good.block_map, grid)
        for kind in KINDS:
            functional = ops(kind)[0]
            want = functional(x, good, 3, 1, 1)
            assert_bitwise(functional(x, active, 3, 1, 1), want if count > 0 else torch.zeros_like(want))


# ---- gradients
def grads(function, x, dtype, upstream):
    leaf = x.detach().to(dtype).requires_grad_()
    function(leaf).backward(upstream.to(dtype))
    return leaf.grad


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize(
    "pool", [window(3, 2, 1), window(2), window(3, 1, 1, ceil_mode=True), window((3, 2), 3, (1, 1))], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_gradient(device, kind, pool, layout):
    """Ties go to the first, as in PyTorch: a third of the values are equal."""
    x = tensor((2, 6, 20, 27), torch.float32, device)
    x = laid_out(torch.where(torch.rand_like(x) < 0.5, x, x.round()), layout)
    out = output_size((20, 27), pool)
    active = random_active(BlockGrid.cover(out, (5, 8)), 2, 0.6, device)
    upstream = tensor((2, 6, *out), torch.float32, device)
    op, plain = ops(kind)[0], getattr(reference, f"sparse_{kind}_pool2d")
    torchs = grads(lambda t: plain(t, active, **pool), x, torch.float32, upstream)
    exact = grads(lambda t: plain(t, active, **pool), x, torch.float64, upstream)
    got = grads(lambda t: op(t, active, **pool), x, torch.float32, upstream)
    assert_as_accurate_as_torch(got, torchs, exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_in_half(device, kind, dtype):
    x = laid_out(tensor((2, 8, 20, 26), dtype, device), "channels_last")
    active = random_active(BlockGrid.cover((10, 13), 4), 2, 0.6, device)
    upstream = tensor((2, 8, 10, 13), dtype, device)
    op, plain = ops(kind)[0], getattr(reference, f"sparse_{kind}_pool2d")
    got = grads(lambda t: op(t, active, 3, 2, 1), x, dtype, upstream)
    exact = grads(lambda t: plain(t, active, 3, 2, 1), x, torch.float64, upstream)
    assert got.dtype == dtype
    error = (got.double() - exact).norm() / exact.norm()
    assert float(error) < 4 * torch.finfo(dtype).eps


def test_second_derivative_and_refusals(device):
    x = tensor((2, 4, 20, 26), torch.float32, device).requires_grad_()
    active = random_active(BlockGrid.cover((10, 13), 4), 2, 0.6, device)
    for kind in KINDS:
        functional, mutating = ops(kind)
        (slope,) = torch.autograd.grad(functional(x, active, 2).pow(3).sum(), x, create_graph=True)
        (curve,) = torch.autograd.grad(slope.sum(), x)
        assert bool(curve.isfinite().all())
        assert bool((curve != 0).any())
        with pytest.raises(RuntimeError, match=f"sparse_{kind}_pool2d_: .*no_grad"):
            mutating(x, active, torch.zeros(2, 4, 10, 13, device=device), 2)
        out = torch.zeros(2, 4, 10, 13, device=device)
        before = out._version
        mutating(x.detach(), active, out, 2)
        assert out._version > before


# ---- bad input
BAD = [
    ({"x": None}, "x: NoneType"),
    ({"x": lambda a: a["x"][0]}, "x: a tensor of 3"),
    ({"x": lambda a: a["x"].double()}, "x: dtype: expected .*, got float64"),
    ({"x": lambda a: a["x"][..., :0]}, "x"),
    ({"x": lambda a: a["x"][:1]}, "out|block_map|active|gather"),
    ({"active": None}, "active: NoneType"),
    (
        {"active": lambda a: random_active(BlockGrid.cover((7, 13), 4), 2, 0.5, a["x"].device.type)},
        "active: block grid",
    ),
    ({"kernel_size": 0}, "kernel_size.*0"),
    ({"kernel_size": -3}, "kernel_size.*-3"),
    ({"kernel_size": (1, 2, 3)}, "kernel_size"),
    ({"kernel_size": 2.5}, "kernel_size"),
    ({"kernel_size": 40}, "x|active"),
    ({"kernel_size": 2**31}, "kernel_size: .*32 bits"),
    ({"kernel_size": 2**30}, "kernel_size.*2\\^28"),
    ({"stride": 0}, "stride"),
    ({"stride": -1}, "stride"),
    ({"padding": 2}, "padding: 2; 0 to half of kernel_size, 1,"),
    ({"padding": -1}, "padding: -1"),
    ({"padding": "same"}, "padding"),
]
BAD_OUT = [
    ({"out": None}, "out: NoneType"),
    ({"out": lambda a: a["out"].half()}, "out: dtype: expected .*, got float16"),
    ({"out": lambda a: a["out"][:, :3]}, r"out: shape: expected \[2,4,10,13\] .*, got \[2,3,10,13\]"),
    ({"out": lambda a: a["out"][..., :12]}, r"out: shape: expected .*, got \[2,4,10,12\]"),
    ({"out": lambda a: a["out"][:, :1].expand(2, 4, 10, 13)}, "out: an expanded tensor"),
    ({"fringe": 3}, "fringe: int"),
]


@pytest.mark.parametrize(
    ("changes", "pattern"), BAD + BAD_OUT, ids=lambda v: v if isinstance(v, str) else next(iter(v), "none")
)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_input(device, kind, changes, pattern):
    arguments = {
        "x": torch.zeros(2, 4, 20, 26, device=device),
        "active": random_active(BlockGrid.cover((10, 13), 4), 2, 0.5, device),
        "out": torch.zeros(2, 4, 10, 13, device=device),
        "kernel_size": 3,
        "stride": 2,
        "padding": 1,
    }
    arguments |= {k: v(arguments) if callable(v) else v for k, v in changes.items()}
    functional, mutating = ops(kind)
    errors = (RuntimeError, ValueError, TypeError)
    with pytest.raises(errors, match=f"sparse_{kind}_pool2d.*({pattern})"):
        mutating(**arguments)
    if not set(changes) & {"out", "fringe"} and "out" not in pattern:
        del arguments["out"]
        with pytest.raises(errors, match=f"sparse_{kind}_pool2d.*({pattern})"):
            functional(**arguments)


def test_bad_options(device):
    x = torch.zeros(2, 4, 20, 26, device=device)
    active = random_active(BlockGrid.cover((10, 13), 4), 2, 0.5, device)
    with pytest.raises(RuntimeError, match="sparse_avg_pool2d: divisor_override: 0"):
        sbnet.sparse_avg_pool2d(x, active, 2, divisor_override=0)
    with pytest.raises(RuntimeError, match="sparse_avg_pool2d: divisor_override: .*32 bits"):
        sbnet.sparse_avg_pool2d(x, active, 2, divisor_override=2**40)
    with pytest.raises(RuntimeError, match="sparse_max_pool2d: kernel_size, stride, dilation: 2, 2, 0"):
        sbnet.sparse_max_pool2d(x, active, 2, dilation=0)
    with pytest.raises(TypeError, match="sparse_max_pool2d: dilation"):
        sbnet.sparse_max_pool2d(x, active, 2, dilation=None)


# ---- one device, one build: the same bits
def test_thread_counts_agree():
    x = laid_out(tensor((2, 24, 61, 47), torch.float32), "channels_last")
    active = random_active(BlockGrid.cover((31, 24), 4), 2, 0.5)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append([ops(kind)[0](x, active, 3, 2, 1) for kind in KINDS])
    torch.set_num_threads(before)
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert_bitwise(got, want)


def test_every_instruction_set_agrees():
    """The baseline build pools the same bits: sums are in the same order, maxima exact."""
    code = """
import torch, sbnet
from support.helpers import random_active
torch.manual_seed(0)
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    x = torch.randn(2, 43, 33, 29).to(dtype).contiguous(memory_format=torch.channels_last)
    active = random_active(sbnet.BlockGrid.cover((17, 15), 4), 2, 0.6)
    for y in (sbnet.sparse_max_pool2d(x, active, 3, 2, 1), sbnet.sparse_avg_pool2d(x, active, 3, 2, 1)):
        print(y.double().sum().item(), y.double().square().sum().item())
"""
    runs = [run_python(code, SBNET_ISA=isa) for isa in ("generic", "avx2")]
    assert all(run.returncode == 0 for run in runs), runs[0].stderr + runs[1].stderr
    assert runs[0].stdout == runs[1].stdout


@pytest.mark.gpu
def test_a_tensor_of_more_than_2_31_elements():
    x = torch.randn(1, 64, 5900, 5900, device="cuda", dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    assert x.numel() > 2**31
    grid = BlockGrid.cover((5900, 5900), 16)
    active = one_block(grid, 1, "cuda")
    y = torch.empty_like(x)
    for kind in KINDS:
        y[..., -20:, -20:] = NAN
        ops(kind)[1](x, active, y, 3, 1, 1)
        want = dense(kind, x[..., -20:, -20:], window(3, 1, 1))
        rest = 5900 % 16
        torch.testing.assert_close(y[..., -rest:, -rest:], want[..., -rest:, -rest:], rtol=2e-3, atol=2e-3)
        assert bool(y[0, 0, -rest - 1, -rest - 1].isnan())
