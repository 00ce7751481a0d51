"""README's figures, made from results/ as docs/benchmarks.md is: between two marks, none typed by hand."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from sbnet.benchmarks.harness.document import markdown
from sbnet.benchmarks.harness.measure import Row, Session
from sbnet.benchmarks.harness.report import cell

START = "<!-- {}: made by `sbnet bench --docs` from benchmarks/results/; edit harness/{}, not this. -->"
END = "<!-- end -->"
ROWS = (  # the lines of the GPU's table: networks, then layers, those among them that gain least
    "sparsified network", "residual network", "residual network, ONNX Runtime", "quantized network", "residual block",
    "conv 3x3", "conv 3x3 stride 2", "conv 1x1", "conv 7x7 stem", "conv transposed", "conv 3x3, dilation",
    "conv 3x3, groups",
)  # fmt: skip
MASKS = ("rect", "blobs", "all")
NETWORKS = {"four 3x3, 64 channels": "four 3x3 layers, 64 channels", "contour_net": "the contour network"}


def parts(sessions: Iterable[Session]) -> dict[str, str]:
    """What stands between the marks of each name."""
    sessions = list(sessions)
    cpus = [s for s in sessions if "threads" in s.environment]
    gpus = [s for s in sessions if "threads" not in s.environment]
    tables = (table for table in map(cpu_table, cpus) if table)
    return {"cpu": next(tables, ""), "gpu": network_table(gpus) + gpu_table(gpus, ROWS)}


def network_table(sessions: Iterable[Session]) -> str:
    """Whole networks by batch and mask; nothing where no such row is."""
    rows = [row for s in sessions for row in s.rows if row["name"] == "whole network"]
    if not rows:
        return ""
    columns = sorted(
        {(row["facts"]["size"][0], kind) for row in rows for kind in MASKS}, key=lambda c: (c[0], MASKS.index(c[1]))
    )
    lines = []
    for network, device in dict.fromkeys((row["facts"]["network"], row["of"]["device"]) for row in rows):
        own = [row for row in rows if (row["facts"]["network"], row["of"]["device"]) == (network, device)]
        found = {(row["facts"]["size"][0], row["facts"]["mask"]): row["x dense"] for row in own}
        height, width = own[0]["facts"]["size"][1:]
        title = network if (height, width) == (640, 640) else f"{network}, {height}x{width}"
        lines.append([title, device, *(cell(found[c]) if c in found else "" for c in columns)])
    return (
        "Whole networks, 640x640 unless said, float16, frame, mask and lists included: times faster than the fastest\n"
        "dense form (PyTorch in a CUDA graph, torch.compile), by batch and mask: a rectangle of a tenth of the\n"
        "pixels, ten blobs of 4 % together, all pixels.\n\n"
        f"{markdown(['', 'device', *(f'{n}: {kind}' for n, kind in columns)], lines)}\n"
    )


def cpu_table(session: Session) -> str:
    """Nothing of a file that holds other rows only. Ratios are the rows' own: both sides of the same rounds."""
    e = session.environment
    head, columns, said = ["active blocks"], [], []
    rows = [r for r in session.rows if r["name"] == "network" and r["facts"].get("network") in NETWORKS]
    for network, title in NETWORKS.items():
        own = sorted((r for r in rows if r["facts"]["network"] == network), key=lambda r: r["facts"]["wanted density"])
        if not own:
            continue
        head += [title, "x dense"]
        times = [r["us"][r["dense form"]] / 1e3 for r in own]
        said.append(f"{title} {cell(min(times))} to {cell(max(times))} ms")
        columns.append({r["facts"]["wanted density"]: (r["us"]["masked"] / 1e3, r["x dense"]) for r in own})
    lines = []
    for density in sorted({d for column in columns for d in column}):
        line = [f"{density:.0%}"]
        for column in columns:
            ms, ratio = column.get(density, (None, None))
            line += ["", ""] if ms is None else [f"{cell(ms)} ms", f"**{cell(ratio)}x**"]
        lines.append(line)
    if not lines:
        return ""
    forms = sorted({side for r in rows for side in r["us"]} - {"masked"})
    of = f"{e['device']} ({e['instructions']})" if "instructions" in e else e["device"]
    return (
        f"{markdown(head, lines)}\n"
        f"400x704 in blocks of 16x16 chosen at random, float32, {e['threads']} cores of an {of}, torch\n"
        f"{e['torch']}, {e['date']}. Masked times include building the block lists; dense is the fastest of\n"
        f"{', '.join(forms)}, timed in turn with it:\n{', '.join(said)}.\n"
    )


def density_of(row: Row) -> float:
    return float(row.get("density", row["facts"].get("wanted density", -1.0)))


def gpu_table(sessions: list[Session], shown: Collection[str] | None = None) -> str:
    """Least to most over ALL recorded rows of a name, every dtype, size and mask among them; cold beside warm.

    shown: the names that get a line; all where it is left out.
    """
    caches = sorted({s.conditions["cache"] for s in sessions}, reverse=True)  # warm first
    lines = []
    names = dict.fromkeys(row["name"] for s in sessions for row in s.rows if row["group"] != "ops")
    for name in names if shown is None else [name for name in shown if name in names]:
        cells = []
        for cache in caches:
            of = [s for s in sessions if s.conditions["cache"] == cache]
            rows = [row for s in of for row in s.rows if row["name"] == name and "x dense" in row]
            tenth = [row["x dense"] for row in rows if 0.08 < density_of(row) < 0.12]
            whole = [row["x dense"] for row in rows if density_of(row) > 0.99]
            cells += [f"{cell(min(v))} to {cell(max(v))} ({len(v)})" if v else "" for v in (tenth, whole)]
        if any(cells):
            lines.append([name, *cells])
    devices, dates = ({s.environment[k] for s in sessions} for k in ("device", "date"))
    head = [f"{what}, {cache} L2" for cache in caches for what in ("a tenth of the blocks", "all blocks")]
    return (
        f"On an {' and an '.join(sorted(devices))}, {min(dates)} to {max(dates)}, CUDA graphs: times faster than the\n"
        "fastest dense form, least to most over all recorded rows of every size, dtype and mask (their number). Warm:\n"
        "one call after another; cold: the caches flushed before each.\n\n"
        f"{markdown(['', *head], lines)}"
    )


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
