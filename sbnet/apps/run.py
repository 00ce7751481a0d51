"""What `sbnet run` does: frames through the job, pictures to the writer, the closing table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from sbnet.apps import video, writers
from sbnet.apps.machine import device_name
from sbnet.apps.video_job import Report, VideoJob


class CommandError(Exception):
    """Something the person at the keyboard can put right; the message is one line."""


@dataclass(frozen=True)
class Order:
    """What to run: the options of `sbnet run`.

    Attributes:
        size: (H, W) that frames are scaled to.
        limit: frames at most.
        onnx: a model of `sbnet export` that ONNX Runtime runs.
    """

    source: Path
    target: Path
    size: tuple[int, int]
    limit: int | None
    block: int
    threshold: float
    device: torch.device
    dtype: torch.dtype
    onnx: Path | None


def process(order: Order, info: video.VideoInfo, console: Console) -> tuple[Report, str]:
    """The report, and what ended the film early (or nothing): the frames before are written and in the report.

    Raises:
        CommandError, VideoError: nothing was written.
    """
    expected = min(info.frames, order.limit or info.frames) or order.limit
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with writers.open_writer(order.target, info.rate) as writer, Progress(*columns, console=console) as progress:
        name = escape(order.source.name)
        task = progress.add_task(f"{name}: setting up", total=expected)
        job = _job(order)
        job.told = lambda stage: progress.update(task, description=f"{name}: {stage}")
        fault = ""
        try:
            for frame in video.read_frames(order.source, order.size, order.limit):
                output, active = job.step(frame)
                picture = paint(output)
                writer.write(video.compose(frame, active, job.masked.grid, picture))
                progress.advance(task)
        except video.VideoError as error:
            fault = str(error)
            if fault.startswith(f"{order.target}"):  # the writer's: what it wrote is not whole
                raise
        except (RuntimeError, MemoryError) as error:
            fault = _without_memory(order, error)
        if not job.report.frames:
            raise video.VideoError(fault or f"{order.source}: has no frames")
        progress.update(task, total=job.report.frames)
    return job.report, fault


def _job(order: Order) -> VideoJob:
    # Not at the top: `sbnet info` has to work in a checkout where models/ is not yet installed as sbnet.models.
    from sbnet.models import contour_net

    if order.onnx is not None and not order.onnx.is_file():
        raise CommandError(f"--onnx {order.onnx}: no such file")
    settings = order.size, order.block, order.threshold, order.device, order.dtype
    try:
        return VideoJob(contour_net(), *settings, order.onnx)
    except ImportError as error:
        raise CommandError(f"--onnx: {error}") from None
    except Exception as error:
        if order.onnx is not None and not _is_memory(error):
            # onnxruntime raises classes of its own for models that it refuses
            raise CommandError(f"--onnx {order.onnx}: {str(error).splitlines()[0]}") from None
        raise CommandError(_without_memory(order, error)) from None


def _is_memory(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)


def _without_memory(order: Order, error: Exception) -> str:
    """What to say of an error that means too little memory; any other is raised."""
    if not _is_memory(error):
        raise error
    height, width = order.size
    return f"{order.source}: too little memory for frames of {height}x{width}; expected a smaller --size"


def paint(output: Tensor) -> np.ndarray:
    """[H,W,3] uint8: contours by their direction; of a network with other outputs, their size in grey."""
    from sbnet.models import paint_contours

    if output.shape[1] == 3:
        return paint_contours(output)[0].cpu().numpy()
    size = output[0].float().square().mean(0).sqrt()
    grey = (255 * size / size.max().clamp(min=1e-20)).byte()
    return grey[..., None].expand(-1, -1, 3).contiguous().cpu().numpy()


def closing_table(order: Order, report: Report) -> Table:
    """What it cost and how close it came."""
    height, width = order.size
    kind = str(order.dtype).removeprefix("torch.")
    title = f"{order.source.name}, {height}x{width}, blocks of {order.block}x{order.block}"
    title += f", {kind} on {device_name(order.device)}"
    worst = max(report.checks, key=lambda check: check.largest)
    ratio = max(check.error / check.torch_error if check.torch_error else 0.0 for check in report.checks)
    table = Table(title=escape(title), title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    rows = [
        ("frames", str(report.frames), ""),
        ("mean density", f"{report.mean_density:.1%}", "active blocks"),
        ("dense", f"{report.mean_dense_ms:.3g} ms", f"mean of {len(report.dense_ms)} frames, {report.dense_form}"),
        ("masked", f"{report.mean_masked_ms:.3g} ms", "mean of all frames, motion mask included"),
        ("speed-up", f"{report.speed_up:.2f}x", ""),
        ("largest difference", f"{worst.largest:.2g}", f"from the masked oracle, {len(report.checks)} frames checked"),
        ("rms error", f"{ratio:.2f}x", "of PyTorch's own, 2x is allowed"),
    ]
    for row in rows:
        table.add_row(*row)
    return table
