"""blocksparse's convolution classes by its names: shapes, normalised filters, edge biases."""

import pytest
import torch

from sbnet.compat.blocksparse import (
    BlocksparseConv,
    BlocksparseDeconv,
    ConvEdgeBias,
    conv_edge_bias_init,
    deconv_edge_bias_init,
)
from sbnet.weights.functional import blocksparse_l2_decay, blocksparse_norm
from support.blockconv_cases import UNEVEN, diagonal

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
    got, y = conv(f, x, b, g), conv(f, x)  # the filter, images, bias, gain

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


# Of blocksparse's own test: images, filters, and how many groups of positions lie near the edge. By hand: the output
# position of a 3x3 filter of padding 1 is one of 3x3 kinds, of which one, the inside, has no group.
@pytest.mark.parametrize(("side", "groups"), [(16, 8), (8, 8), (4, 8), (2, 4), (1, 1)])
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_edge_bias_of_plain_convolutions(side, groups, data_format):
    """op(x, gain, bias) in that order, gain and bias of op.shape, in both formats."""
    first = data_format == "NCHW"
    shape = (2, 3, side, side) if first else (2, side, side, 3)
    y, w = torch.randn(shape), torch.empty(3, 3, 3, 3)
    op = conv_edge_bias_init(y, torch.empty(shape), w, strides=[1, 1], data_format=data_format)
    assert op.shape == ((3, groups) if first else (groups, 3))
    gain, bias = torch.randn(op.shape), torch.randn(op.shape)
    got = op(y, gain, bias)
    planes, made = (y, got) if first else (y.permute(0, 3, 1, 2), got.permute(0, 3, 1, 2))
    gain, bias = (gain, bias) if first else (gain.T, bias.T)
    kinds = {}
    for p in range(side):
        for q in range(side):
            outside = tuple((r, s) for r in range(3) for s in range(3)
                            if not (0 <= p + r - 1 < side and 0 <= q + s - 1 < side))  # fmt: skip
            want = planes[:, :, p, q]
            if outside:
                e = kinds.setdefault(outside, len(kinds))
                want = want * gain[:, e] + bias[:, e]
            torch.testing.assert_close(made[:, :, p, q], want)
    assert len(kinds) == groups


@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_edge_bias_of_transposed_convolutions(data_format, padding):
    """Groups are the output positions for which the same taps fall beyond the input."""
    small, large = (5, 10) if padding == "SAME" else (5, 11)
    first = data_format == "NCHW"
    x, y = (torch.randn((1, c, n, n) if first else (1, n, n, c)) for c, n in ((4, small), (3, large)))
    op = deconv_edge_bias_init(
        y, x, torch.empty(3, 3, 3, 4), [1, 1, 2, 2] if first else [1, 2, 2, 1], padding, data_format
    )
    gain, bias = torch.ones(op.shape), torch.arange(1.0, op.edgeBiasDim + 1)
    bias = bias.expand(3, -1) if first else bias[:, None].expand(-1, 3)
    group = (op(torch.zeros_like(y), gain, bias))[0, 0 if first else slice(None), :]
    group = group if first else group[..., 0]
    pad = max((small - 1) * 2 + 3 - large, 0) // 2 if padding == "SAME" else 0
    seen = {}
    for p in range(large):
        for q in range(large):
            outside = []
            for r in range(3):
                for s in range(3):
                    at = [(p + pad - r, 2), (q + pad - s, 2)]
                    holes = [v % 2 != 0 for v, _ in at]
                    if any(not hole and not 0 <= v // 2 < small for (v, _), hole in zip(at, holes, strict=True)):
                        outside.append((r, s))
            seen.setdefault(tuple(outside), set()).add(float(group[p, q]))
    assert seen.pop((), {0.0}) == {0.0}
    assert [sorted(v) for v in seen.values()] == [[float(e)] for e in range(1, op.edgeBiasDim + 1)]


def test_edge_bias_refuses_the_layout_of_pytorchs_filters():
    with pytest.raises(ValueError, match=r"w_shape: expected \[\*window, 4, 6\]"):
        ConvEdgeBias((1, 6, 8, 8), (1, 4, 8, 8), (6, 4, 3, 3), data_format="NCHW")
    with pytest.raises(ValueError, match="padding: expected SAME or VALID"):
        ConvEdgeBias((1, 6, 8, 8), (1, 4, 8, 8), (3, 3, 4, 6), data_format="NCHW", padding="same_upper")


def test_bad_input():
    conv = BlocksparseConv(B4, (3, 3), (8, 8))
    with pytest.raises(ValueError, match="images of"):
        conv(torch.randn(conv.f_shape()), torch.randn(2, 32, 8, 9))
    assert conv.edge_bias_shape() == (48, 8), "of a convolution that was not told of an edge bias, too"
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
