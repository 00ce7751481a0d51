"""The fringe of a tensor: what a consumer reads of it that no active block writes. See docs/contracts.md."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks, Fringe
from sbnet.geometry import Window, as_window, conv_output_size, to_pair
from sbnet.ops.common import refuse_meta_mix, require_active


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
    """Pixels of an H x W tensor that the consumer's active blocks read and `active` does not cover.

    A layer that writes the tensor takes it as `fringe=` and zeroes these pixels in the same launch; make it once per
    tensor and mask. Nothing is read on the host.

    Args:
        active: active blocks of the tensor (tiling grid of its plane).
        consumer: active blocks of the consumer's output (tiling grid of that plane).
        size: (H, W) of the tensor.
        window: what the consumer reads; or the kernel size of a convolution or pool whose stride, padding and dilation
            follow.
        capacity: most pixels to list; default: all of the tensor's, so that nothing can be cut.
        consumer_size: (H, W) of the consumer's output; default: what a convolution makes. A Window needs it.

    Returns:
        Fringe with pixels [capacity] int32 and count [1] int32.

    >>> edge = sbnet.fringe(active, active, (48, 80), 3, padding=1)  # what a 3x3 convolution reads beside the blocks
    >>> int(edge.count) > 0
    True
    """
    op = "fringe"
    require_active(op, active)
    require_active(op, consumer)
    height, width = to_pair(tuple(size), f"{op}: size")
    reads = as_window(op, window, stride, padding, dilation)
    if consumer_size is not None:
        out = to_pair(tuple(consumer_size), f"{op}: consumer_size")
    elif isinstance(window, Window):
        raise ValueError(f"sbnet::{op}: consumer_size: expected (height, width) with a Window, got None")
    else:
        out = conv_output_size((height, width), window, stride, padding, dilation)
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
            reads.numbers(),
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
    window: list[int],
    capacity: int,
) -> tuple[Tensor, Tensor]:
    refuse_meta_mix("fringe", producer_map, consumer_map)
    return (
        producer_map.new_empty((capacity,), dtype=torch.int32),
        producer_map.new_empty((1,), dtype=torch.int32),
    )
