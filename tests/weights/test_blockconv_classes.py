"""blocksparse's convolution classes by its names: shapes, normalised filters, edge biases."""

import pytest
import torch
import torch.nn.functional as F

from sbnet.weights.conv import BlocksparseConv, BlocksparseDeconv, conv_edge_bias_init, deconv_edge_bias_init
from sbnet.weights.functional import blocksparse_l2_decay, blocksparse_norm
from support.blockconv_cases import UNEVEN, diagonal
from support.helpers import tensor

B4 = diagonal(4, 8, 12)


def test_shapes():
    conv = BlocksparseConv(B4, (3, 3), (8, 9), strides=(1, 2, 2))
    assert (conv.i_shape(2), conv.o_shape(2), conv.f_shape()) == ([2, 32, 8, 9], [2, 48, 4, 5], [4, 12, 8, 3, 3])
    back = BlocksparseDeconv(B4, (3, 3), (4, 5), strides=(2, 2))
    assert (back.o_shape(2), back.f_shape(1)) == ([2, 48, 8, 10], [8, 12, 3, 3])
    assert BlocksparseConv(B4, (4,), (9,)).MPQ == [10]  # SAME pads half an even filter on both sides
    uneven = BlocksparseConv(UNEVEN, (3, 2), (7, 5))
    assert uneven.f_shape() == [(6 + 12 + 1) * 6]
    parts = [torch.randn(uneven.f_shape(b)) for b in range(3)]
    assert list(uneven.collapse_filter(parts).shape) == uneven.f_shape()


@pytest.mark.parametrize("BCK", [B4, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("kind", [BlocksparseConv, BlocksparseDeconv])
def test_l2_normalize_and_its_gradients(kind, BCK):
    conv = kind(BCK, (3, 2), (7, 6))
    filters = torch.randn(conv.f_shape(), dtype=torch.float64).float().requires_grad_()
    outputs = [len(k) for _, k in conv.BCK]
    gain = torch.randn(sum(outputs)).requires_grad_()

    def by_hand(f, g):
        made, at, first = [], 0, 0
        for b, count in enumerate(outputs):
            shape = conv.f_shape(b)
            size = torch.Size(shape).numel()
            part = f.reshape(-1)[at : at + size].view(shape)
            axis = 1 if conv.deconv else 0
            dims = [d for d in range(4) if d != axis]
            scale = g[first : first + count].view([-1 if d == axis else 1 for d in range(4)])
            made.append((part * scale / part.square().sum(dims, keepdim=True).clamp(min=1e-12).sqrt()).reshape(-1))
            at, first = at + size, first + count
        return torch.cat(made).view(f.shape)

    got, want = conv.l2_normalize(filters, gain), by_hand(filters.double(), gain.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    dy = torch.randn(got.shape)
    for mine, true in zip(
        torch.autograd.grad(got, (filters, gain), dy),
        torch.autograd.grad(want, (filters, gain), dy.double()),
        strict=True,
    ):
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)
    ones = torch.ones(sum(outputs))
    torch.testing.assert_close(conv.l2_normalize(filters), by_hand(filters, ones))


@pytest.mark.parametrize(
    ("kernel", "image", "groups"), [((3, 3), (8, 8), 8), ((3, 3, 3), (4, 4, 4), 26), ((1, 1), (5, 5), 0)]
)
def test_edge_groups(kernel, image, groups):
    conv = BlocksparseConv(B4, kernel, image, edge_bias=True)
    assert conv.edge_bias_shape() == (48, groups)
    firsts = [int((conv.edges.index.flatten() == e).nonzero()[0]) for e in range(groups)]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize("kind", [BlocksparseConv, BlocksparseDeconv])
def test_edge_groups_are_what_falls_outside(kind):
    """Two positions are of one group where the same taps read zeros beyond the image."""
    conv = kind(B4, (3, 2), (5, 4), strides=(2, 1), padding=(2, 1), edge_bias=True)
    seen = {}
    for p in range(conv.MPQ[0]):
        for q in range(conv.MPQ[1]):
            outside = []
            for r in range(3):
                for s in range(2):
                    at = [p + 2 - r, q + 1 - s] if conv.deconv else [2 * p - 2 + r, q - 1 + s]
                    hole = conv.deconv and at[0] % 2
                    rows = at[0] // 2 if conv.deconv else at[0]
                    if (not hole and not 0 <= rows < 5) or not 0 <= at[1] < 4:
                        outside.append((r, s))
            seen.setdefault(tuple(outside), set()).add(int(conv.edges.index[p, q]))
    assert seen.pop((), {conv.edges.groups}) == {conv.edges.groups}
    assert sorted(seen.values(), key=min) == [{e} for e in range(conv.edges.groups)]


def test_edge_bias_and_its_gradients():
    conv = BlocksparseConv(B4, (3, 3), (5, 6), edge_bias=True)
    f, x = torch.randn(conv.f_shape(), requires_grad=True), torch.randn(conv.i_shape(2))
    g, b = (torch.randn(conv.edge_bias_shape(), requires_grad=True) for _ in range(2))
    got, y = conv(f, x, b, g), conv(f, x)

    def by_hand(y, g, b):
        z = y.clone().flatten(2)
        for e in range(conv.edges.groups):
            at = (conv.edges.index.flatten() == e).nonzero()[:, 0]
            z = z.index_copy(2, at, z[:, :, at] * g[:, e, None] + b[:, e, None])
        return z.view(y.shape)

    torch.testing.assert_close(got, by_hand(y, g, b))
    torch.testing.assert_close(conv(f, x, b), by_hand(y, torch.ones_like(g), b))
    dy = torch.randn(got.shape)
    grads = [torch.autograd.grad(z, (f, g, b), dy, retain_graph=True) for z in (got, by_hand(conv(f, x), g, b))]
    for mine, true in zip(*grads, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-4)


def test_edge_bias_of_plain_convolutions():
    x, w = tensor((2, 3, 8, 8)), torch.randn(4, 3, 3, 3)
    assert conv_edge_bias_init(F.conv2d(x, w, padding=1), x, w, padding=1).groups == 8
    back = deconv_edge_bias_init(F.conv_transpose2d(x, w[:3], padding=1), x, w[:3], padding=1)
    y = torch.randn(2, 3, 8, 8)
    bias = torch.randn(3, back.groups)
    assert torch.equal(back(y, bias)[:, :, 1:-1, 1:-1], y[:, :, 1:-1, 1:-1])
    assert not torch.equal(back(y, bias), y)


def test_bad_input():
    conv = BlocksparseConv(B4, (3, 3), (8, 8))
    with pytest.raises(ValueError, match="images of"):
        conv(torch.randn(conv.f_shape()), torch.randn(2, 32, 8, 9))
    with pytest.raises(ValueError, match="edge_bias: expected True"):
        conv.edge_bias_shape()
    with pytest.raises(ValueError, match="gain: expected"):
        conv.l2_normalize(torch.randn(conv.f_shape()), torch.randn(3))
    with pytest.raises(ValueError, match="expected 2 numbers"):
        BlocksparseConv(B4, (3, 3), (8,))


@pytest.mark.parametrize("gated", [False, True])
def test_block_norms_and_decay(gated):
    w, gate = torch.randn(6, 8, 8), torch.tensor([1.0, 0, 1, 0, 1, 1])
    norms = [w.double().square().sum((1, 2)).sqrt(), w.double().abs().amax((1, 2))]
    for name, want in zip(("l2", "max"), norms, strict=True):
        torch.testing.assert_close(blocksparse_norm(w, name).double(), want)
    w[2] *= 1e-3  # of less norm than the rate
    want = w.double() * (1 - 0.05 / w.double().square().sum((1, 2)).sqrt()).clamp(min=0)[:, None, None]
    if gated:
        want = torch.where(gate[:, None, None] != 0, want, w.double())
    got = blocksparse_l2_decay(w, gate if gated else None, rate=0.05)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    assert not got[2].any()
    with pytest.raises(ValueError, match="norm: expected"):
        blocksparse_norm(w, "l1")
