"""Guides' figures of examples: those of the recorded run beside the script (`--record`), none typed by hand."""

import json
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def recorded(example: str) -> tuple[dict, dict]:
    stored = json.loads((DOCS / f"examples/{example}.json").read_text())
    return stored["run"], stored["found"]


def test_prune_digits():
    run, found = recorded("prune_digits")
    page = " ".join((DOCS / "weights.md").read_text().split())
    for row, name in {
        "dense": "dense",
        "pruned, before fine-tuning": "pruned",
        "pruned and fine-tuned, in PyTorch and in ONNX Runtime": "tuned",
    }.items():
        assert f"| {row} | {found[name]:.2%} |".replace("%", " %") in page
    assert found["tuned, ORT"] == found["tuned"]
    assert f"from {found['MB dense']:.1f} to {found['MB sparse']:.1f} MB" in page
    for name, runtime in {"torch": "PyTorch", "ORT": "ONNX Runtime"}.items():
        before, after = found[f"{name} dense"], found[f"{name} sparse"]
        assert f"{after:.0f} ms for {before:.0f} in {runtime} (x{before / after:.1f})" in page
    assert f"{run['threads']} cores of an {run['device']} ({run['instructions']}), {run['date']}" in page


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ("dense", "dense"),
        ("`fixed`, chunks of 32, four verticals", "fixed"),
        ("`local` and `strided` in turn, 32", "strided"),
    ],
)
def test_sparse_transformer(row, name):
    _, found = recorded("sparse_transformer")
    assert f"| {row} | {found[name]:.3f} |" in (DOCS / "attention.md").read_text()
    assert found[f"{name}, ORT"] == pytest.approx(found[name], abs=1e-3)


@pytest.mark.parametrize("name", ["dense", "sparse", "pruned"])
def test_language_model(name):
    run, found = recorded("lstm_language_model")
    page, row = " ".join((DOCS / "language_model.md").read_text().split()), found[name]
    bits = f"{row['bits']:.3f} | {row['bits, ORT']:.3f}"
    assert f"| {name} | {row['weights']:,} | {bits} | {row['MB']:.2f} MB | {row['ms, ORT']:.2f} ms |" in page
    assert f"({found['pruned at once']:.3f} bits per byte)" in page
    assert f"{run['batches']} batches, {run['date']}, {run['seconds']} s with {run['threads']} threads" in page
    assert found["dense"]["weights"] == found["sparse"]["weights"]
    assert found["sparse"]["bits"] < found["dense"]["bits"]  # "says more"


def test_masked_tokens():
    found = json.loads((DOCS / "examples/masked_tokens.json").read_text())
    page = " ".join((DOCS / "training.md").read_text().split())
    for row, name in {
        "pictures, dense": "dense",
        "pictures, masked, as it was trained": "masked, as it was trained",
        "films, dense": "films, dense",
        "films, cached: keys and values of the frame before": "films, cached",
        "films, changed tokens alone": "films, changed alone",
    }.items():
        assert f"| {row} | {found[name]:.1%} |".replace("%", " %") in page
    more = f"after {found['steps'] // 4} more steps inside `sbnet.masked` | {found['masked, fine-tuned']:.1%} |"
    assert more.replace("%", " %") in page
    assert f"{found['tokens computed']:.1%} of the tokens".replace("%", " %") in page
    assert f"in {found['films, as dense']:.1%} of the".replace("%", " %") in page
    cached, dense = (found[f"ms a frame, {name}"] for name in ("cached", "dense"))
    assert f"{cached:.2f} ms of processor time a frame, {dense:.2f} dense" in page
