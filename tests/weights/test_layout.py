"""BlockLayout: order, tables, conversions, copies."""

import copy
import pickle

import pytest
import torch
import torch.utils._pytree as pytree

from sbnet import BlockLayout
from support.helpers import assert_bitwise
from support.weight_cases import random_layout, weights_of


def test_order():
    mask = torch.ones(4, 4)
    assert BlockLayout(mask, 8).coords.tolist() == [[c, k] for c in range(4) for k in range(4)]
    morton = BlockLayout(mask, 8, z_order=True).coords.tolist()
    assert morton[:8] == [[0, 0], [1, 0], [0, 1], [1, 1], [2, 0], [3, 0], [2, 1], [3, 1]]
    assert sorted(morton) == [[c, k] for c in range(4) for k in range(4)]


def test_tables():
    """What make_block_layout wrote, read as core/weights/layout.h describes it."""
    layout = random_layout(5, 7, 16, z_order=True)
    words = layout.on(torch.device("cpu"))[0].tolist()
    n = layout.blocks
    pairs = [list(zip(part[::2], part[1::2], strict=True)) for part in (words[i * 2 * n :][: 2 * n] for i in range(3))]
    coords, by_column, by_row = pairs
    column_start, row_start = words[6 * n : 6 * n + 8], words[6 * n + 8 :]
    assert [list(c) for c in coords] == layout.coords.tolist()
    for k in range(7):
        entries = by_column[column_start[k] : column_start[k + 1]]
        assert entries == sorted((c, b) for b, (c, column) in enumerate(coords) if column == k)
    for c in range(5):
        entries = by_row[row_start[c] : row_start[c + 1]]
        assert entries == sorted((k, b) for b, (row, k) in enumerate(coords) if row == c)


@pytest.mark.parametrize("ragged", [0, 5])
def test_dense_and_back(device, ragged):
    layout = random_layout(4, 3, 16, ragged=ragged)
    weight = weights_of(layout, torch.float32, device)
    dense = layout.to_dense(weight)
    assert dense.shape == layout.shape == (64 - ragged, 48 - ragged)
    assert_bitwise(layout.from_dense(dense), weight.nan_to_num(0.0))
    assert_bitwise(dense.isnan(), torch.zeros_like(dense, dtype=torch.bool))
    x = weight.nan_to_num(0.0).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda w: layout.from_dense(layout.to_dense(w)), x[:].detach().requires_grad_())


def test_bsr_and_back(device):
    layout = random_layout(4, 3, 16, z_order=True)
    weight = weights_of(layout, torch.float32, device)
    matrix = layout.to_bsr(weight)
    assert_bitwise(matrix.to_dense(), layout.to_dense(weight))
    back, values = BlockLayout.from_bsr(matrix)
    assert_bitwise(back.to_dense(values), layout.to_dense(weight))
    with pytest.raises(ValueError, match="whole blocks"):
        random_layout(4, 3, 16, ragged=1).to_bsr(weight)


def test_magnitude():
    dense = torch.zeros(32, 48)
    dense[8:16, 16:24], dense[0, 0], dense[31, 47] = 0.1, 5.0, 0.2
    assert BlockLayout.from_magnitude(dense, 8).coords.tolist() == [[0, 0], [1, 2], [3, 5]]
    assert BlockLayout.from_magnitude(dense, 8, 2 / 24).coords.tolist() == [[0, 0], [1, 2]]
    assert BlockLayout.from_magnitude(dense, 8, 0.0).blocks == 0
    assert BlockLayout.from_magnitude(dense, 8, 1.0).density == 1
    assert BlockLayout.from_magnitude(torch.ones(30, 9), 8, 0.5).shape == (30, 9)
    with pytest.raises(ValueError, match="density"):
        BlockLayout.from_magnitude(dense, 8, 1.5)


def test_copies_and_pytree():
    layout = random_layout(4, 3, 16, ragged=2, z_order=True)
    for other in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout), copy.copy(layout)):
        assert other == layout
        assert hash(other) == hash(layout)
        assert other.coords.tolist() == layout.coords.tolist()
    assert layout != random_layout(4, 3, 16, 1.0)
    assert layout != BlockLayout(layout.mask(), 16)
    leaves, spec = pytree.tree_flatten({"a": layout})
    assert leaves == []
    assert pytree.tree_unflatten(leaves, spec)["a"] == layout


@pytest.mark.parametrize(
    ("match", "arguments", "options"),
    [
        ("matrix of 0 and 1", ([1, 0], 8), {}),
        ("matrix of 0 and 1", ([[1, 2]], 8), {}),
        ("block_size", ([[1]], 12), {}),
        ("block_size", ([[1]], 256), {}),
        ("input features", ([[1], [1]], 8), {"in_features": 8}),
        ("output features", ([[1], [1]], 8), {"out_features": 9}),
        ("expected 1 to", (torch.zeros(0, 3), 8), {}),
    ],
)
def test_bad_layouts(match, arguments, options):
    with pytest.raises(ValueError, match=match):
        BlockLayout(*arguments, **options)


def test_bad_coords():
    for coords in ([[0, 3]], [[-1, 0]], [[2, 0]], [[0, 0], [0, 0]]):
        with pytest.raises(ValueError, match="coords"):
            BlockLayout.from_coords(coords, (2, 3), 8)
