"""The plans of the Hopper kernels: every block once, where it belongs. What lies in them: csrc/core/weights/plan.h."""

from itertools import pairwise

import pytest
import torch

from sbnet import BlockLayout

SIZES = [128, 64, 32, 16]
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(3)


def random_layout(rows: int, columns: int, size: int, density: float = 0.3) -> BlockLayout:
    mask = torch.rand(rows, columns) < density
    mask[-1, -1] = True
    mask[:, 0] = False
    return BlockLayout(mask, size)


def plan_of(layout: BlockLayout, of_pass: int) -> list[int]:
    tables, _ = layout.on(torch.device("cpu"))
    return torch.ops.sbnet.blocksparse_plan(tables, list(layout._shape), of_pass).tolist()


def tiles(plan: list[int], layout: BlockLayout, transposed: bool, slices: int, cluster: int, table: int):
    """Yields (box, first output feature, first input feature) and returns where the next table begins."""
    size, unit = layout.block_size, min(layout.block_size, 64)
    parts, ids = 64 // unit, slices * (64 // unit) ** 2
    blocks = layout.block_rows if transposed else layout.block_columns
    groups = -(-blocks * size // (64 * slices * cluster))
    entries = [plan[table + 3 * g : table + 3 * g + 3] for g in range(groups + 1)]
    costs = [b[1] - a[1] for a, b in pairwise(entries)]
    assert costs == sorted(costs, reverse=True)
    assert sorted(entry[2] for entry in entries[:-1]) == list(range(groups))
    found = []
    for (first, _, group), (end, _, _) in pairwise(entries):
        pieces = []
        for record in range(first, end, 1 + cluster * ids):
            pieces.append(plan[record])
            for i, box in enumerate(plan[record + 1 : record + 1 + cluster * ids]):
                if box >= 0:
                    slice_, sub, part = i // parts**2, i // parts % parts, i % parts
                    feature = (group * cluster * slices + slice_) * 64 + part * unit
                    found.append((box, feature, plan[record] + sub * unit))
        assert pieces == sorted(set(pieces)), "pieces of a group in rising order, each once"
    return found, table + 3 * (groups + 1)


@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("density", [0.05, 0.5])
@pytest.mark.parametrize("size", SIZES)
def test_every_box_once(size, density, transposed):
    layout = random_layout(1100 // size, 1500 // size, size, density)
    plan = plan_of(layout, INPUT_GRADIENT if transposed else FORWARD)
    wanted = []
    for block, at in enumerate(layout.coords.tolist()):
        feature, reduction = (v * size for v in (at if transposed else at[::-1]))
        if size < 64:
            wanted.append((block, feature, reduction))
        for down in range(0, size if size >= 64 else 0, 64):
            for right in range(0, size, 64):
                o, i = (down, right) if transposed else (right, down)
                wanted.append((block * 4 + down // 64 * 2 + right // 64, feature + o, reduction + i))
    cluster = 2 if size < 64 and layout.density >= 0.2 else 1
    wide, after = tiles(plan, layout, transposed, 2, cluster, 0)
    narrow, _ = tiles(plan, layout, transposed, 1, 1, after)
    assert sorted(wide) == sorted(wanted)
    assert sorted(narrow) == sorted(wanted)


@pytest.mark.parametrize("density", [0.05, 0.5])
@pytest.mark.parametrize("size", SIZES)
def test_every_gradient_once(size, density):
    layout = random_layout(1100 // size, 1500 // size, size, density)
    units, *plan = plan_of(layout, WEIGHT_GRADIENT)
    across, down = max(64 // size, 1), max(128 // size, 1)
    words = 6 + 4 * across * down
    assert len(plan) == units * words
    found, all_pieces = [], []
    for at in range(0, len(plan), words):
        first, pieces, *columns = plan[at : at + 6]
        all_pieces.append(pieces)
        assert first % 128 == 0
        for piece in range(4):
            ids = plan[at + 6 + piece * across * down :][: across * down]
            assert piece < pieces or set(ids) == {-1}
            assert columns[piece] < layout.block_columns * size or set(ids) == {-1}
            for i, block in enumerate(ids):
                if block >= 0:
                    found.append((block, first + i // across * size, columns[piece] + i % across * size))
    assert all_pieces == sorted(all_pieces, reverse=True)
    wanted = []
    for block, (c, k) in enumerate(layout.coords.tolist()):
        wanted += [(block, c * size, k * size + part) for part in range(0, size, 64)]
    assert sorted(found) == sorted(wanted)


def test_same_layout_same_plan():
    layout = random_layout(40, 30, 32)
    again = BlockLayout.from_coords(layout.coords, (40, 30), 32)
    for of_pass in range(3):
        assert plan_of(layout, of_pass) == plan_of(again, of_pass)


@pytest.mark.parametrize("of_pass", [FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT])
def test_blocks_of_8_by_fours(of_pass):
    """The plan of the blocks of 16 that hold them; behind it, what each of those holds."""
    layout = random_layout(9, 13, 8)
    where = {tuple(at): block for block, at in enumerate(layout.coords.tolist())}
    fours = sorted({(c // 2, k // 2) for c, k in where})
    features = {"in_features": 72, "out_features": 104}
    larger = BlockLayout.from_coords(torch.tensor(by_first_use(layout)), (5, 7), 16, **features)
    plan = plan_of(layout, of_pass)
    count = plan.pop()
    assert count == len(fours) == larger.blocks
    held, plan = plan[len(plan) - 4 * count :], plan[: len(plan) - 4 * count]
    assert plan == plan_of(larger, of_pass)
    for block, (c, k) in enumerate(larger.coords.tolist()):
        corners = [(2 * c, 2 * k), (2 * c, 2 * k + 1), (2 * c + 1, 2 * k), (2 * c + 1, 2 * k + 1)]
        assert held[4 * block : 4 * block + 4] == [where.get(at, -1) for at in corners]


def by_first_use(layout: BlockLayout) -> list[tuple[int, int]]:
    """Blocks of 16 by block rows, in each as its blocks of 8 come, row by row."""
    blocks = sorted(layout.coords.tolist())
    found = dict.fromkeys((c // 2, k // 2) for c, k in blocks)
    return list(found)
