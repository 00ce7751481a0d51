"""3x3 convolutions of stride 1 with block-sparse weights, which CPUs compute by Winograd's products: layouts with
enough weights for that, in every dtype and direction, on whole planes and on active blocks."""

import pytest
import torch

from sbnet import BlockGrid, ConvLayout, blocksparse_conv, blocksparse_deconv, reference, sparse_conv2d
from support.blockconv_cases import B8
from support.helpers import FLOATS, assert_as_accurate_as_torch, assert_bitwise, laid_out, random_active, tensor


def grid(inputs, outputs, size, density, seed=0):
    rows, columns = -(-inputs // size), -(-outputs // size)
    mask = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < density
    mask[torch.arange(rows), torch.arange(rows) % columns] = True
    mask[torch.arange(columns) % rows, torch.arange(columns)] = True
    return ConvLayout.from_mask(mask, inputs, outputs, size, (3, 3))


LAYOUTS = {
    "blocks of 32": grid(128, 96, 32, 0.5),
    "blocks of 8": grid(64, 96, 8, 0.6),
    "blocks of 16, ragged": grid(70, 90, 16, 0.7),
    "whole": grid(48, 40, 128, 1.0),
    "overlapping": ConvLayout(B8, (3, 3)),
    "of several sizes": ConvLayout([(range(130), range(20)), (range(90, 150), range(13, 61)), ([7], [3])], (3, 3)),
}


def inputs(layout, device, dtype=torch.float32, shape=(2, 9, 11), back=False):
    n, *plane = shape
    c, k = layout.in_channels, layout.out_channels
    if back:
        c, k = k, c
    weight = (torch.randn(layout.weights) / 16).to(device, dtype)
    return tensor((n, c, *plane), dtype, device), weight, tensor((k,), dtype, device)


@pytest.mark.parametrize("padding", [(1, 1), (0, 2)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_both_directions(device, name, dtype, padding):
    layout = LAYOUTS[name]
    options = {"padding": padding, "activation": "silu"}
    x, w, b = inputs(layout, device, dtype)
    want = reference.blocksparse_conv(x, w, layout, b, **options)
    exact = reference.blocksparse_conv(x.double(), w.double(), layout, b.double(), **options)
    assert_as_accurate_as_torch(blocksparse_conv(x, w, layout, b, **options), want, exact)
    x, w, b = inputs(layout, device, dtype, back=True)
    options["output_size"] = [side + 2 - 2 * p for side, p in zip(x.shape[2:], padding, strict=True)]
    back = layout.swapped()
    want = reference.blocksparse_deconv(x, w, back, b, **options)
    exact = reference.blocksparse_deconv(x.double(), w.double(), back, b.double(), **options)
    assert_as_accurate_as_torch(blocksparse_deconv(x, w, back, b, **options), want, exact)


@pytest.mark.parametrize("shape", [(1, 4, 4), (3, 5, 40), (2, 29, 33)])
def test_planes_and_memory_formats(device, shape):
    layout = LAYOUTS["blocks of 16, ragged"]
    x, w, b = inputs(layout, device, shape=shape)
    want = reference.blocksparse_conv(x, w, layout, b)
    exact = reference.blocksparse_conv(x.double(), w.double(), layout, b.double())
    got = blocksparse_conv(x, w, layout, b)
    assert_as_accurate_as_torch(got, want, exact)
    for form in ("channels_last", "channel_slice", "plane_slice", "permuted"):
        assert_bitwise(blocksparse_conv(laid_out(x, form), w, layout, b), got, form)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients(device, name):
    layout = LAYOUTS[name]
    x, w, b = inputs(layout, device)

    def gradients(f, *tensors):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        y = f(*leaves[:2], layout, leaves[2], padding=1)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device, y.dtype)
        return torch.autograd.grad(y, leaves, dy)

    got, want = gradients(blocksparse_conv, x, w, b), gradients(reference.blocksparse_conv, x, w, b)
    exact = gradients(reference.blocksparse_conv, x.double(), w.double(), b.double())
    for mine, torchs, true in zip(got, want, exact, strict=True):
        assert_as_accurate_as_torch(mine, torchs, true)


@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("size", [4, 7, 16])
def test_on_active_blocks(device, size, density):
    layout = LAYOUTS["blocks of 32"]
    x, w, b = inputs(layout, device, shape=(2, 18, 21))
    active = random_active(BlockGrid.cover((18, 21), size), 2, density, device)
    options = {"padding": 1, "activation": "relu"}
    got = sparse_conv2d(x, w, b, active, layout=layout, **options)
    want = reference.blocksparse_conv_active(x, w, layout, active, b, **options)
    exact = reference.blocksparse_conv_active(x.double(), w.double(), layout, active, b.double(), **options)
    assert_as_accurate_as_torch(got, want, exact)
    assert not got[~active.pixel_mask((18, 21)).expand_as(got)].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_in_its_blocks(device, bad):
    """And an infinity makes no NaN of its neighbours' differences."""
    layout = LAYOUTS["blocks of 32"]
    x, w, b = inputs(layout, device)
    x[0, 40, 4, 5] = bad
    got, exact = (
        blocksparse_conv(x, w, layout, b),
        reference.blocksparse_conv(x.double(), w.double(), layout, b.double()),
    )
    assert_bitwise(got.isnan(), exact.isnan())
    assert_bitwise(got.isinf(), exact.isinf())
    finite = exact.isfinite()
    assert bool(finite.any())
    assert not bool(finite.all())
    torch.testing.assert_close(got[finite].double(), exact[finite], rtol=1e-4, atol=1e-4)
    readers = {k for c, outputs in layout.BCK if 40 in c for k in outputs}
    assert not bool(got[:, [k for k in range(96) if k not in readers]].isfinite().logical_not().any())
