"""Window: what layers read, against PyTorch's gradients; fringes and pyramids of layers that are no convolution."""

import pytest
import torch
import torch.nn.functional as F

from sbnet import BlockGrid, Window, fringe, mask_pyramid, reference
from support.helpers import random_active

# name: the layer as PyTorch has it, and its window
LAYERS = {
    "3x3": (lambda x: conv(x, 3, padding=1), Window.conv(3, 1, 1)),
    "3x3 stride 2": (lambda x: conv(x, 3, stride=2, padding=1), Window.conv(3, 2, 1)),
    "1x1 stride 3": (lambda x: conv(x, 1, stride=3), Window.conv(1, 3)),
    "3x3 dilation 4": (lambda x: conv(x, 3, padding=4, dilation=4), Window.conv(3, 1, 4, 4)),
    "2x2 stride 3 dilation 2": (lambda x: conv(x, 2, stride=3, dilation=2), Window.conv(2, 3, 0, 2)),
    "ceil_mode pool": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), Window.conv(3, 2, 1)),
    "nearest x2": (lambda x: F.interpolate(x, scale_factor=2), Window((1, 1), (2, 2), (0, 0), (0, 0), (1, 1))),
    "nearest x3": (lambda x: F.interpolate(x, scale_factor=3), Window((1, 1), (3, 3), (0, 0), (0, 0), (1, 1))),
    "nearest to half": (lambda x: F.interpolate(x, scale_factor=0.5), Window.conv(1, 2)),
    "nearest to 2/5": (
        lambda x: F.interpolate(x, size=(x.shape[2] * 2 // 5, x.shape[3] * 2 // 5)),
        Window((5, 5), (2, 2), (0, 0), (0, 0), (1, 1)),
    ),
    "bilinear x2": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        Window((2, 2), (4, 4), (-1, -1), (3, 3), (1, 1)),
    ),
    "transposed 4x4 stride 2 padding 1": (
        lambda x: F.conv_transpose2d(x, torch.ones(1, 1, 4, 4), stride=2, padding=1),
        Window((1, 1), (2, 2), (-1, -1), (1, 1), (1, 1)),
    ),
    "transposed 2x2 stride 2": (
        lambda x: F.conv_transpose2d(x, torch.ones(1, 1, 2, 2), stride=2),
        Window((1, 1), (2, 2), (0, 0), (0, 0), (1, 1)),
    ),
}
SIZES = [(20, 35), (10, 70)]


def conv(x, kernel, **options):
    return F.conv2d(x, torch.ones(1, 1, kernel, kernel), **options)


def by_gradient(layer, consumer, active, size):
    """Pixels that the consumer's active outputs depend on and no active block writes."""
    x = torch.zeros(active.batch, 1, *size, requires_grad=True)
    y = layer(x)
    (reads,) = torch.autograd.grad((y * consumer.pixel_mask(y.shape[2:]).cpu()).sum(), x)
    return ((reads > 0) & ~active.pixel_mask(size).cpu()).flatten().nonzero().flatten().int()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_fringe_is_what_the_layer_reads(device, name, size):
    layer, window = LAYERS[name]
    out = tuple(layer(torch.zeros(1, 1, *size)).shape[2:])
    for block, density in ((4, 0.3), ((3, 7), 0.1), (8, 0.6), (1, 0.02)):
        active = random_active(BlockGrid.cover(size, block), 2, density, device)
        consumer = random_active(BlockGrid.cover(out, 5), 2, 0.2, device)
        got = fringe(active, consumer, size, window, consumer_size=out)
        want = by_gradient(layer, consumer, active, size)
        assert got.pixels[: int(got.count)].cpu().tolist() == want.tolist()
        again = reference.fringe(active, consumer, size, window, consumer_size=out)
        assert torch.equal(got.pixels, again.pixels)
        assert torch.equal(got.count, again.count)


@pytest.mark.parametrize("count", [9, 90])
def test_a_pyramid_of_many_planes_and_consumers(device, count):
    """As many as a large network has, whatever fits into one launch's parameters."""
    size = (40, 56)
    planes = [(size[0] - k % 7, size[1] - k % 11, 8 - k % 3) for k in range(count)]
    fringes = [
        (k, [(k, 3, 1, 1), ((k + 1) % count, Window((1, 1), (2, 2), (-1, -1), (1, 1), (1, 1)))]) for k in range(count)
    ]
    mask = torch.rand(2, *size, device=device) > 0.99
    got = mask_pyramid(mask, planes, 0.5, fringes)
    want = reference.mask_pyramid(mask, planes, 0.5, fringes)
    for ours, theirs in zip(got.planes, want.planes, strict=True):
        assert torch.equal(ours.indices, theirs.indices)
        assert torch.equal(ours.block_map, theirs.block_map)
        assert torch.equal(ours.count, theirs.count)
    for ours, theirs in zip(got.fringes, want.fringes, strict=True):
        assert torch.equal(ours.pixels, theirs.pixels)
        assert torch.equal(ours.count, theirs.count)


def test_a_window_needs_the_size_that_it_makes(device):
    active = random_active(BlockGrid.cover((8, 8), 4), 1, 0.5, device)
    with pytest.raises(ValueError, match=r"fringe: consumer_size: expected \(height, width\) with a Window, got None"):
        fringe(active, active, (8, 8), Window.conv(1))
