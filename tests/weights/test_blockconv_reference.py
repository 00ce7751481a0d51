"""The convolutions of blocksparse's own test, at its batch sizes: values, both gradients, normalised filters and
edge biases against float64."""

import pytest
import torch

from sbnet import reference
from sbnet.compat.blocksparse import BlocksparseConv, BlocksparseDeconv
from support.blockconv_cases import B8, diagonal
from support.helpers import assert_as_accurate_as_torch

B4 = diagonal(4, 32, 48)
CASES = {
    "1 of 32": (BlocksparseConv, B4, (1,), (32,), {"padding": "VALID"}),
    "3 of 32, stride 2": (BlocksparseConv, B4, (3,), (32,), {"strides": (2,)}),
    "5 of 32, stride 2": (BlocksparseConv, B4, (5,), (32,), {"strides": (2,)}),
    "overlapping, 3 of 32, dilation 2": (BlocksparseConv, B8, (3,), (32,), {"dilates": (2,)}),
    "3x3 of 8x8": (BlocksparseConv, B4, (3, 3), (8, 8), {}),
    "overlapping, 3x3 of 8x8, VALID": (BlocksparseConv, B8, (3, 3), (8, 8), {"padding": "VALID"}),
    "3x3x3 of 4x4x4": (BlocksparseConv, B4, (3, 3, 3), (4, 4, 4), {}),
    "transposed, 3 of 32, stride 2": (BlocksparseDeconv, B4, (3,), (32,), {"strides": (2,)}),
}


def made(name, **more):
    kind, BCK, kernel, image, options = CASES[name]
    return kind(BCK, kernel, image, **options, **more)


def uniform(shape, device):
    return (torch.rand(shape) * 2 - 1).to(device)


def held(ours, plain, *tensors):
    """Values and the gradients of all tensors."""

    def run(f, wide):
        leaves = [(t.double() if wide else t).clone().requires_grad_() for t in tensors]
        y = f(*leaves)
        dy = uniform(y.shape, "cpu").to(y.device, y.dtype)
        return y, *torch.autograd.grad(y, leaves, dy)

    results = []
    for f, wide in ((ours, False), (plain, False), (plain, True)):
        torch.manual_seed(5)
        results.append(run(f, wide))
    for got, torchs, exact in zip(*results, strict=True):
        assert_as_accurate_as_torch(got, torchs, exact)


def plain_conv(conv, F, x):
    if conv.deconv:
        return reference.blocksparse_deconv(x, F, conv.layout, output_size=conv.MPQ, **conv.options)
    return reference.blocksparse_conv(x, F, conv.layout, **conv.options)


@pytest.mark.parametrize("N", [1, 2, 28])
@pytest.mark.parametrize("name", CASES)
def test_convolutions(device, name, N):
    conv = made(name)
    F, x = uniform(conv.f_shape(), device), uniform(conv.i_shape(N), device)
    held(conv, lambda F, x: plain_conv(conv, F, x), F, x)


@pytest.mark.parametrize("gained", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_normalised_filters(device, name, gained):
    conv = made(name)
    F = uniform(conv.f_shape(), device)
    gain = uniform((sum(len(k) for _, k in conv.BCK),), device)

    def plain(F, *g):
        dims = [d for d in range(1, F.dim()) if d != (2 if conv.deconv else 1)]
        scale = F.square().sum(dims, keepdim=True).clamp(min=1e-12).rsqrt()
        return F * (scale * g[0].view(scale.shape) if g else scale)

    held(conv.l2_normalize, plain, F, *([gain] if gained else []))


@pytest.mark.parametrize("form", ["bias", "gain and bias"])
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("1 ")])
def test_edge_biases(device, name, form):
    conv = made(name, edge_bias=True)
    F, x = uniform(conv.f_shape(), device), uniform(conv.i_shape(2), device)
    if not conv.edge_bias_shape()[1]:
        assert conv.options["padding"] == "VALID"
        return
    terms = [uniform(conv.edge_bias_shape(), device) for _ in form.split(" and ")]

    def plain(F, x, *terms):
        y = plain_conv(conv, F, x)
        group = conv.edges.index.flatten().to(y.device)
        flat = y.flatten(2)
        columns = []
        for at in range(flat.shape[2]):
            e = int(group[at])
            column = flat[:, :, at]
            if e < conv.edges.groups:
                column = column * terms[0][:, e] + terms[1][:, e] if len(terms) == 2 else column + terms[0][:, e]
            columns.append(column)
        return torch.stack(columns, 2).view(y.shape)

    def ours(F, x, *terms):
        return conv(F, x, terms[-1], terms[0] if len(terms) == 2 else None)

    held(ours, plain, F, x, *terms)
