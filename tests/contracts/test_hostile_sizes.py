"""Sizes whose products overflow, batches of nothing, blocks larger than planes: an error or an answer, soon."""

import contextlib
import time

import pytest
import torch

import sbnet
from sbnet import ActiveBlocks, BlockGrid, reference
from support.helpers import random_active
from support.refusals import OPS, refused, zeros

# 17 * 1036221895 * 1047172037 = 2^64 + 339
COUNTS, IMAGES, WRAPPED = (1036221895, 1047172037), 17, 339
assert IMAGES * COUNTS[0] * COUNTS[1] == 2**64 + WRAPPED


def int32(*shape: int, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)


def test_a_block_map_whose_size_overflows(device):
    grid = [1, 1, 1, 1, 0, 0, *COUNTS]
    x, lists = zeros(IMAGES, 1, 1, 1, device=device), (int32(1, 3, device=device), int32(1, device=device).fill_(1))
    wrapped = int32(WRAPPED, device=device)
    refused(
        "sparse_gather: block_map: expected a contiguous int32 tensor of .*, got int32 of 339 elements",
        OPS.sparse_gather, x, *lists, wrapped, grid, False, True,
    )  # fmt: skip
    for add in (False, True):
        call = zeros(1, 1, 1, 1, device=device), *lists, wrapped, x, grid, add, False, False
        refused(
            "sparse_scatter: block_map: expected a contiguous int32 tensor of .*, got int32 of 339 elements",
            OPS.sparse_scatter,
            *call,
        )
        refused(
            "sparse_scatter_: block_map: expected a contiguous int32 tensor of .*, got int32 of 339 elements",
            OPS.sparse_scatter_,
            *call,
        )
    refused(
        "sparse_fill: block_map: expected a contiguous int32 tensor of .*, got int32 of 339 elements",
        OPS.sparse_fill,
        x,
        wrapped,
        grid,
        0.0,
    )
    refused(
        "sparse_fill_: block_map: expected a contiguous int32 tensor of .*, got int32 of 339 elements",
        OPS.sparse_fill_,
        x,
        wrapped,
        grid,
        0.0,
    )


def test_a_fringe_whose_block_map_overflows(device):
    grid, plane, one = [1, 1, 1, 1, 0, 0, *COUNTS], list(COUNTS), [1, 1]
    wrapped = int32(IMAGES, 1, 1, device=device)
    for maps in ((wrapped, wrapped), (int32(IMAGES, 1, WRAPPED, device=device),) * 2):
        call = *maps, plane, grid, plane, grid, [*one, *one, 0, 0, 0, 0, *one], 4
        refused("fringe: .*", OPS.fringe, *call)


def test_the_product_of_sizes():
    """Zero wins over whatever overflows; what is too large equals nothing that a tensor has."""
    x = zeros(0, 1, 1, 1)
    lists = int32(1, 3), int32(1).fill_(1)
    got = OPS.sparse_gather(x, *lists, int32(0), [1, 1, 1, 1, 0, 0, *COUNTS], False, True)
    assert got.shape == (1, 1, 1, 1)
    assert not got.any()


def no_images(side: int, device: str, rows: int = 1) -> ActiveBlocks:
    """A list for a batch of 0 that counts `rows` blocks, each as large as its plane of side x side."""
    return ActiveBlocks(
        int32(rows, 3, device=device), int32(1, device=device).fill_(rows), int32(1, device=device),
        int32(0, 1, 1, device=device), BlockGrid.cover((side, side), side),
    )  # fmt: skip


@pytest.mark.parametrize("side", [2**15, 2**29])
def test_no_images_take_no_time(side, device):
    """The plane of a batch of 0 may have any size: a count that claims blocks of it must not be believed."""
    x, active = torch.empty(0, 4, side, side, device=device), no_images(side, device, 64)
    weight, narrow = torch.zeros(4, 4, 3, 3, device=device), torch.zeros(4, 4, 1, 1, device=device)
    start = time.monotonic()
    calls = [
        lambda: sbnet.sparse_conv2d_(x, weight, None, active, x.clone(), padding=1),
        lambda: sbnet.sparse_conv2d(x, weight, None, active, padding=1),
        lambda: sbnet.sparse_max_pool2d_(x, active, x.clone(), 3, 1, 1),
        lambda: sbnet.sparse_avg_pool2d(x, active, 3, 1, 1),
        lambda: sbnet.sparse_bottleneck2d(x, (narrow, weight, narrow), None, active),
        lambda: sbnet.sparse_fill(x, active),
    ]
    for call in calls:
        with contextlib.suppress(RuntimeError):  # refused is fine as well
            call()
    assert time.monotonic() - start < 5


def test_pools_of_no_images_whose_work_overflows(device):
    """Columns times channels times taps is 2^64, which was 0, by which was divided."""
    many = 2**24
    x, out = torch.empty(0, many, 1, many - 1, device=device), torch.empty(0, many, 2, many, device=device)
    grid = BlockGrid.cover((2, many), many)
    sbnet.sparse_max_pool2d_(x, no_images(many, device).with_grid(grid), out, 256, 1, 128)


@pytest.mark.parametrize("half", [2**13, 2**20, 2**27])
@pytest.mark.parametrize("dilation", [1, 2])
def test_windows_of_any_reach_take_no_time(half, dilation, device):
    """All but the active block is the fringe of what reads the whole plane: no tap beyond it is looked at."""
    mask, kernel = torch.zeros(1, 256, 256, device=device), 2 * half // dilation + 1
    mask[0, 5, 5] = 1
    active, start = sbnet.reduce_mask(mask, BlockGrid.cover((256, 256), 8)), time.monotonic()
    listed = sbnet.fringe(active, active, (256, 256), kernel, 1, half, dilation)
    window = (0, kernel, 1, half, dilation)
    (again,) = sbnet.mask_pyramid(mask, [(256, 256, 8)], 0.5, [(0, [window])]).fringes
    assert int(listed.count) == int(again.count) == (256**2 - 8**2 if dilation == 1 else int(listed.count))
    assert time.monotonic() - start < 5


# ---- reduce_mask on blocks that overlap
OVERLAPS = {
    "halo": BlockGrid(18, 16, (-1, -1), (4, 5)),
    "stride 1": BlockGrid((7, 9), (1, 1), (0, 20), (40, 7)),
    "gaps down": BlockGrid((3, 9), (7, 2), (-2, -3), (9, 30)),
    "gaps across": BlockGrid((9, 3), (2, 8), (-3, -2), (25, 10)),
    "larger than the plane": BlockGrid((100, 120), (9, 15), (-90, -100), (16, 12)),
    "beyond the plane": BlockGrid((8, 8), (5, 5), (30, 40), (12, 12)),
}


@pytest.mark.parametrize("avgpool", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OVERLAPS)
def test_overlapping_blocks_of_a_mask(name, dtype, avgpool, device):
    grid = OVERLAPS[name]
    mask = (torch.rand(2, 43, 59) > 0.985).to(dtype).to(device)
    if dtype.is_floating_point:
        mask[0, 5, 7] = mask[1, 30, 50] = float("nan")  # neither an average with it nor a maximum is above anything
        mask[0, 20, 30] = float("-inf")
    for given in (mask, mask.mT.contiguous().mT, mask.expand(3, *mask.shape)[1]):
        for capacity in (None, 11):
            got = sbnet.reduce_mask(given, grid, 0.004 if avgpool else 0.5, avgpool, capacity)
            want = reference.reduce_mask(given.cpu(), grid, 0.004 if avgpool else 0.5, avgpool, capacity)
            for field in ("indices", "count", "total", "block_map"):
                assert torch.equal(getattr(got, field).cpu(), getattr(want, field)), field


def test_an_empty_plane_has_no_active_blocks(device):
    for shape in ((2, 0, 9), (2, 9, 0), (0, 9, 9)):
        for avgpool in (False, True):
            active = sbnet.reduce_mask(torch.zeros(shape, device=device), BlockGrid(4, 2, 0, (3, 3)), 0.5, avgpool)
            assert int(active.count) == 0


@pytest.mark.parametrize("avgpool", [False, True])
def test_large_blocks_at_every_pixel_take_no_time(avgpool):
    mask = torch.zeros(1, 1024, 1024)
    mask[0, 600, 300] = 1
    start = time.monotonic()
    active = sbnet.reduce_mask(mask, BlockGrid(512, 1, 0, (513, 513)), 0.5 if not avgpool else 0.0, avgpool)
    assert time.monotonic() - start < 5  # 38 s when each block read its 2^18 pixels
    rows, columns = torch.arange(513)[:, None], torch.arange(513)
    want = (rows > 600 - 512) & (rows <= 600) & (columns > 300 - 512) & (columns <= 300)
    assert torch.equal(active.block_map[0] >= 0, want)


# ---- numbers that do not fit, in Python
def test_indices_are_checked_before_they_are_narrowed():
    grid = BlockGrid.cover((16, 16), 8)
    for row in ([2**32, 0, -(2**32)], [0, 2**32, 0], [-(2**63), 0, 0]):
        with pytest.raises(IndexError, match="from_indices: indices: "):
            ActiveBlocks.from_indices(torch.tensor([row]), grid, 1)
    good = ActiveBlocks.from_indices(torch.tensor([[0, 1, 1]]), grid, 1)
    assert good.indices.dtype == torch.int32


def test_a_list_without_a_grid():
    active = random_active(BlockGrid.cover((16, 24), 8), 1, 0.5)
    bare = ActiveBlocks(active.indices, active.count, active.total, active.block_map, None)
    x = zeros(1, 4, 16, 24)
    for op, *arguments in (
        (sbnet.sparse_gather, x, bare),
        (sbnet.sparse_scatter, zeros(6, 4, 8, 8), bare, x),
        (sbnet.sparse_fill, x, bare),
        (sbnet.sparse_conv2d, x, zeros(4, 4, 1, 1), None, bare),
        (sbnet.sparse_conv2d_quantized, x, zeros(4, 4, 1, 1), zeros(4), None, bare),
        (sbnet.sparse_max_pool2d, x, bare, 1),
        (sbnet.sparse_adaptive_avg_pool2d, x, bare),
        (sbnet.sparse_squeeze_excite2d, x, bare, zeros(2, 4), None, zeros(4, 2), None),
        (sbnet.sparse_group_norm, x, bare, 2),
        (sbnet.sparse_softmax2d, x, bare),
        (sbnet.sparse_resize2d, x, bare),
        (sbnet.sparse_rearrange, x, bare),
        (sbnet.sparse_pointwise, x, bare, "relu"),
        (sbnet.fringe, bare, active, (16, 24), 3, 1, 1),
        (sbnet.fringe, active, bare, (16, 24), 3, 1, 1),
    ):
        with pytest.raises(TypeError, match=f"{op.__name__}: active: grid: expected .*, got NoneType"):
            op(*arguments)
    with pytest.raises(TypeError, match="pixel_mask: grid: expected .*, got NoneType"):
        bare.pixel_mask((16, 24))


def test_meta_tensors_and_zeros():
    """Shapes alone are computed: what is divided by must be looked at here, too."""
    x = torch.zeros(2, 8, 16, 24, device="meta")
    active = sbnet.reduce_mask(x[:, 0], BlockGrid.cover((16, 24), 8))
    empty = torch.zeros(2, 0, 16, 24, device="meta")
    weight = torch.zeros(4, 8, 3, 3, device="meta")
    refused("sparse_conv2d: weight: .* in 0 groups", sbnet.sparse_conv2d, x, weight, None, active, padding=1, groups=0)
    refused("sparse_conv2d: weight: .* in 0 groups", sbnet.sparse_conv2d, empty, weight, None, active, groups=0)
    refused("pack_conv_weight: groups: expected .*, got 0", sbnet.pack_conv_weight, weight, 0)
    refused("pack_conv_weight: groups: expected .*, got 3", sbnet.pack_conv_weight, weight, 3)
    for planes in ([16, 24, 0, 8], [16, 24, 8, 0], [0, 24, 8, 8], [16, 24, 8]):
        refused("mask_pyramid: planes: ", OPS.mask_pyramid, x[:, 0], planes, 0.5, [])
    for fringes in ([0], [0, 0], [1, 1, *[1] * 11], [-1, 1, *[1] * 11]):
        refused("mask_pyramid: fringes: ", OPS.mask_pyramid, x[:, 0], [16, 24, 8, 8], 0.5, fringes)


def test_overlapping_blocks_are_refused_without_data():
    grid = BlockGrid((4, 4), (2, 2), (0, 0), (3, 3))
    active = sbnet.reduce_mask(torch.ones(1, 8, 8, device="meta"), grid)
    blocks, base = torch.zeros(9, 2, 4, 4, device="meta"), torch.zeros(1, 2, 8, 8, device="meta")
    refused("sparse_scatter: grid: .* overlap", sbnet.sparse_scatter, blocks, active, base)
    refused("sparse_scatter_: grid: .* overlap", sbnet.sparse_scatter_, blocks, active, base)
    assert sbnet.sparse_scatter(blocks, active, base, add=True).shape == base.shape
    row = active.with_grid(BlockGrid((4, 4), (4, 2), (0, 0), (3, 3)))
    refused("sparse_scatter: grid: .* overlap", sbnet.sparse_scatter, blocks, row, base)
    apart = active.with_grid(BlockGrid((4, 4), (4, 4), (0, 0), (3, 3)))
    assert sbnet.sparse_scatter(blocks, apart, base).shape == base.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "groups"), [((2, 2, 3, 1), 2), ((2, 8, 1, 3), 1), ((4, 1, 1, 3), 4)])
def test_gradients_of_weights_with_odd_strides(shape, groups, dtype, device):
    """The stride of a dimension of one element says nothing. PyTorch's backward takes it at its word: it refused such
    weights in float16, and gave wrong gradients in bfloat16."""
    active = sbnet.reduce_mask(torch.ones(2, 5, 5, device=device), BlockGrid.cover((5, 5), 4))
    plain, x = torch.randn(shape, device=device), torch.randn(2, shape[1] * groups, 5, 5, device=device)
    padding, grads = (shape[2] // 2, shape[3] // 2), []
    for odd in (None, 64):
        weight = plain.to(dtype).contiguous(memory_format=torch.channels_last)
        stride = [odd if odd and n == 1 else s for n, s in zip(shape, weight.stride(), strict=True)]
        weight = weight.as_strided(shape, stride).requires_grad_()
        given = x.to(dtype, memory_format=torch.channels_last).requires_grad_()
        sbnet.sparse_conv2d(given, weight, None, active, padding=padding, groups=groups).square().sum().backward()
        grads.append((given.grad.float(), weight.grad.float()))
    wanted = plain.to(dtype).float().requires_grad_(), x.to(dtype).float().requires_grad_()
    torch.nn.functional.conv2d(wanted[1], wanted[0], None, 1, padding, 1, groups).square().sum().backward()
    for grad_x, grad_weight in grads:
        for got, want in ((grad_x, wanted[1].grad), (grad_weight, wanted[0].grad)):
            assert float((got - want).norm() / want.norm()) < 0.02
