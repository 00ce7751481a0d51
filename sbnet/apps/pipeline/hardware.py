"""Frames of films and streams from a hardware decoder, which stay in device memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sbnet.apps import nvdec, video
from sbnet.apps.nvdec import Unit, UnservedError
from sbnet.apps.pipeline.frames import Frame, PipelineError
from sbnet.apps.pipeline.stages import Reader
from sbnet.apps.surface import Look, Surface, look_of
from sbnet.files import reason

DECODERS = ("auto", "host", "nvdec")
Size = tuple[int, int]


@dataclass
class Decoding:
    """Who decodes a source's frames.

    Attributes:
        wanted: of DECODERS; auto: the hardware where it can and gives the host's pictures, which scaled ones are not,
            else the host.
        device: of the pipeline.
        vectors: frames come with the motion vectors of their codec, which the host's decoder alone tells.
        ran: "NVDEC" or "host" once that is decided, "" before. why: the hardware did not.
    """

    wanted: str = "host"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    vectors: bool = False
    ran: str = ""
    why: str = ""

    def __post_init__(self) -> None:
        if self.wanted not in DECODERS:
            raise PipelineError(f"decoder: expected one of {', '.join(DECODERS)}, got {self.wanted!r}")
        if self.wanted == "nvdec" and self.device.type != "cuda":
            raise PipelineError(f"decoder: expected a device cuda for nvdec, got {self.device}")
        if self.wanted == "nvdec" and self.vectors:
            raise PipelineError("decoder: expected host for a mask that reads motion vectors, got nvdec")

    def frames(
        self, name: str, opened: Callable[[], tuple[Any, Any]], host: Callable[[], Iterator[Frame]],
        size: Size | None, live: bool = False,
    ) -> Iterator[Frame]:  # fmt: skip
        """The frames of a film: of the hardware's decoder, or of the host's where it cannot.

        Args:
            name: for people.
            opened: gives the container and the stream; of a film each time anew, and they are closed here.
            host: the host's frames.
            size: (height, width) that they are scaled to.
            live: a camera's or a server's stream, which is not to be read twice.

        Raises:
            PipelineError: the hardware was asked for, and cannot.
        """
        self.ran, self.why = "host", "the mask reads motion vectors" if self.vectors else ""
        scaled = self.wanted == "auto" and size is not None
        if scaled and not self.why:
            self.why = "the host scales frames in another way"
        if self.device.type == "cuda" and self.wanted != "host" and not self.vectors and not scaled:
            try:
                yield from self._hardware(name, opened, size, live)
                return
            except UnservedError as error:
                if self.ran == "NVDEC":
                    raise PipelineError(f"{name}: {error}") from None
                self.why = str(error)
                if self.wanted == "nvdec":
                    raise PipelineError(f"{name}: nvdec: {error}") from None
        yield from host()

    def _hardware(
        self, name: str, opened: Callable[[], tuple[Any, Any]], size: Size | None, live: bool
    ) -> Iterator[Frame]:
        container, stream = opened()
        with nullcontext() if live else container:
            first = None if live else video.first_frame(container, stream)
            nvdec.check_stream(stream, first)
            context = stream.codec_context
            # A frame knows what the container leaves out.
            look = look_of(context if first is None else first, context.pix_fmt, first, size)
        container, stream = opened()
        with nullcontext() if live else container:
            film = _Film(name, container, stream, look, self.device)
            for frame in film:
                self.ran = "NVDEC"
                yield frame
            if not film.shown:
                raise UnservedError("no frame came of it")
            if not live and not film.broken and video.ends_early(stream, film.count, film.end):
                fault = f"the film ends after {film.count} of {stream.frames} frames: the file is not complete"
                yield Frame(film.count, None, f"{name}, frame {film.count}", fault=fault)


def reader_for(device: torch.device) -> Reader:
    """Who reads the films of cameras that hardware decodes, whose pictures stay on this device."""
    return Reader(partial(nvdec.entered, device)) if device.type == "cuda" else Reader()


class _Film:
    """Iterates over the frames of a stream, each with its fault where it has one.

    Attributes:
        count: frames so far. shown: of them with a picture. end: seconds of the last. broken: the last has a fault.
    """

    def __init__(self, name: str, container: Any, stream: Any, look: Look, device: torch.device) -> None:
        self._name, self._container, self._stream, self._look = name, container, stream, look
        self._decoder = nvdec.Decoder(stream.codec_context.name, device)
        self._sent: dict[int, Unit] = {}  # of which no picture has come, by their number
        base = stream.time_base
        self._base = base.numerator, base.denominator
        self.count = self.shown = 0
        self.end, self.broken = 0.0, False

    def __iter__(self) -> Iterator[Frame]:
        errors = video.pyav().error.FFmpegError, OSError, ValueError
        units = nvdec.with_start_codes(self._container.demux(self._stream), self._stream)
        number, fault = 0, ""
        while True:
            try:
                unit = next(units, None)
            except errors as error:
                unit, fault = None, reason(error)  # nothing can be read past this point
            if unit is not None:
                self._sent[number] = unit
            if unit is None or not unit.why:
                yield from self._sending(unit, number)
            if unit is None:
                if self.shown:
                    yield from self._lost(self._sent)
                if fault:
                    yield self._fault(fault)
                return
            number += 1

    def _sending(self, unit: Unit | None, number: int) -> Iterator[Frame]:
        packet, stamp = (None, 0) if unit is None else (unit.packet, _stamp(unit, number))
        try:
            found = self._decoder.send(packet, stamp)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if not self.shown:
                raise UnservedError(nvdec.told(error)) from None
            again = self._again(packet, stamp)
            if again is None:
                if unit is not None:
                    unit.why = nvdec.told(error)
                return
            found = again
        for which, planes in found:
            yield from self._frames(which, planes)

    def _again(self, packet: Any, stamp: int) -> list[tuple[int, Tensor]] | None:
        """What another decoder makes of a packet that one refused, behind what that has left; None: nothing. A decoder
        is of one size of frames, and another size begins with a key frame: of other packets the next is tried."""
        if packet is None or not packet.is_keyframe:
            return None
        found: list[tuple[int, Tensor]] = []
        with suppress(Exception):
            found = self._decoder.send(None, stamp)
        self._decoder.restart()
        try:
            return found + self._decoder.send(packet, stamp)
        except Exception:
            return None

    def _frames(self, stamp: int, planes: Tensor) -> Iterator[Frame]:
        """A picture's frame, after those that should have come before it and did not."""
        number, first, least = -1, -1, 0
        for k, sent in self._sent.items():
            if not sent.why:
                own = _stamp(sent, k)
                if own == stamp:
                    number = k
                if first < 0 or own < least:
                    first, least = k, own
        unit = self._sent.pop(first if number < 0 else number, Unit(None, None, False))
        if unit.pts is not None:
            lost = [k for k, v in self._sent.items() if v.pts is not None and v.pts < unit.pts]
            if lost:
                yield from self._lost(lost)
        if unit.hidden:
            return
        time = None if unit.pts is None else unit.pts * self._base[0] / self._base[1]
        yield Frame(self.count, Surface(planes, self._look, self._decoder.stream), str(self.count), time)
        self.count, self.shown = self.count + 1, self.shown + 1
        self.end, self.broken = time or self.end, False

    def _lost(self, numbers: Iterable[int]) -> Iterator[Frame]:
        """Faults of packets of which no picture came. Those before the first picture refer to what the film does not
        hold."""
        for number in sorted(numbers, key=lambda k: (self._sent[k].pts or 0, k)):
            unit = self._sent.pop(number)
            if self.shown and not unit.hidden:
                yield self._fault(unit.why or "it cannot be decoded")

    def _fault(self, why: str) -> Frame:
        frame = Frame(self.count, None, f"{self._name}, frame {self.count}", fault=why)
        self.count, self.broken = self.count + 1, True
        return frame


def _stamp(unit: Unit, number: int) -> int:
    """What the decoder gives back with a unit's picture."""
    return number if unit.pts is None else unit.pts
