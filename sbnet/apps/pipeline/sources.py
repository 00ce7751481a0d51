"""Where frames come from: films, cameras, pictures, arrays, anything that can be iterated over."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sbnet.apps import video
from sbnet.apps.pipeline.frames import Frame, PipelineError, unit
from sbnet.apps.pipeline.hardware import Decoding
from sbnet.apps.surface import surface_of
from sbnet.files import reason

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".gif")
ANIMATED = ("PNG", "WEBP", "GIF", "TIFF")  # whose further pictures are frames; a phone's JPEG has previews
VECTORS = ("h264", "mpeg4", "msmpeg4v2", "msmpeg4", "mpeg1video", "mpeg2video", "h263")  # FFmpeg exports theirs
URL = re.compile("[A-Za-z][A-Za-z0-9+.-]+://")
Size = tuple[int, int]


class Source:
    """Frames in their order: iterate over it. A frame that could not be read has a fault in the place of pixels.

    Attributes:
        name: for people.
        rate: frames a second.
        length: how many frames there are, 0 if unknown.
        film: what a film's file says of it.
        files: what it reads.
        decoding: of films and streams, who decodes them.
    """

    def __init__(
        self, frames: Callable[[], Iterator[Frame]], name: str, rate: Fraction, length: int = 0,
        film: video.VideoInfo | None = None, files: Sequence[Path] = (), decoding: Decoding | None = None,
    ) -> None:  # fmt: skip
        self._frames, self.name, self.rate, self.length = frames, name, rate, length
        self.film, self.files, self.decoding = film, files, decoding

    @property
    def decoder(self) -> tuple[str, str]:
        """Who decoded its frames for a GPU, and why the hardware did not; nothing where that is no question."""
        found = self.decoding
        return ("", "") if found is None or found.device.type != "cuda" else (found.ran, found.why)

    @property
    def prompt(self) -> bool:
        """Is no frame after the first long in coming? (Those of a file that hardware decodes.)"""
        return self.film is not None and self.decoding is not None and self.decoding.ran == "NVDEC"

    def __iter__(self) -> Iterator[Frame]:
        return self._frames()


def open_source(
    given: Any, size: Size | None = None, read: Callable[[Path], Any] | None = None,
    pixels: Callable[[Any, Size | None], np.ndarray] | None = None, decoding: Decoding | None = None,
) -> Source:  # fmt: skip
    """The source that `given` names or holds.

    Args:
        given: a film's path, a URL of a stream, a camera ("/dev/video0", or its number), a folder or glob of pictures,
            one picture, an array [N,H,W,C], or anything that yields arrays [H,W,C], tensors [C,H,W] or Frames.
        size: (height, width) that films and pictures are scaled to.
        read: reads one file of a folder or glob, for what is no picture.
        pixels: (Pillow's picture, size) -> what a picture's frame holds, in the place of its colours.
        decoding: who decodes films and streams; None: the host.

    Raises:
        PipelineError, video.VideoError: there is no such thing.
    """
    if isinstance(given, Source):
        return given
    if isinstance(given, int) and not isinstance(given, bool):
        given = f"/dev/video{given}"
    if isinstance(given, (str, os.PathLike)):
        return _open_path(os.fspath(given), size, read, pixels or _pixels_of, decoding or Decoding())
    if isinstance(given, Iterable):
        length = len(given) if isinstance(given, Sized) else 0
        return Source(lambda: _of_arrays(given), type(given).__name__, Fraction(25), length)
    raise PipelineError(
        f"source: expected a path, a URL, a camera's number or something to iterate over, got {type(given).__name__}"
    )


def _open_path(
    text: str, size: Size | None, read: Callable[[Path], Any] | None,
    pixels: Callable[[Any, Size | None], np.ndarray], decoding: Decoding,
) -> Source:  # fmt: skip
    if text.isdecimal() and not Path(text).exists():  # as it is typed at a command
        text = f"/dev/video{text}"
    if URL.match(text) or text.startswith("/dev/video"):
        return _stream(text, size, decoding)
    path = Path(text)
    if path.is_dir():
        listed = (p for p in path.iterdir() if read is not None or p.suffix.lower() in PICTURES)
        names = in_order(p for p in listed if not p.is_dir())
    elif path.is_file() and (read is not None or (path.suffix.lower() in PICTURES and path.suffix.lower() != ".gif")):
        names = [path]
    elif any(c in text for c in "*?[") and not path.exists():
        names = in_order(p for p in map(Path, glob.glob(text, recursive=True)) if not p.is_dir())
    else:
        info = video.video_info(path)

        def frames() -> Iterator[Frame]:
            return decoding.frames(
                path.name, lambda: video.open_film(path), lambda: _of_film(path, size, decoding), size
            )

        return Source(frames, path.name, info.rate, info.frames, info, [path], decoding)
    if not names:
        raise PipelineError(f"{text}: expected pictures ({', '.join(PICTURES)}), found none")
    load = read or (lambda p: read_pictures(p, size, pixels))
    rate = _rate_of(path) if read is None and names == [path] else Fraction(25)
    return Source(lambda: _of_files(names, load), path.name, rate, len(names) if len(names) > 1 else 0, files=names)


def in_order(paths: Iterable[Path]) -> list[Path]:
    """Sorted as a person counts: frame2 before frame10."""

    def key(path: Path) -> Any:
        parts = re.split(r"([0-9]+)", path.as_posix())
        return [int(part) if k % 2 else part for k, part in enumerate(parts)], path

    return sorted(paths, key=key)


def read_picture(path: Path, size: Size | None = None) -> np.ndarray:
    """The first picture of a file: [H,W,3] or, with an alpha channel, [H,W,4] uint8, upright; of more than 8 bits a
    channel [H,W,3] float32, as `unit` makes them.

    Raises:
        ValueError: it cannot be read.
    """
    return next(read_pictures(path, size)).pixels


def read_pictures(
    path: Path, size: Size | None = None, pixels: Callable[[Any, Size | None], np.ndarray] | None = None
) -> Iterator[Frame]:
    """All pictures of a file, as `read_picture` gives one, or as `pixels` does; of an animation with their times.

    Raises:
        ValueError: one of them cannot be read.
    """
    image, sequence = _pillow()
    try:
        with image.open(path) as file:
            time = 0.0
            count = _count(file, sequence)
            for index in range(count):
                file.seek(index)
                yield Frame(index, (pixels or _pixels_of)(file, size), time=time if count > 1 else None)
                time += (file.info.get("duration") or 40) / 1e3
    except image.DecompressionBombError:
        most = 2 * image.MAX_IMAGE_PIXELS
        raise ValueError(f"more than {most} pixels; run_large reads pictures larger than memory") from None
    except Exception as error:  # Pillow's readers raise whatever a broken file leads them to
        raise ValueError((str(error).splitlines() or [""])[0] or type(error).__name__) from None


def _pillow() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageSequence
    except ImportError:
        raise PipelineError("reading pictures needs Pillow: pip install 'sbnet[video]'") from None
    return Image, ImageSequence


def _count(file: Any, sequence: Any) -> int:
    """How many frames a file of pictures holds: pages of a TIFF only where all are of one size, as those of smaller
    copies are not."""
    count = getattr(file, "n_frames", 1) if file.format in ANIMATED else 1
    if count > 1 and file.format == "TIFF" and len({page.size for page in sequence.Iterator(file)}) > 1:
        count = 1
    file.seek(0)
    return count


def _rate_of(path: Path) -> Fraction:
    """Pictures a second of an animation; 25 of one picture, and of what cannot be read: who reads it says so."""
    image, sequence = _pillow()
    try:
        with image.open(path) as file:
            count = _count(file, sequence)
            times = [frame.info.get("duration") or 40 for frame in sequence.Iterator(file)][:count]
    except Exception:
        return Fraction(25)
    return Fraction(1000 * count, max(1, round(sum(times)))) if count > 1 else Fraction(25)


def _pixels_of(file: Any, size: Size | None) -> np.ndarray:
    from PIL import Image, ImageOps

    picture = ImageOps.exif_transpose(file)
    deep = picture.mode.startswith("I") or picture.mode == "F"
    if deep:  # 16 or 32 bits, which Pillow would cut off at 255
        numbers = unit(np.asarray(picture))
        if size is not None and picture.size != size[::-1]:
            numbers = np.asarray(Image.fromarray(numbers, "F").resize(size[::-1], Image.Resampling.BILINEAR))
        return np.repeat(numbers[..., None], 3, 2)
    picture = picture.convert("RGBA" if "A" in picture.getbands() or "transparency" in file.info else "RGB")
    if size is not None and picture.size != size[::-1]:
        picture = picture.resize(size[::-1], Image.Resampling.BILINEAR)
    return np.array(picture)


def _of_files(names: list[Path], load: Callable[[Path], Any]) -> Iterator[Frame]:
    """The frames of files one after another. Files of one name in several folders are told by their folders."""
    alike = len({path.name for path in names}) < len(names)
    above = Path(os.path.commonpath([path.absolute().parent for path in names]))
    index = 0
    for path in names:
        name = path.absolute().relative_to(above).as_posix() if alike else path.name
        try:
            if not path.is_file():  # a pipe would wait for ever
                raise ValueError("not a regular file" if path.exists() else "no such file")
            found = load(path)
            for frame in found if isinstance(found, Iterator) else [found]:
                made = frame if isinstance(frame, Frame) else Frame(0, frame)
                made.name = name if made.index == 0 else f"{name}, frame {made.index}"
                made.index, made.path = index, path
                yield made
                index += 1
        except (OSError, ValueError, SyntaxError) as error:
            yield Frame(index, None, name, fault=(str(error).splitlines() or [""])[0] or type(error).__name__)
            index += 1


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


def _of_film(path: Path, size: Size | None, decoding: Decoding) -> Iterator[Frame]:
    """Frames of a file, one by one: a packet that cannot be decoded is a broken frame, and the next is tried. So is the
    end of a film that is shorter than its header promises."""
    container, stream = video.open_film(path)
    with container:
        count, end, broken = 0, 0.0, False
        for frame in _decoded(container, stream, size, path.name, decoding):
            yield frame
            count, end, broken = count + 1, frame.time or end, bool(frame.fault)
        if not broken and video.ends_early(stream, count, end):
            fault = f"the film ends after {count} of {stream.frames} frames: the file is not complete"
            yield Frame(count, None, f"{path.name}, frame {count}", fault=fault)


def _stream(address: str, size: Size | None, decoding: Decoding) -> Source:
    av = video.pyav()
    options: dict[str, Any] = {"timeout": (10.0, 30.0)} if URL.match(address) else {"format": "v4l2"}
    try:
        container = av.open(address, **options)
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise PipelineError(f"{address}: cannot be opened ({reason(error)})") from None
    stream = video.film_of(container)
    if stream is None:
        container.close()
        raise PipelineError(f"{address}: has no video stream")

    def frames() -> Iterator[Frame]:
        with container:
            yield from decoding.frames(
                address,
                lambda: (container, stream),
                lambda: _decoded(container, stream, size, address, decoding),
                size,
                live=True,
            )

    return Source(frames, address, Fraction(stream.average_rate or 25), stream.frames, decoding=decoding)


def _decoded(
    container: Any, stream: Any, size: Size | None, name: str, decoding: Decoding
) -> Iterator[Frame]:  # fmt: skip
    errors = video.pyav().error.FFmpegError, OSError, ValueError
    stream.thread_type = "AUTO"
    if decoding.vectors:
        stream.codec_context.options = {"flags2": "+export_mvs"}
    exports = decoding.vectors and stream.codec_context.name in VECTORS
    upright, on_gpu = video.Upright(), decoding.device.type == "cuda" and size is None
    index = 0
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets)
        except StopIteration:
            return
        except errors as error:
            yield Frame(index, None, f"{name}, frame {index}", fault=reason(error))
            return  # nothing can be read past this point
        try:
            found = packet.decode()
        except errors as error:
            yield Frame(index, None, f"{name}, frame {index}", fault=reason(error))
            index += 1
            continue
        for picture in found:
            try:
                motion = video.motion_of(picture) if exports else None
                surface = surface_of(picture, upright) if on_gpu else None
                pixels = upright(picture, size) if surface is None else surface
                yield Frame(index, pixels, str(index), picture.time, motion=motion)
            except errors as error:
                yield Frame(index, None, f"{name}, frame {index}", fault=reason(error))
            index += 1
