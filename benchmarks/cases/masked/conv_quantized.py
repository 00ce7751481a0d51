"""sparse_conv2d_quantized_ of int8 against the same layer in floats: ours, and PyTorch's on the whole plane. On a CPU
they are float32, on a GPU float16 (by fused cuDNN)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness import masks
from sbnet.benchmarks.harness.layers import Shape, facts
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, WrongResult

SCALE = 0.05  # of x and y


def cases(setting: Setting) -> Iterator[Case]:
    shapes: list[Shape] = setting.pick([(1, 18, 22, 8)], [(1, 400, 704, 64)], [(1, 400, 704, 64), (1, 100, 176, 256)])
    layers = [(shape, kernel) for shape in shapes for kernel in setting.pick((3,), (3, 1), (3, 1))]
    if setting.cuda:
        layers = [((8, 128, 128, 256), 3), ((1, 400, 704, 64), 3), ((1, 400, 704, 256), 1)]
        layers = setting.pick([((1, 18, 22, 32), 3)], layers, layers)
    for shape, kernel in layers:
        for density in setting.pick((0.5,), (1.0, 0.1), (1.0, 0.25, 0.05)):
            described = facts(shape, torch.int8, "random", 16, kernel=kernel, sparsity=1 - density)
            yield Case("sparse_conv2d_quantized_", "ops", described, partial(conv, setting, shape, kernel, density))


def conv(setting: Setting, shape: Shape, kernel: int, density: float) -> Work:
    n, h, w, c = shape
    device, padding = setting.device, kernel // 2
    x = torch.randn(n, c, h, w, device=device).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(c, c, kernel, kernel, device=device) / (c * kernel * kernel) ** 0.5
    weight = weight.contiguous(memory_format=torch.channels_last)
    bias, step = torch.randn(c, device=device), weight.abs().amax((1, 2, 3)) / 127
    bytes_ = (x / SCALE).round().clamp(-127, 127).to(torch.int8)
    filters = (weight / step[:, None, None, None]).round().to(torch.int8)
    grid = sbnet.BlockGrid.cover((h, w), 16)
    count = max(1, round(n * grid.bcount[0] * grid.bcount[1] * density))
    active = masks.random_active((n, h, w), grid, count, device)
    inside = active.pixel_mask((h, w))
    call = bytes_, filters, step * SCALE, bias, active
    peer = torch.float16 if setting.cuda else torch.float32
    x, weight, bias = (t.to(peer) for t in (x, weight, bias))
    out, floats = torch.empty_like(bytes_).fill_(77), torch.empty_like(x)
    packed, packed_floats = sbnet.pack_conv_weight(filters), sbnet.pack_conv_weight(weight)
    want = sbnet.reference.sparse_conv2d_quantized(*call, out_scale=SCALE, padding=padding, activation="relu")

    def ours() -> Tensor:
        sbnet.sparse_conv2d_quantized_(*call, out, out_scale=SCALE, padding=padding, activation="relu", packed=packed)
        return out

    def ours_in_floats() -> Tensor:
        sbnet.sparse_conv2d_(x, weight, bias, active, floats, padding=padding, activation="relu", packed=packed_floats)
        return floats

    def dense() -> Tensor:
        if setting.cuda:
            return torch.cudnn_convolution_relu(x, weight, bias, [1, 1], [padding, padding], [1, 1], 1)
        return F.conv2d(x, weight, bias, padding=padding).relu_()

    def check(side: str, got: Tensor) -> float:
        """Of int8: the largest difference, in steps. Of floats: how far int8 is away from them, rms in its steps."""
        if side != "sparse_conv2d_quantized_":
            apart = torch.where(inside, got / SCALE - want, 0).clamp(-127, 127)
            return float(apart.square().mean().sqrt())
        apart = torch.where(inside, got.int() - want.int(), 0).abs()
        if (
            int(apart.max()) > 1
            or float((apart > 0).float().mean()) > 1e-3
            or bool((got != 77)[~inside.expand_as(got)].any())
        ):
            raise WrongResult("int8 results are not those of the reference")
        return float(apart.max())

    pixels = float(inside.sum())
    return Work(
        {
            "sparse_conv2d_quantized_": Side(ours, "ours"),
            f"sparse_conv2d_, {str(peer)[6:]}": Side(ours_in_floats, "peer"),
            "cuDNN fused, float16" if setting.cuda else "F.conv2d, float32": Side(dense),
        },
        check,
        bytes=2 * pixels * c,
        dtype=torch.int8,
        notes={"density": int(active.count) / active.capacity, "blocks": int(active.count)},
    )
