"""Where frames come from: films, cameras, pictures, arrays, anything that can be iterated over."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sized
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sbnet.apps import video
from sbnet.apps.pipeline.frames import Frame, PipelineError

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".gif")
URL = re.compile("[A-Za-z][A-Za-z0-9+.-]+://")
Size = tuple[int, int]


class Source:
    """Frames in their order: iterate over it. A frame that could not be read has a fault in the place of pixels.

    Attributes:
        name: for people.
        rate: frames a second.
        length: how many frames there are, 0 if unknown.
    """

    def __init__(self, frames: Callable[[], Iterator[Frame]], name: str, rate: Fraction, length: int = 0) -> None:
        self._frames, self.name, self.rate, self.length = frames, name, rate, length

    def __iter__(self) -> Iterator[Frame]:
        return self._frames()


def open_source(given: Any, size: Size | None = None, read: Callable[[Path], Any] | None = None) -> Source:
    """The source that `given` names or holds.

    Args:
        given: a film's path, a URL of a stream, a camera ("/dev/video0", or its number), a folder or glob of pictures,
            one picture, an array [N,H,W,C], or anything that yields arrays [H,W,C], tensors [C,H,W] or Frames.
        size: (height, width) that films and pictures are scaled to.
        read: reads one file of a folder or glob, for what is no picture.

    Raises:
        PipelineError, video.VideoError: there is no such thing.
    """
    if isinstance(given, Source):
        return given
    if isinstance(given, int) and not isinstance(given, bool):
        given = f"/dev/video{given}"
    if isinstance(given, (str, os.PathLike)):
        return _open_path(os.fspath(given), size, read)
    if isinstance(given, Iterable):
        length = len(given) if isinstance(given, Sized) else 0
        return Source(lambda: _of_arrays(given), type(given).__name__, Fraction(25), length)
    raise PipelineError(
        f"source: expected a path, a URL, a camera's number or something to iterate over, got {type(given).__name__}"
    )


def _open_path(text: str, size: Size | None, read: Callable[[Path], Any] | None) -> Source:
    if text.isdecimal() and not Path(text).exists():  # as it is typed at a command
        text = f"/dev/video{text}"
    if URL.match(text) or text.startswith("/dev/video"):
        return _stream(text, size)
    path = Path(text)
    if path.is_dir():
        names = sorted(p for p in path.iterdir() if read is not None or p.suffix.lower() in PICTURES)
    elif path.is_file() and (read is not None or (path.suffix.lower() in PICTURES and path.suffix.lower() != ".gif")):
        names = [path]
    elif any(c in text for c in "*?[") and not path.exists():
        names = sorted(Path(p) for p in glob.glob(text, recursive=True))
    else:
        info = video.video_info(path)
        return Source(lambda: _of_film(path, size), path.name, info.rate, info.frames)
    if not names:
        raise PipelineError(f"{text}: expected pictures ({', '.join(PICTURES)}), found none")
    load = read or (lambda p: read_picture(p, size))
    return Source(lambda: _of_files(names, load), path.name, Fraction(25), len(names))


def read_picture(path: Path, size: Size | None = None) -> np.ndarray:
    """[H,W,3] or, with an alpha channel, [H,W,4] uint8, upright."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise PipelineError("reading pictures needs Pillow: pip install 'sbnet[video]'") from None
    with Image.open(path) as file:
        picture = ImageOps.exif_transpose(file)
        if picture.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255
            picture = Image.fromarray((np.asarray(picture).clip(0, 65535) // 257).astype(np.uint8))
        picture = picture.convert("RGBA" if "A" in picture.getbands() or "transparency" in file.info else "RGB")
        if size is not None and picture.size != size[::-1]:
            picture = picture.resize(size[::-1], Image.Resampling.BILINEAR)
        return np.array(picture)


def _of_files(names: list[Path], load: Callable[[Path], Any]) -> Iterator[Frame]:
    for index, path in enumerate(names):
        try:
            found = load(path)
            if isinstance(found, Frame):
                found.index, found.name = index, path.name
            yield found if isinstance(found, Frame) else Frame(index, found, path.name)
        except (OSError, ValueError, SyntaxError) as error:  # Pillow raises any of them for what is no picture
            yield Frame(index, None, path.name, fault=str(error).splitlines()[0])


def _of_arrays(given: Iterable[Any]) -> Iterator[Frame]:
    for index, item in enumerate(given):
        is_tensor, is_array = isinstance(item, Tensor), isinstance(item, np.ndarray)
        if isinstance(item, Frame):
            yield item
        elif (is_tensor and item.dim() == 3) or (is_array and item.ndim in (2, 3)):
            yield Frame(index, item, str(index))
        else:
            shape = getattr(item, "shape", "")
            raise PipelineError(
                f"source: item {index}: expected an array [H,W,C] or a tensor [C,H,W], got {type(item).__name__} "
                f"{tuple(shape) if shape else ''}".rstrip()
            )


def _of_film(path: Path, size: Size | None) -> Iterator[Frame]:
    """Frames of a file, one by one: a packet that cannot be decoded is a broken frame, and the next is tried. So is the
    end of a film that is shorter than its header promises."""
    container, stream = video.open_film(path)
    with container:
        count, end, broken = 0, 0.0, False
        for frame in _decoded(container, stream, size, path.name):
            yield frame
            count, end, broken = count + 1, frame.time or end, bool(frame.fault)
        if not broken and video.ends_early(stream, count, end):
            fault = f"the film ends after {count} of {stream.frames} frames: the file is not complete"
            yield Frame(count, None, f"{path.name}, frame {count}", fault=fault)


def _stream(address: str, size: Size | None) -> Source:
    av = video.pyav()
    options: dict[str, Any] = {"timeout": (10.0, 30.0)} if URL.match(address) else {"format": "v4l2"}
    try:
        container = av.open(address, **options)
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise PipelineError(f"{address}: cannot be opened ({video.reason(error)})") from None
    if not container.streams.video:
        container.close()
        raise PipelineError(f"{address}: has no video stream")
    stream = container.streams.video[0]

    def frames() -> Iterator[Frame]:
        with container:
            yield from _decoded(container, stream, size, address)

    return Source(frames, address, Fraction(stream.average_rate or 25), stream.frames)


def _decoded(container: Any, stream: Any, size: Size | None, name: str) -> Iterator[Frame]:
    errors = video.pyav().error.FFmpegError, OSError
    stream.thread_type = "AUTO"
    upright = video.Upright()
    index = 0
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets)
        except StopIteration:
            return
        except errors as error:
            yield Frame(index, None, f"{name}, frame {index}", fault=video.reason(error))
            return  # nothing can be read past this point
        try:
            found = packet.decode()
        except errors as error:
            yield Frame(index, None, f"{name}, frame {index}", fault=video.reason(error))
            index += 1
            continue
        for picture in found:
            yield Frame(index, upright(picture, size), str(index), picture.time)
            index += 1
