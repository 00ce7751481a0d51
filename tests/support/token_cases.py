"""Sample calls of the ops that pack tokens and move their rows."""

import torch

from sbnet import BlockGrid
from support.helpers import laid_out, random_active, tensor


def token_samples(device):
    """op name -> list of arguments."""
    grid, small = BlockGrid.cover((20, 28), 8), BlockGrid.cover((10, 14), 8)
    active, few = random_active(grid, 2, 0.5, device), random_active(small, 2, 0.5, device)
    overlapping = random_active(grid.conv_input(3, 1, 1), 2, 0.3, device)
    x = laid_out(tensor((2, 8, 20, 28), torch.float32, device), "channels_last")
    wide = laid_out(tensor((2, 16, 10, 14), torch.float32, device), "channels_last")
    rows, order = torch.randn(2, 9, 8, device=device), torch.randint(9, (2, 12), device=device)
    lengths, there = torch.tensor([9, 5], dtype=torch.int32, device=device), torch.rand(2, 12, device=device) > 0.5
    out, patches = torch.zeros(2, 12, 8, device=device), torch.zeros(2, 12, 12, device=device)
    return {
        "pack_tokens": [
            (active.block_map, grid.numbers(), [20, 28], 1, 2, 580),
            (overlapping.block_map, overlapping.grid.numbers(), [20, 28], 0, 0, 560),
        ],
        "move_rows_": [
            (rows, None, order, lengths, None, 0, False, out),
            (rows, None, order, None, there, 0, False, out),
            (rows, None, order, None, there, 0, True, out),
            (rows, rows[:1, :3], None, lengths, None, 2, False, out),
        ],
        "move_rows": [
            (rows, None, order, lengths, None, 0, 12),
            (rows, None, order, None, there, 0, 12),
            (rows, rows[:1, :3], None, lengths, None, 2, 14),
        ],
        "pack_patches": [(x[:, :3], order, lengths, [2, 2])],
        "merge_pixels": [(x, few.block_map, small.numbers(), 2, [0, 0, 1, 1])],
        "pack_patches_": [(x[:, :3], order, lengths, [2, 2], patches)],
        "merge_pixels_": [(x, few.block_map, small.numbers(), 2, [0, 0, 1, 1], wide)],
    }
