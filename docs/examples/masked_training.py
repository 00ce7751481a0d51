"""Fine-tunes a network under the masks that it will be run with, and pretrains one on images of which it sees 40 %.

    pip install 'sbnet[examples]'
    python docs/examples/masked_training.py

The data are scikit-learn's 1797 handwritten digits, enlarged to 24 x 24 pixels and laid somewhere on 96 x 96 pixels of
clutter: pieces of other digits. The mask is a square around the digit, 10 % of the picture, as a detector would give
it. Nothing is downloaded; a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import sbnet
from sbnet.benchmarks.harness.dense_masked import DenseMasked
from sbnet.benchmarks.harness.measure import environment

RESULTS = Path(__file__).with_suffix(".json")  # what docs/training.md says of this
SIDE, DIGIT, BLOCK, BATCH = 96, 24, 8, 64


def pictures(train: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures [N,1,96,96], masks [N,96,96] and classes [N]."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, classes = load_digits(return_X_y=True)
    parts = train_test_split(pixels, classes, test_size=0.25, random_state=0, stratify=classes)
    x, y = (torch.as_tensor(parts[k if train else k + 1]) for k in (0, 2))
    digits = F.interpolate(x.float().view(-1, 1, 8, 8) / 16, size=DIGIT, mode="bilinear")
    draw = torch.Generator().manual_seed(int(train))
    canvas = torch.zeros(len(x), 1, SIDE, SIDE)
    for _ in range(12):  # pieces of others
        order = torch.randperm(len(x), generator=draw)
        for k, other in enumerate(order.tolist()):
            h, w = (int(torch.randint(6, 13, (1,), generator=draw)) for _ in range(2))
            top, left = (int(torch.randint(SIDE - side, (1,), generator=draw)) for side in (h, w))
            a, b = (int(torch.randint(DIGIT - side, (1,), generator=draw)) for side in (h, w))
            canvas[k, :, top : top + h, left : left + w] = digits[other, :, a : a + h, b : b + w]
    masks = torch.zeros(len(x), SIDE, SIDE, dtype=torch.bool)
    edge = 3  # pixels around a digit
    for k, digit in enumerate(digits):
        top, left = (int(torch.randint(edge, SIDE - DIGIT - edge, (1,), generator=draw)) for _ in range(2))
        canvas[k, :, top : top + DIGIT, left : left + DIGIT] = digit
        masks[k, top - edge : top + DIGIT + edge, left - edge : left + DIGIT + edge] = True
    return canvas.contiguous(memory_format=torch.channels_last), masks, y


def layer(i: int, o: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


def classifier() -> nn.Sequential:
    body = [layer(1, 16), layer(16, 16), layer(16, 32, 2), layer(32, 32), layer(32, 64, 2), layer(64, 64)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def train(
    net: nn.Module, data: tuple[Tensor, Tensor, Tensor], steps: int, rate: float, mode: Callable[[Tensor], Any]
) -> float:
    """Steps a second; mode: the context of a batch's masks."""
    x, masks, y = data
    optimizer = torch.optim.AdamW(net.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
    draw = torch.Generator().manual_seed(0)
    net.train()
    begin = time.process_time()
    for _ in range(steps):
        batch = torch.randint(len(x), (BATCH,), generator=draw)
        optimizer.zero_grad()
        with mode(masks[batch]):
            loss = F.cross_entropy(net(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        schedule.step()
    return steps / (time.process_time() - begin)


def peak_memory(data: tuple[Tensor, Tensor, Tensor], mode: Callable[[Tensor], Any]) -> float:
    """MiB that a step takes, forward and backward, beside the network and its batch."""
    x, masks, y = (part[:BATCH] for part in data)
    net = classifier().train()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        with mode(masks):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
    events = [e for e in measured.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(held) / 2**20


@torch.no_grad()
def accuracy(net: nn.Module, data: tuple[Tensor, Tensor, Tensor], masked: bool) -> float:
    """Share of the test pictures, by the dense network or by a run under masks."""
    x, masks, y = data
    net.eval()
    run = sbnet.sparsify(net, x[:BATCH], block=BLOCK) if masked else None
    right = 0
    for first in range(0, len(x) - BATCH + 1, BATCH):
        part = slice(first, first + BATCH)
        found = net(x[part]) if run is None else run(x[part], masks[part])
        right += int((found.argmax(1) == y[part]).sum())
    return right / (len(x) // BATCH * BATCH)


def under_masks(masks: Tensor) -> Any:
    return sbnet.masked(masks, block=BLOCK)


def fine_tune(steps: int) -> dict[str, float]:
    """What a network that was trained dense loses under masks, and what fine-tuning gives back."""
    data, test = pictures(True), pictures(False)
    torch.manual_seed(0)
    net = classifier()
    found = {"dense steps a second": train(net, data, steps, 3e-3, lambda _: contextlib.nullcontext())}
    found["dense"] = accuracy(net, test, False)
    found["masked, as it was trained"] = accuracy(net, test, True)
    found["masked steps a second"] = train(net, data, steps // 4, 1e-3, under_masks)
    found["masked, fine-tuned"] = accuracy(net, test, True)
    found["dense MiB"] = peak_memory(data, lambda _: contextlib.nullcontext())
    found["masked MiB"] = peak_memory(data, under_masks)
    found["masked, a capacity of 0.2, MiB"] = peak_memory(
        data, lambda masks: sbnet.masked(masks, block=BLOCK, capacity=0.2)
    )
    return found


class Autoencoder(nn.Module):
    """A ConvNeXt-like encoder, which sees the active pixels, and a layer that fills in each patch of 8 x 8."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 4, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 7, padding=3, groups=width), nn.BatchNorm2d(width),
                          nn.Conv2d(width, 4 * width, 1), nn.GELU(), nn.Conv2d(4 * width, width, 1))
            for _ in range(4)
        )  # fmt: skip
        self.fill = nn.Parameter(torch.zeros(width, 1, 1))
        self.decoder = nn.Sequential(nn.Conv2d(width, width, 7, padding=3, groups=width), nn.GELU(),
                                     nn.Conv2d(width, 16, 1))  # fmt: skip

    def encode(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x

    def decode(self, x: Tensor, seen: Tensor) -> Tensor:
        """Pixels of all patches; those that the encoder did not see are filled first."""
        return F.pixel_shuffle(self.decoder(torch.where(seen, x, self.fill)), 4)


def pretrain(steps: int) -> dict[str, float]:
    """Patches of 16 x 16 pixels, 60 % of them unseen, are filled in, as FCMAE does: by `sbnet.masked`, and dense with
    masks."""
    x = pictures(True)[0]
    found: dict[str, float] = {}
    for name, mode in (("masked", under_masks), ("dense with masks", lambda masks: DenseMasked(masks, BLOCK))):
        torch.manual_seed(0)
        net, draw = Autoencoder().train(), torch.Generator().manual_seed(0)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
        begin, losses = time.process_time(), []
        for _ in range(steps):
            batch = x[torch.randint(len(x), (16,), generator=draw)]
            rank = torch.rand(16, 36, generator=draw).argsort(1).argsort(1).view(16, 6, 6)
            seen = (rank < 0.4 * 36).repeat_interleave(16, 1).repeat_interleave(16, 2)
            optimizer.zero_grad()
            with mode(seen):
                features = net.encode(batch)
            y = net.decode(features, seen[:, None, ::4, ::4])
            loss = (y - batch).square()[~seen[:, None]].mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        found[f"{name}: steps a second"] = steps / (time.process_time() - begin)
        found[f"{name}: first loss"], found[f"{name}: last loss"] = losses[0], losses[-1]
    return found


def main(steps: int = 400, write: bool = False) -> dict[str, Any]:
    found = {"fine-tuning": fine_tune(steps), "pretraining": pretrain(steps // 8), "steps": steps}
    for part, numbers in found.items():
        print(part, json.dumps(numbers, indent=1))
    if write:
        RESULTS.write_text(json.dumps(found | {"of": environment("cpu")}, indent=1, default=str) + "\n")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.write)
