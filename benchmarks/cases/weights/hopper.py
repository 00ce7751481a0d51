"""Block-sparse products on the GPU against cuBLAS (F.linear) and PyTorch's own block-sparse rows (Triton).

The layouts are random with an exact density; the dense side multiplies by the same matrix, zeros and all.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, close

SIZES = (128, 64, 32, 16)
DENSITIES = (1.0, 0.5, 0.25, 0.1)


def cases(setting: Setting) -> Iterator[Case]:
    if not setting.cuda:
        return
    side = setting.pick(256, 4096, 4096)
    sizes, densities = setting.pick((64,), (128, 32), SIZES), setting.pick((0.5,), (1.0, 0.25), DENSITIES)
    for size in sizes:
        for density in densities:
            yield _case("blocksparse_matmul", side, side, side, size, density)
    for size in sizes:
        for density in densities[::2]:
            yield _case("blocksparse_matmul, input gradient", side, side, side, size, density)
    for size in sizes:
        for density in densities:
            yield _case("blocksparse_weight_grad", side, side, side, size, density)
    for rows in setting.pick((1,), (1, 64), (1, 4, 16, 32, 64)):
        for size in sizes:
            yield _case("blocksparse_matmul, few rows", rows, side, 4 * side, size, 0.25)
    for i in setting.pick((1,), (1, 4), (1, 2, 4, 8)):  # as many weights in ever wider layers
        for size in setting.pick((32,), (32,), (32, 16)):
            yield _case("blocksparse_matmul, 6.55 M weights", 64, 2560 * i, 2560 * i, size, 1 / i**2)


def _case(name: str, rows: int, inputs: int, outputs: int, size: int, density: float) -> Case:
    facts = {"rows": rows, "in": inputs, "out": outputs, "block": size, "density": density}
    return Case(name, "weights", facts, partial(_work, name, rows, inputs, outputs, size, density))


def random_layout(rows: int, columns: int, size: int, density: float) -> sbnet.BlockLayout:
    mask = torch.zeros(rows * columns)
    mask[torch.randperm(rows * columns)[: max(1, round(rows * columns * density))]] = 1
    return sbnet.BlockLayout(mask.view(rows, columns), size)


def _work(name: str, rows: int, inputs: int, outputs: int, size: int, density: float) -> Work:
    layout = random_layout(inputs // size, outputs // size, size, density)
    weight = torch.randn(layout.weight_shape, device="cuda", dtype=torch.half) / (inputs * density) ** 0.5
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.half)
    products = 2.0 * rows * layout.blocks * size * size
    moved = 2.0 * (layout.blocks * size * size + rows * (inputs + outputs))
    notes = {"blocks": layout.blocks}
    if name == "blocksparse_weight_grad":
        dy = torch.randn(rows, outputs, device="cuda", dtype=torch.half)
        ids = layout.coords.long().to("cuda").unbind(1)

        def blocks_of(full: Tensor) -> Tensor:
            return full.view(layout.block_rows, size, layout.block_columns, size).transpose(1, 2)[ids]

        torchs, exact = blocks_of(x.t() @ dy), blocks_of(x.double().t() @ dy.double())
        return Work(
            {
                name: Side(lambda: sbnet.blocksparse_weight_grad([(x, dy)], layout), "ours"),
                "x.T @ dy": Side(lambda: x.t() @ dy),
            },
            lambda side, got: close(got if side == name else blocks_of(got), torchs, exact),
            products,
            moved,
            torch.half,
            notes,
        )
    transposed = name.endswith("input gradient")
    dense = layout.to_dense(weight)
    dense = dense if transposed else dense.t().contiguous()
    torchs, exact = F.linear(x, dense), F.linear(x.double(), dense.double())
    sides = {
        name: Side(lambda: sbnet.blocksparse_matmul(x, weight, layout, transposed=transposed), "ours"),
        "F.linear": Side(lambda: F.linear(x, dense)),
    }
    if not transposed and rows % 64 == 0 and size > 16 and density < 1:
        bsr = dense.to_sparse_bsr((size, size))
        sides["F.linear, BSR"] = Side(lambda: F.linear(x, bsr), "peer")
    return Work(sides, lambda _, got: close(got, torchs, exact), products, moved, torch.half, notes)
