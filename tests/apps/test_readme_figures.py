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
    assert len(text.splitlines()) <= 180
    with pytest.raises(ValueError, match="expected the marks of 'speed'"):
        figures.made("no marks", sessions.values())


def network_row(us: dict[str, float], mask: str, batch: int = 1, network: str = "resnet50") -> dict:
    facts = {"network": network, "size": [batch, 640, 640], "dtype": "float32", "mask": mask}
    dense = min((side for side in us if side != "masked"), key=us.__getitem__)
    return {
        "group": "networks", "name": "whole network", "facts": facts, "us": us, "ours": "masked",
        "dense form": dense, "x dense": us[dense] / us["masked"],
    }  # fmt: skip


def line_of(text: str, network: str = "resnet50") -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {network} |"))
    return [cell.strip(" *") for cell in line.strip("|").split("|")]


def test_dense_in_the_readme_is_the_fastest_form_of_the_same_rounds():
    """The machine may be faster in one row than in another: no row is divided by another's time."""
    rows = [
        network_row({"masked": 1000.0, "PyTorch": 9000.0, "OpenVINO": 9500.0}, "rect"),
        network_row({"masked": 4000.0, "PyTorch": 9000.0, "OpenVINO": 8000.0}, "half"),
        network_row({"masked": 5000.0, "PyTorch": 7000.0, "OpenVINO": 6500.0}, "all"),
        network_row({"masked": 1000.0, "PyTorch": 90000.0}, "rect", batch=16),
        network_row({"masked": 1.0, "ORT dense": 4000.0}, "rect") | {"name": "other"},
    ]
    done = session(*rows)
    done.environment |= {"threads": 2, "torch": "t", "instructions": "avx512"}
    text = figures.speed_table([done])
    assert "| resnet50 | 8 ms | **9** / 90 | **2** | **1.3** |  |  |  |  |" in text
    assert (
        "CPU: 2 cores of an a machine (avx512), float32, torch t,\n2026-11-21; dense: the fastest of OpenVINO, PyTorch"
        in text
    )
    assert "After the slash:\n16 images a call." in text
    rows[1]["others"] = 0.2
    text = figures.speed_table([done])
    assert "| **2**\\* |" in text
    assert "\\*: other programs took\nmore than a tenth of the processor meanwhile" in text
    done.rows = rows[-1:]
    assert figures.speed_table([done]) == ""  # a file of other networks


def test_a_networks_figures_are_of_one_session():
    """The one with most masks, then the newest: what stands beside each other was measured together."""
    few, many, new = (session() for _ in range(3))
    for of, factor, masks in ((few, 2.0, ["rect"]), (many, 3.0, ["rect", "all"]), (new, 4.0, ["rect", "all"])):
        of.environment |= {"torch": "t", "device": f"card {factor}"}
        of.rows = [network_row({"masked": 1.0, "PyTorch": factor}, mask) for mask in masks]
    new.environment["date"] = "2026-11-22"
    text = figures.speed_table([new, few, many])
    assert line_of(text)[5:] == ["0.004 ms", "4", "", "4"]
    assert "GPU: card 4.0, float32, CUDA graphs" in text
    assert line_of(figures.speed_table([few, many]))[6:] == ["3", "", "3"]
