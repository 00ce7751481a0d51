"""What `sbnet bench --quick` measures in its minute: what a verdict needs, and nothing that would end later."""

import torch

from sbnet.benchmarks.harness import command, measure, registry
from sbnet.benchmarks.harness.measure import Session
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work
from sbnet.benchmarks.harness.timing import Timer


def test_a_budget_begins_with_what_the_verdict_needs():
    chosen = command.one_of_each_first(list(registry.cases(Setting("cpu", "quick", compiled=False))))
    kinds = [(case.name, case.title.split()[-1]) for case in chosen]
    assert tuple(kinds[: len(command.FIRST)]) == command.FIRST
    names = [name for name, _ in kinds[len(command.FIRST) :]]
    assert len(set(names[:12])) == 12


def test_no_case_is_begun_that_would_end_after_the_budget(monkeypatch):
    """Each takes 20 s: the third would end at 60."""
    now, done = [0.0], Session({"device": "a machine", "sbnet": "0"}, {}, {}, [])
    monkeypatch.setattr(measure.time, "monotonic", lambda: now[0])

    def make() -> Work:
        now[0] += 20.0
        return Work({"ours": Side(lambda: torch.tensor(0.0), "ours")}, lambda _, got: 0.0)

    slow = [Case(name, "ops", {}, make) for name in "abc"]
    assert not measure.run(slow, done, Timer("cpu", rounds=1, repeat=1), budget=55)
    assert [row["name"] for row in done.rows] == ["a", "b"]
