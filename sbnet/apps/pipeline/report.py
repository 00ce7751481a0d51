"""A summary as one page of HTML that needs no other file: frame and result under a slider, curves, the table."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from sbnet import files
from sbnet.apps.pipeline.frames import PipelineError
from sbnet.apps.pipeline.sinks import blocks_on, nearest
from sbnet.apps.pipeline.summary import Series, Shot, Summary

WIDEST = 1600  # pixels of a picture on the page
PLOT = (560, 170)

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1160px; padding: 0 1rem; color: #222; }
h1 { font-size: 1.2rem; font-weight: 600; } h2 { font-size: 1rem; font-weight: 600; margin: 1.6rem 0 .4rem; }
table { border-collapse: collapse; } td { padding: .15rem 1.2rem .15rem 0; vertical-align: top; }
td:nth-child(2) { text-align: right; font-variant-numeric: tabular-nums; } td:nth-child(3) { color: #777; }
.pair { position: relative; line-height: 0; } .pair img { width: 100%; }
.pair .over { position: absolute; inset: 0; } input[type=range] { width: 100%; }
.plots { display: flex; flex-wrap: wrap; gap: 1.5rem; } svg { background: #f6f6f6; } .none { display: none; }
"""
SCRIPT = """
const at = id => document.getElementById(id), shots = [...document.querySelectorAll(".shot")];
const show = () => {
  shots.forEach((shot, k) => {
    shot.classList.toggle("none", k != at("shot").value);
    shot.querySelector(".over").style.clipPath = `inset(0 0 0 ${at("bar").value}%)`;
    shot.querySelectorAll("[data-left]").forEach(image => {
      image.classList.toggle("none", image.dataset.left != at("left").value);
    });
  });
};
["bar", "shot", "left"].forEach(id => at(id).addEventListener("input", show)); show();
"""


def page(summary: Summary) -> str:
    """HTML of the whole page."""
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(summary.title)}</title>"
        f"<style>{STYLE}</style></head><body>{body(summary)}</body></html>\n"
    )


def body(summary: Summary) -> str:
    """What a notebook shows: the page without its frame."""
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in summary.rows()
    )  # fmt: skip
    plots = _plot("active blocks", "%", summary.densities) + _plot("time of a frame, mask included", "ms", summary.ms)
    return (
        f"<h1>{escape(summary.title)}</h1>{_shots(summary)}"
        f"<h2>Frame by frame</h2><div class='plots'>{plots}</div><h2>All in all</h2><table>{rows}</table>"
    )


def check_report(path: Path, sources: Sequence[Any] = ()) -> None:
    """Raises PipelineError where no report can be written: before hours of work, not after."""
    files.Part(path, sources, PipelineError).drop()


def write_report(summary: Summary, path: Path) -> None:
    """Raises PipelineError where it cannot be written."""
    files.write(path, page(summary).encode(), PipelineError)


def _shots(summary: Summary) -> str:
    """The frames, one at a time, each with its result under a slider."""
    shots = [shot for _, shot in sorted(summary.shots.items()) if shot.result is not None]
    if not shots:
        return ""
    worst = max(range(len(shots)), key=lambda k: shots[k].largest)
    stepped = max((shot.seam for shot in shots if not math.isnan(shot.seam)), default=math.nan)
    mapped = any(shot.differences is not None for shot in shots)
    of = "" if len(shots) > 1 else " hidden"
    return (
        "<h2>Left of the slider the frame, right of it the result</h2>"
        + "".join(_shot(shot, shots[worst] is shot and mapped, shot.seam == stepped) for shot in shots)
        + "<input id='bar' type='range' min='0' max='100' value='50' aria-label='slider'>"
        + f"<label{of}>frames <input id='shot' type='range' min='0' max='{len(shots) - 1}' value='{worst}'></label> "
        + "<label>on the left <select id='left'><option value='plain'>the frame as it came</option>"
        + "<option value='marked'>active blocks</option>"
        + ("<option value='apart'>differences from the dense result</option>" if mapped else "")
        + f"</select></label><script>{SCRIPT}</script>"
    )


def _shot(shot: Shot, worst: bool, stepped: bool) -> str:
    result = shot.result
    frame = result.frame.picture()
    shown = frame if result.picture is None else result.picture
    pictures = {"plain": frame, "marked": blocks_on(result)}
    if shot.differences is not None:
        pictures["apart"] = np.repeat(shot.differences[..., None], 3, 2)
    left = "".join(
        f"<img data-left='{name}' class='{'none' if name != 'plain' else ''}' alt='{name}' src='{_source(p, shown)}'>"
        for name, p in pictures.items()
    )
    facts = [f"Frame {result.frame.index}"]
    if shot.differences is not None:
        facts.append(f"largest difference from the dense result {shot.largest:.2g}{' (the worst)' if worst else ''}, "
                     "white on the map of differences")  # fmt: skip
    if not math.isnan(shot.seam):
        facts.append(f"seams {shot.seam:.2f}x{' (the worst)' if stepped else ''}")
    return (
        f"<div class='shot'><p>{'; '.join(facts)}</p>"
        f"<div class='pair'>{left}<img class='over' alt='result' src='{_source(shown, shown)}'></div></div>"
    )


def _source(picture: np.ndarray, like: np.ndarray) -> str:
    """Of an img, at another's size."""
    return f"data:image/jpeg;base64,{_jpeg(nearest(picture, like.shape[:2]))}"


def _jpeg(picture: np.ndarray) -> str:
    try:
        from PIL import Image
    except ImportError:
        raise PipelineError("a report needs Pillow: pip install 'sbnet[video]'") from None
    image: Any = Image.fromarray(picture)
    image.thumbnail((WIDEST, WIDEST))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=88)
    return base64.b64encode(file.getvalue()).decode()


def _plot(name: str, unit: str, series: Series) -> str:
    """One curve as SVG, from 0 up, over the frames; its axes say what they count, in what."""
    width, height, left, below = *PLOT, 62, 30
    values = series.points()
    top = max([*values, 1e-9])
    unit, factor = _unit_of(unit, top)
    step = (width - left - 8) / max(len(values) - 1, 1)
    high = height - below - 10

    def y(share: float) -> float:
        return 10 + high * (1 - share)

    line = " ".join(f"{left + k * step:.1f},{y(v / top):.1f}" for k, v in enumerate(values))
    ticks = "".join(
        f"<line x1='{left}' x2='{width - 8}' y1='{y(share):.1f}' y2='{y(share):.1f}' stroke='#ddd'/>"
        f"<text x='{left - 5}' y='{y(share) + 4:.1f}' text-anchor='end' font-size='11' fill='#777'>"
        f"{_number(factor * top * share)} {unit}</text>"
        for share in (0, 0.5, 1)
    ) + "".join(
        f"<text x='{left + (width - left - 8) * share:.1f}' y='{height - below + 14}' text-anchor='{anchor}' "
        f"font-size='11' fill='#777'>{round(series.count * share)}</text>"
        for share, anchor in ((0, "start"), (0.5, "middle"), (1, "end"))
    )
    return (
        f"<figure style='margin:0'><svg viewBox='0 0 {width} {height}' width='{width}' height='{height}' role='img'>"
        f"<title>{escape(name)} over the frames</title>{ticks}"
        f"<polyline points='{line}' fill='none' stroke='#c33' stroke-width='1.5'/>"
        f"<text x='{(width + left) / 2:.0f}' y='{height - 3}' text-anchor='middle' font-size='11' fill='#777'>frames"
        "</text></svg>"
        f"<figcaption>{escape(name)}; mean {_number(factor * series.mean)} {unit}, {series.count} frames</figcaption>"
        "</figure>"
    )


def _unit_of(unit: str, top: float) -> tuple[str, float]:
    """A unit in which numbers up to `top` of the given one are read easily, and what they are multiplied by."""
    if unit == "%":
        return unit, 100.0
    return ("s", 1e-3) if top >= 1000 else ("\N{MICRO SIGN}s", 1e3) if top < 0.1 else (unit, 1.0)


def _number(value: float) -> str:
    """Three digits, never a power of ten."""
    return "n/a" if math.isnan(value) else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
