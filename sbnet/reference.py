"""Every op in plain PyTorch, readable as its definition: the oracle that tests compare kernels with.

Same arguments and results as the ops of the same names. Slow on purpose: one Python step a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.blocks import ActiveBlocks, BlockGrid, Fringe, MaskPyramid, conv_output_size, to_pair


def _block(grid: BlockGrid, i: int, j: int, size: Sequence[int]) -> tuple[slice, slice, slice, slice]:
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
                y, x, _, _ = _block(grid, i, j, mask.shape[1:])
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


def _listed(active: ActiveBlocks) -> Iterator[tuple[int, int, int, int]]:
    """(row, n, i, j) for each row within the count that names a block."""
    count = min(max(int(active.count), 0), active.capacity)
    for row, (n, i, j) in enumerate(active.indices[:count].tolist()):
        if 0 <= n < active.batch and 0 <= i < active.grid.bcount[0] and 0 <= j < active.grid.bcount[1]:
            yield row, n, i, j


def sparse_gather(
    x: Tensor, active: ActiveBlocks, transpose: bool = False, *, grid: BlockGrid | None = None, tail: str = "zero"
) -> Tensor:
    active = active if grid is None else active.with_grid(grid)
    blocks = x.new_zeros(active.capacity, x.shape[1], *active.grid.bsize)
    for row, n, i, j in _listed(active):
        y, xs, by, bx = _block(active.grid, i, j, x.shape[2:])
        blocks[row, :, by, bx] = x[n, :, y, xs]
    return blocks


def sparse_scatter(
    blocks: Tensor,
    active: ActiveBlocks,
    base: Tensor,
    grid: BlockGrid | None = None,
    add: bool = False,
    atomic: bool = False,
    transpose: bool = False,
) -> Tensor:
    active = active if grid is None else active.with_grid(grid)
    out = base.clone()
    for row, n, i, j in _listed(active):
        if row >= blocks.shape[0]:
            continue
        y, x, by, bx = _block(active.grid, i, j, base.shape[2:])
        if add:
            out[n, :, y, x] += blocks[row, :, by, bx]
        else:
            out[n, :, y, x] = blocks[row, :, by, bx]
    return out


def sparse_scatter_(
    blocks: Tensor,
    active: ActiveBlocks,
    base: Tensor,
    grid: BlockGrid | None = None,
    add: bool = False,
    atomic: bool = False,
    transpose: bool = False,
) -> Tensor:
    return base.copy_(sparse_scatter(blocks, active, base, grid, add, atomic, transpose))


def activate(x: Tensor, activation: str | None, negative_slope: float = 0.01) -> Tensor:
    if activation in (None, "none"):
        return x
    if activation == "leaky_relu":
        return F.leaky_relu(x, negative_slope)
    if activation not in ("relu", "relu6", "silu", "gelu", "hardswish"):
        raise ValueError(f"sbnet: activation: {activation!r}; None or one of sparse_conv2d's is wanted")
    return getattr(F, activation)(x)


def sparse_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    active: ActiveBlocks,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    activation: str | None = None,
    negative_slope: float = 0.01,
    residual: Tensor | None = None,
    allow_tf32: bool = False,
) -> Tensor:
    y = F.conv2d(x, weight, None if bias is None else bias.to(x.dtype), stride, padding, dilation, groups)  # type: ignore[arg-type]
    if residual is not None:
        y = y + residual
    y = activate(y, activation, negative_slope)
    return torch.where(active.pixel_mask(y.shape[2:]), y, torch.zeros_like(y))


def sparse_bottleneck2d(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
    active: ActiveBlocks,
    *,
    activation: str | None = "relu",
    negative_slope: float = 0.01,
    allow_tf32: bool = False,
) -> Tensor:
    bias = biases or [None] * 3
    act = {"activation": activation, "negative_slope": negative_slope}
    y = sparse_conv2d(x, weights[0], bias[0], active, **act)  # type: ignore[arg-type]
    y = sparse_conv2d(y, weights[1], bias[1], active, padding=1, **act)  # type: ignore[arg-type]
    return sparse_conv2d(y, weights[2], bias[2], active, residual=x, **act)  # type: ignore[arg-type]


def sparse_max_pool2d(
    x: Tensor,
    active: ActiveBlocks,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    y = F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)  # type: ignore[arg-type]
    return torch.where(active.pixel_mask(y.shape[2:]), y, torch.zeros_like(y))


def sparse_avg_pool2d(
    x: Tensor,
    active: ActiveBlocks,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    y = F.avg_pool2d(x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)  # type: ignore[arg-type]
    return torch.where(active.pixel_mask(y.shape[2:]), y, torch.zeros_like(y))


def sparse_fill(x: Tensor, active: ActiveBlocks, value: float = 0.0) -> Tensor:
    return torch.where(active.pixel_mask(x.shape[2:]), x, torch.full_like(x, value))


def sparse_fill_(x: Tensor, active: ActiveBlocks, value: float = 0.0) -> Tensor:
    return x.copy_(sparse_fill(x, active, value))


def fringe(
    active: ActiveBlocks,
    consumer: ActiveBlocks,
    size: Sequence[int],
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    capacity: int | None = None,
) -> Fringe:
    """A pixel is read iff the gradient of a sum over the consumer's active pixels, all weights one, reaches it."""
    height, width = to_pair(size, "size")
    k, s = to_pair(kernel_size, "kernel_size"), to_pair(stride, "stride")
    p, d = to_pair(padding, "padding"), to_pair(dilation, "dilation")
    x = torch.zeros(active.batch, 1, height, width, requires_grad=True)
    with torch.enable_grad():
        y = F.conv2d(x, torch.ones(1, 1, *k), None, s, p, d)
        written = consumer.pixel_mask(conv_output_size((height, width), k, s, p, d)).cpu()
        (reads,) = torch.autograd.grad((y * written).sum(), x)
    hit = (reads > 0) & ~active.pixel_mask((height, width)).cpu()
    found = hit.flatten().nonzero().flatten().int()
    limit = hit.numel() if capacity is None else capacity
    pixels = torch.full((limit,), -1, dtype=torch.int32)
    count = min(len(found), limit)
    pixels[:count] = found[:count]
    device = active.count.device
    return Fringe(pixels.to(device), torch.tensor([count]).int().to(device))


def mask_pyramid(
    mask: Tensor,
    planes: Sequence[Sequence[int]],
    tol: float = 0.5,
    fringes: Sequence[tuple[int, Sequence[Sequence[int]]]] = (),
) -> MaskPyramid:
    if mask.dim() == 4:
        mask = mask.squeeze(1) if mask.shape[1] == 1 else mask.squeeze(3)
    compare = torch.float64 if mask.dtype == torch.float64 else torch.float32
    pixels = (mask.to(compare) > torch.tensor(tol, dtype=compare)).float()[:, None]
    actives = []
    for height, width, block in planes:
        pooled = F.adaptive_max_pool2d(pixels, (height, width)) if len(mask) else pixels.new_zeros(0, 1, height, width)
        actives.append(reduce_mask(pooled, BlockGrid.cover((height, width), block)))
    edges = []
    for k, consumers in fringes:
        size = planes[k][:2]
        found = [fringe(actives[k], actives[reader], size, *geometry) for reader, *geometry in consumers]
        read = torch.cat([f.pixels[: int(f.count)] for f in found]).unique().int()
        listed = torch.full((len(mask) * size[0] * size[1],), -1, dtype=torch.int32, device=mask.device)
        listed[: len(read)] = read
        edges.append(Fringe(listed, torch.tensor([len(read)], dtype=torch.int32, device=mask.device)))
    return MaskPyramid(tuple(actives), tuple(edges))
