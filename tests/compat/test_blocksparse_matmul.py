"""BlocksparseMatMul, SparseProj and the functions beside them, as blocksparse defines them."""

import pickle

import pytest
import torch

from sbnet import blocksparse_matmul
from sbnet.compat.blocksparse import BlocksparseMatMul, SparseProj
from sbnet.weights import block_reduced_full_dw, l2_normalize
from support.helpers import assert_bitwise
from support.weight_cases import barabasi_albert, random_layout, weights_of


@pytest.mark.parametrize("axis", [0, 1])
def test_products(device, axis):
    bsmm = BlocksparseMatMul(barabasi_albert(12, 3), block_size=16, feature_axis=axis)
    assert bsmm.w_shape == (bsmm.blocks, 16, 16)
    assert bsmm.g_shape == (bsmm.blocks,)
    assert (bsmm.C, bsmm.K, bsmm.CB, bsmm.KB, bsmm.bsize) == (192, 192, 12, 12, 16)
    assert bsmm.i_shape(7) == bsmm.o_shape(7) == ((7, 192) if axis else (192, 7))
    assert bsmm.block_coord(0) == (0, 0)
    assert bsmm.density == bsmm.blocks / 144
    x, dy = (torch.randn(bsmm.i_shape(7), device=device) for _ in range(2))
    weight = torch.randn(bsmm.w_shape, device=device)
    gate = torch.rand(bsmm.g_shape, device=device)
    dense = bsmm.layout.to_dense(weight * gate[:, None, None])
    rows = (lambda t: t) if axis else (lambda t: t.T)
    torch.testing.assert_close(rows(bsmm(x, weight, gate)), rows(x) @ dense, rtol=1e-4, atol=1e-4)
    assert_bitwise(bsmm.matmul(x, weight, gate), bsmm(x, weight, gate))
    torch.testing.assert_close(rows(bsmm.bprop(dy, weight, gate)), rows(dy) @ dense.T, rtol=1e-4, atol=1e-4)
    full = bsmm.layout.from_dense(rows(x).T @ rows(dy))
    torch.testing.assert_close(bsmm.updat(x, dy), full, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bsmm.updat(x, dy, gate), full * gate[:, None, None], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bsmm.group_param_grads([(x, dy)] * 9), 9 * full, rtol=1e-4, atol=1e-3)
    assert_bitwise(pickle.loads(pickle.dumps(bsmm))(x, weight, gate), bsmm(x, weight, gate))


def test_l2_normalize(device):
    layout = random_layout(4, 5, 16, ragged=3)
    weight = weights_of(layout, torch.float32, device).nan_to_num(0.0).requires_grad_()
    gain = torch.rand(layout.out_features, device=device, requires_grad=True)

    def dense(w, g):
        w = layout.to_dense(w)
        return layout.from_dense(w * g / w.square().sum(0).clamp(min=1e-12).sqrt())

    got, want = l2_normalize(weight, layout, gain), dense(weight, gain)
    torch.testing.assert_close(got, want)
    direction = torch.randn_like(got)
    grads = [torch.autograd.grad((y * direction).sum(), (weight, gain)) for y in (got, want)]
    torch.testing.assert_close(grads[0][1], grads[1][1], rtol=1e-4, atol=1e-5)
    inside = layout.from_dense(torch.ones(layout.shape, device=device)) > 0
    torch.testing.assert_close(grads[0][0][inside], grads[1][0][inside], rtol=1e-4, atol=1e-5)
    ones = l2_normalize(weight.detach(), layout)
    sums = layout.to_dense(ones).square().sum(0)
    full = layout.to_dense(weight.detach()).abs().sum(0) > 0
    torch.testing.assert_close(sums[full], torch.ones_like(sums[full]))
    assert l2_normalize(weight.detach().half(), layout).dtype == torch.float16
    assert torch.isfinite(l2_normalize(torch.zeros_like(weight), layout)).all()


def test_ortho_init():
    bsmm = BlocksparseMatMul(random_layout(5, 4, 8, 0.6).mask(), 8)
    dense = bsmm.layout.to_dense(bsmm.ortho_init())
    for k in range(3):  # the last block column is empty
        column = dense[:, k * 8 : (k + 1) * 8]
        torch.testing.assert_close(column.T @ column, torch.eye(8), rtol=0, atol=1e-5)


def test_identity_init(device):
    bsmm = BlocksparseMatMul(torch.ones(4, 4), 8)
    x = torch.randn(3, 32, device=device)
    torch.testing.assert_close(bsmm(x, bsmm.identity_init(2.0, device=device)), 2 * x)
    wide = BlocksparseMatMul(torch.ones(2, 4), 8)
    x = torch.randn(3, 16, device=device)
    torch.testing.assert_close(wide(x, wide.identity_init(device=device)), torch.cat([x, x], 1))


def test_checker_gates_and_prune(device):
    bsmm = BlocksparseMatMul(torch.ones(3, 4), 8)
    gate = bsmm.checker_init(device)
    assert gate.sum() == 6
    assert all(gate[b] == (sum(bsmm.block_coord(b)) % 2 == 0) for b in range(12))
    weight, x = torch.randn(bsmm.w_shape, device=device), torch.randn(5, 24, device=device)
    left, smaller = bsmm.prune(weight, gate)
    assert (smaller.blocks, smaller.C, smaller.K) == (6, 24, 32)
    torch.testing.assert_close(smaller(x, left), bsmm(x, weight, gate))
    with pytest.raises(ValueError, match="expected weight"):
        bsmm.prune(weight, gate[:3])


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_block_reduced_full_dw(device, norm, monkeypatch):
    layout = random_layout(5, 3, 16, ragged=3)
    x, dy = torch.randn(9, 77, device=device), torch.randn(9, 45, device=device)
    full = torch.nn.functional.pad(x.T @ dy, (0, 3, 0, 3)).view(5, 16, 3, 16)
    want = full.abs().amax((1, 3)) if norm == "max" else full.square().sum((1, 3)).sqrt()
    torch.testing.assert_close(block_reduced_full_dw(x, dy, layout, norm=norm), want)
    monkeypatch.setattr("sbnet.weights.functional.CHUNK_ELEMENTS", 1)  # a block row at a time
    torch.testing.assert_close(block_reduced_full_dw(x, dy, layout, norm=norm), want)
    turned = block_reduced_full_dw(x.T, dy.T, layout, norm=norm, feature_axis=0)
    torch.testing.assert_close(turned, want)
    with pytest.raises(ValueError, match="norm"):
        block_reduced_full_dw(x, dy, layout, norm="l1")
    for wrong, name in (((x[:, :76], dy), "x: expected 9 rows of 77"), ((x, dy[:8]), "dy: expected 9 rows of 45")):
        with pytest.raises(ValueError, match=f"block_reduced_full_dw: {name} features, got"):
            block_reduced_full_dw(*wrong, layout)


def test_sparse_proj(device):
    """blocksparse's case: 8192 features, 1024 of them, 64 columns; gradients too."""
    proj = SparseProj(8192, nproj=1024)
    lut = proj.gather_lut
    assert len(lut) == 1024
    assert (lut.diff() > 0).all()
    x = torch.randn(8192, 64, device=device, requires_grad=True)
    y = torch.randn(1024, 64, device=device, requires_grad=True)
    lut = lut.to(device)
    calls = {
        "gather": (lambda: proj.gather(x), lambda: x[lut]),
        "scatter": (lambda: proj.scatter(y), lambda: torch.zeros_like(x).index_put((lut,), y)),
        "add": (lambda: proj.scatter_add(x, y), lambda: x.index_put((lut,), x[lut] + y)),
        "mul": (lambda: proj.scatter_mul(x, y), lambda: x.index_put((lut,), x[lut] * y)),
    }
    for name, pair in calls.items():
        results = [f() for f in pair]
        assert_bitwise(*results, name)
        direction = torch.randn_like(results[0])
        grads = [torch.autograd.grad((r * direction).sum(), (x, y), allow_unused=True) for r in results]
        for a, b in zip(*grads, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, msg=name)
    assert_bitwise(pickle.loads(pickle.dumps(proj)).gather(x), proj.gather(x))


def test_sparse_proj_tables():
    assert SparseProj(1000, proj_stride=3, block_size=32).gather_lut.tolist() == list(range(0, 320 * 3, 3))
    assert SparseProj(10, gather_lut=[7, 2]).gather_lut.tolist() == [7, 2]
    for options in ({}, {"nproj": 3, "gather_lut": [1]}, {"nproj": 11}, {"gather_lut": [10]}, {"gather_lut": [1, 1]},
                    {"gather_lut": [0.5]}, {"gather_lut": [True, False]}):  # fmt: skip
        with pytest.raises(ValueError, match="SparseProj"):
            SparseProj(10, **options)
    proj, wide, narrow = SparseProj(10, nproj=3), torch.ones(10, 2), torch.ones(3, 2)
    for call, match in (
        (lambda: proj.gather(narrow), r"x: expected \[10, ...\], got \[3, 2\]"),
        (lambda: proj.scatter(wide), r"x: expected \[3, ...\]"),
        (lambda: proj.scatter_add(wide, wide), r"y: expected \[3, ...\]"),
        (lambda: proj.scatter_mul(narrow, narrow), r"x: expected \[10, ...\]"),
    ):
        with pytest.raises(ValueError, match=f"SparseProj: {match}"):
            call()


@pytest.mark.parametrize("axis", [0, 1])
def test_no_block_at_all(device, axis):
    """A layout of zeros: every product, initial value and norm is there, and is zero."""
    bsmm = BlocksparseMatMul(torch.zeros(2, 3), 8, feature_axis=axis)
    weight = bsmm.ortho_init(device=device)
    assert weight.shape == bsmm.w_shape == (0, 8, 8)
    assert bsmm.identity_init(device=device).shape == bsmm.l2_normalize(weight).shape == (0, 8, 8)
    x, dy = torch.randn(bsmm.i_shape(5), device=device), torch.randn(bsmm.o_shape(5), device=device)
    assert_bitwise(bsmm(x, weight, bsmm.checker_init(device)), torch.zeros_like(dy))
    assert_bitwise(bsmm.bprop(dy, weight), torch.zeros_like(x))
    assert bsmm.updat(x, dy).shape == (0, 8, 8)
    full = BlocksparseMatMul(torch.ones(2, 3), 8, feature_axis=axis)
    left, none = full.prune(full.ortho_init(device=device), torch.zeros(full.g_shape, device=device))
    assert_bitwise(none(x, left), torch.zeros_like(dy))


# ---- what users of the libraries before this one met
def test_blocksparse_30_matrix_times_vector(device):
    """openai/blocksparse#30: with feature_axis 0 and one column the result was zeros."""
    mask = torch.tensor([[1, 0], [1, 1]])
    bsmm = BlocksparseMatMul(mask, block_size=8, feature_axis=0)
    y = bsmm(torch.ones(16, 1, device=device), torch.ones(bsmm.w_shape, device=device))
    assert y.flatten().tolist() == [16.0] * 8 + [8.0] * 8


def test_triton_419_gradients_of_training(device):
    """triton#419: gradients of a rectangular product with blocks of 64 were wrong, even with a full layout."""
    for density in (1.0, 0.5):
        layout = random_layout(16, 12, 64, density)
        x = torch.randn(64, 1024, device=device, requires_grad=True)
        w = torch.randn(layout.weight_shape, device=device, requires_grad=True)
        direction = torch.randn(64, 768, device=device)
        got = torch.autograd.grad((blocksparse_matmul(x, w, layout) * direction).sum(), (x, w))
        want = torch.autograd.grad((x @ layout.to_dense(w) * direction).sum(), (x, w))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-2)
