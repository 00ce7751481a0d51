"""Convolutions as products of patches: what halves on CUDA run; the same code on the CPU in float32."""

import pytest
import torch

from sbnet import ConvLayout, blocksparse_conv, reference
from sbnet.ops.weights.conv_geometry import parts, to_geometry
from sbnet.ops.weights.conv_product import as_product, convolve_by_product
from support.blockconv_cases import B4, UNEVEN
from support.helpers import assert_as_accurate_as_torch, tensor

CASES = {
    "1d": ((3,), (17,), {"padding": 1}),
    "2d": ((3, 3), (9, 7), {"padding": 1}),
    "2d_stride": ((3, 2), (9, 8), {"stride": (2, 3), "padding": (0, 1)}),
    "2d_dilated": ((3, 2), (11, 9), {"dilation": (2, 3), "padding": 2}),
    "2d_1x1": ((1, 1), (5, 6), {"padding": 0}),
    "3d": ((1, 3, 2), (3, 5, 6), {"padding": (0, 1, 1)}),
}


def mask():
    return torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 1], [1, 1, 1]])


def random_inputs(case, size, device, dtype):
    kernel, image, options = CASES[case]
    layout = ConvLayout.from_mask(mask(), 4 * size, 3 * size, size, kernel)
    x = tensor((2, 4 * size, *image), dtype, device)
    filters = torch.randn(layout.filter_shape, device=device).div(8).to(dtype)
    return layout, x, filters, tensor((3 * size,), dtype, device), options


def compare(run, layout, x, filters, bias, options):
    """Values and gradients, against the reference in float64."""

    def all_of(f, *tensors):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        y = f(*leaves)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device, y.dtype)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    def plain(x, filters, bias):
        return reference.blocksparse_conv(x, filters, layout, bias, "silu", **options)

    got, want = all_of(run, x, filters, bias), all_of(plain, x, filters, bias)
    exact = all_of(plain, x.double(), filters.double(), bias.double())
    for mine, torchs, true in zip(got, want, exact, strict=True):
        assert_as_accurate_as_torch(mine, torchs, true)


@pytest.mark.parametrize("case", CASES)
def test_products_of_patches(device, case):
    layout, x, filters, bias, options = random_inputs(case, 8, device, torch.float32)
    geometry = to_geometry("blocksparse_conv", layout, **{"stride": 1, "dilation": 1, **options})
    own = [part[3 - len(layout.kernel_size) :] for part in parts(geometry)]
    product = as_product(layout)
    assert product.blocks == layout.blocks * torch.Size(layout.kernel_size).numel()
    compare(lambda x, f, b: convolve_by_product(x, f, product, b, "silu", own), layout, x, filters, bias, options)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [8, 32, 64])
@pytest.mark.parametrize("case", CASES)
def test_halves_on_cuda(case, size):
    """What blocksparse_conv itself runs there without a gradient, of either memory format; with one, a kernel."""
    layout, x, filters, bias, options = random_inputs(case, size, "cuda", torch.float16)
    arguments = filters, layout, bias, "silu"
    got = blocksparse_conv(x, *arguments, **options)
    assert layout.by_product
    want = reference.blocksparse_conv(x, *arguments, **options)
    exact = reference.blocksparse_conv(x.double(), filters.double(), layout, bias.double(), "silu", **options)
    assert_as_accurate_as_torch(got, want, exact)
    other = blocksparse_conv(x.requires_grad_(), *arguments, **options)
    assert_as_accurate_as_torch(other, want, exact)
    assert other.requires_grad
    if x.dim() == 4:
        last = x.detach().contiguous(memory_format=torch.channels_last)
        y = blocksparse_conv(last, *arguments, **options)
        assert y.stride(1) == 1
        assert_as_accurate_as_torch(y, want, exact)  # on Hopper a kernel of convolutions


def test_blocks_that_are_no_grid():
    assert as_product(ConvLayout.from_mask(mask(), 32, 24, 8, 3)).mask().sum() == 24
    twice = [(range(8), range(8)), (range(8), range(8))]
    shifted = [(range(8), range(8)), (range(4, 12), range(8)), (range(8, 16), range(8))]
    for BCK in (B4, UNEVEN, twice, shifted, [(range(12), range(12))]):
        assert as_product(ConvLayout(BCK, (3, 3))) is None
