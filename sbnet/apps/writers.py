"""Videos and folders of pictures. Each file is written beside its place and moved there once it is whole."""

from __future__ import annotations

import errno
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sbnet.apps.video import VideoError, pyav, reason

FORMATS = {".mp4": "mp4", ".mkv": "matroska", ".mov": "mov", ".avi": "avi", ".gif": "gif"}
PACKERS = min(8, os.cpu_count() or 1)  # PNG files that are packed at a time


def _beside(path: Path) -> Path:
    """Where a file is written until it is whole; a symbolic link at `path` is replaced, not followed."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _make_folder(folder: Path, target: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise VideoError(f"{target}: cannot be written ({folder} is not a folder)") from None
    except OSError as error:
        raise VideoError(f"{target}: cannot be written ({reason(error)})") from None


class _Sink:
    """A file that FFmpeg writes to. It never meets an error, as not all of its writers survive one: the first is kept,
    and everything from then on is dropped."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        self._attempt(self._file.write, data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._attempt(self._file.seek, offset, whence)
        return self._file.tell()

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._attempt(self._file.flush)
        self._attempt(self._file.close)

    def drop(self) -> None:
        """From now on nothing is written."""
        self.error = self.error or OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))

    def _attempt(self, call: Any, *arguments: Any) -> None:
        if self.error is None:
            try:
                call(*arguments)
            except OSError as error:
                self.error = error


class VideoWriter:
    """Writes pictures [H,W,3] uint8 of one size into a video file. A context manager: the file is there, whole, once it
    is left without an exception; otherwise what was there before stays."""

    def __init__(self, path: Path, rate: Fraction) -> None:
        self.path, self.rate, self._part = path, rate, _beside(path)
        self._av = pyav()
        if path.is_dir():
            raise VideoError(f"{path}: expected the name of a file, got a folder")
        if path.exists() and not path.is_file():
            raise VideoError(f"{path}: cannot be written (not a regular file)")
        _make_folder(path.parent, path)
        try:
            file = self._part.open("xb", buffering=0)
        except OSError as error:
            raise self._failed(error) from None
        self._file, self._sink = file, _Sink(file)
        self._container = self._av.open(self._sink, "w", format=FORMATS[path.suffix.lower()])
        self._stream: Any = None

    def _failed(self, error: Exception) -> VideoError:
        return VideoError(f"{self.path}: cannot be written ({reason(error)})")

    def _start(self, height: int, width: int) -> None:
        if self.path.suffix.lower() == ".gif":
            codec, pixels = "gif", "rgb8"
        else:
            codec, pixels = ("libx264" if "libx264" in self._av.codecs_available else "mpeg4"), "yuv420p"
        self._stream = self._container.add_stream(codec, rate=self.rate)
        self._stream.height, self._stream.width, self._stream.pix_fmt = height, width, pixels
        if codec == "libx264":
            self._stream.options = {"preset": "veryfast", "crf": "20"}
            # PyAV's own choice, slices of each frame, keeps few cores busy; films need no short delay.
            self._stream.thread_type = "FRAME"
        elif codec == "mpeg4":
            self._stream.bit_rate = 4 * height * width * int(self.rate) // 10

    def write(self, picture: np.ndarray) -> None:
        """Raises VideoError where the disk is full or the picture cannot be encoded."""
        if picture.shape[0] % 2 or picture.shape[1] % 2:
            # The video formats halve the colour planes: one black row or column where a side is odd.
            picture = np.pad(picture, [(0, picture.shape[0] % 2), (0, picture.shape[1] % 2), (0, 0)])
        if self._stream is None:
            self._start(*picture.shape[:2])
        # Not copied: `encode` converts it before it returns.
        self._encode(self._av.VideoFrame.from_numpy_buffer(np.ascontiguousarray(picture), format="rgb24"))

    def _encode(self, frame: Any) -> None:
        try:
            self._container.mux(self._stream.encode(frame))
        except self._av.error.FFmpegError as error:
            raise self._failed(error) from None
        if self._sink.error is not None:
            raise self._failed(self._sink.error)

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None and self._stream is not None:
                self._encode(None)
            else:
                self._sink.drop()
            self._container.close()
            self._sink.close()
            if kind is None and self._stream is not None:
                if self._sink.error is not None:
                    raise self._failed(self._sink.error)
                self._part.replace(self.path)
        finally:
            self._file.close()
            self._part.unlink(missing_ok=True)


class PictureWriter:
    """Writes pictures as numbered PNG files into a folder, some at a time. A context manager; a picture that cannot be
    written is raised by a later `write`, or at the end."""

    def __init__(self, folder: Path) -> None:
        try:
            from PIL import Image
        except ImportError:
            raise VideoError("writing pictures needs Pillow: pip install 'sbnet[video]'") from None
        self._image = Image
        self.folder, self._count = folder, 0
        self._pool = ThreadPoolExecutor(PACKERS, "sbnet-png")
        self._under_way: deque[Future[None]] = deque()
        _make_folder(folder, folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise VideoError(f"{folder}: cannot be written ({os.strerror(errno.EACCES)})")

    def write(self, picture: np.ndarray) -> None:
        """picture: stays as it is until the writer is left."""
        self._under_way.append(self._pool.submit(self._save, self.folder / f"{self._count:05d}.png", picture))
        self._count += 1
        while len(self._under_way) > PACKERS:
            self._under_way.popleft().result()

    def _save(self, path: Path, picture: np.ndarray) -> None:
        part = _beside(path)
        try:
            with part.open("xb") as file:
                # A third of the time of Pillow's own level, a tenth more bytes.
                self._image.fromarray(picture).save(file, "PNG", compress_level=1)
            part.replace(path)
        except OSError as error:
            raise VideoError(f"{path}: cannot be written ({reason(error)})") from None
        finally:
            part.unlink(missing_ok=True)

    def __enter__(self) -> PictureWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown()
        if kind is None:
            for one in self._under_way:
                one.result()


def open_writer(path: Path, rate: Fraction) -> VideoWriter | PictureWriter:
    """A video file where the name ends as one, else a folder of PNG files."""
    if path.suffix.lower() in FORMATS:
        return VideoWriter(path, rate)
    if path.suffix and not path.is_dir():
        endings = ", ".join(FORMATS)
        raise VideoError(f"{path}: expected a name that ends in {endings}, .jsonl, or a folder (no ending) for PNGs")
    return PictureWriter(path)
