"""What earlier runs left of a film: how many frames its outputs hold, so that a run goes on after them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sbnet.apps import video
from sbnet.apps.pipeline.frames import PipelineError
from sbnet.apps.pipeline.sinks import LINES
from sbnet.apps.writers import FORMATS, TIMED


def frames_held(sinks: Any) -> int:
    """Frames that all outputs hold: those that Ctrl-C, a limit or a broken frame ended, or none are there.

    Raises:
        PipelineError: they hold different numbers of frames, or one is of a kind that cannot be gone on with.
    """
    listed = sinks if isinstance(sinks, (list, tuple)) else [sinks]
    paths = [Path(one) for one in listed if isinstance(one, (str, os.PathLike))]
    counts = {path: _held(path) for path in paths}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{path} {count}" for path, count in counts.items())
        raise PipelineError(f"resume: expected outputs of the same number of frames, got {told}")
    return next(iter(counts.values()), 0)


def _held(path: Path) -> int:
    suffix = path.suffix.lower()
    if suffix in FORMATS and suffix not in TIMED:
        raise PipelineError(f"{path}: resume: expected one of {', '.join((*TIMED, *LINES))} or a folder, got {suffix}")
    if not path.exists():
        return 0
    if suffix in LINES:
        return path.read_bytes().count(b"\n")
    if suffix in TIMED:
        container, stream = video.open_film(path)
        with container:
            return sum(1 for packet in container.demux(stream) if packet.size)
    count = 0
    while (path / f"{count:05d}.png").is_file():
        count += 1
    return count
