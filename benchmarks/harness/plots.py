"""Plots of a session's sparsity sweeps. Needs matplotlib: the extra `sbnet[bench]`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

from sbnet.benchmarks.harness.document import heading, swept
from sbnet.benchmarks.harness.measure import Row, Session
from sbnet.benchmarks.harness.registry import format_fact

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# The same rows give the same file: no random ids, no date; text stays text.
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "sbnet", "svg.fonttype": "none", "font.size": 8, "axes.grid": True, "grid.alpha": 0.3
}  # fmt: skip


def draw(name: str, session: Session, path: Path) -> None:
    """Speed-up and fraction of the floor against sparsity, and the break-even, of the cases of one name."""
    found = swept(session)[name]
    with plt.rc_context(STYLE):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.5))
        speedup(left, found)
        floor(middle, found)
        breakeven(right, found)
        figure.suptitle(f"{name}: {heading(session)}")
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
    # matplotlib ends lines of SVG paths with a space
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def title(rows: list[Row]) -> str:
    facts = rows[0]["facts"]
    return " ".join(format_fact(v) for k, v in facts.items() if k not in ("sparsity", "block"))


def _curves(axes: Any, found: list[list[Row]], column: str) -> None:
    """Colours tell sizes apart, dashes masks, markers dtypes."""
    facts = [rows[0]["facts"] for rows in found]
    sizes, masks, dtypes = ([*dict.fromkeys(str(f.get(k)) for f in facts)] for k in ("size", "mask", "dtype"))
    for rows, fact in zip(found, facts, strict=True):
        have = [row for row in rows if column in row]
        axes.plot(
            [1 - row["density"] for row in have],
            [row[column] for row in have],
            ["-", ":", "--", "-."][masks.index(str(fact.get("mask"))) % 4],
            color=f"C{sizes.index(str(fact.get('size'))) % 10}",
            marker="o^sv"[dtypes.index(str(fact.get("dtype"))) % 4],
            markersize=3,
            linewidth=1,
            label=title(rows),
        )
    axes.set_xlabel("sparsity (share of inactive blocks)")


def speedup(axes: Any, found: list[list[Row]]) -> None:
    _curves(axes, found, "x dense")
    densities = [1 - step / 200 for step in range(200)]
    axes.plot([1 - d for d in densities], [1 / d for d in densities], "k--", linewidth=1, label="1 / density")
    axes.axhline(1, color="k", linewidth=0.5)
    axes.set_yscale("log")
    axes.set_ylabel("speed-up over the fastest dense form")
    axes.legend(fontsize=5)


def floor(axes: Any, found: list[list[Row]]) -> None:
    _curves(axes, found, "of floor")
    axes.set_ylim(0, None)
    axes.set_ylabel("fraction of the floor")


def breakeven(axes: Any, found: list[list[Row]]) -> None:
    ways: dict[str, Callable[[Row], float | None]] = {
        "sparse": lambda row: row.get("x dense"),
        "with index building": lambda row: row.get("x indexed"),
        "gather-conv-scatter": lambda row: _way(row, "gather-conv-scatter"),
    }
    found = [rows for rows in found if rows[0]["density"] > 0.99]  # of others it is not known
    for at, (name, figure) in enumerate(ways.items()):
        values = [crossing([(r["density"], f) for r in rows if (f := figure(r))]) for rows in found]
        axes.barh([y + 0.27 * (at - 1) for y in range(len(found))], values, height=0.25, label=name)
    axes.set_yticks(range(len(found)), [title(rows) for rows in found], fontsize=5)
    axes.set_xlim(0, 1.02)
    axes.set_xlabel("break-even: faster than dense up to this density")
    axes.legend(fontsize=5)


def _way(row: Row, side: str) -> float | None:
    return row["us"][row["dense form"]] / row["us"][side] if side in row["us"] and "dense form" in row else None


def crossing(points: list[tuple[float, float]]) -> float:
    """The density where the speed-up falls to 1, from (density, speed-up) from dense to sparse; between two points by
    its logarithm. The densest point where nothing is slower, 0 where everything is."""
    if points and points[0][1] >= 1:
        return points[0][0]
    for (d0, s0), (d1, s1) in itertools.pairwise(points):
        if s1 >= 1:
            return d1 + (d0 - d1) * math.log(s1) / (math.log(s1) - math.log(s0))
    return 0.0
