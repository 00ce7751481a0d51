"""What `sbnet run` does: a pipeline with a progress bar, and its closing table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from sbnet import files
from sbnet.apps.pipeline import films
from sbnet.apps.pipeline.frames import PipelineError
from sbnet.apps.pipeline.pipeline import Pipeline
from sbnet.apps.pipeline.summary import Summary
from sbnet.progress import drawing


def check_targets(targets: Sequence[Path], source: str, overwrite: bool) -> None:
    """Raises PipelineError where an output is the source, is named twice, or is there and may not be replaced."""
    for k, target in enumerate(targets):
        if files.is_same(target, source):
            raise PipelineError(f"--output: expected another name than the source, got {target}")
        if target.absolute() in [other.absolute() for other in targets[:k]]:
            raise PipelineError(f"--output: expected different names, got {target} twice")
        there = (target.suffix and target.is_file()) or (target.is_dir() and any(target.glob("[0-9]*.png")))
        if there and not overwrite:
            what = "holds pictures" if target.is_dir() else "is there"
            raise PipelineError(f"{target}: {what} already; --overwrite replaces it")


def run(pipeline: Pipeline, console: Console) -> Summary:
    """Runs it under a bar that shows density and frames a second, and prints the table."""
    columns = (
        _Stage(pipeline), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[now]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with drawing(), Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=pipeline.limit or pipeline.source.length or None, now="")

        def told(summary: Summary, expected: int) -> None:
            shares, times = summary.densities, summary.ms
            now: dict[str, Any] = {}
            if shares.count and times.mean:
                now["now"] = f"{shares.mean:.0%} active, {1e3 / times.mean:.3g} networks/s"
            progress.update(task, advance=1, **now)

        summary = pipeline.run(told)
        progress.update(task, total=summary.frames, completed=summary.frames)
    console.print(summary.table())
    return summary


class _Stage(ProgressColumn):
    """What the pipeline is doing, asked whenever the bar is drawn: a long step says so while it lasts."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self._pipeline = pipeline

    def render(self, task: Task) -> Text:
        summary = self._pipeline.summary
        return Text(f"{self._pipeline.source.name}: {summary.stage if summary else 'setting up'}")


def run_films(source: str, network: str, out: Path, console: Console, **options: Any) -> films.Films:
    """A folder of films under a bar, a line for each that is done."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with drawing(), Progress(*columns, console=console) as progress:
        task = progress.add_task(escape(source), total=None)

        def told(row: dict[str, Any], count: int) -> None:
            progress.update(task, advance=1, total=count)
            what = row["fault"] or f"{row['frames']} frames, {row['density']:.0%} active, {row['fps']:.3g} frames/s"
            console.print(f"{escape(row['film'])}: {escape(what)}", soft_wrap=True)

        try:
            found = films.run_films(source, network, out, told=told, **options)
        except KeyboardInterrupt:
            console.print(f"{escape(source)}: ended by Ctrl-C; the same command goes on with what is left")
            raise
    console.print(escape(str(found)), soft_wrap=True)
    return found
