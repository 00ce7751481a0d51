"""What becomes of a decoder's pictures."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def yuv_to_rgb_(planes: Tensor, look: Sequence[int], rgb: Tensor) -> None:
    luma, red, blue, green_u, green_v, black, planar, turned, over, across = look
    height, width = planes.shape[1] * 2 // 3, planes.shape[2]
    y, chroma = planes[:, :height].int(), planes[:, height:].int() - 128
    if planar:
        u, v = chroma.reshape(-1, 2, height // 2, width // 2).unbind(1)
    else:
        u, v = chroma.reshape(-1, height // 2, width // 2, 2).unbind(3)

    def upper(values: Tensor, factor: int) -> Tensor:
        return values * factor >> 13

    tint = torch.stack([upper(v, red), upper(u, green_u) + upper(v, green_v), upper(u, blue)], 1)
    tint = tint.repeat_interleave(2, 2).repeat_interleave(2, 3)
    shown = (upper(y - black, luma)[:, None] + tint).clamp(0, 255)
    shown = shown.transpose(2, 3) if turned else shown
    shown = shown.flip([axis for axis, mirrored in ((2, over), (3, across)) if mirrored])
    rows, columns = (torch.arange(n).clamp(max=m - 1) for n, m in zip(rgb.shape[2:], shown.shape[2:], strict=True))
    shown = shown[:, :, rows.to(rgb.device)][:, :, :, columns.to(rgb.device)]
    if rgb.dtype != torch.uint8:
        shown = shown.float()
        shown = shown / torch.full_like(shown, 255)  # by a number, a GPU multiplies by its inverse
    rgb.copy_(shown)


def connected_components(
    scores: Tensor, least: float, smallest: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, height, width = scores.shape
    set_ = scores.float() > least
    names = torch.arange(1, height * width + 1, dtype=torch.int64).view(1, height, width) * set_.cpu()
    while True:  # each pixel takes the least name around it
        near = torch.where(names > 0, names, height * width + 1)
        near = F.pad(near, (1, 1, 1, 1), value=height * width + 1).unfold(1, 3, 1).unfold(2, 3, 1).amin((3, 4))
        near = near * (names > 0)
        if torch.equal(near, names):
            break
        names = near
    levels = (scores.cpu().double().clamp(0, 1) * 2**30).round().long()
    boxes, pixels = torch.zeros(images, capacity, 4, dtype=torch.int32), torch.zeros(images, capacity).int()
    sums, count = torch.zeros(images, capacity, dtype=torch.int64), torch.zeros(images).int()
    for n in range(images):
        found = [k for k in names[n].unique().tolist() if k and (names[n] == k).sum() >= smallest]
        count[n] = len(found)
        for row, k in enumerate(found[:capacity]):
            y, x = (names[n] == k).nonzero(as_tuple=True)
            boxes[n, row] = torch.stack([x.min(), y.min(), x.max() + 1, y.max() + 1])
            pixels[n, row], sums[n, row] = len(y), levels[n, y, x].sum()
    return tuple(v.to(scores.device) for v in (boxes, pixels, sums, count))  # type: ignore[return-value]
