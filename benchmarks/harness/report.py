"""Measured rows as tables, CSV and a comparison of two runs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sbnet import files
from sbnet.benchmarks.harness.measure import Row, Session, key
from sbnet.benchmarks.harness.registry import format_fact

FIGURES = (
    "us",
    "dense us",
    "x dense",
    "x indexed",
    "x paper",
    "of floor",
    "faults",
    "TFLOP/s",
    "GB/s",
    "spread us",
    "others",
)


def by_name(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of one name share a table."""
    tables: dict[str, list[Row]] = {}
    for row in rows:
        tables.setdefault(row["name"], []).append(row)
    return tables


FACTS = "density", "blocks", "fringe", "served by", "wanted"
HIDDEN = "TFLOP/s", "GB/s", "fringe", "blocks", "spread us", "others"  # of tables; CSV has them


def flat(row: Row) -> dict[str, Any]:
    """A row in columns: facts, notes, figures, then the time of every side."""
    notes = {k: v for k, v in row.items() if k in FACTS}
    peers = {f"{name} us": us for name, us in row["us"].items() if name not in (row["ours"], row.get("dense form"))}
    figures = dict(row) | {"us": row["us"][row["ours"]]}
    if "dense form" in row:
        figures["dense us"] = row["us"][row["dense form"]]
        if row.get("page faults"):
            figures["faults"] = row["page faults"].get(row["dense form"])
    return {**row["facts"], **notes, **{f: figures[f] for f in FIGURES if f in figures}, **peers}


def columns(rows: list[dict[str, Any]]) -> list[str]:
    """The union of the rows' columns, in order."""
    return list(dict.fromkeys(name for row in rows for name in row))


def cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else format_fact(value)


def compact(rows: list[Row], hidden: Iterable[str]) -> tuple[dict[str, Any], list[str], list[list[str]]]:
    """A table of rows of one name: facts that all rows share, then columns and cells; of the rest nothing `hidden`."""
    lines = [{k: v for k, v in flat(row).items() if k not in hidden} for row in rows]
    first = rows[0]["facts"]
    shared = {k: v for k, v in first.items() if len(rows) > 1 and all(row["facts"].get(k) == v for row in rows)}
    names = [name for name in columns(lines) if name not in shared]
    return shared, names, [[cell(line.get(name)) for name in names] for line in lines]


def table(name: str, rows: list[Row]) -> Table:
    """A rich table of rows of one name; facts that tell rows apart share a column."""
    shared, names, lines = compact(rows, (*HIDDEN, "dense us"))
    facts = [names.index(name) for name in names if any(name in row["facts"] for row in rows)]
    figures = [at for at in range(len(names)) if at not in facts]
    title = ", ".join([name, *(f"{fact} {format_fact(v)}" for fact, v in shared.items())])
    made = Table(title=escape(title), title_justify="left")
    made.add_column(" ".join(names[at] for at in facts), no_wrap=True)
    for at in figures:
        made.add_column(names[at], justify="right")
    for line in lines:
        made.add_row(*map(escape, [" ".join(line[at] for at in facts), *(line[at] for at in figures)]))
    return made


def line(title: str, row: Row | None) -> str:
    """A case that is done, in a line: how long it took, and how many times faster than dense it was."""
    if row is None:
        return f"{title}: skipped"
    gain = f", {cell(row['x dense'])} x dense" if "x dense" in row else ""
    return f"{title}: {cell(row['us'][row['ours']])} us{gain}"


def show(session: Session, console: Console) -> None:
    """Everything that was measured, and under what conditions."""
    for name, rows in by_name(session.rows).items():
        console.print(table(name, rows))
    for row in session.rows:
        for side, fault in row.get("wrong", {}).items():
            console.print(f"[red]wrong[/] {escape(row['name'])}: {escape(side)}, not timed: {escape(fault)}")
    for title, lack in session.skipped.items():
        console.print(f"[yellow]skipped[/] {escape(title)}: {escape(lack)}")
    facts = {**session.environment, **session.conditions}
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), soft_wrap=True, markup=False)
    for sentence in verdict(session):
        console.print(sentence, soft_wrap=True, markup=False)


KINDS = {
    "network": "networks", "conv": "convolutions", "networks": "detectors and classifiers", "block": "residual blocks",
    "attention": "attention", "weights": "block-sparse weights", "training": "training steps",
}  # fmt: skip
SHARES = {"with 5 to 15 % of the blocks active": (0.049, 0.155), "with all of them": (0.999, 1.001)}


def verdict(session: Session) -> list[str]:
    """What the rows say, in a sentence for each share of active blocks."""
    sentences = []
    for share, (least, most) in SHARES.items():
        parts = []
        for group, kind in KINDS.items():
            rows = [row for row in session.rows if row["group"] == group and "x dense" in row]
            found = sorted(row["x dense"] for row in rows if least <= row.get("density", -1.0) <= most)
            if found:
                ends = [f"{factor:.2g}" for factor in (found[0], found[-1])]
                parts.append(f"{kind} {ends[0] if ends[0] == ends[1] else ' to '.join(ends)}x")
        if parts:
            sentences.append(
                f"On this machine, {share}: {', '.join(parts)} as fast as the fastest dense form measured."
            )
    return sentences


def shared(session: Session) -> dict[str, Any]:
    """One object for a report: device, versions, conditions and rows, and nothing that names a person or a path."""
    kept = (
        "group",
        "name",
        "facts",
        "density",
        "us",
        "dense form",
        "x dense",
        "spread us",
        "error",
        "served by",
        "wrong",
    )
    rows = [{name: row[name] for name in kept if name in row} for row in session.rows]
    facts = {"environment": session.environment, "conditions": session.conditions, "limits": session.limits}
    return {"sbnet bench --share": 1, **facts, "rows": rows, "verdict": verdict(session)}


def write_csv(session: Session, path: Path) -> None:
    lines = [{"group": row["group"], "name": row["name"], **flat(row)} for row in session.rows]
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, columns(lines))
    writer.writeheader()
    writer.writerows({k: format_fact(v) if isinstance(v, list) else v for k, v in line.items()} for line in lines)
    files.write(path, file.getvalue().encode())


@dataclass(frozen=True)
class Change:
    """One case in two runs. factor: how many times slower it became.

    Where both runs have a dense side, factor compares the speed-ups over it, which a chip's power state moves less than
    times; otherwise times.
    """

    row: Row
    before: float
    after: float
    factor: float


def changes(before: Iterable[Row], after: Iterable[Row]) -> list[Change]:
    """Cases that both runs have, the worst first."""
    old = {key(row): row for row in before}
    found = []
    for row in after:
        past = old.get(key(row))
        if past is None:
            continue
        times = past["us"][past["ours"]], row["us"][row["ours"]]
        ratio = past["x dense"] / row["x dense"] if "x dense" in past and "x dense" in row else times[1] / times[0]
        found.append(Change(row, *times, ratio))
    return sorted(found, key=lambda change: -change.factor)


def change_table(found: list[Change]) -> Table:
    made = Table(title="times slower, by the speed-up over dense where there is one", title_justify="left")
    for column in ("case", "before us", "after us", "times slower"):
        made.add_column(column, justify="left" if column == "case" else "right")
    for change in found:
        facts = " ".join(format_fact(v) for v in change.row["facts"].values())
        colour = "red" if change.factor > 1 else "green"
        figures = cell(change.before), cell(change.after), f"[{colour}]{change.factor:.2f}[/]"
        made.add_row(escape(f"{change.row['name']}: {facts}"), *figures)
    return made
