"""tests/gpu_record.json: which kernels, and which Python, the last run of the GPU tests was of."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gpu_record():
    spec = importlib.util.spec_from_file_location("gpu_record", ROOT / "tests/tools/gpu_record.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_record_is_of_these_kernels(gpu_record):
    """A warning, as most commits are made where there is no GPU; an error for a release (make release-check)."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    stale = gpu_record.stale()
    if not stale:
        return
    text = f"tests/gpu_record.json: of other {' and other '.join(stale)} than HEAD's: the GPU tests have not run on it"
    if os.environ.get("SBNET_RELEASE") == "1":
        pytest.fail(text)
    warnings.warn(text, stacklevel=1)


def test_the_record_says_what_it_must(gpu_record):
    record = json.loads(gpu_record.RECORD.read_text())
    for name in ("csrc", "python"):
        assert re.fullmatch("[0-9a-f]{40}", record.get(name, "0" * 40)), name
    if os.environ.get("SBNET_RELEASE") == "1":
        assert record["failed"] == 0
    assert record["failed"] == 0 or record["note"], "which, and why"
    assert record["passed"] > 100 * record["failed"]
    assert {"device", "torch", "skipped", "date"} <= record.keys()


def test_what_makes_a_record_stale(gpu_record, tmp_path, monkeypatch):
    """Kernels and Python do, the record itself and documents do not."""
    root = tmp_path / "checkout"
    for name in ("csrc/a.cu", "sbnet/a.py", "tests/test_a.py", "tests/gpu_record.json", "docs/a.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("1")

    def commit():
        for arguments in (["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
            subprocess.run(["git", "-C", str(root), *arguments], check=True)

    subprocess.run(["git", "init", "-q", str(root)], check=True)
    commit()
    monkeypatch.setattr(gpu_record, "ROOT", root)
    monkeypatch.setattr(gpu_record, "RECORD", root / "tests/gpu_record.json")
    for changed, wanted in (
        ("docs/a.md", []),
        ("csrc/a.cu", ["csrc"]),
        ("sbnet/a.py", ["python"]),
        ("tests/test_a.py", ["python"]),
    ):
        gpu_record.RECORD.write_text(json.dumps(gpu_record.state()))
        (root / changed).write_text("2")
        commit()
        assert gpu_record.stale() == wanted, changed
