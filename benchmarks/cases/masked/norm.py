"""sparse_group_norm_ (sparse_instance_norm is that of C groups), sparse_response_norm_, sparse_layer_norm2d_ and
sparse_softmax2d_ on active blocks, against PyTorch's of the whole plane, channels_last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sbnet
from sbnet import reference
from sbnet.benchmarks.harness import masks
from sbnet.benchmarks.harness.layers import Shape, facts, fringe_mask
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, WrongResult, close

# What is passed beside x, weight and bias; the dense layer; how often x is read.
NORMS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], int]] = {
    "group_norm": (lambda w, b: (32, w, b), lambda x, w, b: F.group_norm(x, 32, w, b), 2),
    "response_norm": (lambda w, b: (w, b), lambda x, w, b: response_norm(x, w, b), 2),
    "layer_norm2d": (
        lambda w, b: (w, b),
        lambda x, w, b: F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2], w, b).permute(0, 3, 1, 2),
        1,
    ),
    "softmax2d": (lambda w, b: (), lambda x, w, b: F.softmax(x, 1), 1),
}


def response_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As ConvNeXtV2 writes it."""
    size = x.norm(p=2, dim=(2, 3), keepdim=True)
    shares = x * (size / (size.mean(1, keepdim=True) + 1e-6))
    return x + torch.addcmul(bias.view(1, -1, 1, 1), weight.view(1, -1, 1, 1), shares)


def cases(setting: Setting) -> Iterator[Case]:
    shapes: list[Shape] = setting.pick(
        [(1, 36, 44, 32)],
        [(1, 200, 352, 64)],
        [(1, 200, 352, 64), (2, 512, 512, 128)],
    )
    for name in NORMS:
        for shape in shapes[: None if setting.cuda else 1]:
            for density in setting.pick((0.5,), (1.0, 0.1), (1.0, 0.25, 0.1)):
                described = facts(shape, setting.dtype, "random", 16, norm=name, sparsity=1 - density)
                yield Case("sparse_norm2d_", "ops", described, partial(norm, setting, shape, name, density))


def norm(setting: Setting, shape: Shape, name: str, density: float) -> Work:
    n, h, w, c = shape
    x, (weight, bias) = (
        torch.randn(n, c, h, w, device=setting.device, dtype=setting.dtype).contiguous(
            memory_format=torch.channels_last
        ),
        torch.randn(2, c, device=setting.device, dtype=setting.dtype),
    )
    arguments, dense, passes = NORMS[name]
    grid = sbnet.BlockGrid.cover((h, w), 16)
    count = max(1, round(n * grid.bcount[0] * grid.bcount[1] * density))
    active = masks.random_active((n, h, w), grid, count, setting.device)
    inside = active.pixel_mask((h, w))
    fringe = sbnet.fringe(active, active, (h, w), 3, 1, 1)  # for a 3x3 layer that reads the output
    edge = fringe_mask(fringe, inside)
    out = torch.full_like(x, torch.nan)
    op, definition = getattr(sbnet, f"sparse_{name}_"), getattr(reference, f"sparse_{name}")
    own = definition(x, active, *arguments(weight, bias))
    exact = definition(x.double(), active, *arguments(weight.double(), bias.double()))
    of_all = dense(x, weight, bias), dense(x.double(), weight.double(), bias.double())

    def ours() -> Tensor:
        op(x, active, out, *arguments(weight, bias), fringe=fringe)
        return out

    def check(side: str, got: Tensor) -> float:
        if not side.startswith("sparse"):
            return close(got, *of_all)
        if not bool((got.isnan() | inside | edge).all()) or bool(torch.where(edge, got, 0).any()):
            raise WrongResult("pixels outside of the active blocks are not as they should be")
        return close(got, own, exact, inside)

    return Work(
        {"sparse_norm2d_": Side(ours, "ours"), "PyTorch": Side(lambda: dense(x, weight, bias))},
        check,
        bytes=((1 + passes) * float(inside.sum()) + float(edge.sum())) * c * x.element_size(),
        dtype=setting.dtype,
        notes={"density": int(active.count) / active.capacity, "blocks": int(active.count)},
    )
