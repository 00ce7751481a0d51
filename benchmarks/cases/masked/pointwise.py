"""sparse_pointwise_ on active blocks: a gate, a sum and an activation in one pass, against PyTorch's ops of the whole
plane, channels_last."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

import sbnet
from sbnet.benchmarks.harness.layers import Shape, facts
from sbnet.benchmarks.harness.masked_layer import Output, feature_map, wide
from sbnet.benchmarks.harness.registry import Case, Setting, Work

# name: the program, whose a is a gate and b a feature map; the same in PyTorch
PROGRAMS = {
    "copy": ("", lambda x, a, b: x.clone(memory_format=torch.channels_last)),
    "gate": ("mul a; add b; hardswish", lambda x, a, b: F.hardswish(x * a + b)),
    "mish": ("mish", lambda x, a, b: F.mish(x)),
}


def cases(setting: Setting) -> Iterator[Case]:
    shapes: list[Shape] = setting.pick(
        [(1, 36, 44, 8)],
        [(1, 400, 704, 64)],
        [(1, 400, 704, 64), (2, 1024, 1024, 128)],
    )
    for name in PROGRAMS:
        for shape in shapes[: None if setting.cuda else 1]:
            for density in setting.pick((0.5,), (1.0, 0.1), (1.0, 0.25, 0.1)):
                described = facts(shape, setting.dtype, "random", 16, program=name, sparsity=1 - density)
                yield Case("sparse_pointwise_", "ops", described, partial(pointwise, setting, shape, name, density))


def pointwise(setting: Setting, shape: Shape, name: str, density: float) -> Work:
    program, function = PROGRAMS[name]
    x, b = feature_map(setting, shape), feature_map(setting, shape)
    a = torch.rand(shape[0], shape[3], 1, 1, device=setting.device, dtype=setting.dtype)
    out = Output(x, shape[1:3], shape[3], density)
    maps = 3 if name == "gate" else 2  # that are read and written
    return out.work(
        "sparse_pointwise_",
        lambda: sbnet.sparse_pointwise_(x, out.active, program, a, b, out=out.memory, fringe=out.fringe),
        "PyTorch",
        lambda: function(x, a, b),
        function(*(t.to(wide(t.dtype)) for t in (x, a, b))),
        maps * out.pixels * shape[3],
    )
