"""docs/examples/lstm_language_model.py: what it promises, at a small size."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLE = DOCS / "examples/lstm_language_model.py"
KINDS = "dense", "sparse", "pruned"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_small(tmp_path):
    """All three learn, ONNX Runtime gives PyTorch's figures, dense and sparse have as many weights."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    example = runpy.run_path(str(EXAMPLE))
    small = {"width": 32, "embedding": 16, "block": 8, "streams": 8, "steps": 12, "run_steps": 3, "size": 4000}
    found = example["main"](tmp_path, batches=80, **small)
    for kind in KINDS:
        assert found[kind]["bits, ORT"] == pytest.approx(found[kind]["bits"], rel=1e-4)
        assert found[kind]["bits"] < 7.2
    assert found["dense"]["weights"] == found["sparse"]["weights"]
    assert found["pruned"]["weights"] < 0.5 * found["dense"]["weights"]
    assert found["pruned"]["bits"] < found["pruned at once"]
