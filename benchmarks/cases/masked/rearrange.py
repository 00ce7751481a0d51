"""sparse_rearrange_ on active blocks, against PyTorch's shuffles and padding of the whole plane, channels_last."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import sbnet
from sbnet.benchmarks.harness.layers import Shape, facts
from sbnet.benchmarks.harness.masked_layer import Output, feature_map
from sbnet.benchmarks.harness.registry import Case, Setting, Work
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
    for name in MAPS:
        for shape in shapes[: None if setting.cuda else 1]:
            for density in setting.pick((0.5,), (1.0, 0.1), (1.0, 0.25, 0.1)):
                described = facts(shape, setting.dtype, "random", 16, map=name, sparsity=1 - density)
                yield Case("sparse_rearrange_", "ops", described, partial(rearrange, setting, shape, name, density))


def rearrange(setting: Setting, shape: Shape, name: str, density: float) -> Work:
    x = feature_map(setting, shape)
    _, channels, *size = rearrange_whole(x, **MAPS[name]).shape
    out = Output(x, (size[0], size[1]), channels, density)
    return out.work(
        "sparse_rearrange_",
        lambda: sbnet.sparse_rearrange_(x, out.active, out.memory, **MAPS[name], fringe=out.fringe),
        "PyTorch",
        lambda: rearrange_whole(x, **MAPS[name]),
        None,
        2 * out.pixels * channels,
    )
