"""tests/tools/mutants.txt: the faults that were put into the code, and what became of each."""

import importlib.util
import os
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def mutants(monkeypatch):
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tests/tools/mutants.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutants", module)
    spec.loader.exec_module(module)
    return module


def test_every_fault_is_found_or_argued_to_change_nothing(mutants):
    """A warning, as code moves from commit to commit; an error for a release (make release-check)."""
    faults = mutants.read(mutants.LIST.read_text())
    assert len(faults) >= 100
    left = [f"{m.verdict or 'no verdict'}: {m}" for m in faults if mutants.is_due(m)]
    left += [f"gone: {m}" for m in faults if not mutants.is_there(m, ROOT)]
    if left and os.environ.get("SBNET_RELEASE") == "1":
        pytest.fail("\n".join(left))
    if left:
        warnings.warn(f"{len(left)} faults to judge or renew: make mutants ARGS='--due --record'", stacklevel=1)


def test_the_list_names_tests_that_exist_and_argues_what_it_takes_for_equivalent(mutants):
    for fault in mutants.read(mutants.LIST.read_text()):
        assert all((ROOT / word).exists() for word in fault.tests if word.startswith("tests/")), fault
        assert fault.equivalent or not fault.verdict.startswith("equivalent"), fault


LISTED = """# a comment

@ sbnet/a.py | tests/test_a.py -k "one or two"
- x = 1
+ x = 2
! survived 2026-01-01 abc

- y = 1
-     z
+ y = 2
= nobody reads it
"""


def test_verdicts_are_written_beside_their_faults(mutants):
    first, second = mutants.read(LISTED)
    assert first.tests == ("tests/test_a.py", "-k", "one or two")
    assert (first.old, first.new, first.equivalent, first.verdict) == ("x = 1", "x = 2", "", "survived 2026-01-01 abc")
    assert (second.old, second.equivalent, second.verdict) == ("y = 1\n    z", "nobody reads it", "")
    assert mutants.is_due(first)
    assert mutants.is_due(second)
    text = mutants.recorded(LISTED, {first: "found 2026-01-02 def", second: "equivalent 2026-01-02 def"})
    assert not any(mutants.is_due(m) for m in mutants.read(text))
    assert [line for line in text.splitlines() if line not in LISTED.splitlines()] == [
        "! found 2026-01-02 def", "! equivalent 2026-01-02 def",
    ]  # fmt: skip
    assert "survived" not in text
