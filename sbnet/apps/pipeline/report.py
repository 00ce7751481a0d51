"""A summary as one page of HTML that needs no other file: frame and result under a slider, curves, the table."""

from __future__ import annotations

import base64
import io
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
PLOT = (560, 150)

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
    plots = _plot("active blocks, %", summary.densities, 100) + _plot("ms a frame, mask included", summary.ms, 1)
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
    mapped = any(shot.differences is not None for shot in shots)
    of = "" if len(shots) > 1 else " hidden"
    return (
        "<h2>Left of the slider the frame, right of it the result</h2>"
        + "".join(_shot(shot, shots[worst] is shot and mapped) for shot in shots)
        + "<input id='bar' type='range' min='0' max='100' value='50' aria-label='slider'>"
        + f"<label{of}>frames <input id='shot' type='range' min='0' max='{len(shots) - 1}' value='{worst}'></label> "
        + "<label>on the left <select id='left'><option value='plain'>the frame as it came</option>"
        + "<option value='marked'>active blocks</option>"
        + ("<option value='apart'>differences from the dense result</option>" if mapped else "")
        + f"</select></label><script>{SCRIPT}</script>"
    )


def _shot(shot: Shot, worst: bool) -> str:
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
    what = f", largest difference {shot.largest:.2g}" if shot.differences is not None else ""
    return (
        f"<div class='shot'><p>Frame {result.frame.index}{what}{', the worst of these' if worst else ''}</p>"
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


def _plot(name: str, series: Series, factor: float) -> str:
    """One curve as SVG, from 0 up, over the frames."""
    width, height = PLOT
    values = [factor * v for v in series.points()]
    top = max([*values, 1e-9])
    step = width / max(len(values) - 1, 1)
    line = " ".join(f"{k * step:.1f},{height - (height - 12) * v / top:.1f}" for k, v in enumerate(values))
    return (
        f"<figure style='margin:0'><svg viewBox='0 0 {width} {height}' width='{width}' height='{height}' role='img'>"
        f"<title>{escape(name)}</title><polyline points='{line}' fill='none' stroke='#c33' stroke-width='1.5'/>"
        f"<text x='4' y='11' font-size='11' fill='#777'>{top:.3g}</text>"
        f"<text x='4' y='{height - 4}' font-size='11' fill='#777'>0</text>"
        f"<text x='{width - 4}' y='{height - 4}' text-anchor='end' font-size='11' fill='#777'>{series.count} frames"
        "</text>"
        "</svg>"
        f"<figcaption>{escape(name)}; mean {factor * series.mean:.3g}, {series.count} frames</figcaption></figure>"
    )
