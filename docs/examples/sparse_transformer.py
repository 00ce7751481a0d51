"""Trains three small byte-level transformers alike: with dense, fixed and strided attention. Exports them to ONNX.

    pip install 'sbnet[onnx]'
    python docs/examples/sparse_transformer.py

The text is Python's own reference, which every Python carries (pydoc_data.topics, some 450 KB): nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbnet
from sbnet import AttentionLayout
from sbnet.benchmarks.harness.measure import environment
from sbnet.benchmarks.harness.timing import milliseconds

RESULTS = Path(__file__).with_suffix(".json")  # what docs/attention.md says of this
KINDS = "dense", "fixed", "strided"


def text() -> tuple[Tensor, Tensor]:
    """Bytes to train with, and the last tenth, to test with."""
    from pydoc_data.topics import topics

    every = torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
    cut = len(every) * 9 // 10
    return every[:cut].long(), every[cut:].long()


def layouts(kind: str, layers: int, heads: int, chunk: int) -> list[AttentionLayout | None]:
    """One a layer, as the paper has them (arXiv 1904.10509, section 4): `strided` alternates between the last positions
    and every chunk-th one; `fixed` gives each head another quarter of the chunks. None: dense."""
    match kind:
        case "strided":
            return [AttentionLayout.strided(chunk) if i % 2 else AttentionLayout.local(chunk) for i in range(layers)]
        case "fixed":
            return [AttentionLayout.fixed(chunk, num_verts=heads, block_size=chunk // 4)] * layers
    return [None] * layers


class Block(nn.Module):
    def __init__(self, width: int, heads: int, layout: AttentionLayout | None) -> None:
        super().__init__()
        self.heads, self.layout = heads, layout
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.layout is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = sbnet.block_attention(q, k, v, self.layout)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """Bytes [B, T] to logits [B, T, 256]; positions are learned, as (position in the chunk) + (chunk)."""

    def __init__(self, kind: str, length: int, width: int = 96, heads: int = 4, layers: int = 4, chunk: int = 32):
        super().__init__()
        self.chunk = chunk
        self.bytes = nn.Embedding(256, width)
        self.inside, self.outside = nn.Embedding(chunk, width), nn.Embedding(length // chunk, width)
        self.blocks = nn.Sequential(*(Block(width, heads, layout) for layout in layouts(kind, layers, heads, chunk)))
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, 256)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.bytes(tokens) + self.inside(at % self.chunk) + self.outside(at // self.chunk)
        return self.logits(self.norm(self.blocks(x)))


def batch(data: Tensor, size: int, length: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - length - 1, (size, 1))
    rows = data[starts + torch.arange(length + 1)]
    return rows[:, :-1], rows[:, 1:]


def train(model: nn.Module, data: Tensor, steps: int, size: int, length: int, rate: float = 3e-3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warm, 0.05 + 0.95 * math.cos(math.pi / 2 * i / steps))
    )
    model.train()
    for _ in range(steps):
        tokens, following = batch(data, size, length)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


@torch.no_grad()
def bits_per_byte(model: Callable[[Tensor], Tensor], data: Tensor, size: int, length: int) -> float:
    """Of the first bytes of `data`, some rows of `length`."""
    rows = data[: size * (length + 1)].view(size, length + 1)
    losses = [F.cross_entropy(model(row[None, :-1])[0], row[1:]) for row in rows]
    return float(torch.stack(losses).mean()) / math.log(2)


def run_onnx(session: Any, tokens: Tensor) -> Tensor:
    return sbnet.export.run(session, [tokens])[0]


def main(folder: Path, steps: int = 300, length: int = 256, size: int = 4, rows: int = 64) -> dict[str, float]:
    data, held_out = text()
    found, sides = {}, {}
    for kind in KINDS:
        torch.manual_seed(0)
        model = Transformer(kind, length)
        train(model, data, steps, size, length)
        found[kind] = bits_per_byte(model, held_out, rows, length)
        tokens = held_out[None, :length]
        path = sbnet.export.to_onnx(model, (tokens,), folder / f"{kind}.onnx")
        sbnet.export.verify(path, model, (tokens,))
        in_ort = partial(run_onnx, sbnet.export.session(path, ["CPUExecutionProvider"]))
        sides[kind] = partial(in_ort, tokens)
        found[f"{kind}, ORT"] = bits_per_byte(in_ort, held_out, rows, length)
        print(f"{kind}: {found[kind]:.3f} bits per byte, {found[f'{kind}, ORT']:.3f} in ONNX Runtime", flush=True)
    times = milliseconds(sides, rounds=9)
    print(f"{steps} steps of {size} x {length} bytes, {len(data)} in all; a sequence in ONNX Runtime: "
          + ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in times.items()))  # fmt: skip
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("."), help="where the ONNX files go")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--size", type=int, default=4, help="sequences of a step")
    parser.add_argument(
        "--record", action="store_true", help=f"write {RESULTS.name}, which docs/attention.md's numbers are of"
    )
    options = vars(parser.parse_args())
    record = options.pop("record")
    made_on = environment("cpu")
    results = main(**options)
    if record:
        RESULTS.write_text(json.dumps({"run": made_on, "found": results}, indent=1) + "\n")
