"""Videos and folders of pictures. Each file is written beside its place and moved there once it is whole."""

from __future__ import annotations

import errno
import io
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sbnet import files
from sbnet.apps.sound import Sound
from sbnet.apps.video import BT601, BT709, FULL, SCALERS, UNKNOWN, VideoError, VideoInfo, matrix_of, open_film, pyav
from sbnet.files import Part

FORMATS = {".mp4": "mp4", ".mkv": "matroska", ".mov": "mov", ".avi": "avi", ".gif": "gif"}
NVENC = "h264_nvenc"
LIMITED = 1  # FFmpeg's number of the range 16 to 235
ENCODERS = ("x264", "nvenc")
PACKERS = min(8, os.cpu_count() or 1)  # PNG files that are packed at a time


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

    def drop(self) -> None:
        """From now on nothing is written."""
        self.error = self.error or OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))

    def _attempt(self, call: Any, *arguments: Any) -> None:
        if self.error is None:
            try:
                call(*arguments)
            except OSError as error:
                self.error = error


FINEST = 90_000  # units of a second, for times of frames whose source names none
TIMED = (".mp4", ".mkv", ".mov")  # that hold a time a frame


class VideoWriter:
    """Writes pictures [H,W,3] uint8 of one size into a video file. A context manager: the file is there, whole, once it
    is left without an exception; otherwise what was there before stays.

    Args:
        rate: pictures a second; of those that come with a time, the mean.
        like: the film whose colours and shape of pixels the file has.
        sound: copy the sound of that film, as far as the pictures go.
        held: go on after so many pictures that `path` holds.
        reads: files that are read meanwhile; `path` is none of them.
        encoder: of films but .gif: "x264", on the host, or "nvenc", the hardware of NVIDIA's cards that have it.

    Attributes:
        notes: what could not be kept.
    """

    def __init__(
        self, path: Path, rate: Fraction, like: VideoInfo | None = None, sound: bool = False,
        reads: Sequence[Any] = (), held: int = 0, encoder: str = "x264",
    ) -> None:  # fmt: skip
        self._encoder = _encoder_of(encoder)
        self.path, self.rate, self.notes = path, rate, list[str]()
        self._like, self._av = like, pyav()
        self._part = Part(path, reads, VideoError)
        self._sink = _Sink(self._part.file)
        self._container = self._av.open(self._sink, "w", format=FORMATS[path.suffix.lower()])
        self._stream: Any = None
        self._wanted = sound
        self._sound: Sound | None = None
        self._convert = self._av.video.reformatter.VideoReformatter().reformat
        self._matrix, self._range = 0, LIMITED
        self._base, self._last, self._count = 1 / rate, -1, held
        self._zero: Fraction | None = None  # seconds of the source that are 0 here
        self._lead: Fraction | None = None  # by which its first picture comes later than the rate says
        self._after: Fraction | None = None  # seconds, of the last packet that was held

    def _start(self, height: int, width: int, size: tuple[int, int], timed: bool) -> None:
        suffix, like = self.path.suffix.lower(), self._like
        if suffix == ".gif":
            codec, pixels = "gif", "rgb8"
        else:
            codec, pixels = self._encoder, "yuv420p"
        self._stream = stream = self._container.add_stream(codec, rate=self.rate)
        stream.height, stream.width, stream.pix_fmt = height, width, pixels
        if timed and suffix == ".gif":
            stream.time_base = stream.codec_context.time_base = self._base = Fraction(1, 100)  # all that it has
        elif timed and suffix in TIMED:
            base = like.time_base if like and 0 < like.time_base <= Fraction(1, 1000) else Fraction(1, FINEST)
            stream.time_base = stream.codec_context.time_base = self._base = base
        context = stream.codec_context
        if codec != "gif":
            self._matrix = matrix_of(like.matrix if like else UNKNOWN, height, width)
            self._range = FULL if like and like.full else LIMITED
            context.colorspace, context.color_range = self._matrix, self._range
            usual = self._matrix if self._matrix in (BT709, BT601) else UNKNOWN  # one number names all three
            context.color_primaries = like.primaries if like and like.primaries != UNKNOWN else usual
            context.color_trc = like.transfer if like and like.transfer != UNKNOWN else usual
        if like and like.aspect != 1:
            # Of a frame that was scaled by different factors the pixels' shape changes; the film's own does not.
            shape = Fraction(like.width, like.height) / Fraction(size[1], size[0])
            context.sample_aspect_ratio = stream.sample_aspect_ratio = like.aspect * shape
        if codec == "libx264":
            stream.options = {"preset": "veryfast", "crf": "20"}
            # PyAV's own choice, slices of each frame, keeps few cores busy; films need no short delay.
            stream.thread_type = "FRAME"
        elif codec == NVENC:
            stream.options = {"preset": "p4", "rc": "vbr", "cq": "20"}
        elif codec == "mpeg4":
            stream.bit_rate = 4 * height * width * int(self.rate) // 10
        if self._wanted and like and like.path and suffix != ".gif":
            self._sound = Sound(like.path, self._container, like.start, self.notes)
        if self._count:
            self._container.start_encoding()
            self._copy_held()

    def _copy_held(self) -> None:
        """Puts the packets of the film that is there before those that come."""
        container, held = open_film(self.path)
        with container:
            old, new = held.codec_context, self._stream.codec_context
            same = (old.name, old.width, old.height) == ("h264", new.width, new.height)
            if not (same and _has_sets(new.extradata or b"", old.extradata or b"")):
                raise VideoError(f"{self.path}: resume: expected a film of the same size and settings")
            times = [packet.pts for packet in container.demux(held) if packet.size]
            due = _due(times)
            container.seek(0)
            # Formats that hold no times below 0 have moved all for sound that begins there.
            first = self._like.first - self._like.start if self._like else 0.0
            moved = min(times, default=0) - round(first / held.time_base)
            # Files hold lengths of units, encoders write start codes: what the new file is told to expect.
            units = self._av.BitStreamFilterContext("h264_mp4toannexb", held)
            packets = (one for given in container.demux(held) if given.size for one in units.filter(given))
            for packet, dts in zip(packets, due, strict=True):
                packet.dts = (dts if packet.dts is None else packet.dts) - moved  # Matroska has none
                packet.pts -= moved
                self._after = packet.dts * packet.time_base
                self._last = max(self._last, round(packet.pts * packet.time_base / self._base))
                packet.stream = self._stream
                self._container.mux(packet)

    def write(self, picture: np.ndarray, time: float | None = None, size: tuple[int, int] | None = None) -> None:
        """Adds a picture.

        Args:
            time: seconds from the start; None: one step of the rate after the picture before.
            size: (height, width) of the frame that it shows, where it is a montage.

        Raises:
            VideoError: the disk is full, the picture cannot be encoded, or its time is not the rate's in a format that
                has but one.
        """
        shown = size or (picture.shape[0], picture.shape[1])
        if picture.shape[0] % 2 or picture.shape[1] % 2:
            # The video formats halve the colour planes: one black row or column where a side is odd.
            picture = np.pad(picture, [(0, picture.shape[0] % 2), (0, picture.shape[1] % 2), (0, 0)])
        if self._stream is None:
            self._start(picture.shape[0], picture.shape[1], shown, time is not None)
        # Not copied: `encode` converts it before it returns.
        frame = self._av.VideoFrame.from_numpy_buffer(np.ascontiguousarray(picture), format="rgb24")
        if self._matrix:
            frame = self._convert(
                frame, format="yuv420p", dst_colorspace=SCALERS[self._matrix], dst_color_range=self._range
            )
            frame.colorspace, frame.color_range = self._matrix, self._range
        frame.pts, frame.time_base = self._pts(time), self._base
        self._count += 1
        self._encode(frame)
        if self._sound is not None:
            self._sound.until(float((self._last + 1) * self._base))

    def _pts(self, time: float | None) -> int:
        """The time of the next picture, in units of the stream's."""
        suffix, steady = self.path.suffix.lower(), self._count / self.rate
        if time is None:
            at = steady
        else:
            # A film begins at its own start; what comes without a file, as a stream does, with its first picture.
            self._zero = Fraction(self._like.start if self._like else time) if self._zero is None else self._zero
            at = Fraction(time) - self._zero
            self._lead = at - steady if self._lead is None else self._lead
            if suffix == ".avi" and abs(at - self._lead - steady) > 1 / self.rate:
                raise VideoError(
                    f"{self.path}: expected frames at one rate, which is all that AVI has, got a frame at "
                    f"{float(at):.3f} s; {', '.join(TIMED)} keep times"
                )
        at = steady if suffix == ".avi" else max(at, Fraction(0))
        self._last = max(self._last + 1, round(at / self._base))
        return self._last

    def _encode(self, frame: Any) -> None:
        try:
            packets = self._stream.encode(frame)
            for packet in packets if self._after is not None else ():
                # An encoder's first packets are due before its first frame: not before the last that was held.
                if packet.dts * packet.time_base <= self._after:
                    packet.dts = min(packet.pts, int(self._after / packet.time_base) + 1)
                self._after = packet.dts * packet.time_base
            self._container.mux(packets)
        except self._av.error.FFmpegError as error:
            raise self._part.failed(error) from None
        if self._sink.error is not None:
            raise self._part.failed(self._sink.error)

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None and self._stream is not None:
                if self._sound is not None:
                    self._sound.until(float(self._last * self._base + 1 / self.rate))
                self._encode(None)
            else:
                self._sink.drop()
            self._container.close()
            if kind is None and self._stream is not None:
                if self._sink.error is not None:
                    raise self._part.failed(self._sink.error)
                self._part.keep()
        finally:
            if self._sound is not None:
                self._sound.close()
            self._part.drop()


def _encoder_of(name: str) -> str:
    """FFmpeg's name of an encoder of ENCODERS.

    Raises:
        VideoError: there is no such one, or no card that has it.
    """
    av = pyav()
    if name not in ENCODERS:
        raise VideoError(f"encoder: expected one of {', '.join(ENCODERS)}, got {name!r}")
    if name != "nvenc":
        return "libx264" if "libx264" in av.codecs_available else "mpeg4"
    try:
        tried = av.CodecContext.create(NVENC, "w")
        tried.width, tried.height, tried.pix_fmt, tried.time_base = 256, 256, "yuv420p", Fraction(1, 25)
        tried.open()
    except (av.error.FFmpegError, ValueError, OSError) as error:
        raise VideoError(
            f"encoder nvenc: this machine's cards, or PyAV, do not have it ({files.reason(error)})"
        ) from None
    return NVENC


def _due(times: list[int]) -> list[int]:
    """When packets with these times of showing, in their order in a file, are to be decoded."""
    shown = sorted(times)
    places = {time: k for k, time in enumerate(shown)}
    late = max((k - places[time] for k, time in enumerate(times)), default=0)  # places by which one stands too late
    step = shown[1] - shown[0] if len(shown) > 1 else 1
    return [shown[k - late] if k >= late else shown[0] - (late - k) * step for k in range(len(times))]


def _has_sets(extradata: bytes, box: bytes) -> bool:
    """Has an encoder's extradata all parameter sets of an avcC box, which a film's file has?"""
    at, sets = 5, []
    for mask in (31, 255):  # how many sequences there are, how many pictures
        count, at = (box[at] & mask if at < len(box) else 0), at + 1
        for _ in range(count):
            length = int.from_bytes(box[at : at + 2], "big")
            sets.append(box[at + 2 : at + 2 + length])
            at += 2 + length
    return bool(sets) and all(one and one in extradata for one in sets)


class PictureWriter:
    """Writes pictures as numbered PNG files into a folder, some at a time. A context manager; a picture that cannot be
    written is raised by a later `write`, or at the end."""

    def __init__(self, folder: Path, reads: Sequence[Any] = (), held: int = 0) -> None:
        try:
            from PIL import Image
        except ImportError:
            raise VideoError("writing pictures needs Pillow: pip install 'sbnet[video]'") from None
        self._image = Image
        self.folder, self._count = folder, held
        self._pool = ThreadPoolExecutor(PACKERS, "sbnet-png")
        self._under_way: deque[Future[None]] = deque()
        files.make_folder(folder, folder, VideoError)
        if any(files.is_same(folder, above) for above in {Path(read).parent for read in reads}):
            raise VideoError(f"{folder}: expected another name than the source's folder")
        files.watch()
        if not os.access(folder, os.W_OK | os.X_OK):
            raise VideoError(f"{folder}: cannot be written ({os.strerror(errno.EACCES)})")

    def write(self, picture: np.ndarray) -> None:
        """picture: [H,W,3], or [H,W,4] with an opacity; stays as it is until the writer is left."""
        self._under_way.append(self._pool.submit(self._save, self.folder / f"{self._count:05d}.png", picture))
        self._count += 1
        while len(self._under_way) > PACKERS:
            self._under_way.popleft().result()

    def _save(self, path: Path, picture: np.ndarray) -> None:
        with Part(path, error=VideoError) as part:
            file = io.BytesIO()
            # A third of the time of Pillow's own level, a tenth more bytes.
            self._image.fromarray(picture).save(file, "PNG", compress_level=1)
            part.write(file.getvalue())

    def __enter__(self) -> PictureWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown()
        if kind is None:
            for one in self._under_way:
                one.result()
            files.settle(self.folder)


def open_writer(
    path: Path, rate: Fraction, like: VideoInfo | None = None, sound: bool = False, reads: Sequence[Any] = (),
    held: int = 0, encoder: str = "x264",
) -> VideoWriter | PictureWriter:  # fmt: skip
    """A video file where the name ends as one, else a folder of PNG files. held: go on after so many pictures."""
    if path.suffix.lower() in FORMATS:
        return VideoWriter(path, rate, like, sound, reads, held, encoder)
    if path.suffix and not path.is_dir():
        endings = ", ".join(FORMATS)
        raise VideoError(f"{path}: expected a name that ends in {endings}, .jsonl, or a folder (no ending) for PNGs")
    return PictureWriter(path, reads, held)
