"""sparse_bottleneck2d_ against its three layers, and against the dense block. Biases and ReLU, fringe zeroed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import sbnet
from sbnet import reference
from sbnet.benchmarks.harness import masks
from sbnet.benchmarks.harness.layers import Shape, facts, fringe_mask
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, WrongResult, close

# (N, H, W, C), width: ResNet-50's first two stages, SBNet's
BLOCKS: list[tuple[Shape, int]] = [
    ((1, 200, 352, 256), 64),
    ((1, 100, 176, 512), 128),
    ((1, 400, 704, 96), 24),
    ((1, 200, 352, 192), 48),
    ((1, 100, 176, 256), 64),
    ((1, 50, 88, 384), 96),
]


def cases(setting: Setting) -> Iterator[Case]:
    for shape, width in setting.pick([((1, 36, 44, 32), 8)], BLOCKS[:1], BLOCKS):
        for block in setting.pick((8,), (8,), (8, 16)):
            for density in setting.pick((0.5,), (0.1,), (1.0, 0.3, 0.1)):
                described = facts(shape, setting.dtype, "random", block, width=width, sparsity=round(1 - density, 4))
                make = partial(work, setting, shape, width, block, density)
                yield Case("sparse_bottleneck2d_", "block", described, make)


def work(setting: Setting, shape: Shape, width: int, block: int, density: float) -> Work:
    n, h, w, c = shape
    device, dtype, last = setting.device, setting.dtype, torch.channels_last
    x = torch.randn(n, c, h, w, device=device).to(dtype).contiguous(memory_format=last)
    shapes = (width, c, 1, 1), (width, width, 3, 3), (c, width, 1, 1)
    weights = [torch.randn(s, device=device) / (s[1] * s[2] * s[3]) ** 0.5 for s in shapes]
    weights = [weight.to(dtype).contiguous(memory_format=last) for weight in weights]
    biases = [torch.randn(s[0], device=device).to(dtype) for s in shapes]
    active = sbnet.reduce_mask(
        masks.pixels("random", (n, h, w), density, device, block), sbnet.BlockGrid.cover((h, w), block)
    )
    everywhere = sbnet.reduce_mask(torch.ones(n, h, w, device=device), active.grid)
    fringe = sbnet.fringe(active, active, (h, w), 3, 1, 1)
    inside = active.pixel_mask((h, w))
    edge = fringe_mask(fringe, inside)
    out, layered = (torch.full_like(x, torch.nan) for _ in range(2))
    first, second = (torch.empty(n, width, h, w, device=device, dtype=dtype, memory_format=last) for _ in range(2))

    def ours() -> Tensor:
        sbnet.sparse_bottleneck2d_(x, weights, biases, active, out, fringe=fringe)
        return out

    def layers() -> Tensor:
        conv = partial(sbnet.sparse_conv2d_, active=active, activation="relu")
        conv(x, weights[0], biases[0], out=first, fringe=fringe)
        conv(first, weights[1], biases[1], out=second, padding=1)
        conv(second, weights[2], biases[2], out=layered, residual=x, fringe=fringe)
        return layered

    def dense() -> Tensor:
        y = F.conv2d(x, weights[0], biases[0]).relu_()
        y = F.conv2d(y, weights[1], biases[1], padding=1).relu_()
        return F.conv2d(y, weights[2], biases[2]).add_(x).relu_()

    def fused() -> Tensor:
        pointwise, window = ([1, 1], [0, 0], [1, 1], 1), ([1, 1], [1, 1], [1, 1], 1)
        y = torch.cudnn_convolution_relu(x, weights[0], biases[0], *pointwise)
        y = torch.cudnn_convolution_relu(y, weights[1], biases[1], *window)
        return torch.cudnn_convolution_add_relu(y, weights[2], x, 1.0, biases[2], *pointwise)

    denses = {"PyTorch": Side(dense)} | ({"fused cuDNN": Side(fused)} if x.is_cuda else {})

    wide = torch.float64 if dtype == torch.float32 else torch.float32
    widened = x.to(wide), [t.to(wide) for t in weights], [t.to(wide) for t in biases]

    def check(side: str, got: Tensor) -> float:
        blocks = everywhere if side in denses else active
        torchs = reference.sparse_bottleneck2d(x, weights, biases, blocks)
        exact = reference.sparse_bottleneck2d(*widened, blocks)
        if side in denses:
            return close(got, torchs, exact)
        if not bool((got.isnan() | inside | edge).all()) or bool(torch.where(edge, got, 0).any()):
            raise WrongResult("pixels outside of the active blocks are not as they should be")
        return close(got, torchs, exact, inside)

    pixels, constants = float(inside.sum()), sum(t.numel() for t in (*weights, *biases))
    return Work(
        {
            "sparse_bottleneck2d_": Side(ours, "ours"),
            "three sparse_conv2d_": Side(layers, "peer"),
            **denses,
        },
        check,
        flops=2 * sum(t.numel() for t in weights) * pixels,
        bytes=(2 * pixels * c + constants) * x.element_size(),
        dtype=dtype,
        notes={
            "density": int(active.count) / active.capacity,
            "blocks": int(active.count),
            "fringe": int(fringe.count),
        },
    )
