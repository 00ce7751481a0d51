"""Maps whose connected components are hard to get right."""

from __future__ import annotations

import torch
from torch import Tensor


def spiral(side: int) -> Tensor:
    """One component as long as it can be: a line that winds to the middle, a pixel of nothing between its turns."""
    field = torch.zeros(side, side, dtype=torch.bool)
    y, x, dy, dx = 0, 0, 0, 1
    field[0, 0] = True
    for _ in range(side * side):
        for _ in range(2):
            ahead, beyond = (y + dy, x + dx), (y + 2 * dy, x + 2 * dx)
            inside = all(0 <= v < side for v in ahead)
            free = inside and not (all(0 <= v < side for v in beyond) and field[beyond])
            if free and not field[ahead]:
                break
            dy, dx = dx, -dy
        else:
            return field
        y, x = ahead
        field[y, x] = True
    return field


def fields(height: int, width: int) -> dict[str, Tensor]:
    """Maps [height,width] bool by what they hold."""
    rows, columns = torch.arange(height)[:, None], torch.arange(width)
    made = {name: torch.rand(height, width) < share for name, share in
            (("few", 0.05), ("some", 0.3), ("about to join", 0.4), ("most", 0.7))}  # fmt: skip
    made["none"], made["all"] = torch.zeros(height, width, dtype=torch.bool), torch.ones(height, width).bool()
    made["diagonals"] = (rows + columns) % 7 == 0
    made["other diagonals"] = (rows - columns) % 5 == 0
    made["chessboard"] = (rows + columns) % 2 == 0
    made["apart"] = (rows % 2 == 0) & (columns % 2 == 0)
    made["rings"] = (rows // 3 + columns // 3) % 4 != 1
    made["combs"] = (columns % 2 == 0) | (rows == height - 1)
    made["combs upside down"] = (columns % 3 == 0) | (rows == 0)
    made["border"] = ((rows % max(height - 1, 1)) * (columns % max(width - 1, 1))) == 0
    side = min(height, width)
    made["spiral"] = torch.zeros(height, width, dtype=torch.bool)
    made["spiral"][:side, :side] = spiral(side)
    return made


def scored(field: Tensor, least: float) -> Tensor:
    """Scores above `least` where the field is set, multiples of 2**-10, so that halves hold them; elsewhere at most
    `least`, which is among them."""
    steps = torch.randint(1, 257, field.shape)
    return least + torch.where(field, steps, (steps % 5 - 4).clamp(max=0) * 32) / 1024
