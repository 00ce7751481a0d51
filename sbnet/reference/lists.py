"""Lists of active blocks and fringes, as their definitions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.active import ActiveBlocks, BlockGrid, Fringe, MaskPyramid
from sbnet.geometry import Window, as_window, conv_output_size, to_pair


def block_slices(grid: BlockGrid, i: int, j: int, size: Sequence[int]) -> tuple[slice, slice, slice, slice]:
    """Block (i, j) clipped to an H x W plane: (rows, columns) of the plane and (rows, columns) of the block."""
    spans = []
    for a, at in enumerate((i, j)):
        start = grid.boffset[a] + at * grid.bstride[a]
        first, last = max(start, 0), min(start + grid.bsize[a], size[a])
        last = max(first, last)
        spans.append((slice(first, last), slice(first - start, last - start)))
    return spans[0][0], spans[1][0], spans[0][1], spans[1][1]


def reduce_mask(
    mask: Tensor, grid: BlockGrid, tol: float = 0.5, avgpool: bool = False, capacity: int | None = None
) -> ActiveBlocks:
    if mask.dim() == 4:
        mask = mask.squeeze(1) if mask.shape[1] == 1 else mask.squeeze(3)
    compare = torch.float64 if mask.dtype == torch.float64 else torch.float32
    threshold = torch.tensor(tol, dtype=compare)
    rows = []
    block_map = torch.full((mask.shape[0], *grid.bcount), -1, dtype=torch.int32)
    limit = block_map.numel() if capacity is None else capacity
    total = 0
    for n in range(mask.shape[0]):
        for i in range(grid.bcount[0]):
            for j in range(grid.bcount[1]):
                y, x, _, _ = block_slices(grid, i, j, mask.shape[1:])
                pixels = mask[n, y, x].cpu()
                if avgpool:
                    mean = pixels.double().sum() / (grid.bsize[0] * grid.bsize[1])
                    active = bool(mean.float() > torch.tensor(tol).float())
                else:
                    active = bool((pixels.to(compare) > threshold).any())
                if active and total < limit:
                    block_map[n, i, j] = total
                    rows.append((n, i, j))
                total += active
    indices = torch.full((limit, 3), -1, dtype=torch.int32)
    if rows:
        indices[: len(rows)] = torch.tensor(rows, dtype=torch.int32)
    count, wanted = torch.tensor([len(rows)]).int(), torch.tensor([total]).int()
    device = mask.device
    return ActiveBlocks(indices.to(device), count.to(device), wanted.to(device), block_map.to(device), grid)


def fringe(
    active: ActiveBlocks,
    consumer: ActiveBlocks,
    size: Sequence[int],
    window: Window | int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    capacity: int | None = None,
    *,
    consumer_size: Sequence[int] | None = None,
) -> Fringe:
    """A pixel is read iff an active pixel of the consumer reads its row and its column."""
    height, width = to_pair(size, "size")
    out = consumer_size or conv_output_size((height, width), window, stride, padding, dilation)  # type: ignore[arg-type]
    reads = as_window("fringe", window, stride, padding, dilation)
    rows, columns = (_reads(reads, axis, (height, width)[axis], out[axis]) for axis in range(2))
    written = consumer.pixel_mask(out).cpu()[:, 0].float()
    read = torch.einsum("yo,nop,xp->nyx", rows, written, columns) > 0
    hit = read & ~active.pixel_mask((height, width)).cpu()[:, 0]
    found = hit.flatten().nonzero().flatten().int()
    limit = hit.numel() if capacity is None else capacity
    pixels = torch.full((limit,), -1, dtype=torch.int32)
    count = min(len(found), limit)
    pixels[:count] = found[:count]
    device = active.count.device
    return Fringe(pixels.to(device), torch.tensor([count]).int().to(device))


def _reads(window: Window, axis: int, side: int, out: int) -> Tensor:
    """[side, out] float: does output o read this coordinate?"""
    found = torch.zeros(side, out)
    num, den, lo, hi, step = (pair[axis] for pair in (window.num, window.den, window.lo, window.hi, window.step))
    for o in range(out):
        for at in range((o * num + lo) // den, (o * num + hi) // den + 1, step):
            if 0 <= at < side:
                found[at, o] = 1
    return found


def motion_mask(
    frame: Tensor, background: Tensor, threshold: float = 0.08, rate: float = 0.5, cut: float = 0.15, smooth: int = 5
) -> tuple[Tensor, Tensor]:
    """In float64 where the background is, else in float32."""
    given = frame.to(background.dtype) / (255 if frame.dtype == torch.uint8 else 1)
    brightness = F.avg_pool2d(given.mean(1), smooth, 1, smooth // 2, count_include_pad=False)
    change = (brightness - background).abs()
    is_cut = ~(change.mean((1, 2), keepdim=True) <= cut)
    return (change > threshold) | is_cut, torch.where(is_cut, brightness, torch.lerp(background, brightness, rate))


def mask_pyramid(
    mask: Tensor,
    planes: Sequence[Sequence[int]],
    tol: float = 0.5,
    fringes: Sequence[tuple[int, Sequence[Sequence[int]]]] = (),
    margin: int = 0,
) -> MaskPyramid:
    if mask.dim() == 4:
        mask = mask.squeeze(1) if mask.shape[1] == 1 else mask.squeeze(3)
    compare = torch.float64 if mask.dtype == torch.float64 else torch.float32
    pixels = (mask.to(compare) > torch.tensor(tol, dtype=compare)).float()[:, None]
    pixels = F.max_pool2d(pixels, 2 * margin + 1, 1, margin) if margin and len(mask) else pixels
    actives = []
    for height, width, block in planes:
        pooled = F.adaptive_max_pool2d(pixels, (height, width)) if len(mask) else pixels.new_zeros(0, 1, height, width)
        actives.append(reduce_mask(pooled, BlockGrid.cover((height, width), block)))
    edges = []
    for k, consumers in fringes:
        size = planes[k][:2]
        found = [
            fringe(actives[k], actives[reader], size, *geometry, consumer_size=planes[reader][:2])
            for reader, *geometry in consumers
        ]
        read = torch.cat([f.pixels[: int(f.count)] for f in found]).unique().int()
        listed = torch.full((len(mask) * size[0] * size[1],), -1, dtype=torch.int32, device=mask.device)
        listed[: len(read)] = read
        edges.append(Fringe(listed, torch.tensor([len(read)], dtype=torch.int32, device=mask.device)))
    return MaskPyramid(tuple(actives), tuple(edges))
