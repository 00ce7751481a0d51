"""README's tables of speeds: made of benchmarks/results/, each figure of rows that were measured together."""

from pathlib import Path

import pytest

from sbnet.benchmarks.harness import document
from sbnet.benchmarks.harness import readme as figures
from sbnet.benchmarks.harness.measure import Session


def session(*rows: dict) -> Session:
    environment = {"date": "2026-11-21", "device": "a machine", "sbnet": "0"}
    conditions = {"level": "full", "clock": "wall", "cache": "warm", "rounds": 1, "torch.compile": False}
    return Session(environment, conditions, {}, list(rows))


def test_the_readmes_figures_are_made_of_the_results():
    """README.md: `sbnet bench --docs` after a change of results or of readme.py."""
    readme = Path(__file__).parents[2] / "README.md"
    if not readme.exists():
        pytest.skip("no source tree")
    text, sessions = readme.read_text(), document.load_results(readme.parent / "benchmarks" / "results")
    assert figures.made(text, sessions.values()) == text
    stale = text.replace(" ms |", "1 ms |", 1)
    assert stale != text
    assert figures.made(stale, sessions.values()) == text
    with pytest.raises(ValueError, match="expected the marks of 'cpu'"):
        figures.made("no marks", sessions.values())


def network_row(us: dict[str, float], density: float, name: str = "network") -> dict:
    facts = {"network": "contour_net", "wanted density": density}
    return {"group": "network", "name": name, "facts": facts, "us": us, "density": density}


def test_dense_in_the_readme_is_the_fastest_form_of_the_same_rounds():
    """The machine may be faster in one row than in another: no row is divided by another's time."""
    rows = [
        network_row({"masked": 5000.0, "PyTorch": 7000.0, "OpenVINO": 6500.0}, 1.0) | {"x dense": 1.3},
        network_row({"masked": 1000.0, "PyTorch": 9000.0, "OpenVINO": 9500.0}, 0.1) | {"x dense": 9.0},
        network_row({"ORT sparse": 1.0, "ORT dense": 4000.0}, 0.1, "ONNX Runtime") | {"x dense": 4000.0},
    ]
    for row, form in zip(rows, ("OpenVINO", "PyTorch", "ORT dense"), strict=True):
        row["dense form"] = form
    done = session(*rows)
    done.environment |= {"threads": 2, "torch": "t"}
    text = figures.cpu_table(done)
    assert "| 10% | 1 ms | **9x** |\n| 100% | 5 ms | **1.3x** |" in text
    assert "dense is the fastest of\nOpenVINO, PyTorch, timed in turn" in text
    assert "the contour network 6.5 to 9 ms" in text
    done.rows = []
    assert figures.cpu_table(done) == ""  # a file of other networks


def test_the_gpus_range_is_over_every_row():
    def row(ratio: float, density: float, **facts) -> dict:
        return {"group": "conv", "name": "conv", "facts": facts, "x dense": ratio, "density": density}

    a, b = session(row(3.0, 0.1), row(1.5, 1.0)), session(row(1.75, 0.1, dtype="float32"), row(9.0, 0.5))
    assert "| conv | 1.75 to 3 (2) | 1.5 to 1.5 (1) |" in figures.gpu_table([a, b])
    assert "all blocks, warm L2" in figures.gpu_table([a, b])
    cold = session(row(2.0, 0.1), row(1.25, 1.0))
    cold.conditions["cache"] = "cold"
    text = figures.gpu_table([cold, a, b])
    assert "| conv | 1.75 to 3 (2) | 1.5 to 1.5 (1) | 2 to 2 (1) | 1.25 to 1.25 (1) |" in text
    assert text.index("warm L2") < text.index("cold L2")
    other = session(row(4.0, 0.1) | {"name": "other"})
    assert "| other |" in figures.gpu_table([a, other])
    assert "| other |" not in figures.gpu_table([a, other], ["conv", "missing"])
