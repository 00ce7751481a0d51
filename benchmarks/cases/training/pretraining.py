"""A step of masked pretraining against the dense step multiplied by masks, as the authors of such methods compute it.

60 % of patches of 32 x 32 are not seen. An encoder sees the others. A decoder of one ConvNeXt block, dense on all
sides, fills them in; the loss is of their normalised pixels (FCMAE, Woo et al., 2023; of a ResNet: SparK, Tian et al.,
2023). Timed and held as steps.py says. "no masks" is the dense step without the products.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbnet
from sbnet.benchmarks.cases.training.steps import BLOCK, PATCHES, built, pixels
from sbnet.benchmarks.harness import nets
from sbnet.benchmarks.harness.dense_masked import DenseMasked
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Skip, Work, short
from sbnet.benchmarks.harness.training import backward, hold_gradients, hold_loss, one_graph, peak_gib, under

PATCH, KIND = 32, "patches of 32"


def cases(setting: Setting) -> Iterator[Case]:
    networks = setting.pick((), (), ("convnextv2_tiny", "resnet50")) if setting.cuda else ()
    for name in networks:
        for batch in (8, 64):
            facts = {
                "network": name, "batch": batch, "side": 224, "dtype": short(torch.bfloat16), "mask": KIND,
                "share": PATCHES,
            }  # fmt: skip
            yield Case("masked pretraining", "training", facts, partial(work, setting, name, batch, 224))


class Decoder(nn.Module):
    """Pixels of all patches from features [N,C,H/32,W/32]; unseen ones are filled with a token first."""

    def __init__(self, channels: int, width: int = 512) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(channels, width, 1)
        self.token = nn.Parameter(torch.zeros(width, 1, 1))
        self.mix, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.pixels = nn.Conv2d(width, 3 * PATCH * PATCH, 1)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        x = torch.where(seen, self.narrow(x), self.token)
        y = self.back(F.gelu(self.wide(self.norm(self.mix(x).permute(0, 2, 3, 1)))))
        return self.pixels(x + y.permute(0, 3, 1, 2))


class Pretrained(nn.Module):
    """An encoder and its decoder."""

    def __init__(self, name: str) -> None:
        super().__init__()
        try:
            nets.torchvision()
            if name.startswith("resnet"):
                self.encoder = nn.Sequential(*list(built(name).children())[:-2])
            else:
                timm = importlib.import_module("timm")
                self.encoder = timm.create_model(name, num_classes=0, global_pool="")
        except ImportError as error:
            raise Skip(str(error)) from None
        for parameter in self.encoder.parameters():
            if not parameter.detach().any():  # layers that begin as nothing would hide mistakes
                nn.init.normal_(parameter, 0.0, 0.05)
        with torch.no_grad():
            channels = self.encode(torch.zeros(1, 3, 2 * PATCH, 2 * PATCH)).shape[1]
        self.decoder = Decoder(channels)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x) if isinstance(self.encoder, nn.Sequential) else self.encoder.forward_features(x)

    def loss(self, features: Tensor, x: Tensor, seen: Tensor) -> Tensor:
        """Mean squared error of unseen patches, each normalised to mean 0 and variance 1."""
        target = F.pixel_unshuffle(x, PATCH).float()
        target = (target - target.mean(1, keepdim=True)) / (target.var(1, keepdim=True) + 1e-6).sqrt()
        error = (self.decoder(features, seen).float() - target).square().mean(1, keepdim=True)
        return torch.where(seen, 0.0, error).sum() / (~seen).sum()


def loss_of(net: Pretrained, mode: Any, x: Tensor, seen: Tensor) -> Tensor:
    return net.loss(under(mode, net.encode, x), x, seen)


def made(setting: Setting, name: str, batch: int, side: int) -> tuple[Pretrained, dict[str, Any], Tensor, Tensor]:
    """The network, contexts of its encoder, pictures, and which patches are seen."""
    net = Pretrained(name).to(setting.device).train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(batch, 3, side, side).to(setting.device).contiguous(memory_format=torch.channels_last)
    mask = pixels(KIND, batch, side, PATCHES, setting.device)
    modes = {
        "masked": lambda: sbnet.masked(mask, block=BLOCK),
        "dense masked": lambda: DenseMasked(mask, BLOCK),
        "no masks": contextlib.nullcontext,
    }
    return net, modes, x, mask[:, None, ::PATCH, ::PATCH].contiguous()


def work(setting: Setting, name: str, batch: int, side: int) -> Work:
    net, modes, x, seen = made(setting, name, batch, side)
    losses: dict[str, Any] = {form: partial(loss_of, net, mode, x, seen) for form, mode in modes.items()}
    apart = hold_gradients(setting, net, losses["masked"], losses["dense masked"])
    steps = {form: partial(backward, net, loss, setting.cuda) for form, loss in losses.items()}
    right = {form: float(steps["no masks" if "no" in form else "dense masked"]()) for form in steps}
    notes: dict[str, Any] = {"density": float(seen.float().mean()), **apart}
    for form, step in steps.items():
        notes |= {f"{form} {unit}": value for unit, value in peak_gib(setting, step).items()}
    if setting.compiled:
        steps["dense masked, compiled"] = partial(backward, net, torch.compile(losses["dense masked"]), setting.cuda)
        right["dense masked, compiled"] = right["dense masked"]
    kinds = {"masked": "ours", "no masks": "peer"}
    sides = {form: Side(one_graph(setting, step), kinds.get(form, "dense"), "own") for form, step in steps.items()}
    return Work(sides, lambda form, got: hold_loss(setting, form, got, right[form]), dtype=torch.bfloat16, notes=notes)
