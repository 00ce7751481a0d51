"""A step of training, forward, loss and backward, under masks, against the dense step.

On CUDA in bfloat16 autocast, channels_last, each side one CUDA graph but for torch.compile, which launches as it does;
on a CPU in float32. The masked step is held to the dense step multiplied by masks, by its loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import sbnet
from sbnet.benchmarks.harness import nets
from sbnet.benchmarks.harness.dense_masked import DenseMasked
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Skip, Work, WrongResult, short

BLOCK = 8
# network: batch and side on CUDA, on a CPU
ON_CUDA = {"resnet50": (8, 512), "U-Net": (8, 512), "YOLOv8n-like": (16, 640), "convnext_tiny": (8, 224)}
ON_CPU = {"four 3x3": (1, 256), "resnet18": (4, 224)}
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


def work(setting: Setting, name: str, batch: int, side: int, kind: str, share: float) -> Work:
    net = (four() if name == "four 3x3" else built(name)).to(setting.device).train()
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(batch, 3, side, side).to(setting.device).contiguous(memory_format=torch.channels_last)
    mask = pixels(kind, batch, side, share, setting.device)
    parameters = list(net.parameters())

    @torch.enable_grad()
    def step(forward: Callable[[Tensor], Any], mode: Callable[[], Any]) -> Tensor:
        for p in parameters:
            p.grad = None
        with torch.autocast(setting.device, torch.bfloat16, enabled=setting.cuda), mode():
            loss = loss_of(forward(x))
        loss.backward()
        return loss

    masked = partial(step, net, lambda: sbnet.masked(mask, block=BLOCK))
    sides = {"masked": Side(_own(setting, masked), "ours", "own")}
    dense = partial(step, net, contextlib.nullcontext)
    sides["dense"] = Side(_own(setting, dense), "dense", "own")
    if setting.compiled and setting.level == "full":
        compiled = torch.compile(net)
        sides["torch.compile"] = Side(partial(step, compiled, contextlib.nullcontext), "dense", "eager")
    with torch.no_grad(), torch.autocast(setting.device, torch.bfloat16, enabled=setting.cuda):
        with DenseMasked(mask, BLOCK):
            wanted = float(loss_of(net(x)))
        exact = float(loss_of(net(x)))

    def check(side: str, got: Any) -> float:
        right = wanted if side == "masked" else exact
        error = abs(float(got) - right) / max(abs(right), 1e-6)
        if not error < (0.05 if setting.cuda else 1e-3):
            raise WrongResult(f"{side}: a loss of {float(got):.6g}, wanted {right:.6g}")
        return error

    notes: dict[str, Any] = {"density": float(mask.float().mean())}
    if setting.cuda:
        for of, run in (("masked", masked), ("dense", dense)):
            torch.cuda.reset_peak_memory_stats()
            run()
            notes[f"{of} GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return Work(sides, check, dtype=torch.bfloat16 if setting.cuda else torch.float32, notes=notes)


def loss_of(y: Any) -> Tensor:
    """A loss of every output."""
    parts = y if isinstance(y, (tuple, list)) else [y]
    return sum(t.float().square().mean() for t in parts)  # type: ignore[return-value]


def built(name: str) -> nn.Module:
    if name in nets.NETWORKS:
        return nets.NETWORKS[name]()
    try:
        return nets.torchvision().models.get_model(name, weights=None)
    except ImportError as error:
        raise Skip(str(error)) from None


def _own(setting: Setting, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A replay of the whole step as one CUDA graph; on a CPU the step itself."""
    if not setting.cuda:
        return run
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = run()

    def replay() -> Tensor:
        graph.replay()
        return loss.detach()

    return replay
