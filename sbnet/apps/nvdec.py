"""NVIDIA's hardware decoder, by PyNvVideoCodec: packets in, pictures in device memory out. Needs the extra `nvdec`."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sbnet.apps.surface import FORMATS
from sbnet.files import reason

# FFmpeg's names of codecs -> PyNvVideoCodec's. Those alone whose pictures every decoder makes to the bit.
CODECS = {"h264": "H264", "hevc": "HEVC", "vp8": "VP8", "vp9": "VP9", "av1": "AV1", "libdav1d": "AV1"}
START_CODES = {"h264": "h264_mp4toannexb", "hevc": "hevc_mp4toannexb"}  # what the decoder reads, and files often lack
LIBRARY = "libnvcuvid.so.1"


class UnservedError(Exception):
    """Why the hardware does not decode a film; the host's decoder may."""


@functools.cache
def _library() -> Any:
    """PyNvVideoCodec.

    Raises:
        UnservedError: it is not installed, or does not work with this driver.
    """
    if importlib.util.find_spec("PyNvVideoCodec") is None:
        raise UnservedError("PyNvVideoCodec is not installed: pip install 'sbnet[nvdec]'")
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        raise UnservedError(f"the driver's library {LIBRARY} was not found") from None
    try:
        return importlib.import_module("PyNvVideoCodec")
    except Exception as error:  # of whatever kind: it looks for drivers and libraries as it is imported
        raise UnservedError(f"PyNvVideoCodec cannot be loaded ({reason(error)})") from None


def check_stream(stream: Any, first: Any) -> None:
    """Can the hardware decode a film into the pictures that the host's decoder makes?

    Args:
        stream: PyAV's.
        first: its first frame, where that is known.

    Raises:
        UnservedError: no.
    """
    _library()
    context = stream.codec_context
    if context.name not in CODECS:
        raise UnservedError(f"codec {context.name}: expected one of {', '.join(CODECS)}")
    if context.pix_fmt not in FORMATS:
        raise UnservedError(f"pixels of {context.pix_fmt}: expected 8 bits, 4:2:0")
    if context.width % 2 or context.height % 2:
        raise UnservedError(f"frames of {context.height}x{context.width}: expected even sides")
    if first is not None and first.interlaced_frame:
        raise UnservedError("interlaced frames")


class Decoder:
    """Packets of one stream to NV12 planes on a device.

    All that decoders do on a device is on one stream, `stream`: who waits for it once has the pictures of all. The
    decoder writes each picture where it wrote the last, so each is copied there before the next packet.

    Raises:
        UnservedError: as `check_stream` does.
    """

    def __init__(self, codec: str, device: torch.device) -> None:
        self._codec = CODECS[codec]
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.zeros(1, device=self.device)  # PyTorch's context is the one that is used
        self.stream = _stream(self.device)
        self._made = self._make()
        self._data = _library().PacketData()

    def _make(self) -> Any:
        library = _library()
        # Of this decoder, which is of one size, by their address: to import one takes as long as a copy.
        self._surfaces: dict[int, Tensor] = {}
        try:
            return library.CreateDecoder(
                gpuid=self.device.index, codec=getattr(library.cudaVideoCodec, self._codec), cudacontext=0,
                cudastream=self.stream.cuda_stream, usedevicememory=True,
            )  # fmt: skip
        except Exception as error:
            raise UnservedError(told(error)) from None

    def restart(self) -> None:
        """Forgets what it was sent: it goes on with the next key frame, of whatever size."""
        self._made = self._make()

    def send(self, packet: Any, stamp: int) -> list[tuple[int, Tensor]]:
        """Pictures that are finished, in the order in which they are shown: a stamp, and planes [3H/2,W] uint8, which
        `stream` writes.

        Args:
            packet: PyAV's, with start codes where the codec has them; None: no more will come.
            stamp: comes back with a picture. The parser sorts them: they have to be in the order of what is shown, as
                times are, or a picture gets another packet's.

        Raises:
            Exception: PyNvVideoCodec's, of no one kind.
        """
        data = self._data
        data.bsl, data.bsl_data, data.pts = 0, 0, stamp
        if packet is not None:
            data.bsl, data.bsl_data = packet.buffer_size, packet.buffer_ptr
        if getattr(_entered, "device", None) == self.device:
            return self._decoded(data)
        with torch.cuda.stream(self.stream):  # and its device
            return self._decoded(data)

    def _decoded(self, data: Any) -> list[tuple[int, Tensor]]:
        return [(frame.getPTS(), self._copied(frame)) for frame in self._made.Decode(data)]

    def _copied(self, frame: Any) -> Tensor:
        at = frame.GetPtrToPlane(0)
        planes = self._surfaces.get(at)
        if planes is None:
            planes = torch.from_dlpack(frame)
            if planes.dtype != torch.uint8 or planes.dim() != 2 or planes.shape[0] % 3 or planes.shape[1] % 2:
                raise UnservedError(f"pictures of {planes.dtype} {list(planes.shape)}: expected NV12")
            self._surfaces[at] = planes
        return planes.clone()


_entered = threading.local()  # device: this thread's current stream is that of its decoders


@contextmanager
def entered(device: torch.device) -> Iterator[None]:
    """For a thread that does nothing but decode: `Decoder.send` need not change streams, which takes longer than the
    copy that it is for."""
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    with torch.cuda.stream(_stream(device)):
        _entered.device = device
        try:
            yield
        finally:
            _entered.device = None


@functools.cache
def _stream(device: torch.device) -> Any:
    """Before what the network is doing: a picture that waits for its copy keeps a decoder from the next."""
    return torch.cuda.Stream(device, priority=-1)


def told(error: Exception) -> str:
    """An error of PyNvVideoCodec's in a line: which call failed, and the type of the error, if it says that."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kinds = [line.partition(":")[2].strip() for line in lines if line.startswith("Error Type")]
    return kinds[0] if kinds else reason(error)


@dataclass
class Unit:
    """What is sent of a frame, or why nothing can be. pts: its time in the stream's units. hidden: it is not shown."""

    packet: Any
    pts: int | None
    hidden: bool
    why: str = ""


def with_start_codes(packets: Iterator[Any], stream: Any) -> Iterator[Unit]:
    """A stream's packets as the hardware reads them. Packets of nothing, which ask for what is left, are not among
    them."""
    from sbnet.apps.video import pyav

    name, extra = stream.codec_context.name, stream.codec_context.extradata
    # Extradata of a box begin with a version; of start codes, with zeros.
    boxed = name in START_CODES and bool(extra) and bytes(extra)[:1] == b"\x01"
    filtered = pyav().BitStreamFilterContext(START_CODES[name], stream) if boxed else None
    for packet in packets:
        if not packet.size:
            continue
        pts, hidden = packet.pts, packet.is_discard  # the filter takes them with the packet
        try:
            found = [packet] if filtered is None else list(filtered.filter(packet))
        except (pyav().error.FFmpegError, ValueError) as error:
            yield Unit(None, pts, hidden, reason(error))
            continue
        for one in found:
            yield Unit(one, one.pts, one.is_discard)
