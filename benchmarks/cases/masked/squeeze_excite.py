"""sparse_squeeze_excite2d on active blocks, against PyTorch's gate of squeeze and excitation of the whole plane."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness import masks
from sbnet.benchmarks.harness.layers import Shape, facts
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, close
from sbnet.ops.masked.squeeze_excite import squeeze_excite_whole


def cases(setting: Setting) -> Iterator[Case]:
    """Gates of mobilenet_v3_large on frames of 720x1280."""
    shapes: list[tuple[Shape, int]] = setting.pick(
        [((1, 36, 44, 8), 4)],
        [((1, 45, 80, 672), 168)],
        [((1, 90, 160, 120), 32), ((1, 45, 80, 672), 168), ((1, 23, 40, 960), 240)],
    )
    for shape, hidden in shapes:
        for density in setting.pick((0.5,), (0.1,), (1.0, 0.1)):
            described = facts(shape, setting.dtype, "random", 8, hidden=hidden, sparsity=1 - density)
            make = partial(gate, setting, shape, hidden, density)
            yield Case("sparse_squeeze_excite2d", "ops", described, make)


def gate(setting: Setting, shape: Shape, hidden: int, density: float) -> Work:
    n, h, w, c = shape
    of = {"device": setting.device, "dtype": setting.dtype}
    x = torch.randn(n, c, h, w, **of).contiguous(memory_format=torch.channels_last)
    weight1, weight2 = torch.randn(hidden, c, **of) / c**0.5, torch.randn(c, hidden, **of) / hidden**0.5
    bias1, bias2 = torch.randn(hidden, **of), torch.randn(c, **of)
    grid = sbnet.BlockGrid.cover((h, w), 8)
    count = max(1, round(n * grid.bcount[0] * grid.bcount[1] * density))
    active = masks.random_active((n, h, w), grid, count, setting.device)
    inside = active.pixel_mask((h, w))
    x = torch.where(inside, x, 0).contiguous(memory_format=torch.channels_last)  # as the masked contract has it
    everywhere, tensors = torch.ones_like(inside), (x, weight1, weight2, bias1, bias2)

    def dense() -> Tensor:
        return squeeze_excite_whole(*tensors, everywhere, "relu", "hardsigmoid")

    def ours() -> Tensor:
        return sbnet.sparse_squeeze_excite2d(
            x, active, weight1, bias1, weight2, bias2, activation="relu", gate="hardsigmoid"
        )

    doubles = [t.double() for t in tensors]
    exact = squeeze_excite_whole(*doubles, everywhere, "relu", "hardsigmoid")  # type: ignore[call-arg, arg-type]
    torchs = dense()
    return Work(
        {"sparse_squeeze_excite2d": Side(ours, "ours"), "PyTorch": Side(dense)},
        lambda _, got: close(got, torchs, exact),
        bytes=float(inside.sum()) * c * x.element_size() + 4 * hidden * c,
        dtype=setting.dtype,
        notes={"density": int(active.count) / active.capacity, "blocks": int(active.count)},
    )
