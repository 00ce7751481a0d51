"""The sound of a film, copied as it is into another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sbnet.apps.video import opened, pyav
from sbnet.files import reason


class Sound:
    """The sound of a film as streams of `target`; not decoded. `until(seconds)` copies what comes before.

    Args:
        film: the file.
        target: PyAV's container for writing, before its first packet.
        start: seconds at which the film begins, which become 0.
        notes: gets a line for each stream that the format of `target` cannot hold, and for sound that cannot be read.
    """

    def __init__(self, film: Path, target: Any, start: float, notes: list[str]) -> None:
        self._film, self._target, self._start, self._notes = film, target, start, notes
        self._container = opened(film)
        self._streams: dict[int, Any] = {}
        known = target.supported_codecs
        for stream in self._container.streams.audio:
            name = getattr(stream.codec_context, "name", "unknown")
            codec = getattr(getattr(stream.codec_context, "codec", None), "canonical_name", name)
            if not {name, codec} & set(known):
                notes.append(f"sound left out: {target.format.name} holds no {name}; .mkv holds most")
                continue
            self._streams[stream.index] = target.add_stream_from_template(stream)
        self._packets: Iterator[Any] = iter(())
        if self._streams:
            self._packets = self._container.demux([self._container.streams[k] for k in self._streams])
        self._next: Any = None

    def until(self, seconds: float) -> None:
        """Copies the packets that begin before a time of the target."""
        while (packet := self._next or self._read()) is not None:
            self._next = packet
            if float(packet.pts * packet.time_base) - self._start >= seconds:
                return
            self._next = None
            shift = round(self._start / packet.time_base)
            packet.pts -= shift
            packet.dts = packet.pts if packet.dts is None else packet.dts - shift
            packet.stream = self._streams[packet.stream.index]
            self._target.mux(packet)

    def _read(self) -> Any:
        try:
            for packet in self._packets:
                if packet.pts is not None and packet.size:
                    return packet
        except (pyav().error.FFmpegError, OSError, ValueError) as error:
            self._notes.append(f"sound cut short: {self._film} cannot be read on ({reason(error)})")
        self._packets = iter(())
        return None

    def close(self) -> None:
        self._container.close()
