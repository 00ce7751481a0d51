"""A step of training, forward, loss and backward, under masks, against the dense step.

On CUDA in bfloat16 autocast, channels_last, each side one CUDA graph, torch.compile's too; on a CPU in float32. The
masked step is held to the dense step multiplied by masks, by its loss and all gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import sbnet
from sbnet.benchmarks.harness import nets
from sbnet.benchmarks.harness.dense_masked import DenseMasked
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Skip, Work, short
from sbnet.benchmarks.harness.training import backward, hold_gradients, hold_loss, one_graph, peak_gib, under

BLOCK = 8
# network: batch and side on CUDA, on a CPU
ON_CUDA = {
    "resnet50": (8, 512), "U-Net": (8, 512), "U-Net, bilinear": (8, 512), "YOLOv8n-like": (16, 640),
    "convnext_tiny": (8, 224),
}  # fmt: skip
ON_CPU = {"four 3x3": (1, 256), "resnet18": (4, 224), "U-Net, bilinear": (1, 256)}
RECTANGLES = (0.1, 0.3, 1.0)
PATCHES = 0.4  # of 32 x 32 pixels, at random, are seen in masked pretraining


def cases(setting: Setting) -> Iterator[Case]:
    networks = setting.pick({"four 3x3": (1, 32)}, {"four 3x3": (1, 128)}, ON_CUDA if setting.cuda else ON_CPU)
    dtype = torch.bfloat16 if setting.cuda else torch.float32
    for name, (batch, side) in networks.items():
        of: list[tuple[str, float]] = [
            ("a rectangle each", share) for share in setting.pick((0.1,), (0.1,), RECTANGLES)
        ]
        if setting.level == "full" and side % 32 == 0:
            of.append(("patches of 32", PATCHES))
        for kind, share in of:
            facts = {"network": name, "batch": batch, "side": side, "dtype": short(dtype), "mask": kind, "share": share}
            yield Case("training step", "training", facts, partial(work, setting, name, batch, side, kind, share))


def four() -> nn.Module:
    """Four 3x3 convolutions and their ReLUs."""
    layers: list[nn.Module] = []
    for i, o in ((3, 32), (32, 64), (64, 64), (64, 64)):
        layers += [nn.Conv2d(i, o, 3, padding=1), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[:-1])


def pixels(kind: str, batch: int, side: int, share: float, device: str) -> Tensor:
    """[N,H,W] bool: a square somewhere, of another place in each picture, or patches of 32 x 32 at random."""
    generator = torch.Generator().manual_seed(0)
    if kind == "patches of 32":
        patches = torch.rand(batch, side // 32, side // 32, generator=generator)
        rank = patches.flatten(1).argsort(1).argsort(1).view_as(patches)
        seen = rank < round(share * patches[0].numel())
        return seen.repeat_interleave(32, 1).repeat_interleave(32, 2).to(device)
    mask = torch.zeros(batch, side, side, dtype=torch.bool)
    length = round(side * share**0.5)
    for picture in mask:
        top, left = (int(torch.randint(side - length + 1, (1,), generator=generator)) for _ in range(2))
        picture[top : top + length, left : left + length] = True
    return mask.to(device)


@functools.lru_cache(maxsize=1)
def dense_step(setting: Setting, name: str, batch: int, side: int) -> tuple[nn.Module, Tensor, dict[str, Side], Any]:
    """A network, its input, and the dense step in its forms and its memory: the same for every mask."""
    net = (four() if name == "four 3x3" else built(name)).to(setting.device).train()
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(batch, 3, side, side).to(setting.device).contiguous(memory_format=torch.channels_last)
    forms = {"dense": net}
    if setting.compiled and setting.level == "full":
        forms["torch.compile"] = torch.compile(net)  # type: ignore[assignment]
    steps = {form: partial(backward, net, partial(loss_of_net, run, x), setting.cuda) for form, run in forms.items()}
    gib = peak_gib(setting, steps["dense"])
    return net, x, {form: Side(one_graph(setting, step), "dense", "own") for form, step in steps.items()}, gib


def loss_of_net(forward: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    return loss_of(forward(x))


def work(setting: Setting, name: str, batch: int, side: int, kind: str, share: float) -> Work:
    net, x, dense, gib = dense_step(setting, name, batch, side)
    mask = pixels(kind, batch, side, share, setting.device)
    masked = partial(under, lambda: sbnet.masked(mask, block=BLOCK), loss_of_net, net, x)
    dense_masked = partial(under, lambda: DenseMasked(mask, BLOCK), loss_of_net, net, x)
    apart = hold_gradients(setting, net, masked, dense_masked)
    step = partial(backward, net, masked, setting.cuda)
    losses = {"masked": float(backward(net, dense_masked, setting.cuda))}
    exact = float(backward(net, partial(loss_of_net, net, x), setting.cuda))
    notes: dict[str, Any] = {"density": float(mask.float().mean()), **apart}
    for form, found in (("masked", peak_gib(setting, step)), ("dense", gib)):
        notes |= {f"{form} {unit}": value for unit, value in found.items()}
    return Work(
        {"masked": Side(one_graph(setting, step), "ours", "own"), **dense},
        lambda form, got: hold_loss(setting, form, got, losses.get(form, exact)),
        dtype=torch.bfloat16 if setting.cuda else torch.float32,
        notes=notes,
    )


def loss_of(y: Any) -> Tensor:
    """A loss of every output."""
    parts = y if isinstance(y, (tuple, list)) else [y]
    return sum(t.float().square().mean() for t in parts)  # type: ignore[return-value]


def built(name: str) -> nn.Module:
    if name in nets.NETWORKS:
        net = nets.NETWORKS[name]()
    else:
        try:
            net = nets.torchvision().models.get_model(name, weights=None)
        except ImportError as error:
            raise Skip(str(error)) from None
    for module in net.modules():
        if type(module).__name__ == "StochasticDepth":
            module.p = 0.0  # the same step each time
    return net
