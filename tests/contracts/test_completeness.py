"""Nothing is left out: every op has samples, a benchmark and its place in the README; no file grows past 400 lines.

The samples are what opcheck (test_framework.py), the no-sync proof (test_streams.py) and the sanitizers
(tests/tools/sanitize.py) go over. Schemas, translations and pages of ONNX ops: tests/export/test_export.py.
"""

import re
import subprocess
from pathlib import Path

import pytest
import torch

import sbnet
from sbnet.benchmarks.harness import registry
from sbnet.benchmarks.harness.registry import Setting
from support.op_samples import op_samples

ROOT = Path(__file__).resolve().parents[2]
OPS = [name for name in sbnet.ops.__all__ if name.islower()]
CODE = {".py", ".h", ".cpp", ".cu", ".cuh", ".sh", ".toml"}
ALIASES = {"sparse_pixel_shuffle", "sparse_pixel_unshuffle"}  # of sparse_rearrange


def test_every_registered_op_has_samples():
    names = torch._C._dispatch_get_all_op_names()
    registered = {n.split("::")[1].split(".")[0] for n in names if n.startswith("sbnet::")}
    assert registered == set(op_samples("cpu"))


def names(op: str, text: str) -> bool:
    return re.search(rf"\b{op.rstrip('_')}_?\b", text) is not None


def test_every_op_stands_in_the_readme():
    page = (ROOT / "README.md").read_text()
    assert not [op for op in OPS if not names(op, page)]


@pytest.mark.filterwarnings("ignore")
def test_every_op_has_a_benchmark():
    text = "\n".join(case.title for case in registry.cases(Setting("cpu", "tiny")))
    text += "\n".join(path.read_text() for path in (ROOT / "benchmarks/cases").rglob("*.py"))
    assert not [op for op in OPS if op not in ALIASES and not names(op, text)]


def test_files_have_400_lines_at_most():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    code = [ROOT / line for line in listed.stdout.splitlines() if Path(line).suffix in CODE]
    long = {str(path): len(path.read_text().splitlines()) for path in code if path.exists()}
    assert not {path: lines for path, lines in long.items() if lines > 400}
