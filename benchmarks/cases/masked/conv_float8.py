"""sparse_conv2d_quantized_ of float8 against the same layer in float16: ours, and fused cuDNN on the whole plane."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness import masks
from sbnet.benchmarks.harness.layers import Shape, facts
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Skip, Work, WrongResult

FLOAT8 = torch.float8_e4m3fn
SCALE = 0.02  # of x and y
FARTHEST = 0.05  # of float8 results from the reference, rms: they are rounded to 1/16


def cases(setting: Setting) -> Iterator[Case]:
    layers: list[tuple[Shape, int]] = setting.pick(
        [((1, 18, 22, 32), 3)],
        [((8, 128, 128, 256), 3), ((1, 400, 704, 64), 3)],
        [((8, 128, 128, 256), 3), ((1, 400, 704, 64), 3), ((1, 400, 704, 256), 1)],
    )
    for shape, kernel in layers:
        for density in setting.pick((0.5,), (1.0, 0.1), (1.0, 0.3, 0.1, 0.05)):
            described = facts(shape, FLOAT8, "random", 16, kernel=kernel, sparsity=1 - density)
            yield Case(
                "sparse_conv2d_quantized_ of float8", "ops", described, partial(conv, setting, shape, kernel, density)
            )


def conv(setting: Setting, shape: Shape, kernel: int, density: float) -> Work:
    if not setting.cuda:
        raise Skip("float8 is for GPUs; on a CPU it is there to judge accuracy")
    n, h, w, c = shape
    device, padding = setting.device, kernel // 2
    x = torch.randn(n, c, h, w, device=device).clamp(-4, 4).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(c, c, kernel, kernel, device=device) / (c * kernel * kernel) ** 0.5
    weight = weight.contiguous(memory_format=torch.channels_last)
    bias, step = torch.randn(c, device=device), weight.abs().amax((1, 2, 3)) / 448
    inputs, filters = (x / SCALE).to(FLOAT8), (weight / step[:, None, None, None]).to(FLOAT8)
    grid = sbnet.BlockGrid.cover((h, w), 16)
    count = max(1, round(n * grid.bcount[0] * grid.bcount[1] * density))
    active = masks.random_active((n, h, w), grid, count, device)
    inside = active.pixel_mask((h, w))
    half, half_weight, half_bias = x.half(), weight.half(), bias.half()
    out, halves = torch.zeros_like(inputs), torch.zeros_like(half)
    call = inputs, filters, step * SCALE, bias, active
    floats = torch.relu(torch.nn.functional.conv2d(x, weight, bias, padding=padding))

    def ours() -> Tensor:
        sbnet.sparse_conv2d_quantized_(*call, out, out_scale=SCALE, padding=padding, activation="relu")
        return out

    def float16() -> Tensor:
        sbnet.sparse_conv2d_(half, half_weight, half_bias, active, halves, padding=padding, activation="relu")
        return halves

    def dense() -> Tensor:
        return torch.cudnn_convolution_relu(half, half_weight, half_bias, [1, 1], [padding, padding], [1, 1], 1)

    def check(side: str, got: Tensor) -> float:
        """rms from the layer in float32, relative, on active pixels."""
        values = got.float() * (SCALE if got.dtype == FLOAT8 else 1)
        pixels = inside.expand_as(got)
        error = float((values - floats)[pixels].square().mean().sqrt() / floats[pixels].square().mean().sqrt())
        if not error <= (FARTHEST if got.dtype == FLOAT8 else 2e-3):
            raise WrongResult(f"{side}: {error:.2g} from the layer in float32")
        return error

    return Work(
        {
            "sparse_conv2d_quantized_, float8": Side(ours, "ours"),
            "sparse_conv2d_, float16": Side(float16, "peer"),
            "cuDNN fused, float16": Side(dense, "dense"),
        },
        check,
        bytes=2 * float(inside.sum()) * c,
        dtype=FLOAT8,
        notes={"density": int(active.count) / active.capacity, "blocks": int(active.count)},
    )
