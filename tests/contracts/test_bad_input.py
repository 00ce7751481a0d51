"""Bad input: an exception that names the op and the argument, never a crash or a wrong result."""

import re

import pytest
import torch
import torch.utils._pytree as pytree

from sbnet import (
    ActiveBlocks,
    BlockGrid,
    Window,
    conv_output_size,
    fringe,
    mask_pyramid,
    pool_output_size,
    reduce_mask,
    same_padding,
    sparse_avg_pool2d,
    sparse_avg_pool2d_,
    sparse_bottleneck2d,
    sparse_bottleneck2d_,
    sparse_conv2d,
    sparse_conv2d_,
    sparse_fill,
    sparse_fill_,
    sparse_gather,
    sparse_max_pool2d,
    sparse_max_pool2d_,
    sparse_scatter,
    sparse_scatter_,
)
from sbnet.nn import SparseBatchNorm2d
from support.helpers import random_active
from support.refusals import GRID, OPS, refused, zeros


# ---- grids
@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ((0, 1, 0, 1), "BlockGrid: bsize"),
        (((4, -1), 1, 0, 1), "BlockGrid: bsize"),
        ((1, 0, 0, 1), "BlockGrid: bstride"),
        ((1, (1, -3), 0, 1), "BlockGrid: bstride"),
        ((1, 1, 0, -1), "BlockGrid: bcount"),
        (((1, 2, 3), 1, 0, 1), "BlockGrid: bsize"),
        ((1, (), 0, 1), "BlockGrid: bstride"),
        ((1, 1, None, 1), "BlockGrid: boffset"),
        ((1.5, 1, 0, 1), "BlockGrid: bsize"),
        (("16", 1, 0, 1), "BlockGrid: bsize"),
        ((1, 1, 0, (2.0, 2)), "BlockGrid: bcount"),
    ],
)
def test_grids(arguments, pattern):
    refused(pattern, BlockGrid, *arguments)


def test_cover():
    refused("BlockGrid.cover: bsize", BlockGrid.cover, (16, 16), 0)
    refused("BlockGrid.cover: bsize", BlockGrid.cover, (16, 16), None)
    refused("BlockGrid.cover: size", BlockGrid.cover, (16, 16, 3), 4)
    refused("BlockGrid", BlockGrid.cover, (-16, 16), 4)
    refused("BlockGrid.conv_input: kernel_size", GRID.conv_input, (3, 3, 3))
    refused("BlockGrid", GRID.conv_input, 0)
    refused("BlockGrid", GRID.conv_input, 3, 0)


# ---- reduce_mask
@pytest.mark.parametrize(
    ("mask", "options", "pattern"),
    [
        (None, {}, "mask: expected .*, got NoneType"),
        ([[1]], {}, "mask: expected .*, got list"),
        (zeros(16, 24), {}, r"mask: shape: expected .*, got \(16, 24\)"),
        (zeros(1, 3, 16, 24), {}, r"mask: shape: expected .*, got \(1, 3, 16, 24\)"),
        (zeros(1, 16, 24, 3), {}, "mask: shape"),
        (zeros(1, 1, 1, 16, 24), {}, "mask: shape"),
        (zeros(1, 16, 24, dtype=torch.complex64), {}, "mask: .*complex64"),
        (zeros(1, 16, 24), {"grid": None}, "grid: expected .*, got NoneType"),
        (zeros(1, 16, 24), {"grid": (8, 8, 0, 2)}, "grid: expected .*, got tuple"),
        (zeros(1, 16, 24), {"capacity": -1}, "capacity: expected .*, got -1"),
        (zeros(1, 16, 24), {"capacity": 2**40}, "capacity: expected .*, got 1099511627776"),
        (zeros(1, 16, 24), {"capacity": "many"}, "capacity"),
        (zeros(1, 16, 24), {"tol": None}, "tol"),
        (zeros(1, 16, 24), {"tol": "0.5"}, "tol"),
        (zeros(1, 16, 24), {"grid": BlockGrid(8, 8, 0, (2**31 - 1, 2**31 - 1))}, "grid"),
        (zeros(1, 16, 24), {"grid": BlockGrid(8, 8, 0, 2**20)}, "grid: .*2\\^29"),
        (zeros(1, 16, 24), {"grid": BlockGrid(8, 8, 2**40, 2)}, "grid: .*32 bits"),
        (zeros(1, 16, 24), {"grid": BlockGrid(8, 8, -(2**31), 2)}, "grid"),
        (zeros(1, 16, 24), {"grid": BlockGrid(2**31 - 1, 8, 0, 2)}, "grid"),
    ],
)
def test_reduce_mask(device, mask, options, pattern):
    mask = mask.to(device) if isinstance(mask, torch.Tensor) else mask
    refused("reduce_mask.*" + pattern, reduce_mask, mask, **{"grid": GRID, **options})


# ---- mask_pyramid
PLANES = [(16, 24, 8), (8, 12, 4)]


def window(num=1, den=1, lo=0, hi=0, step=1):
    return Window(*((v, v) for v in (num, den, lo, hi, step)))


@pytest.mark.parametrize(
    ("mask", "planes", "fringes", "pattern"),
    [
        (None, PLANES, (), "mask: expected .*, got NoneType"),
        (zeros(16, 24), PLANES, (), r"mask: shape: expected .*, got \(16, 24\)"),
        (zeros(1, 3, 16, 24), PLANES, (), "mask: shape"),
        (zeros(1, 16, 24, dtype=torch.complex64), PLANES, (), "mask: .*complex64"),
        (zeros(1, 0, 24), PLANES, (), "mask: expected .*, got 0x24"),
        (zeros(1, 16, 24), 3, (), "planes: expected .*, got int"),
        (zeros(1, 16, 24), [8], (), r"planes\[0\]: expected .*, got int"),
        (zeros(1, 16, 24), [(16, 24)], (), r"planes\[0\]: expected .*, got \(16, 24\)"),
        (zeros(1, 16, 24), [(0, 24, 8)], (), r"planes\[0\]: expected .*, got 0x24"),
        (zeros(1, 16, 24), [(2**30, 24, 8)], (), r"planes\[0\]: expected .*, got 1073741824x24"),
        (zeros(1, 16, 24), [(2**16, 2**16, 2**10)], (), "fewer than 2\\^31 pixels"),
        (zeros(1, 16, 24), PLANES, 3, "fringes: expected .*, got int"),
        (zeros(1, 16, 24), PLANES, [3], r"fringes\[0\]: expected .*, got 3"),
        (zeros(1, 16, 24), PLANES, [(2, [(0, 3)])], r"fringes\[0\]: plane: .*, got 2"),
        (zeros(1, 16, 24), PLANES, [(0, [(2, 3)])], r"fringes\[0\]: plane: .*, got 2"),
        (zeros(1, 16, 24), PLANES, [(0, [(-1, 3)])], r"fringes\[0\]: plane: .*, got -1"),
        (zeros(1, 16, 24), PLANES, [(0, [(0,)])], "consumer"),
        (zeros(1, 16, 24), PLANES, [(0, [(0, None)])], "kernel_size"),
        (zeros(1, 16, 24), PLANES, [(0, [(0, (3, 3, 3))])], "kernel_size"),
        (zeros(1, 16, 24), PLANES, [(0, [])], "fringes: fringe 0 is cut short"),
        (zeros(1, 16, 24), PLANES, [(0, [(0, 0, 1, 1)])], "kernel_size"),
        (zeros(1, 16, 24), PLANES, [(0, [(0, 3, 1, -1)])], "padding"),
        (zeros(1, 16, 24), PLANES, [(0, [(0, 3, 2**31, 1)])], "window: expected numbers of 32 bits, got 2147483648"),
        (zeros(1, 16, 24), PLANES, [(0, [(0, 3, 1, 1)] * 65537)], "at most 65536 consumers"),
        (zeros(1, 16, 24), [*PLANES * 32768, PLANES[0]], (), "at most 65536 planes"),
        (zeros(1, 16, 24), PLANES, [(0, [(0, window(num=0))])], "num, den, step: expected at least 1"),
        (zeros(1, 16, 24), PLANES, [(0, [(0, window(den=-1))])], "num, den, step: expected at least 1"),
        (zeros(1, 16, 24), PLANES, [(0, [(0, window(hi=-1))])], "expected lo of at most hi"),
        (zeros(1, 16, 24), PLANES, [(0, [(0, window(den=2, step=2))])], "expected a step of 1"),
        (zeros(1, 16, 24), PLANES, [(0, [(0, window(hi=2**30))])], "a reach of at most 2"),
        (zeros(1, 16, 24), PLANES, [(0, [(0, window(num=2**28))])], "coordinates below 2"),
        (zeros(1, 16, 24), PLANES, [(0, [(0, window(den=2**28))])], "coordinates below 2"),
    ],
)
def test_mask_pyramid(device, mask, planes, fringes, pattern):
    mask = mask.to(device) if isinstance(mask, torch.Tensor) else mask
    refused("mask_pyramid.*" + pattern, mask_pyramid, mask, planes, 0.5, fringes)


@pytest.mark.parametrize("margin", [-1, 2**29 + 1])
def test_margin_of_a_pyramid(device, margin):
    refused(
        "mask_pyramid: margin: expected 0 to", mask_pyramid, zeros(1, 16, 24, device=device), PLANES, 0.5, (), margin
    )


@pytest.mark.parametrize(
    ("planes", "fringes"),
    [
        ([1], []),
        ([16, 24, 8], []),
        ([16, 24, 8, 8], [0]),
        ([16, 24, 8, 8], [0, 1, 0, 3]),
        ([16, 24, 8, 8], [0, 2**40]),
        ([16, 24, 8, 8], [5, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1]),
        ([16, 24, 8, 8], [0, 1, 5, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1]),
    ],
)
def test_raw_pyramid(device, planes, fringes):
    refused("mask_pyramid.*(planes|fringes)", OPS.mask_pyramid, zeros(1, 16, 24, device=device), planes, 0.5, fringes)


# ---- gather and scatter
def test_gather(device):
    active = random_active(GRID, 2, 0.5, device)
    x = zeros(2, 3, 16, 24, device=device)
    op = "sparse_gather.*"
    refused(op + "x: expected .*, got NoneType", sparse_gather, None, active)
    refused(op + "x: expected 4 dimensions, got 3", sparse_gather, x[0], active)
    refused(op + "active: expected .*, got NoneType", sparse_gather, x, None)
    refused(op + "active: expected .*, got Tensor", sparse_gather, x, active.indices)
    refused(op + "x: dtype: expected a real floating or integer one", sparse_gather, x.to(torch.complex64), active)
    refused(op + "block_map", sparse_gather, x[:1], active)  # another batch
    refused("grid", sparse_gather, x, active, grid=BlockGrid.cover((16, 16), 8))
    refused("grid", sparse_gather, x, active, grid=7)
    refused(op + "tail: expected 'zero' or 'undefined', got 'junk'", sparse_gather, x, active, tail="junk")
    refused(op + "grid", sparse_gather, x, active, grid=BlockGrid(2**30, 1, 0, GRID.bcount))
    refused(op + "transpose", sparse_gather, x, active, "yes")


def test_scatter(device):
    active = random_active(GRID, 2, 0.5, device)
    base, blocks = zeros(2, 3, 16, 24, device=device), zeros(12, 3, 8, 8, device=device)
    for form, name in ((sparse_scatter, "sparse_scatter"), (sparse_scatter_, "sparse_scatter_?")):
        op = f"sbnet::{name}.*"
        refused(op + "blocks: expected .*, got NoneType", form, None, active, base)
        refused(op + "base: expected .*, got NoneType", form, blocks, active, None)
        refused(op + "active: expected .*, got BlockGrid", form, blocks, GRID, base)
        refused(op + "base: expected 4 dimensions, got 3", form, blocks, active, base[0])
        refused(op + "blocks: expected 4 dimensions, got 5", form, blocks[None], active, base)
        refused(op + "blocks: dtype: expected that of base, float32, got float16", form, blocks.half(), active, base)
        for wrong in ((12, 4, 8, 8), (12, 3, 8, 9), (12, 3, 7, 8)):
            text = re.escape(str(list(wrong)).replace(" ", ""))
            refused(op + "blocks: shape: expected .*, got " + text, form, zeros(*wrong, device=device), active, base)
        refused(op + "blocks: expected at most .*, got 13", form, zeros(13, 3, 8, 8, device=device), active, base)
        refused(op + "block_map", form, blocks, active, base[:1])
        refused("grid", form, blocks, active, base, BlockGrid(8, 8, 0, (2, 4)))
        overlapping = BlockGrid((10, 8), (8, 8), 0, GRID.bcount)
        refused(op + "overlap.*add=True", form, zeros(12, 3, 10, 8, device=device), active, base, overlapping)
        for dtype in (torch.float64, torch.int32, torch.bool):
            refused(op + "add: dtype", form, blocks.to(dtype), active, base.to(dtype), add=True)
    refused(
        "sparse_scatter.*base: .*an expanded one", sparse_scatter_, blocks, active, base[:, :1].expand(2, 3, 16, 24)
    )
    refused("sparse_scatter.*base: .*an expanded one", sparse_scatter_, blocks, active, base[:1].expand(2, 3, 16, 24))
    inside = zeros(12 * 3 * 64, device=device)
    blocks, base = inside.view(12, 3, 8, 8), inside.view(2, 3, 16, 24)
    refused("sparse_scatter.*blocks: expected memory of its own", sparse_scatter_, blocks, active, base)


def test_lists_of_the_wrong_kind(device):
    active = random_active(GRID, 2, 0.5, device)
    x, grid = zeros(2, 3, 16, 24, device=device), GRID
    make = ActiveBlocks
    i, c, t, m = active.indices, active.count, active.total, active.block_map
    for bad, pattern in (
        (make(i.long(), c, t, m, grid), "indices"),
        (make(i.float(), c, t, m, grid), "indices"),
        (make(i[:, :2], c, t, m, grid), "indices"),
        (make(i.T, c, t, m, grid), "indices"),
        (make(i.flatten(), c, t, m, grid), "indices"),
        (make(torch.cat([i, i], 1)[:, ::2], c, t, m, grid), "indices"),
        (make(i, c.long(), t, m, grid), "count"),
        (make(i, c[:0], t, m, grid), "count"),
        (make(i, torch.cat([c, c]), t, m, grid), "count"),
        (make(i, c, t, m.long(), grid), "block_map"),
        (make(i, c, t, m[..., :1], grid), "block_map"),
        (make(i, c, t, m[:1], grid), "block_map"),
    ):
        refused(f"sparse_gather.*{pattern}", sparse_gather, x, bad)
        refused(f"sparse_scatter.*{pattern}", sparse_scatter, zeros(12, 3, 8, 8, device=device), bad, x)


# ---- what no kernel would notice: images without blocks, blocks without images
@pytest.mark.parametrize("images", [0, 1, 3])
def test_active_blocks_of_another_batch(device, images):
    active = random_active(GRID, 2, 0.5, device)
    x, weight = zeros(images, 4, 16, 24, device=device), zeros(4, 4, 3, 3, device=device)
    text = f"active: expected the images of x, {images}, got 2"
    refused(f"sparse_conv2d: {text}", sparse_conv2d, x, weight, None, active, padding=1)
    refused(f"sparse_conv2d_: {text}", sparse_conv2d_, x, weight, None, active, x.clone(), padding=1)
    for pool, pool_ in ((sparse_max_pool2d, sparse_max_pool2d_), (sparse_avg_pool2d, sparse_avg_pool2d_)):
        refused(f"{pool.__name__}: {text}", pool, x, active, 3, 1, 1)
        refused(f"{pool_.__name__}: {text}", pool_, x, active, x.clone(), 3, 1, 1)
    three = zeros(4, 4, 1, 1, device=device), weight, zeros(4, 4, 1, 1, device=device)
    refused(f"sparse_bottleneck2d: {text}", sparse_bottleneck2d, x, three, None, active)
    refused(f"sparse_bottleneck2d_: {text}", sparse_bottleneck2d_, x, three, None, active, x.clone())


def test_ops_called_past_python_know_the_batch(device):
    """As exported programs call them."""
    active, x = random_active(GRID, 2, 0.5, device), zeros(1, 4, 16, 24, device=device)
    lists = active.indices, active.count, active.block_map, GRID.numbers()
    text = "block_map: expected the images of x, 1, got 2"
    window = [1, 1], [1, 1], [1, 1], 1, "none", 0.0, False, False, None, None, None, []
    conv = zeros(4, 4, 3, 3, device=device), None, None, None, *lists, *window
    refused(text, OPS.sparse_conv2d, x, *conv)
    refused(text, OPS.sparse_max_pool2d, x, *lists, [3, 3], [1, 1], [1, 1], [1, 1], False)
    refused(text, OPS.sparse_avg_pool2d, x, *lists, [3, 3], [1, 1], [1, 1], False, True, None)


def test_out_in_the_weight(device):
    out = zeros(2, 4, 16, 24, device=device)
    weight = out.view(-1)[:144].view(4, 3, 3, 4).permute(0, 3, 1, 2)
    active = random_active(GRID, 2, 0.5, device)
    text = "out: expected memory of its own, got that of weight"
    refused(text, sparse_conv2d_, torch.ones_like(out), weight, None, active, out, padding=1)


def test_batch_statistics_of_other_pixels(device):
    """They know of the blocks only what the mask of pixels says, which broadcasts."""
    norm, active = SparseBatchNorm2d(4, device=device), random_active(GRID, 2, 0.5, device)
    x = zeros(2, 4, 16, 24, device=device)
    refused("SparseBatchNorm2d: active: expected .*, got 2", norm, x[:1], active)
    refused("SparseBatchNorm2d: active: expected .*, got 2", norm, x[..., :16], active)
    refused("SparseBatchNorm2d: active: expected .*, got Tensor", norm, x, x[:, 0] > 0)
    refused("SparseBatchNorm2d: x: .*int32", norm, x.int(), active)
    refused("SparseBatchNorm2d: x: ", norm, x[:, :3], active)


def test_lists_of_ones_own():
    def make(rows, **changes):
        given = {"indices": torch.tensor(rows), "grid": GRID, "batch": 2, **changes}
        return ActiveBlocks.from_indices(**given)

    assert make([[1, 1, 2], [0, 0, 0]]).indices.dtype == torch.int32
    for rows in ([[0, -1, 0]], [[0, 2, 0]], [[2, 0, 0]], [[0, 0, 0], [0, 0, 3]]):
        refused(r"from_indices: indices: expected .* below \(2, 2, 3\)", make, rows)
    refused("from_indices: indices: expected each block once", make, [[1, 1, 2], [0, 0, 0], [1, 1, 2]])
    refused("from_indices: indices: dtype: expected .*, got torch.float32", make, [[0.0, 0, 0]])
    refused(r"from_indices: indices: expected .*, got \(3,\)", make, [0, 0, 0])
    refused("from_indices: indices: expected .*, got list", make, [[0, 0, 0]], indices=[[0, 0, 0]])
    refused("from_indices: grid: expected .*, got int", make, [[0, 0, 0]], grid=8)
    refused("pixel_mask: size", make([[0, 0, 0]]).pixel_mask, (16.0, 24))


def test_sizes():
    for function in (conv_output_size, pool_output_size):
        refused(f"{function.__name__}: stride: ", function, (16, 24), 3, 0)
        refused(f"{function.__name__}: kernel_size: ", function, (16, 24), 0, 1)
        refused(f"{function.__name__}: size: ", function, (16, 24, 3), 3, 1)
    assert conv_output_size((16, 24), 3, 2, 1) == (8, 12)
    refused("same_padding: stride: expected at least 1, got 0", same_padding, 16, 3, 0)
    refused(r"cover: size: expected at least 0, got \(-16, 24\)", BlockGrid.cover, (-16, 24), 8)


# ---- fringe
def test_fringe(device):
    active = random_active(GRID, 2, 0.5, device)
    refused("fringe.*active: expected .*, got NoneType", fringe, None, active, (16, 24), 3)
    refused("fringe.*consumer|fringe.*active: expected .*, got int", fringe, active, 3, (16, 24), 3)
    refused("fringe.*size", fringe, active, active, (16, 24, 3), 3, 1, 1)
    refused("fringe.*size", fringe, active, active, (-16, 24), 3, 1, 1)
    refused("fringe.*size", fringe, active, active, (2**31, 2**31), 3, 1, 1)
    refused("fringe.*tiling grid|fringe.*active", fringe, active, active, (16, 25), 3, 1, 1)  # another plane's grid
    refused("fringe.*tiling grid|fringe.*active", fringe, active, active, (17, 24), 3, 1, 1)
    refused("fringe.*kernel_size", fringe, active, active, (16, 24), 0, 1, 1)
    refused("fringe.*kernel_size", fringe, active, active, (16, 24), None, 1, 1)
    refused("fringe.*stride", fringe, active, active, (16, 24), 3, 0, 1)
    refused("fringe.*padding", fringe, active, active, (16, 24), 3, 1, -1)
    refused("fringe.*dilation", fringe, active, active, (16, 24), 3, 1, 1, 0)
    refused("fringe.*capacity: expected .*, got -1", fringe, active, active, (16, 24), 3, 1, 1, capacity=-1)
    refused("fringe.*capacity", fringe, active, active, (16, 24), 3, 1, 1, capacity=2**40)
    one = random_active(GRID, 1, 0.5, device)
    refused("fringe.*consumer", fringe, active, one, (16, 24), 3, 1, 1)
    refused("fringe.*consumer", fringe, one, active, (16, 24), 3, 1, 1)


# ---- devices
@pytest.mark.gpu
def test_device_mixes():
    cpu, cuda = random_active(GRID, 2, 0.5), random_active(GRID, 2, 0.5, "cuda")
    x = zeros(2, 4, 16, 24)
    for x_, active in ((x, cuda), (x.cuda(), cpu)):
        refused("sparse_gather.*indices: .*device", sparse_gather, x_, active)
        blocks = zeros(12, 4, 8, 8, device=x_.device)
        refused("sparse_scatter.*device", sparse_scatter, blocks, active, x_)
        weight = zeros(4, 4, 3, 3, device=x_.device)
        refused("sparse_conv2d.*indices: .*device", sparse_conv2d, x_, weight, None, active, padding=1)
    refused("sparse_scatter.*blocks: .*device", sparse_scatter, zeros(12, 4, 8, 8), cuda, x.cuda())
    weight, bias = zeros(4, 4, 3, 3), zeros(4)
    refused("sparse_conv2d.*weight: .*device", sparse_conv2d, x.cuda(), weight, None, cuda, padding=1)
    refused("sparse_conv2d.*bias: .*device", sparse_conv2d, x.cuda(), weight.cuda(), bias, cuda, padding=1)
    refused(
        "sparse_conv2d.*residual: .*device", sparse_conv2d, x.cuda(), weight.cuda(), None, cuda, padding=1, residual=x
    )
    refused("sparse_conv2d_.*out: .*device", sparse_conv2d_, x.cuda(), weight.cuda(), None, cuda, x.clone(), padding=1)
    refused("fringe.*device", fringe, cuda, cpu, (16, 24), 3, 1, 1)


def test_meta_tensors_run_no_kernel():
    """The meta device has shapes only: the fake implementations answer."""
    mask = torch.zeros(2, 16, 24, device="meta")
    active = reduce_mask(mask, GRID)
    assert sparse_gather(torch.zeros(2, 3, 16, 24, device="meta"), active).shape == (12, 3, 8, 8)


def test_shapes_that_do_not_fit_are_refused_without_values():
    """While a graph is traced, not when it runs."""
    x = torch.zeros(2, 8, 16, 24, device="meta")
    active = reduce_mask(x[:, 0], GRID)
    for shape, groups in (((4, 3, 3, 3), 1), ((6, 8, 3, 3), 3), ((3, 4, 3, 3), 2)):
        call = x, torch.zeros(shape, device="meta"), None, active
        refused("sparse_conv2d: weight: expected the 8 channels of x", sparse_conv2d, *call, padding=1, groups=groups)
    weight = torch.zeros(6, 4, 3, 3, device="meta")
    assert sparse_conv2d(x, weight, None, active, padding=1, groups=2).shape == (2, 6, 16, 24)


def test_meta_tensors_among_others():
    """The fake implementations would answer, with memory of a real device that was not written."""
    active, x, weight = random_active(GRID, 2, 0.5), zeros(2, 4, 16, 24), zeros(4, 4, 3, 3)
    blocks, aside = zeros(12, 4, 8, 8), pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), active)
    one = "sparse_conv2d: expected tensors on one device, got cpu and meta"
    refused(one, sparse_conv2d, x, weight.to("meta"), None, active, padding=1)
    refused(one.replace("2d", "2d_"), sparse_conv2d_, x, weight.to("meta"), None, active, x.clone(), padding=1)
    for function, *arguments in (
        (sparse_conv2d, x, weight, None, aside),
        (sparse_gather, x, aside),
        (sparse_scatter, blocks, aside, x),
        (sparse_scatter_, blocks, aside, x),
        (sparse_fill, x, aside),
        (sparse_fill_, x, aside),
        (sparse_max_pool2d, x, aside, 3, 1, 1),
        (sparse_max_pool2d_, x, aside, x.clone(), 3, 1, 1),
        (sparse_avg_pool2d, x, aside, 3, 1, 1),
        (sparse_avg_pool2d_, x, aside, x.clone(), 3, 1, 1),
        (fringe, active, aside, (16, 24), 3, 1, 1),
    ):
        options = {"padding": 1} if function is sparse_conv2d else {}
        refused(f"sbnet::{function.__name__}: expected tensors on one device", function, *arguments, **options)
