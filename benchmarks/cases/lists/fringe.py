"""fringe and sparse_fill_: what keeps undefined pixels from being read, against the same in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness import masks
from sbnet.benchmarks.harness.layers import fringe_mask
from sbnet.benchmarks.harness.masks import Size
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, WrongResult, same, short


def cases(setting: Setting) -> Iterator[Case]:
    sizes: list[Size] = setting.pick([(1, 40, 56)], [(1, 400, 704)], [(1, 400, 704), (8, 256, 256)])
    for size in sizes:
        for mask in setting.pick(("random",), ("random",), ("random", "top-left")):
            facts = {"size": list(size), "mask": mask, "sparsity": 0.9}
            yield Case("fringe of a 3x3", "ops", facts, partial(fringe, setting.device, size, mask))
        for channels in setting.pick((8,), (64,), (64, 256)):
            facts = {"size": list(size), "channels": channels, "dtype": short(setting.dtype), "sparsity": 0.9}
            yield Case("sparse_fill_", "ops", facts, partial(fill, setting, size, channels))


def active_of(size: Size, mask: str, device: str) -> sbnet.ActiveBlocks:
    grid = sbnet.BlockGrid.cover(size[1:], 16)
    return sbnet.reduce_mask(masks.pixels(mask, size, 0.1, device), grid)


def fringe(device: str, size: Size, mask: str) -> Work:
    active = active_of(size, mask, device)
    inside = active.pixel_mask(size[1:])
    wanted = (F.max_pool2d(inside.float(), 3, 1, 1) > 0) & ~inside  # pixels beside the blocks

    def in_torch() -> Tensor:  # waits for the device
        pixels = F.interpolate((active.block_map >= 0).float()[:, None], scale_factor=16)[..., : size[1], : size[2]]
        return ((F.max_pool2d(pixels, 3, 1, 1) - pixels) > 0).flatten().nonzero()

    def check(side: str, got: Any) -> float:
        if side == "fringe":
            return same(fringe_mask(got, inside), wanted)
        return same(got.flatten(), wanted.flatten().nonzero().flatten())

    sides = {
        "fringe": Side(lambda: sbnet.fringe(active, active, size[1:], 3, 1, 1), "ours"),
        "max_pool2d + nonzero": Side(in_torch, "dense", "wall"),
    }
    pixels = int(wanted.sum())
    return Work(sides, check, bytes=4.0 * (active.block_map.numel() + pixels), notes={"pixels": pixels})


def fill(setting: Setting, size: Size, channels: int) -> Work:
    n, h, w = size
    active = active_of(size, "random", setting.device)
    inside = active.pixel_mask((h, w))
    whole = torch.randn(n, channels, h, w, device=setting.device, dtype=setting.dtype)
    whole = whole.contiguous(memory_format=torch.channels_last)
    x = torch.where(inside, whole, torch.nan).contiguous(memory_format=torch.channels_last)
    spare = torch.empty_like(x)

    def check(side: str, got: Tensor) -> float:
        if side == "zero_":
            if bool(got.any()):
                raise WrongResult("not zero")
            return 0.0
        return same(got, torch.where(inside, whole, 0))

    sides = {"sparse_fill_": Side(lambda: sbnet.sparse_fill_(x, active), "ours"), "zero_": Side(lambda: spare.zero_())}
    outside = float((~inside).sum()) * channels * x.element_size()
    return Work(sides, check, bytes=outside, dtype=setting.dtype)
