"""mask_pyramid and fringe: the planes of a ResNet from one mask, against one op a plane and a fringe."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import sbnet
from sbnet.benchmarks.harness import registry
from sbnet.benchmarks.harness.masks import Size, random_active
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, short

Requests = tuple[list[tuple[int, int, int]], list[tuple[int, list[tuple[int, ...]]]]]


def cases(setting: Setting) -> Iterator[Case]:
    sizes: list[Size] = setting.pick([(1, 64, 96)], [(1, 512, 512)], [(1, 1024, 1024), (8, 1024, 1024), (1, 400, 704)])
    for size in sizes:
        for dtype in setting.pick((torch.bool,), (torch.bool,), (torch.bool, torch.float32)):
            for fringes in (False, True):
                facts = {"size": list(size), "dtype": short(dtype), "fringes": fringes}
                yield Case("mask_pyramid, 16x16", "ops", facts, partial(pyramid, setting.device, size, dtype, fringes))
    plane: Size = setting.pick((1, 40, 56), (1, 400, 704), (1, 400, 704))
    yield Case("fringe of 3x3, 16x16", "ops", {"size": list(plane)}, partial(edge, setting.device, plane))


def resnet(size: tuple[int, int]) -> Requests:
    """Planes 1/2 to 1/32; on each a tensor that a 3x3 reads, and one that 3x3 and 1x1 of stride 2 read."""
    planes: list[tuple[int, int, int]] = []
    fringes: list[tuple[int, list[tuple[int, ...]]]] = []
    for k in range(5):
        size = sbnet.conv_output_size(size, (3, 3), (2, 2), (1, 1), (1, 1))
        planes.append((*size, 16))
        fringes.append((k, [(k, 3, 1, 1)]))
        if k < 4:
            fringes.append((k, [(k + 1, 3, 2, 1), (k + 1, 1, 2)]))
    return planes, fringes


def pyramid(device: str, size: Size, dtype: torch.dtype, with_fringes: bool) -> Work:
    n, height, width = size
    planes, fringes = resnet((height, width))
    fringes = fringes if with_fringes else []
    mask = torch.zeros(size, device=device)
    mask[:, height // 8 : height // 2, width // 8 : width // 3] = 1
    mask = mask.to(dtype)

    def one_by_one() -> Any:  # a fringe of two consumers stays two lists here
        actives = [
            sbnet.reduce_mask(F.adaptive_max_pool2d(mask[:, None].float(), p[:2]), sbnet.BlockGrid.cover(p[:2], p[2]))
            for p in planes
        ]
        return actives, [[sbnet.fringe(actives[k], actives[r], planes[k][:2], *g) for r, *g in c] for k, c in fringes]

    def check(side: str, got: Any) -> float:
        """Each side by the other."""
        together = side == "mask_pyramid"
        actives, edges = one_by_one() if together else got
        got = got if together else sbnet.mask_pyramid(mask, planes, 0.5, fringes)
        for mine, theirs in zip(got.planes, actives, strict=True):
            registry.same(mine.indices, theirs.indices)
            registry.same(mine.block_map, theirs.block_map)
        for mine, lists in zip(got.fringes, edges, strict=True):
            read = torch.cat([f.pixels[: int(f.count)] for f in lists]).unique()
            registry.same(mine.pixels[: int(mine.count)], read)
        return 0.0

    sides = {
        "mask_pyramid": Side(lambda: sbnet.mask_pyramid(mask, planes, 0.5, fringes), "ours"),
        "an op each": Side(one_by_one),
    }
    written = 16 * sum(n * -(-h // 16) * -(-w // 16) for h, w, _ in planes)
    written += 4 * sum(n * planes[k][0] * planes[k][1] for k, _ in fringes)
    return Work(sides, check, bytes=mask.numel() * mask.element_size() + written, dtype=dtype)


def edge(device: str, size: Size) -> Work:
    n, height, width = size
    active = random_active(size, sbnet.BlockGrid.cover(size[1:], 16), max(1, height * width // 2560), device)
    wanted = sbnet.reference.fringe(active, active, size[1:], 3, 1, 1)

    def check(side: str, got: Any) -> float:
        if side != "fringe":
            return registry.same(got, torch.full_like(wanted.pixels, -1))
        registry.same(got.count, wanted.count)
        return registry.same(got.pixels, wanted.pixels)

    sides = {
        "fringe": Side(lambda: sbnet.fringe(active, active, size[1:], 3, 1, 1), "ours"),
        "fill of its size": Side(lambda: torch.full_like(wanted.pixels, -1)),
    }
    return Work(sides, check, bytes=4 * n * height * width)
