"""A byte-level language model of an LSTM: dense, block-sparse of as many weights, and dense pruned; exported to ONNX.

    pip install 'sbnet[onnx]'
    python docs/examples/lstm_language_model.py

The text is Python's own reference, which every Python carries (pydoc_data.topics): nothing is downloaded. Training is
blocksparse's loop: streams side by side, states carried from batch to batch, Adam, and averaged weights to score with.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbnet
from sbnet.benchmarks.harness.timing import milliseconds
from sbnet.compat.blocksparse import AdamOptimizer, Ema, clip_by_global_norm
from sbnet.nn import BlockSparseLinear, BlockSparseLSTM

RESULTS = Path(__file__).with_suffix(".json")
State = tuple[Tensor, Tensor]


def text() -> tuple[Tensor, Tensor]:
    """Bytes to train with, and the last tenth, to test with."""
    from pydoc_data.topics import topics

    every = torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
    cut = len(every) * 9 // 10
    return every[:cut].long(), every[cut:].long()


class Model(nn.Module):
    """Bytes [T, N] and a state to logits [T, N, 256] and the next state."""

    def __init__(self, lstm: nn.Module, logits: nn.Module, embedding: int, width: int) -> None:
        super().__init__()
        self.bytes, self.lstm, self.logits, self.width = nn.Embedding(256, embedding), lstm, logits, width

    def forward(self, tokens: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h, c) = self.lstm(self.bytes(tokens), (h, c))
        return self.logits(y), h, c

    def start(self, streams: int) -> State:
        return torch.zeros(1, streams, self.width), torch.zeros(1, streams, self.width)


def dense(width: int, embedding: int) -> Model:
    return Model(nn.LSTM(embedding, width), nn.Linear(width, 256), embedding, width)


def sparse(width: int, embedding: int, block: int) -> Model:
    """Twice as wide: a quarter of the recurrent blocks and half of the others have the dense model's weights."""
    lstm = BlockSparseLSTM(embedding, 2 * width, density=0.25, input_density=0.5, block_size=block)
    return Model(lstm, BlockSparseLinear(2 * width, 256, density=0.5, block_size=block), embedding, 2 * width)


def pruned(model: Model, density: float, block: int) -> Model:
    """The strongest blocks of a trained dense model, with their values."""
    lstm = BlockSparseLSTM.from_dense(model.lstm, density, block, input_density=density)
    logits = BlockSparseLinear.from_linear(model.logits, density, block)
    made = Model(lstm, logits, model.bytes.embedding_dim, model.width)
    made.bytes.load_state_dict(model.bytes.state_dict())
    return made


def stream(data: Tensor, streams: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches [steps, streams] of bytes and the bytes that follow; a batch goes on where the one before it ended."""
    length = (len(data) - 1) // streams // steps * steps
    x, y = (data[at : at + streams * length].view(streams, length).t() for at in (0, 1))
    yield from zip(x.split(steps), y.split(steps), strict=True)


def train(model: Model, data: Tensor, batches: int, streams: int, steps: int, rate: float) -> Ema:
    """The averages of the weights; gradients end where a batch begins, states do not."""
    parameters = list(model.parameters())
    optimizer, ema = AdamOptimizer(parameters, learning_rate=rate), Ema(decay=max(0.0, 1 - 10 / batches))
    warm, done = max(1, batches // 20), 0
    model.train()
    while done < batches:
        state = model.start(streams)
        for x, y in stream(data, streams, steps):
            optimizer.param_groups[0]["lr"] = rate * min(1, (done + 1) / warm) * (1 - 0.95 * done / batches)
            logits, *state = model(x, *(s.detach() for s in state))
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            _, scale = clip_by_global_norm([p.grad for p in parameters if p.grad is not None])
            optimizer.step(norm_scale=scale)
            ema.apply(parameters)
            done += 1
            if done == batches:
                break
    return ema


def averaged(model: Model, ema: Ema) -> Model:
    """The model with the averages of its weights."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(ema.average(p))
    return model.eval()


@torch.no_grad()
def bits_per_byte(run: Callable[..., Any], state: State, data: Tensor, streams: int, steps: int) -> float:
    losses = []
    for x, y in stream(data, streams, steps):
        logits, *state = run(x, *state)
        losses.append(float(F.cross_entropy(logits.flatten(0, 1), y.flatten())))
    return statistics.mean(losses) / math.log(2)


def weights_of(model: nn.Module) -> int:
    """Numbers in matrices."""
    return sum(p.numel() for p in model.parameters() if p.dim() > 1)


def run_onnx(session: Any, *inputs: Tensor) -> list[Tensor]:
    return sbnet.export.run(session, list(inputs))


def main(
    folder: Path,
    batches: int = 600,
    width: int = 256,
    embedding: int = 64,
    block: int = 32,
    density: float = 0.25,
    streams: int = 32,
    steps: int = 32,
    run_steps: int = 8,
    size: int | None = None,
) -> dict[str, Any]:
    """Trains on `steps` bytes of each stream at once, prunes, exports models of `run_steps` and scores them.

    size: bytes of the text that are used, all by default.
    """
    data, held_out = (t[:size] for t in text())
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    models = {"dense": dense(width, embedding), "sparse": sparse(width, embedding, block)}
    for model in models.values():
        averaged(model, train(model, data, batches, streams, steps, 4e-3))
    cut = models["pruned"] = pruned(models["dense"], density, block)
    found["pruned at once"] = bits_per_byte(cut.eval(), cut.start(streams), held_out, streams, run_steps)
    averaged(cut, train(cut, data, batches // 2, streams, steps, 2e-3))

    sides = {}
    for name, model in models.items():
        inputs = held_out[: streams * run_steps].view(run_steps, streams), *model.start(streams)
        path = sbnet.export.to_onnx(model, inputs, folder / f"lstm_{name}.onnx")
        in_ort = partial(run_onnx, sbnet.export.session(path, ["CPUExecutionProvider"]))
        sides[name] = partial(in_ort, *inputs)
        found[name] = {
            "weights": weights_of(model),
            "bits": bits_per_byte(model, model.start(streams), held_out, streams, run_steps),
            "bits, ORT": bits_per_byte(in_ort, model.start(streams), held_out, streams, run_steps),
            "MB": path.stat().st_size / 2**20,
        }
    for name, ms in milliseconds(sides).items():
        found[name]["ms, ORT"] = ms
    return found


def report(found: dict[str, Any]) -> None:
    for name in ("dense", "sparse", "pruned"):
        row = found[name]
        print(
            f"{name}: {row['weights']} weights, {row['bits']:.3f} bits per byte, {row['bits, ORT']:.3f} in ONNX "
            f"Runtime, {row['MB']:.2f} MB, {row['ms, ORT']:.2f} ms"
        )
    print(f"pruned, before training on: {found['pruned at once']:.3f} bits per byte")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("."), help="where the ONNX files go")
    parser.add_argument("--batches", type=int, default=600)
    parser.add_argument("--width", type=int, default=256, help="of the dense model")
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.name}, which the guide's numbers are of")
    options = vars(parser.parse_args())
    record = options.pop("record")
    begin = time.monotonic()
    results = main(**options)
    report(results)
    if record:
        made_on = {"date": time.strftime("%Y-%m-%d"), "seconds": round(time.monotonic() - begin),
                   "python": platform.python_version(), "torch": torch.__version__, "threads": torch.get_num_threads(),
                   "cores": os.cpu_count(), "batches": options["batches"], "width": options["width"]}  # fmt: skip
        RESULTS.write_text(json.dumps({"run": made_on, "found": results}, indent=1) + "\n")
