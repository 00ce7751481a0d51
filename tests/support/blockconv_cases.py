"""Layouts and samples of convolutions with block-sparse weights: the cases of blocksparse's own tests."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sbnet import BlockGrid, ConvLayout
from sbnet.ops.weights.conv_geometry import to_geometry
from support.helpers import random_active, tensor


def diagonal(blocks: int, c: int, k: int):
    return [(range(b * c, b * c + c), range(b * k, b * k + k)) for b in range(blocks)]


def overlapping(blocks: int, c: int, c_step: int, k: int, k_step: int):
    return [(range(b * c_step, b * c_step + c), range(b * k_step, b * k_step + k)) for b in range(blocks)]


UNEVEN = [((0, 5, 3), (1, 0)), ((1, 2, 3, 4), (2, 1, 4)), ((4,), (3,))]  # of several sizes, unsorted, overlapping


class Case(NamedTuple):
    BCK: list
    kernel: tuple
    image: tuple
    stride: int = 1
    padding: str | tuple = "SAME"
    dilation: int = 1


B4, B8 = diagonal(4, 8, 12), overlapping(8, 16, 8, 32, 16)
CASES = {
    "1d": Case(B4, (1,), (32,), padding="VALID"), "1d_3": Case(B4, (3,), (32,)),
    "1d_3_stride": Case(B4, (3,), (32,), 2), "1d_5_stride": Case(B4, (5,), (32,), 2),
    "1d_dilated": Case(B4, (3,), (32,), dilation=2), "1d_even": Case(B4, (4,), (9,)), "2d": Case(B4, (3, 3), (8, 8)),
    "2d_overlap_valid": Case(B8, (3, 3), (8, 8), padding="VALID"),
    "2d_uneven": Case(UNEVEN, (3, 2), (7, 5), padding=(2, 0)),
    "2d_uneven_stride": Case(UNEVEN, (5, 3), (9, 8), 3, (1, 2), 2), "3d": Case(B4, (3, 3, 3), (4, 4, 4)),
    "3d_uneven": Case(UNEVEN, (1, 3, 2), (3, 4, 6), 2),
}  # fmt: skip


def blockconv_samples(device: str) -> dict[str, list[tuple]]:
    """op name -> list of arguments, for opcheck."""
    torch.manual_seed(0)
    layout = ConvLayout(UNEVEN, (3, 2))
    back = layout.swapped()
    geometry = to_geometry("blocksparse_conv", layout, 2, (1, 2), 1)
    tables, numbers = layout.on(torch.device(device))
    back_tables, back_numbers = back.on(torch.device(device))
    x, weight = tensor((2, 6, 1, 7, 6), torch.float32, device), torch.randn(layout.weights, device=device)
    bias, back_bias = tensor((5,), torch.float32, device), tensor((5,), torch.float32, device)
    last = x.contiguous(memory_format=torch.channels_last_3d)
    dy = tensor((2, 5, 1, 4, 5), torch.float32, device)
    plane = random_active(BlockGrid.cover((4, 5), 2), 2, 0.5, device)
    active = (plane.indices, plane.count, plane.block_map, plane.grid.numbers())

    def grad(t):
        return t.detach().clone().requires_grad_()

    # enough weights for Winograd's products on CPUs
    dense = ConvLayout([(range(16), range(20)), (range(8, 24), range(20))], (3, 3))
    many = (*dense.on(torch.device(device)), to_geometry("blocksparse_conv", dense, 1, 1, 1), [1, 6, 7])
    wide, wide_weight = tensor((2, 24, 1, 6, 7), torch.float32, device), torch.randn(dense.weights, device=device) / 16

    # blocks of a grid in halves, channels side by side: Hopper's kernel
    squares = ConvLayout.from_mask(torch.tensor([[1, 0], [1, 1]]), 32, 32, 16, (3, 3))
    half = (*squares.on(torch.device(device)), many[2], [1, 6, 7])
    halves = tensor((2, 32, 1, 6, 7), torch.float16, device).contiguous(memory_format=torch.channels_last_3d)
    half_weight = torch.randn(squares.weights, device=device).div(16).half()

    pack = torch.ops.sbnet.pack_blocksparse_filters(half_weight, *half[:2], True)

    rest = (geometry, [1, 4, 5])
    return {
        "blocksparse_conv": [
            (x, weight, None, tables, numbers, *rest, False, "none", 0.0),
            (grad(x), grad(weight), grad(bias), tables, numbers, *rest, False, "silu", 0.0),
            (last, weight, bias, tables, numbers, *rest, False, "leaky_relu", 0.3),
            (grad(wide), grad(wide_weight), None, *many, False, "relu", 0.0),
            (halves, half_weight, None, *half, False, "relu", 0.0),
            (halves, half_weight, None, *half, True, "none", 0.0, pack),
            (
                grad(x),
                grad(weight),
                grad(back_bias),
                back_tables,
                back_numbers,
                geometry,
                [1, 13, 9],
                True,
                "none",
                0.0,
            ),
        ],
        "blocksparse_conv_active": [
            (x, weight, None, tables, numbers, *rest, *active, "none", 0.0),
            (grad(last), grad(weight), grad(bias), tables, numbers, *rest, *active, "silu", 0.0),
        ],
        "blocksparse_conv_weight_grad": [
            (x, dy, tables, numbers, geometry),
            (grad(last), grad(dy), tables, numbers, geometry),
        ],
        "pack_blocksparse_filters": [
            (weight, tables, numbers, False),
            (half_weight, *half[:2], False),
            (half_weight, *half[:2], True),
        ],
        "blocksparse_conv_tables": [(layout.lists, 6, 5, 6)] if device == "cpu" else [],
    }
