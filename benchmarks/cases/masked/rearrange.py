"""sparse_rearrange_ on active blocks, against PyTorch's shuffles and padding of the whole plane, channels_last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sbnet.benchmarks.harness.layers import Shape
from sbnet.benchmarks.harness.masked_layer import moving_cases
from sbnet.benchmarks.harness.registry import Case, Setting
from sbnet.ops.masked.rearrange import rearrange_whole

MAPS: dict[str, dict[str, Any]] = {
    "pixel_shuffle": {"up": 2},
    "pixel_unshuffle": {"down": 2},
    "channel_shuffle": {"groups": 8},
    "pad": {"pad": (1, 1, 1, 1)},
}


def cases(setting: Setting) -> Iterator[Case]:
    shapes: list[Shape] = setting.pick(
        [(1, 36, 44, 8)],
        [(1, 200, 352, 64)],
        [(1, 200, 352, 64), (2, 512, 512, 128)],
    )
    return moving_cases(setting, "sparse_rearrange_", rearrange_whole, MAPS, shapes)
