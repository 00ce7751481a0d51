"""docs/examples/sparse_transformer.py: trains, exports, and says the same in ONNX Runtime."""

import math
import runpy
from pathlib import Path

import pytest

pytest.importorskip("pydoc_data.topics")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
EXAMPLE = Path(__file__).resolve().parents[2] / "docs/examples/sparse_transformer.py"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_sparse_transformer(tmp_path, capsys):
    """A few steps are enough to know that bytes are not uniform; each file gives what PyTorch gives."""
    found = runpy.run_path(str(EXAMPLE))["main"](tmp_path, steps=8, length=64, size=4, rows=4)
    for kind in ("dense", "fixed", "strided"):
        assert found[kind] < math.log2(256) - 0.5
        assert found[f"{kind}, ORT"] == pytest.approx(found[kind], abs=1e-3)
        assert (tmp_path / f"{kind}.onnx").exists()
    assert "bits per byte" in capsys.readouterr().out
