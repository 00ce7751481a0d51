"""docs/benchmarks.md and its plots, made from results/: no figure in it is typed by hand."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sbnet.benchmarks.harness.measure import Row, Session, key
from sbnet.benchmarks.harness.registry import GROUPS, format_fact
from sbnet.benchmarks.harness.report import HIDDEN, by_name, cell, compact

HERE = Path(__file__).resolve().parents[1]
RESULTS = HERE / "results"
DOCS = HERE.parent / "docs"

# What docs/benchmarks.md holds: the tables that people look at, by result file. `--tables` writes all of them.
SHOWN = {
    "cpu_sparsify": ("sparsified network",),
    "h200_blocksparse_conv": ("blocksparse_conv",),
    "h200_conv": ("conv 3x3",),
    "h200_conv_1x1_settled": ("conv 1x1",),
    "h200_weights_settled": ("blocksparse_matmul",),
}

HEAD = """\
# Benchmarks

<!-- Made by `sbnet bench --docs` from benchmarks/results/: edit those, or harness/document.py, not this. -->

The tables that people look at; `sbnet bench --docs --tables FOLDER` makes all of them from the same results. Finished
pipelines are in [is_it_for_me.md](is_it_for_me.md).

Every result was checked before it was timed (rms error against a wider type at most twice PyTorch's own; copies bit for
bit). The sides of a case run in turn in one process; figures are medians, in microseconds. **x dense** is against the
fastest dense form of the same layer: `F.conv2d` (oneDNN on a CPU), fused cuDNN and, where it says so, `torch.compile`,
channels_last. **indexed** times include listing blocks and fringe from the pixel mask in every call. How to measure:
`sbnet bench --help`, [benchmarks/](../benchmarks/README.md).
"""

FLOOR = """\
**of floor** is the share of the least time that the active part could take on that machine: the larger of its
operations over the rate of a matrix product and its bytes over that of a copy, both measured in the same run, and a
launch.
"""

PAPER = """\
## Beside the SBNet paper

Ren et al., *SBNet: Sparse Blocks Network for Fast Inference*, [arXiv 1801.02108](https://arxiv.org/abs/1801.02108),
measured on a GTX 1080 Ti in float32, mask at the top left, 90 % sparsity, index building left out: so are ours here.
Figures are speed-ups over dense on the same device, so they say how well each uses its machine, not which is faster.
"""


def shown(sessions: Mapping[str, Session], tables: Mapping[str, Sequence[str]] = SHOWN) -> dict[str, Session]:
    """The sessions cut to the named tables. KeyError: a file of results or a table that is not there."""
    found = {}
    for stem, names in tables.items():
        rows = [row for row in sessions[stem].rows if row["name"] in names]
        if missing := {*names} - {row["name"] for row in rows}:
            raise KeyError(f"{stem}: no table {', '.join(sorted(missing))}")
        found[stem] = dataclasses.replace(sessions[stem], rows=rows, skipped={})
    return found


def document(sessions: Mapping[str, Session], papers: Iterable[Session] | None = None, brief: bool = False) -> str:
    """Tables of all rows, by the stem of their file; the paper's figures beside those of `papers`, or the same.

    brief: without the machine's rates, of other forms only how much faster ours is than the fastest dense one, and
    without layers that were measured at fewer sparsities than others.
    """
    parts = [HEAD, *([] if brief else [FLOOR, *glance(sessions.values())])]
    parts += paper_table(sessions.values() if papers is None else papers)
    for stem, session in sessions.items():
        parts.append(f"## {heading(session)}\n\n{conditions(stem, session, brief)}\n")
        for name, rows in by_name(sorted(session.rows, key=lambda row: GROUPS.index(row["group"]))).items():
            parts.append(section(name, rows, brief))
            if name in swept(session):
                parts.append(f"![{name}: speed-up, fraction of the floor, break-even]({plot_file(stem, name)})\n")
        for title, lack in session.skipped.items():
            parts.append(f"Skipped: {title}: {lack}.\n")
    return "\n".join(parts)


def heading(session: Session) -> str:
    e, c = session.environment, session.conditions
    clock = "" if c["clock"] == "wall" else f", {c['clock']}"
    settled = f", {c['settle ms']} ms alone before each turn" if "settle ms" in c else ""
    compiled = ", torch.compile among the dense forms" if c.get("torch.compile") else ""
    return f"{e['device']}{clock}, {c['cache']} caches{settled}{compiled}"


def conditions(stem: str, session: Session, brief: bool = False) -> str:
    facts = {k: v for k, v in session.environment.items() if k not in ("device", "sbnet", "python", "load before")}
    limits = {} if brief else dict(session.limits)
    rates = limits.pop("matrix TFLOP/s", {})
    facts |= limits | {f"matrix TFLOP/s, {dtype}": rate for dtype, rate in rates.items()}
    facts |= {k: v for k, v in session.conditions.items() if k == "rounds"}
    others = [row["others"] for row in session.rows if "others" in row]
    if others and not brief:
        facts["other processes' share of the processor time, median"] = statistics.median(others)
    listed = ", ".join(f"{name} {cell(value)}" for name, value in facts.items())
    return f"{listed}. [Results](../benchmarks/results/{stem}.jsonl)"


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    written = [f"| {' | '.join(line)} |" for line in [head, *lines]]
    return "\n".join([written[0], f"|{'|'.join(rule)}|", *written[1:]]) + "\n"


def section(name: str, rows: list[Row], brief: bool = False) -> str:
    """A heading, what all rows share, and a table; one row a layer where sparsity is swept."""
    axis, steps = _axis(rows, 2 if brief else 3)
    hidden = set(HIDDEN)
    if brief:
        hidden |= {f"{side} us" for row in rows for side in ("dense", *row["us"])} | {"faults"}
        hidden |= {"wanted density", "sparsity"} if all("density" in row for row in rows) else set()
        if axis:
            rows = [row for same in layers(rows, axis).values() if len(same) >= min(3, steps) for row in same]
    shared, head, lines = compact(rows, hidden)
    facts = [", ".join(f"{fact} {format_fact(v)}" for fact, v in shared.items())]
    if axis:
        head, lines = sweep(rows, shared, axis)
        indexed = " (indexed)" * any("x indexed" in row for row in rows)
        facts.append(f"x dense{indexed} by {axis}" + ", / what is wanted" * any("wanted" in row for row in rows))
    stated = "; ".join(filter(None, facts))
    return "\n\n".join(filter(None, [f"### {name}", stated, markdown(head, lines)]))


def _axis(rows: list[Row], least: int) -> tuple[str, int]:
    """The fact that rows of so many values at least are swept over, and their number; or "" and 0."""
    for axis in ("sparsity", "density"):
        steps = len({row["facts"].get(axis) for row in rows})
        if steps >= least and all("x dense" in row for row in rows) and any(axis in row["facts"] for row in rows):
            return axis, steps
    return "", 0


def layers(rows: list[Row], axis: str = "sparsity") -> dict[str, list[Row]]:
    """Rows that differ in sparsity (or another fact) alone, by what they share."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        rest = {k: v for k, v in row["facts"].items() if k != axis}
        found.setdefault(key({**row, "facts": rest}), []).append(row)
    return found


def sweep(rows: list[Row], shared: dict[str, Any], axis: str) -> tuple[list[str], list[list[str]]]:
    """One line a layer, its x dense (indexed) along the axis, from dense to sparse."""
    rows = [row for row in rows if axis in row["facts"]]
    steps = sorted({row["facts"][axis] for row in rows}, reverse=axis == "density")
    facts = list(dict.fromkeys(k for row in rows for k in row["facts"] if k not in (*shared, axis)))
    served = ["served by"] if any("served by" in row for row in rows) else []
    lines = []
    for same in layers(rows, axis).values():
        at = {row["facts"][axis]: row for row in same}
        figures = [_pair(at[step]) if step in at else "" for step in steps]
        named = [*(same[0]["facts"].get(fact) for fact in facts), *(same[0].get(note) for note in served)]
        lines.append([*map(cell, named), *figures])
    return [*facts, *served, *(f"{step:g}" for step in steps)], lines


def _pair(row: Row) -> str:
    indexed = f" ({cell(row['x indexed'])})" if "x indexed" in row else ""
    wanted = f" / {cell(row['wanted'])}" if "wanted" in row else ""
    return cell(row["x dense"]) + indexed + wanted


def glance(sessions: Iterable[Session]) -> list[str]:
    """Speed-ups at a tenth of the blocks and at all of them: median, least and most."""
    lines = []
    for session in sessions:
        for name, rows in by_name(session.rows).items():
            found = [row for row in rows if row["group"] != "ops" and "density" in row and "x dense" in row]
            tenth = [row["x dense"] for row in found if 0.08 < row["density"] < 0.12]
            whole = [row["x dense"] for row in found if row["density"] > 0.99]
            if tenth or whole:
                lines.append([heading(session), name, _spread(tenth), _spread(whole)])
    head = ["measured on", "what", "x dense, a tenth of the blocks", "x dense, all blocks"]
    text = f"## At a glance\n\nMedian (least to most) of all cases of these results.\n\n{markdown(head, lines)}"
    return [text] if lines else []


def _spread(values: list[float]) -> str:
    if not values:
        return ""
    return f"{cell(statistics.median(values))} ({cell(min(values))} to {cell(max(values))})"


def paper_table(sessions: Iterable[Session]) -> list[str]:
    """Our figures beside the paper's, one column a device and dtype."""
    cases: dict[tuple[str, str], dict[str, str]] = {}
    names: dict[str, None] = {}
    for session in sessions:
        for row in session.rows:
            if "x paper" not in row:
                continue
            facts = row["facts"]
            case = row["name"], f"{format_fact(facts['size'])}x{facts['channels']}"
            column = f"{heading(session)}, {facts['dtype']}"
            names[column] = None
            cases.setdefault(case, {"paper": cell(row["x paper"])})[column] = cell(row["x dense"])
    if not cases:
        return []
    head = ["layer", "size", "the paper", *names]
    lines = [[*case, figures["paper"], *(figures.get(name, "") for name in names)] for case, figures in cases.items()]
    return [PAPER, markdown(head, lines)]


def swept(session: Session) -> dict[str, list[list[Row]]]:
    """By name: layers measured at three sparsities or more, each from dense to sparse."""
    found: dict[str, list[list[Row]]] = {}
    for rows in layers([row for row in session.rows if "sparsity" in row["facts"] and "density" in row]).values():
        if len(rows) > 2:
            found.setdefault(rows[0]["name"], []).append(sorted(rows, key=lambda row: -row["density"]))
    return found


def plot_file(stem: str, name: str) -> str:
    return f"plots/{stem}-{re.sub('[^a-z0-9]+', '-', name.lower())}.svg"


def load_results(folder: Path = RESULTS) -> dict[str, Session]:
    return {path.stem: Session.load(path) for path in sorted(folder.glob("*.jsonl"), key=lambda path: path.stem)}


def page(sessions: Mapping[str, Session]) -> str:
    """The text of docs/benchmarks.md."""
    return document(shown(sessions), sessions.values(), brief=True)


def write(folder: Path = DOCS) -> list[Path]:
    """Writes benchmarks.md, its plots, figures of README.md and is_it_for_me.md, and gains.json."""
    from sbnet.apps.density import GAINS
    from sbnet.benchmarks.harness import gains, readme

    sessions = load_results()
    readme.write(folder.parent / "README.md", sessions.values())
    gains.write(folder / "is_it_for_me.md", GAINS, sessions, RESULTS)
    return _write(folder, page(sessions), shown(sessions))


def write_all(folder: Path) -> list[Path]:
    """Writes every table to benchmarks.md in the folder, and plots/*.svg beside it."""
    sessions = load_results()
    folder.mkdir(parents=True, exist_ok=True)
    return _write(folder, document(sessions), sessions)


def _write(folder: Path, text: str, sessions: Mapping[str, Session]) -> list[Path]:
    from sbnet.benchmarks.harness import plots

    written = [folder / "benchmarks.md"]
    written[0].write_text(text)
    for stem, session in sessions.items():
        for name in swept(session):
            path = folder / plot_file(stem, name)
            path.parent.mkdir(exist_ok=True)
            plots.draw(name, session, path)
            written.append(path)
    return written
