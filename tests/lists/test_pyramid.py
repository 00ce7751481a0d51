"""mask_pyramid: the active blocks and fringes of all planes from one mask."""

import itertools

import pytest
import torch

from sbnet import MaskPyramid, conv_output_size, fringe, mask_pyramid, reduce_mask, reference
from sbnet.masks.grow import grow
from support.helpers import assert_bitwise, assert_same_active

DTYPES = [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64]


def assert_same_pyramid(got: MaskPyramid, want: MaskPyramid) -> None:
    assert (len(got.planes), len(got.fringes)) == (len(want.planes), len(want.fringes))
    for mine, theirs in zip(got.planes, want.planes, strict=True):
        assert_same_active(mine, theirs)
    for k, (mine, theirs) in enumerate(zip(got.fringes, want.fringes, strict=True)):
        assert_bitwise(mine.count, theirs.count, f"fringe {k}: count")
        assert_bitwise(mine.pixels, theirs.pixels, f"fringe {k}: pixels")


def halved(size, k=3, p=1):
    return conv_output_size(size, (k, k), (2, 2), (p, p), (1, 1))


def resnet(size, block=16):
    """Planes 1/2 to 1/32 of a network of stride-2 layers, and the fringes that its tensors need."""
    planes, fringes = [], []
    for k in range(5):
        size = halved(size, *((7, 3) if k == 0 else (3, 1)))
        planes.append((*size, block))
        fringes.append((k, [(k, 3, 1, 1)]))
        if k < 4:
            fringes.append((k, [(k + 1, 3, 2, 1), (k + 1, 1, 2)]))
    return planes, fringes


def spots(shape, density, device, dtype=torch.float32):
    """Values around tol = 0.5, few above it, some NaN where the dtype has it."""
    hits = torch.rand(shape) < density
    if not dtype.is_floating_point:
        return hits.to(dtype).to(device)
    mask = torch.where(hits, 0.75 + torch.rand(shape), 0.5 - torch.rand(shape))
    return mask.masked_fill(torch.rand(shape) < 0.01, float("nan")).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(128, 192), (100, 176), (93, 155), (64, 70)], ids=str)
def test_equals_reference(device, size, dtype):
    for block, density in ((8, 0.0005), (16, 0.001), ((4, 16), 0.002)):
        planes, fringes = resnet(size, block)
        mask = spots((2, *size), density, device, dtype)
        assert_same_pyramid(
            mask_pyramid(mask, planes, 0.5, fringes), reference.mask_pyramid(mask, planes, 0.5, fringes)
        )


@pytest.mark.parametrize(
    "planes",
    [
        [(1, 1, 1)],
        [(7, 5, 1), (7, 5, 3)],
        [(60, 90, 8), (45, 61, 8), (30, 45, 8), (29, 200, 16)],  # larger than the mask, and of no common strip
        [(31, 37, 64), (17, 300, (1, 40)), (300, 17, (40, 1))],
    ],
    ids=str,
)
def test_any_planes(device, planes):
    for density in (0, 0.003, 0.1, 1):
        mask = spots((3, 31, 37), density, device)
        assert_same_pyramid(mask_pyramid(mask, planes), reference.mask_pyramid(mask, planes))


@pytest.mark.parametrize(
    ("height", "planes"),
    [
        (6, [(12, 4, (7, 2))]),  # the border of its blocks lies within a row: at 3.5
        (200, [(200, 4, (100, 2))]),  # more rows from one border to the next than a strip may have
        (90, [(60, 4, (20, 4)), (45, 4, (9, 4))]),
    ],
)
def test_a_row_is_in_no_strip_but_its_own(device, height, planes):
    """Kernels look at strips of rows first: one row set in each image."""
    mask = torch.eye(height, dtype=torch.bool, device=device)[:, :, None].repeat(1, 1, 4)
    assert_same_pyramid(mask_pyramid(mask, planes), reference.mask_pyramid(mask, planes))


def test_is_what_the_single_ops_give(device):
    """Composed of the ops themselves, on a plane large enough for several thread blocks."""
    size = (512, 640)
    planes, fringes = resnet(size)
    mask = torch.zeros(2, *size, dtype=torch.bool, device=device)
    mask[0, 100, 200] = mask[1, 511, 639] = mask[1, 300, 310] = True
    got = mask_pyramid(mask, planes, 0.5, fringes)
    actives = []
    for (h, w, _), active in zip(planes, got.planes, strict=True):
        pooled = torch.nn.functional.adaptive_max_pool2d(mask.float()[:, None], (h, w))
        actives.append(reduce_mask(pooled, active.grid))
        assert_same_active(active, actives[-1])
    for edge, (k, consumers) in zip(got.fringes, fringes, strict=True):
        found = [fringe(actives[k], actives[r], planes[k][:2], *g) for r, *g in consumers]
        read = torch.cat([f.pixels[: int(f.count)] for f in found]).unique()
        assert int(edge.count) == len(read)
        assert_bitwise(edge.pixels[: len(read)], read)
        assert bool((edge.pixels[len(read) :] == -1).all())
    assert all(int(edge.count) for edge in got.fringes[:6])


@pytest.mark.parametrize("shape", [(2, 40, 56), (2, 1, 40, 56), (2, 40, 56, 1)], ids=str)
def test_shapes_of_the_mask(device, shape):
    mask = torch.rand(shape, device=device) > 0.995
    planes = [(20, 28, 8), (10, 14, 4)]
    assert_same_pyramid(mask_pyramid(mask, planes), reference.mask_pyramid(mask, planes))


def test_strided_mask(device):
    planes, fringes = resnet((48, 64), 8)
    for mask in (
        torch.rand(2, 64, 48, device=device).transpose(1, 2),
        torch.rand(2, 48, 128, device=device)[:, :, 3:67],
        torch.rand(4, 48, 130, device=device)[::2, :, ::2][:, :, :64],
        torch.rand(1, 48, 64, device=device).expand(2, 48, 64),
    ):
        assert_same_pyramid(
            mask_pyramid(mask, planes, 0.998, fringes), reference.mask_pyramid(mask, planes, 0.998, fringes)
        )


@pytest.mark.parametrize(("k", "s", "p", "d"), list(itertools.product((1, 2, 3, 7), (1, 2, 3), (0, 2), (1, 3))))
def test_consumers(device, k, s, p, d):
    size = (37, 75)
    out = conv_output_size(size, (k, k), (s, s), (p, p), (d, d))
    planes = [(*size, 8), (*out, 4)]
    fringes = [(0, [(1, k, s, p, d)]), (0, [(1, k, s, p, d), (0, 3, 1, 1)])]
    mask = spots((2, 80, 150), 0.001, device)
    assert_same_pyramid(mask_pyramid(mask, planes, 0.5, fringes), reference.mask_pyramid(mask, planes, 0.5, fringes))


@pytest.mark.parametrize("value", [0, 1])
def test_empty_and_full(device, value):
    planes, fringes = resnet((96, 160))
    mask = torch.full((2, 96, 160), value, device=device, dtype=torch.uint8)
    got = mask_pyramid(mask, planes, 0.5, fringes)
    for active in got.planes:
        assert int(active.count) == int(active.total) == value * active.capacity
    assert all(int(f.count) == 0 for f in got.fringes)
    assert_same_pyramid(got, reference.mask_pyramid(mask, planes, 0.5, fringes))


def test_empty_batch_and_no_planes(device):
    got = mask_pyramid(torch.zeros(0, 32, 48, device=device), [(16, 24, 8)], fringes=[(0, [(0, 3, 1, 1)])])
    assert int(got.planes[0].count) == int(got.fringes[0].count) == 0
    assert mask_pyramid(torch.zeros(1, 32, 48, device=device), []) == MaskPyramid((), ())


def test_large(device):
    """Many thread blocks in every kernel."""
    planes, fringes = resnet((1536, 2048), 32)
    mask = torch.zeros(4, 1536, 2048, device=device)
    mask.view(-1)[torch.randint(mask.numel(), (60,), device=device)] = 1
    got = mask_pyramid(mask, planes, 0.5, fringes)
    pooled = [torch.nn.functional.adaptive_max_pool2d(mask[:, None], p[:2]) for p in planes]
    for active, pool in zip(got.planes, pooled, strict=True):
        assert_same_active(active, reduce_mask(pool, active.grid))
    for edge, (k, consumers) in zip(got.fringes, fringes, strict=True):
        if len(consumers) == 1:
            want = fringe(got.planes[k], got.planes[k], planes[k][:2], 3, 1, 1)
            assert_bitwise(edge.pixels, want.pixels)
            assert_bitwise(edge.count, want.count)


@pytest.mark.parametrize("margin", [1, 5, 16, 32, 200, 2**29])
def test_a_margin_is_a_mask_grown_before(device, margin):
    """Of planes of the mask's size, smaller, larger; margins of whole blocks and of parts, in the frame and beyond."""
    torch.manual_seed(margin)
    planes = [(96, 130, 16), (96, 130, (3, 7)), (48, 65, 8), (7, 9, 2), (200, 131, 5)]
    fringes = [(0, [(2, 3, 2, 1)])]
    mask = (torch.rand(3, 96, 130) > 0.9995).to(device)
    mask[2] = False
    assert 0 < int(mask[:2].sum()) < 20
    grown = grow(mask, min(margin, 200))
    want = mask_pyramid(grown, planes, 0.5, fringes)
    assert_same_pyramid(want, reference.mask_pyramid(grown, planes, 0.5, fringes))
    for given in (mask, mask.half(), mask.transpose(1, 2).contiguous().transpose(1, 2)):
        assert_same_pyramid(mask_pyramid(given, planes, 0.5, fringes, margin), want)
