"""reduce_mask, sparse_gather and sparse_scatter_ against PyTorch's own copy of as many bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness import registry
from sbnet.benchmarks.harness.masks import Size, random_active
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, short


def cases(setting: Setting) -> Iterator[Case]:
    single, cuda = torch.float32, setting.cuda
    small: Size = setting.pick((1, 40, 56), (1, 400, 704), (1, 400, 704))
    masks = [(small, single, False), (small, torch.bool, False), (small, single, True)]
    if setting.level == "full":
        large = (8, 1024, 1024) if cuda else (1, 800, 704)
        masks += [(large, single, False), (large, torch.bool, False), (large, single, True)]
    for size, dtype, avgpool in masks:
        facts = {"size": list(size), "dtype": short(dtype), "pool": "average" if avgpool else "max"}
        yield Case("reduce_mask, 16x16", "ops", facts, partial(reduction, setting.device, size, dtype, avgpool))

    layouts = (True, False) if setting.level == "tiny" else (True,)
    yield from copies(setting, small, setting.pick(5, 110, 50), setting.pick((8,), (64,), (64,)), layouts)
    if setting.level == "full":
        far: tuple[Size, int] = ((4, 1024, 1024), 10_000) if cuda else ((1, 800, 704), 2200)  # far larger than caches
        yield from copies(setting, far[0], far[1], (64, 256), (True, False))


def copies(
    setting: Setting, size: Size, blocks: int, channels: tuple[int, ...], layouts: tuple[bool, ...]
) -> Iterator[Case]:
    """Blocks of 16 as they tile the plane; blocks of 18 are what a 3x3 convolution's blocks of 16 read."""
    dtypes = (torch.float16, torch.float32) if setting.cuda else (torch.float32,)
    every = itertools.product(layouts, (16, 18), channels, dtypes, (False, True), ("sparse_gather", "sparse_scatter_"))
    for channels_last, block, c, dtype, transpose, op in every:
        facts = {
            "size": list(size), "blocks": blocks, "block": block, "channels": c, "dtype": short(dtype),
            "layout": "NHWC" if channels_last else "NCHW", "transpose": transpose,
        }  # fmt: skip
        yield Case(op, "ops", facts, partial(copy, setting.device, op, facts))


def reduction(device: str, size: Size, dtype: torch.dtype, avgpool: bool) -> Work:
    mask = (torch.rand(size, device=device) > 0.999).to(dtype)
    grid = sbnet.BlockGrid.cover(size[1:], 16)
    wanted = sbnet.reference.reduce_mask(mask, grid, 0.001, avgpool)

    def in_torch() -> Tensor:  # what one writes without the op; its nonzero waits for the device
        if not avgpool:
            return (pool(mask) > 0.001).nonzero()
        return (F.avg_pool2d(mask[:, None].float(), 16, 16, ceil_mode=True, divisor_override=256) > 0.001).nonzero()

    def check(side: str, got: Any) -> float:
        if side == "reduce_mask":
            registry.same(got.block_map, wanted.block_map)
            return registry.same(got.indices, wanted.indices)
        return registry.same(got[:, [0, 2, 3]].int(), wanted.indices[: int(wanted.count)])

    sides = {
        "reduce_mask": Side(lambda: sbnet.reduce_mask(mask, grid, 0.001, avgpool), "ours"),
        "pool + nonzero": Side(in_torch, "dense", "wall"),
    }
    read = mask.numel() * mask.element_size()
    return Work(sides, check, bytes=read + 16 * size[0] * grid.bcount[0] * grid.bcount[1], dtype=dtype)


def pool(mask: Tensor) -> Tensor:
    return F.max_pool2d(mask[:, None].float(), 16, 16, ceil_mode=True)


def copy(device: str, op: str, facts: dict[str, Any]) -> Work:
    n, h, w = facts["size"]
    dtype = getattr(torch, facts["dtype"])
    memory = torch.channels_last if facts["layout"] == "NHWC" else torch.contiguous_format
    x = torch.randn(n, facts["channels"], h, w, device=device, dtype=dtype).contiguous(memory_format=memory)
    transpose, block = facts["transpose"], facts["block"]
    tiling = sbnet.BlockGrid.cover((h, w), block)
    # a gather's may overlap, a scatter writes a tiling
    halo = sbnet.BlockGrid.cover((h, w), 16).conv_input(3, 1, 1) if block == 18 else tiling
    grid = halo if op == "sparse_gather" else tiling
    active = random_active((n, h, w), grid, facts["blocks"], device).trim()
    stack = sbnet.sparse_gather(x, active, transpose, tail="undefined")
    notes = {"MB": 2 * stack.numel() * stack.element_size() / 1e6}
    spare = torch.empty_like(stack)
    if op == "sparse_gather":
        wanted = windows(x, active)
        sides = {
            op: Side(lambda: sbnet.sparse_gather(x, active, transpose, tail="undefined"), "ours"),
            "copy of its size": Side(lambda: stack.clone()),  # allocates, as the gather does: most of a CPU's time
        }
        return Work(sides, lambda _, got: registry.same(got, wanted), bytes=notes["MB"] * 1e6, dtype=dtype, notes=notes)

    base, where = torch.full_like(x, float("nan")), active.pixel_mask((h, w))

    def scatter() -> Tensor:
        sbnet.sparse_scatter_(stack, active, base, transpose=transpose)
        return base

    def check(side: str, got: Tensor) -> float:
        if side == "rows by PyTorch":
            return registry.same(got, whole_blocks(x, block))
        if side != op:
            return registry.same(got, stack)
        registry.same(got.isnan(), ~where.expand_as(got))  # the rest was left alone
        return registry.same(got, x, where)

    sides = {op: Side(scatter, "ours"), "copy of its size": Side(lambda: spare.copy_(stack))}
    every = len(stack) == tiling.bcount[0] * tiling.bcount[1]
    if device == "cpu" and every and not transpose and memory == torch.contiguous_format:
        # The same rows written by PyTorch's own copy: what rows of a plane cost, a line or two each, its pitch apart.
        to = whole_blocks(base, block)
        rows = stack.unflatten(0, tiling.bcount)[: to.shape[0], : to.shape[1]]
        sides["rows by PyTorch"] = Side(lambda: to.copy_(rows), "peer")
    inside = 2 * int(where.sum()) * facts["channels"] * x.element_size()  # blocks that the plane clips write less
    return Work(sides, check, bytes=inside, dtype=dtype, notes=notes)


def whole_blocks(x: Tensor, block: int) -> Tensor:
    """[rows of blocks, blocks in a row, C, block, block]: blocks of the first image, clipped ones left out."""
    return x[0].unfold(1, block, block).unfold(2, block, block).permute(1, 2, 0, 3, 4)


def windows(x: Tensor, active: sbnet.ActiveBlocks) -> Tensor:
    """The stack of blocks by plain indexing of padded windows."""
    g = active.grid
    pad = [max(0, -g.boffset[a]) for a in range(2)]
    after = [max(0, g.boffset[a] + (g.bcount[a] - 1) * g.bstride[a] + g.bsize[a] - x.shape[2 + a]) for a in range(2)]
    padded = F.pad(x, (pad[1], after[1], pad[0], after[0]))
    corner = padded[:, :, g.boffset[0] + pad[0] :, g.boffset[1] + pad[1] :]
    blocks = corner.unfold(2, g.bsize[0], g.bstride[0]).unfold(3, g.bsize[1], g.bstride[1])
    n, i, j = active.indices.long().unbind(1)
    return blocks[n, :, i, j]
