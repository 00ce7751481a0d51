"""The fringe of a tensor: what a consumer reads of it that no active block writes. See docs/contracts.md."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks, Fringe
from sbnet.geometry import conv_output_size, to_window
from sbnet.ops.common import refuse_meta_mix, require_active


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
    """Pixels of an H x W tensor that the consumer's active blocks read and `active` does not cover.

    A layer that writes the tensor takes it as `fringe=` and zeroes these pixels in the same launch; make it once per
    tensor and mask. Nothing is read on the host.

    Args:
        active: active blocks of the tensor (tiling grid of its plane).
        consumer: active blocks of the consumer's output (tiling grid of that plane).
        size: (H, W) of the tensor.
        kernel_size, stride, padding, dilation: geometry of the consumer, a convolution or pool.
        capacity: most pixels to list; default: all of the tensor's, so that nothing can be cut.

    Returns:
        Fringe with pixels [capacity] int32 and count [1] int32.
    """
    op = "fringe"
    require_active(op, active)
    require_active(op, consumer)
    (height, width), k, s, p, d = to_window(
        op, size=size, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation
    )
    out = conv_output_size((height, width), k, s, p, d)
    if capacity is None:
        capacity = active.batch * height * width
    return Fringe(
        *torch.ops.sbnet.fringe(
            active.block_map,
            consumer.block_map,
            [height, width],
            active.grid.numbers(),
            list(out),
            consumer.grid.numbers(),
            list(k),
            list(s),
            list(p),
            list(d),
            capacity,
        )
    )


@torch.library.register_fake("sbnet::fringe")
def _fringe_fake(
    producer_map: Tensor,
    consumer_map: Tensor,
    size: list[int],
    producer_grid: list[int],
    consumer_size: list[int],
    consumer_grid: list[int],
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    capacity: int,
) -> tuple[Tensor, Tensor]:
    refuse_meta_mix("fringe", producer_map, consumer_map)
    return (
        producer_map.new_empty((capacity,), dtype=torch.int32),
        producer_map.new_empty((1,), dtype=torch.int32),
    )
