"""connected_components: what the areas of a map are that lie above a threshold."""

from __future__ import annotations

import torch
from torch import Tensor

_ops = torch.ops.sbnet
SCORE_BITS = 30  # of fraction, of sums


def connected_components(
    scores: Tensor, least: float, smallest: int = 1, capacity: int = 4096
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The areas of pixels above a threshold that touch, corners too, in the order of their first pixels, row by row.
    The device and its threads do not show; nothing is read on the host. `torch.vmap` goes over images in one call.

    Args:
        scores: [N,H,W] float32, float16 or bfloat16, any strides.
        least: above which a pixel is set, compared in float32.
        smallest: pixels of an area that counts.
        capacity: areas of an image that there is place for: the first ones.

    Returns:
        boxes [N,capacity,4] int32, left, top, right and bottom, the last two exclusive; pixels [N,capacity] int32;
        sums [N,capacity] int64, of scores as whole numbers: clamped to 0 to 1, times 2**30, rounded; count [N] int32,
        of all areas that count, those without a place too. Rows without an area are zeros.

    >>> scores = torch.tensor([[[0.5, 0, 0, 0], [0, 0.75, 0, 0.25]]])
    >>> boxes, pixels, sums, count = connected_components(scores, 0.2, capacity=2)
    >>> boxes[0].tolist(), pixels[0].tolist(), (sums[0] / 2**30).tolist(), count.tolist()
    ([[0, 0, 2, 2], [3, 1, 4, 2]], [2, 1], [1.25, 0.25], [2])
    """
    return _ops.connected_components(scores, least, smallest, capacity)


@torch.library.register_fake("sbnet::connected_components")
def _fake(scores: Tensor, least: float, smallest: int, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch._check(scores.dim() == 3, lambda: f"sbnet::connected_components: expected [N,H,W], got {tuple(scores.shape)}")
    images, dtype = scores.shape[0], torch.int32
    return (
        scores.new_empty((images, capacity, 4), dtype=dtype), scores.new_empty((images, capacity), dtype=dtype),
        scores.new_empty((images, capacity), dtype=torch.int64), scores.new_empty(images, dtype=dtype),
    )  # fmt: skip


@torch.library.register_vmap("sbnet::connected_components")
def _batched(
    info: object, dims: tuple[int | None, ...], scores: Tensor, least: float, smallest: int, capacity: int
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    assert dims[0] is not None
    scores = scores.movedim(dims[0], 0)
    found = connected_components(scores.flatten(0, 1), least, smallest, capacity)
    return tuple(v.unflatten(0, tuple(scores.shape[:2])) for v in found), (0,) * len(found)
