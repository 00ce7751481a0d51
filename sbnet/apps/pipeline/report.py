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
from sbnet.apps.pipeline.frames import PipelineError, Result
from sbnet.apps.pipeline.sinks import blocks_on, nearest
from sbnet.apps.pipeline.summary import Series, Summary

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
const over = document.getElementById("over"), bar = document.getElementById("bar");
const move = () => { over.style.clipPath = `inset(0 0 0 ${bar.value}%)`; };
bar.addEventListener("input", move); move();
document.getElementById("blocks").addEventListener("change", event => {
  document.getElementById("plain").classList.toggle("none", event.target.checked);
  document.getElementById("marked").classList.toggle("none", !event.target.checked);
});
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
        f"<h1>{escape(summary.title)}</h1>{_slider(summary.pictures)}"
        f"<h2>Frame by frame</h2><div class='plots'>{plots}</div><h2>All in all</h2><table>{rows}</table>"
    )


def check_report(path: Path, sources: Sequence[Any] = ()) -> None:
    """Raises PipelineError where no report can be written: before hours of work, not after."""
    files.Part(path, sources, PipelineError).drop()


def write_report(summary: Summary, path: Path) -> None:
    """Raises PipelineError where it cannot be written."""
    files.write(path, page(summary).encode(), PipelineError)


def _slider(result: Result | None) -> str:
    if result is None:
        return ""
    frame = result.frame.picture()
    shown = frame if result.picture is None else result.picture
    marked = blocks_on(result)
    if shown.shape[:2] != frame.shape[:2]:
        frame, marked = (nearest(p, shown.shape[:2]) for p in (frame, marked))
    plain, blocks, over = (f"data:image/jpeg;base64,{_jpeg(p)}" for p in (frame, marked, shown))
    return (
        f"<h2>Frame {result.frame.index}: left of the slider as it came, right of it the result</h2>"
        f"<div class='pair'><img id='plain' src='{plain}' alt='frame'>"
        f"<img id='marked' class='none' src='{blocks}' alt='active blocks'>"
        f"<img id='over' class='over' src='{over}' alt='result'></div>"
        "<input id='bar' type='range' min='0' max='100' value='50' aria-label='slider'>"
        "<label><input id='blocks' type='checkbox'> active blocks</label>"
        f"<script>{SCRIPT}</script>"
    )


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
    """One curve as SVG, from 0 up."""
    width, height = PLOT
    values = [factor * v for v in series.points()]
    top = max([*values, 1e-9])
    step = width / max(len(values) - 1, 1)
    line = " ".join(f"{k * step:.1f},{height - (height - 12) * v / top:.1f}" for k, v in enumerate(values))
    return (
        f"<figure style='margin:0'><svg viewBox='0 0 {width} {height}' width='{width}' height='{height}' role='img'>"
        f"<title>{escape(name)}</title><polyline points='{line}' fill='none' stroke='#c33' stroke-width='1.5'/>"
        f"<text x='4' y='11' font-size='11' fill='#777'>{top:.3g}</text></svg>"
        f"<figcaption>{escape(name)}; mean {factor * series.mean:.3g}, {series.count} frames</figcaption></figure>"
    )
