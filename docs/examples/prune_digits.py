"""Prunes a trained network to a quarter of its weights, fine-tunes it, exports it, and says what was lost and won.

    pip install 'sbnet[onnx,examples]'
    python docs/examples/prune_digits.py

The data are scikit-learn's 1797 handwritten digits of 8 x 8 pixels: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import sbnet
from sbnet.benchmarks.harness.measure import environment
from sbnet.benchmarks.harness.timing import milliseconds

RESULTS = Path(__file__).with_suffix(".json")  # what docs/weights.md says of this


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pixels [N, 64] and classes [N], to train with and to test with."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, classes = load_digits(return_X_y=True)
    parts = train_test_split(pixels, classes, test_size=0.25, random_state=0, stratify=classes)
    x, x_test, y, y_test = (torch.as_tensor(p) for p in parts)
    return x.float() / 16, y, x_test.float() / 16, y_test


def network(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            noisy = x[rows] + 0.05 * torch.randn_like(x[rows])
            nn.functional.cross_entropy(model(noisy), y[rows]).backward()
            optimizer.step()
        schedule.step()
    model.eval()


@torch.no_grad()
def accuracy(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> float:
    return float((model(x).argmax(1) == y).float().mean())


def main(
    folder: Path, width: int = 1024, density: float = 0.25, block: int = 32, epochs: int = 8, rows: int = 512
) -> dict[str, float]:
    torch.manual_seed(0)
    x, y, x_test, y_test = digits()
    dense = network(width)
    train(dense, x, y, epochs, 1e-3)

    # The first and last layers are small, and the network suffers most from theirs. The middle one, with 93 % of all
    # weights, keeps its blocks of largest norm, and their values.
    sparse = sbnet.weights.prune(copy.deepcopy(dense), density, block, exclude="0|4")
    cut = accuracy(sparse, x_test, y_test)
    train(sparse, x, y, epochs, 1e-3)
    found = {"dense": accuracy(dense, x_test, y_test), "pruned": cut, "tuned": accuracy(sparse, x_test, y_test)}

    batch = torch.rand(rows, 64)
    any_rows = ({0: torch.export.Dim.DYNAMIC},)
    files = {
        name: sbnet.export.to_onnx(model, (batch,), folder / f"{name}.onnx", dynamic=any_rows)
        for name, model in (("dense", dense), ("sparse", sparse))
    }
    sbnet.export.verify(files["sparse"], sparse, (batch,))
    sessions = {name: sbnet.export.session(path, ["CPUExecutionProvider"]) for name, path in files.items()}
    found["tuned, ORT"] = accuracy(lambda t: sbnet.export.run(sessions["sparse"], [t])[0], x_test, y_test)

    times = milliseconds(
        {
            "torch dense": lambda: dense(batch),
            "torch sparse": lambda: sparse(batch),
            "ORT dense": lambda: sbnet.export.run(sessions["dense"], [batch]),
            "ORT sparse": lambda: sbnet.export.run(sessions["sparse"], [batch]),
        }
    )
    size = {name: path.stat().st_size / 2**20 for name, path in files.items()}

    print(f"width {width}, blocks of {block}, {1 - density:.0%} zeros, {rows} rows, {torch.get_num_threads()} threads")
    print("accuracy: " + ", ".join(f"{name} {value:.2%}" for name, value in found.items()))
    print(f"file: dense {size['dense']:.1f} MB, sparse {size['sparse']:.1f} MB")
    for name in ("torch", "ORT"):
        before, after = times[f"{name} dense"], times[f"{name} sparse"]
        print(f"{name}: dense {before:.2f} ms, sparse {after:.2f} ms, x{before / after:.2f}")
    return found | times | {f"MB {name}": value for name, value in size.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("."), help="where the two ONNX files go")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--density", type=float, default=0.25)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--rows", type=int, default=512, help="of a batch that is timed")
    parser.add_argument(
        "--record", action="store_true", help=f"write {RESULTS.name}, which docs/weights.md's numbers are of"
    )
    options = vars(parser.parse_args())
    record = options.pop("record")
    made_on = environment("cpu")
    results = main(**options)
    if record:
        RESULTS.write_text(json.dumps({"run": made_on, "found": results}, indent=1) + "\n")
