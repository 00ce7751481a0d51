"""Figures of README.md, made from results/ as docs/benchmarks.md is: between two marks, none typed by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sbnet.benchmarks.harness.document import markdown
from sbnet.benchmarks.harness.measure import Row, Session
from sbnet.benchmarks.harness.report import cell

START = "<!-- {}: made by `sbnet bench --docs` from benchmarks/results/; edit harness/{}, not this. -->"
END = "<!-- end -->"
NETWORKS = "YOLOv8s-like", "mobilenet_v3_large", "convnext_tiny", "resnet50", "ViT-B/16"
MASKS = {"rect": "a tenth", "half": "half", "all": "all"}
USUAL = (640, 640)
MARK = r"\*"
DISTURBED = 0.1  # share of the processor time that other processes took


def parts(sessions: Iterable[Session]) -> dict[str, str]:
    """What stands between README's marks, by their name."""
    return {"speed": speed_table([s for s in sessions if s.environment.get("kernels") != "portable"])}


# ---- README: whole networks


def speed_table(sessions: Sequence[Session]) -> str:
    """Five networks under three masks, on CPUs and on GPUs. A cell is a row's own ratio: all sides of one case were
    timed in turn. The figures of a network on a kind of device are of one session, the one with most masks, then the
    newest."""
    kinds = {"CPU": True, "GPU": False}
    found = {(name, kind): _chosen(sessions, name, cpu) for name in NETWORKS for kind, cpu in kinds.items()}
    lines = []
    for name in NETWORKS:
        line = [_title(name, sessions)]
        for kind in kinds:
            of, rows = found[name, kind]
            dense = sorted(row["us"][row["dense form"]] for row in rows.values())
            line.append(f"{cell(dense[len(dense) // 2] / 1e3)} ms" if dense and of is not None else "")
            many = _many(of, name)
            line += [_gains([of_mask[mask] for of_mask in (rows, many) if mask in of_mask]) for mask in MASKS]
        lines.append(line)
    if not any(rows for _, rows in found.values()):
        return ""
    head = ["times as fast as dense, with active:", *(c for k in kinds for c in (f"{k}, dense", *MASKS.values()))]
    said = [_said(kind, {name: found[name, kind] for name in NETWORKS}) for kind in kinds]
    return (
        f"{markdown(head, lines)}\n"
        "One image of 640x640 unless said, a rectangle of a tenth or a half of its pixels, or all of them; the whole\n"
        "network, with frame, mask and lists of blocks. Dense is each case's fastest form, timed in turn with it.\n"
        + "".join(filter(None, said))
    )


def _gains(rows: Sequence[Row]) -> str:
    """Of one image, and after a slash of many."""
    ratios = [cell(row["x dense"]) for row in rows]
    marks = [MARK if row.get("others", 0.0) > DISTURBED else "" for row in rows]
    ratios[:1] = [f"**{ratio}**" for ratio in ratios[:1]]
    return " / ".join(map("".join, zip(ratios, marks, strict=True)))


def _many(session: Session | None, network: str) -> dict[str, Row]:
    """A session's rows of several images of a network, by mask."""
    rows = [] if session is None else [row for row in _whole(session, network) if row["facts"]["size"][0] > 1]
    return {row["facts"]["mask"]: row for row in rows if "x dense" in row}


def _chosen(sessions: Sequence[Session], network: str, cpu: bool) -> tuple[Session | None, dict[str, Row]]:
    """The session that speaks for a network on a kind of device, and its rows of one image, by mask."""
    best: tuple[Any, Session | None, dict[str, Row]] = ((0, ""), None, {})
    for session in sessions:
        if ("threads" in session.environment) != cpu:
            continue
        rows = {row["facts"]["mask"]: row for row in _whole(session, network) if row["facts"]["size"][0] == 1}
        rows = {mask: row for mask, row in rows.items() if mask in MASKS and "x dense" in row}
        if rows and (rank := (len(rows), session.environment["date"])) >= best[0]:
            best = rank, session, rows
    return best[1], best[2]


def _whole(session: Session, network: str) -> list[Row]:
    return [r for r in session.rows if r["name"] == "whole network" and r["facts"]["network"] == network]


def _title(network: str, sessions: Sequence[Session]) -> str:
    sizes = {tuple(row["facts"]["size"][1:]) for s in sessions for row in _whole(s, network)} - {USUAL}
    return ", ".join([network, *("x".join(map(str, size)) for size in sizes)])


def _said(kind: str, found: Mapping[str, tuple[Session | None, dict[str, Row]]]) -> str:
    """Of what, when, with which versions and against which dense forms the columns of a kind of device are."""
    chosen = {name: (of, rows) for name, (of, rows) in found.items() if of is not None}
    if not chosen:
        return ""
    machines: dict[str, list[str]] = {}
    for name, (of, _) in chosen.items():
        machines.setdefault(_machine(of.environment), []).append(name)
    most = max(machines, key=lambda machine: len(machines[machine]))
    others = [f"{machine} ({', '.join(names)})" for machine, names in machines.items() if machine != most]
    rows = [row for _, own in chosen.values() for row in own.values()]
    dates, torches = ({of.environment[k] for of, _ in chosen.values()} for k in ("date", "torch"))
    forms = ", ".join(sorted({form for row in rows for form in row["us"] if form != row["ours"]}))
    dtypes = ", ".join(sorted({row["facts"]["dtype"] for row in rows}))
    dtypes += "" if kind == "CPU" else ", CUDA graphs"
    text = (
        f"\n{kind}: {' and '.join([most, *others])}, {dtypes}, torch {', '.join(sorted(torches))},\n"
        f"{' to '.join(sorted({min(dates), max(dates)}))}; dense: the fastest of {forms}."
    )
    if any(row.get("others", 0.0) > DISTURBED for row in rows):
        text += f" {MARK}: other programs took\nmore than a tenth of the processor meanwhile."
    images = sorted({row["facts"]["size"][0] for name, (of, _) in chosen.items() for row in _many(of, name).values()})
    if images:
        text += f" After the slash:\n{' or '.join(map(str, images))} images a call."
    return text + "\n"


def _machine(environment: Mapping[str, Any]) -> str:
    if "threads" not in environment:
        return str(environment["device"])
    kind = f" ({environment['instructions']})" if "instructions" in environment else ""
    return f"{environment['threads']} cores of an {environment['device']}{kind}"


# ---- pages


def made(text: str, sessions: Iterable[Session]) -> str:
    """A README with its figures made anew."""
    return filled(text, parts(sessions), "README.md", "readme.py")


def filled(text: str, made: Mapping[str, str], page: str, module: str) -> str:
    """A page with what stands between the marks of each name; `module` of the harness makes it."""
    for name, part in made.items():
        head = START.format(name, module)
        before, start, rest = text.partition(head)
        _, end, after = rest.partition(END)
        if not end:
            raise ValueError(f"{page}: expected the marks of {name!r}, got none")
        text = f"{before}{start}\n{part}{end}{after}"
    return text


def write(readme: Path, sessions: Iterable[Session]) -> None:
    readme.write_text(made(readme.read_text(), sessions))
