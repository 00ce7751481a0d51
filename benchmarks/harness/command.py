"""What `sbnet bench` does with its options."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sbnet import files
from sbnet.benchmarks.harness import measure as measuring
from sbnet.benchmarks.harness import report
from sbnet.benchmarks.harness.measure import Row, Session
from sbnet.benchmarks.harness.registry import Case, Setting, WrongResult, cases
from sbnet.benchmarks.harness.timing import Timer
from sbnet.progress import drawing

__all__ = ["BenchError", "Setting", "Timer", "cases", "compare", "make_documents", "measure"]


class BenchError(Exception):
    """What the person at the keyboard has to know, in a line."""


def measure(
    setting: Setting,
    timer: Timer,
    groups: Sequence[str],
    only: str,
    budget: float | None,
    output: Path | None,
    resume: bool,
    console: Console,
    share: Path | None = None,
) -> bool:
    """Measures, says each case as it is done, shows tables, and writes JSON and CSV where a file is named, and what may
    be shown to others to `share`; True if every result was right."""
    begin = time.monotonic()
    chosen = list(cases(setting, groups, only))
    if budget is not None:
        chosen = one_of_each_first(chosen)
    if not chosen:
        raise BenchError(f"no case of {', '.join(groups)} has all of {only!r} in its title; --list prints the titles")
    session = measuring.start(setting, timer)
    if resume and output is not None and output.exists():
        before = load(output)
        if (before.environment["device"], before.conditions) != (session.environment["device"], session.conditions):
            raise BenchError(f"--resume: {output}: expected rows of this device and these settings, got others")
        session = measuring.resume(before, session)
    text = TextColumn("{task.description}")
    bar = Progress(text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
    with drawing(), bar as progress:
        task = progress.add_task("", total=len(chosen))

        def told(case: Case, row: Row | None) -> None:
            progress.update(task, advance=1)
            progress.console.print(report.line(case.title, row), soft_wrap=True, markup=False)

        def save() -> None:
            if output is not None:
                session.save(output)

        left = None if budget is None else budget - (time.monotonic() - begin)
        try:
            whole = measuring.run(chosen, session, timer, left, told, save)
        except WrongResult as wrong:
            raise BenchError(f"wrong result: {wrong}") from None
    report.show(session, console if console.is_terminal else Console(width=140, highlight=False))
    if output is not None:
        report.write_csv(session, output.with_suffix(".csv"))
        console.print(f"wrote {escape(str(output))} and {escape(output.with_suffix('.csv').name)}", soft_wrap=True)
    if share is not None:
        files.write(share, json.dumps(report.shared(session), indent=1).encode())
        console.print(f"wrote {escape(str(share))}, to attach to a report", soft_wrap=True)
    if not whole:
        rest = "`--resume` measures the rest" if output is not None else "with --output, `--resume` measures the rest"
        console.print(f"stopped before the last case: {len(session.rows)} of {len(chosen)} measured; {rest}")
    return not any("wrong" in row for row in session.rows)


# What a verdict needs most, by name and the last word of the title: few blocks and all of them.
FIRST = ("conv 3x3", "0.9"), ("conv 3x3", "0"), ("whole network", "rect"), ("whole network", "all")


def one_of_each_first(chosen: Sequence[Case]) -> list[Case]:
    """FIRST, then the first case of each name, the second of each, and so on, networks before layers before ops: what
    fits into a budget is of every kind."""
    order = {group: k for k, group in enumerate(report.KINDS)}
    chosen = sorted(chosen, key=lambda case: order.get(getattr(case, "group", ""), len(order)))
    counts: Counter[str] = Counter()
    ranks = []
    for case in chosen:
        name = getattr(case, "name", "")
        ranks.append(counts[name])
        counts[name] += 1
    made = [case for _, case in sorted(zip(ranks, chosen, strict=True), key=lambda pair: pair[0])]
    needed = {what: k for k, what in enumerate(FIRST)}
    return sorted(made, key=lambda case: needed.get((getattr(case, "name", ""), case.title.split()[-1]), len(FIRST)))


def load(path: Path) -> Session:
    try:
        return Session.load(path)
    except (OSError, ValueError, TypeError) as error:
        raise BenchError(f"{path}: is no result file of sbnet bench ({error})") from None


def compare(before: Path, after: Path, threshold: float, console: Console) -> bool:
    """Shows what became slower or faster by more than the threshold; True if anything became slower."""
    old, new = load(before), load(after)
    for name in ("device", "clock", "cache"):
        a, b = ({**s.environment, **s.conditions}[name] for s in (old, new))
        if a != b:
            raise BenchError(f"{before} has {name} {a}, {after} has {b}: they cannot be compared")
    changes = report.changes(old.rows, new.rows)
    if not changes:
        raise BenchError(f"{before} and {after} have no case in common")
    slower = [change for change in changes if change.factor > 1 + threshold]
    faster = [change for change in changes if change.factor < 1 / (1 + threshold)]
    console.print(report.change_table([*slower, *faster]))
    console.print(f"{len(changes)} cases compared: {len(slower)} slower, {len(faster)} faster by over {threshold:.0%}")
    return bool(slower)


def make_documents(console: Console, tables: Path | None = None) -> None:
    """docs/benchmarks.md and its plots; or every table and plot, in the folder `tables`."""
    from sbnet.benchmarks.harness import document

    if not (document.RESULTS.is_dir() and document.DOCS.is_dir()):
        raise BenchError("--docs: works in a checkout, where benchmarks/results/ and docs/ are")
    try:
        written = document.write() if tables is None else document.write_all(tables)
    except ImportError as error:
        raise BenchError(f"--docs: {error}: pip install 'sbnet[bench]'") from None
    console.print(f"wrote {escape(str(written[0]))} and {len(written) - 1} plots", soft_wrap=True)
