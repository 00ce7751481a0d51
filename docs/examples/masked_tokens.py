"""What leaving tokens out costs a vision transformer: dense, masked without and with fine-tuning, and cached on films.

    pip install 'sbnet[examples]'
    python docs/examples/masked_tokens.py

A small transformer, 144 tokens of 8 x 8 pixels, reads scikit-learn's handwritten digits: one lies on 96 x 96 pixels of
clutter, pieces of others. The mask is a square around it, as a detector would give it. Of a film, in which the digit
drifts over clutter that stands still, the mask is where pixels changed, and what is measured is every frame's class.
Nothing is downloaded; some ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbnet
from sbnet.benchmarks.harness.measure import environment

RESULTS = Path(__file__).with_suffix(".json")  # what docs/training.md says of this
SIDE, DIGIT, PATCH, BATCH, EDGE = 96, 24, 8, 64, 4  # EDGE: pixels of a mask around a digit


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, c)
        x = x + self.proj(y)
        return x + self.mlp(self.norm2(x))


class Reader(nn.Module):
    """[N,1,96,96] to the scores of ten classes: a class token, four blocks."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, PATCH, PATCH)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 1 + (SIDE // PATCH) ** 2, width) * 0.02)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


class Pictures:
    """Batches of digits somewhere on clutter, drawn anew each time: pictures, masks and classes."""

    def __init__(self, train: bool) -> None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        pixels, classes = load_digits(return_X_y=True)
        parts = train_test_split(pixels, classes, test_size=0.25, random_state=0, stratify=classes)
        x, self.classes = (torch.as_tensor(parts[k if train else k + 1]) for k in (0, 2))
        self.digits = F.interpolate(x.float().view(-1, 1, 8, 8) / 16, size=DIGIT, mode="bilinear")[:, 0]
        self.draw = torch.Generator().manual_seed(int(train))

    def _below(self, most: int) -> int:
        return int(torch.randint(most, (1,), generator=self.draw))

    def clutter(self) -> Tensor:
        canvas = torch.zeros(SIDE, SIDE)
        for _ in range(8):
            h, w = 6 + self._below(7), 6 + self._below(7)
            top, left, a, b = (self._below(n) for n in (SIDE - h, SIDE - w, DIGIT - h, DIGIT - w))
            canvas[top : top + h, left : left + w] = self.digits[self._below(len(self.digits))][a : a + h, b : b + w]
        return canvas

    def batch(self, count: int = BATCH) -> tuple[Tensor, Tensor, Tensor]:
        x, masks, y = torch.stack([self.clutter() for _ in range(count)]), torch.zeros(count, SIDE, SIDE), []
        for k in range(count):
            which, top, left = self._below(len(self.digits)), *(self._below(SIDE - DIGIT) for _ in range(2))
            x[k, top : top + DIGIT, left : left + DIGIT] = self.digits[which]
            masks[k, max(top - EDGE, 0) : top + DIGIT + EDGE, max(left - EDGE, 0) : left + DIGIT + EDGE] = 1
            y.append(self.classes[which])
        return x[:, None], masks > 0, torch.stack(y)

    def film(self, frames: int) -> tuple[Tensor, int]:
        """[frames,1,1,96,96] of a digit that drifts by up to two pixels a frame, and its class."""
        ground, which = self.clutter(), self._below(len(self.digits))
        at, by = [float(self._below(SIDE - DIGIT)) for _ in range(2)], [self._below(5) - 2 or 1 for _ in range(2)]
        film = ground.repeat(frames, 1, 1)
        for frame in film:
            top, left = (round(a) for a in at)
            frame[top : top + DIGIT, left : left + DIGIT] = self.digits[which]
            for d in range(2):
                by[d] = by[d] if 0 <= at[d] + by[d] <= SIDE - DIGIT else -by[d]
                at[d] += by[d]
        return film[:, None, None], int(self.classes[which])


def train(net: nn.Module, data: Pictures, steps: int, rate: float, mode: Callable[[Tensor], Any]) -> None:
    """mode: the context of a batch's masks."""
    optimizer = torch.optim.AdamW(net.parameters(), rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
    net.train()
    for _ in range(steps):
        x, masks, y = data.batch()
        optimizer.zero_grad()
        with mode(masks):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(net: nn.Module, batches: list[tuple[Tensor, Tensor, Tensor]], masked: bool) -> float:
    """Of pictures: by the dense network, or by a run under masks."""
    run = sbnet.sparsify(net.eval(), batches[0][0]) if masked else None
    found = [(net(x) if run is None else run(x, masks)).argmax(1) == y for x, masks, y in batches]
    return float(torch.cat(found).float().mean())


@torch.no_grad()
def films(net: nn.Module, data: Pictures, count: int, frames: int) -> dict[str, float]:
    """Share of frames that are classed right: dense, cached, and by tokens that changed alone; and processor time."""
    shots = [data.film(frames) for _ in range(count)]
    runs = {mode: sbnet.sparsify(net.eval(), shots[0][0][0], mode=mode) for mode in ("cached", "masked")}
    right, seconds = dict.fromkeys(("dense", "cached", "changed alone"), 0), dict.fromkeys(("dense", "cached"), 0.0)
    active = same = 0.0
    for shot, kind in shots:
        before = None
        for x in shot:
            changed = torch.ones(1, SIDE, SIDE, dtype=torch.bool) if before is None else (x != before)[:, 0]
            start = time.process_time()
            dense = net(x)
            middle = time.process_time()
            cached = runs["cached"](x, changed, keyframe=before is None)
            if before is not None:
                seconds["dense"] += middle - start
                seconds["cached"] += time.process_time() - middle
                active += runs["cached"].density
            for name, scores in (("dense", dense), ("cached", cached), ("changed alone", runs["masked"](x, changed))):
                right[name] += int(scores.argmax()) == kind
            same += int(dense.argmax() == cached.argmax())
            before = x
    total = count * frames
    found = {f"films, {name}": n / total for name, n in right.items()}
    found |= {f"ms a frame, {name}": 1e3 * s / (total - count) for name, s in seconds.items()}
    return found | {"films, as dense": same / total, "tokens computed": active / (total - count)}


def main(steps: int = 1500, write: bool = False) -> dict[str, Any]:
    data, test = Pictures(True), Pictures(False)
    batches = [test.batch() for _ in range(16)]
    torch.manual_seed(0)
    net = Reader()
    train(net, data, steps, 2e-3, lambda _: contextlib.nullcontext())
    found: dict[str, Any] = {"dense": accuracy(net.eval(), batches, False)}
    found["masked, as it was trained"] = accuracy(net, batches, True)
    found |= films(net, test, 16, 24)
    train(net, data, steps // 4, 5e-4, lambda masks: sbnet.masked(masks, block=1))
    found["masked, fine-tuned"] = accuracy(net, batches, True)
    found["steps"] = steps
    print(json.dumps(found, indent=1))
    if write:
        RESULTS.write_text(json.dumps(found | {"of": environment("cpu")}, indent=1, default=str) + "\n")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.write)
