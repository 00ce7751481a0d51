"""Nothing is left out: every op has samples, a benchmark and its place in the table; no file grows past 400 lines.

The samples are what opcheck (test_framework.py), the no-sync proof (test_streams.py) and the sanitizers
(tests/tools/sanitize.py) go over. Schemas, translations and pages of ONNX ops: tests/export/test_export.py.
"""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sbnet
from sbnet.benchmarks.harness import registry
from sbnet.benchmarks.harness.registry import Setting
from support.op_samples import sampled_ops
from support.plain_layers import PLAIN

ROOT = Path(__file__).resolve().parents[2]
OPS = [name for name in sbnet.ops.__all__ if name.islower()]
CODE = {".py", ".h", ".cpp", ".cu", ".cuh", ".sh", ".toml"}
ALIASES = {"sparse_pixel_shuffle", "sparse_pixel_unshuffle", "sparse_instance_norm"}  # of ops that are timed
PACKERS = {"pack_conv_weight", "pack_blocksparse_filters"}  # called once for many calls, which are what is timed


def test_every_registered_op_has_samples():
    names = torch._C._dispatch_get_all_op_names()
    registered = {n.split("::")[1].split(".")[0] for n in names if n.startswith("sbnet::")}
    assert registered == set(sampled_ops())


LISTS = ["x", "indices", "count", "block_map", "grid"]


def arguments(op: str) -> list[str]:
    return [a.name for a in getattr(torch.ops.sbnet, op).default._schema.arguments]


def test_every_plain_layer_has_numbers_to_try():
    """Those whose two forms take x, lists, the same numbers and nothing else."""
    plain = set()
    for op in (name.rstrip("_") for name in sampled_ops() if name.startswith("sparse_") and name.endswith("_")):
        numbers = [name for name in arguments(op) if name not in LISTS]
        in_place = [*LISTS[:3], LISTS[4], *numbers, "out", "fringe_pixels", "fringe_count"]
        if arguments(op) == [*LISTS, *numbers] and arguments(f"{op}_") == in_place:
            plain.add(op)
    assert plain == {op for op, layer in PLAIN.items() if not layer.others}
    for op, layer in PLAIN.items():
        further = arguments(op)[1 : 1 + layer.others]
        assert all([*LISTS[:1], *further, *LISTS[1:], *numbers] == arguments(op) for numbers in layer.numbers), op


def test_contributing_lists_the_files_of_a_plain_layer():
    listed = (ROOT / "CONTRIBUTING.md").read_text().split("A **plain layer**", 1)[1].split("\n\n")[1]
    paths = re.findall(r"^\| `([^`]*)`", listed, re.M)
    assert len(paths) == 10
    for path in paths:
        assert "rearrange" in (ROOT / path.replace("NAME", "rearrange")).read_text().lower(), path


def test_a_plain_layer_is_named_in_few_places():
    """Its own files, and a few lines of those that all share: what CONTRIBUTING counts. Passes that plan it aside."""
    for op in ("sparse_rearrange", "sparse_resize2d", "sparse_norm2d"):
        stem = op.removeprefix("sparse_").removesuffix("2d")
        word = re.compile(rf"\b({op}_?|{stem}_whole|{stem.title()}Layer)\b")
        named = {
            path.relative_to(ROOT).with_suffix("")
            for folder in ("csrc", "sbnet/ops", "sbnet/reference", "export", "benchmarks/cases")
            for path in (ROOT / folder).rglob("*")
            if path.suffix in CODE and word.search(path.read_text())
        }
        shared = {path for path in named if stem not in path.name} - {Path("export/zeros"), Path("export/planned")}
        assert shared <= {
            Path(p)
            for p in (
                "csrc/core/masked/plain_layers",
                "sbnet/ops/__init__",
                "sbnet/reference/masked",
                "export/op_table",
            )
        }, op


def names(op: str, text: str) -> bool:
    return re.search(rf"\b{op.rstrip('_')}_?\b", text) is not None


def test_every_op_stands_in_the_table():
    page = (ROOT / "docs/reference/ops.md").read_text()
    assert not [op for op in OPS if not names(op, page)]


def timed_calls() -> set[str]:
    """Ops that the sides of cases call while they are timed, those of whole networks aside."""
    named = {inspect.unwrap(getattr(sbnet.ops, op)).__code__: op for op in OPS}
    called = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code in named:
            called.add(named[frame.f_code])

    for case in registry.cases(Setting("cpu", "tiny", compiled=False), set(registry.GROUPS) - {"network", "networks"}):
        try:
            sides = case.make().sides.values()
        except registry.Skip:
            continue
        for side in (s for s in sides if s.kind in ("ours", "indexed")):
            sys.setprofile(note)
            try:
                side.run()
            finally:
                sys.setprofile(None)
    return called


@pytest.mark.filterwarnings("ignore")
def test_every_op_has_a_benchmark():
    """That times a call of it, in one of its forms."""
    timed = {op.rstrip("_") for op in timed_calls()}
    assert {op.rstrip("_") for op in OPS} - timed == ALIASES | PACKERS


def test_files_have_400_lines_at_most():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    code = [ROOT / line for line in listed.stdout.splitlines() if Path(line).suffix in CODE]
    long = {str(path): len(path.read_text().splitlines()) for path in code if path.exists()}
    assert not {path: lines for path, lines in long.items() if lines > 400}
