"""sparse_max_pool2d and sparse_avg_pool2d in both forms: PyTorch's pools on active blocks."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import sbnet
from sbnet import ActiveBlocks, BlockGrid, pool_output_size
from support.helpers import FLOATS, LAYOUTS, assert_bitwise, assert_layout, random_active, tensor
from support.pool_cases import KINDS, NAN, assert_pool, check, ops, window

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
    for pool in (window(3, 2, 1), window(3, 1, 1), window(5, 1, 2), window(2)):
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
    for pool in (window(3, 2, 1), window(3, 1, 1), window(5, 1, 2), window(2), window(3, 2, (0, 1), ceil_mode=True)):
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
    with pytest.raises(RuntimeError, match="pool2d.*out: expected memory of its own, got that of x"):
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
