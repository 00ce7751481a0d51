"""What becomes of a decoder's pictures."""

from __future__ import annotations

from collections.abc import Sequence

import torch
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
