"""Whole networks through the engine against the same networks dense.

A masked call starts at a pixel mask and holds everything: reduce_mask, fringe, layers, clearing of the output. The
dense side is channels_last, fused cuDNN in a CUDA graph on a GPU; on a CPU every form of harness/dense.py.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sbnet.benchmarks.harness import dense, masks
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, WrongResult, close, short
from sbnet.engine import compare, sparsify
from sbnet.models import contour_net


def cases(setting: Setting) -> Iterator[Case]:
    size = setting.pick((40, 56), (200, 352), (400, 704))
    densities = setting.pick((0.1,), (0.05, 0.25), (0.01, 0.05, 0.1, 0.25, 0.5, 1.0))
    for network, (build, channels) in CHAINS.items():
        for density in densities:
            facts: dict[str, Any] = {"network": network, "size": list(size)}
            facts |= {"dtype": short(setting.dtype), "mask": "random"}
            facts["wanted density"] = density
            yield Case("network", "network", facts, partial(chain, setting, build, (1, channels, *size), density))


def four_layers(count: int = 4) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(count):
        layers += [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers).eval()


def chain(setting: Setting, build: Callable[[], nn.Sequential], shape: tuple[int, ...], density: float) -> Work:
    device, dtype = setting.device, setting.dtype
    net, forms = dense_forms(setting, build, shape)
    x = torch.rand(shape, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
    masked = sparsify(copy.deepcopy(net).requires_grad_(False).to(device, dtype), x, block=16)
    mask = masks.pixels("random", (1, shape[2], shape[3]), density, device)

    def check(side: str, got: Tensor) -> float:
        if side != "masked":
            own = copy.deepcopy(net).to(device, dtype)  # PyTorch's own run, then the same parameters in float64
            return close(got, own(x), own.double()(x.double()))
        agreement = compare(got, net, x, masked.active[0])
        if not agreement.holds:
            raise WrongResult(str(agreement))
        return agreement.error

    masked(x, mask)
    (active,) = masked.active
    blocks = int(active.count)
    notes = {"blocks": blocks, "density": blocks / active.capacity}
    sides = {"masked": Side(lambda: masked(x, mask), "ours", "own")}
    if setting.cuda:
        sides["dense"] = Side(partial(dense.cudnn(net, x).run, x), "dense", "own")
    for name, form in forms.items():
        sides[name] = Side(partial(form.run, form.prepare(x)))
    return Work(sides, check, notes=notes)


@functools.lru_cache(maxsize=1)
def dense_forms(
    setting: Setting, build: Callable[[], nn.Sequential], shape: tuple[int, ...]
) -> tuple[nn.Sequential, dict[str, dense.Form]]:
    """The network and its forms on a CPU (on CUDA: none): cases that follow each other share them."""
    net = build()
    if setting.cuda:
        return net, {}
    compiled = setting.compiled and setting.level == "full"
    return net, dense.forms(net, torch.rand(shape), compiled)


# name -> builder, input channels
CHAINS: dict[str, tuple[Callable[[], nn.Sequential], int]] = {
    "four 3x3, 64 channels": (four_layers, 64),
    "contour_net": (contour_net, 3),
}
