"""Hardware decoding: the same frames as the host's decoder gives, in the same places, or the host's and why."""

from __future__ import annotations

import heapq
import threading
from fractions import Fraction
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from sbnet.apps import nvdec
from sbnet.apps.pipeline import Cameras, Pipeline, PipelineError, open_source
from sbnet.apps.pipeline.hardware import Decoding, reader_for
from sbnet.apps.pipeline.stages import Ahead
from sbnet.apps.surface import Surface

av = pytest.importorskip("av")

CUDA = torch.device("cuda")


def film(path: Path, codec: str = "libx264", size=(150, 200), count: int = 12, pix: str = "yuv420p", **tags) -> Path:
    """Colours and a square that move. tags: of the codec's context."""
    y, x = np.mgrid[: size[0], : size[1]]
    with av.open(str(path), "w") as out:
        stream = out.add_stream(codec, rate=10)
        stream.height, stream.width, stream.pix_fmt = *size, pix
        stream.options = {"x265-params": "log-level=error"} if codec == "libx265" else {}
        stream.codec_context.time_base = Fraction(1, 10)
        for name, value in tags.items():
            setattr(stream.codec_context, name, value)
        for k in range(count):
            picture = np.stack([x * 255 // size[1], y * 255 // size[0], (x + y + 9 * k) % 256], 2).astype(np.uint8)
            picture[20:60, 8 * k : 8 * k + 40] = (250, 30, 200)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = k, Fraction(1, 10)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


def read(source) -> list[tuple]:
    """(index, time, fault or pixels) of each frame."""
    return [
        (f.index, f.time, f.fault or (f.pixels if f.surface is None else f.raw().cpu().numpy())) for f in source
    ]  # fmt: skip


def hardware(path, device=CUDA, wanted="auto", size=None):
    return open_source(path, size, decoding=Decoding("nvdec" if size else wanted, device))


def same(got: list[tuple], wanted: list[tuple], most: int = 1) -> None:
    assert [one[:2] for one in got] == [one[:2] for one in wanted]
    for (*_, a), (*_, b) in zip(got, wanted, strict=True):
        assert isinstance(a, str) == isinstance(b, str)
        assert isinstance(a, str) or np.abs(a.astype(int) - b).max() <= most


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Says nothing."""


class Fake:
    """The host's decoder in the place of the hardware's, as this is used: pictures are NV12, one size a decoder."""

    broken: tuple[int, ...] = ()  # packets that nothing comes of
    stream = None

    def __init__(self, codec: str, device: torch.device) -> None:
        self._codec = codec
        self.restart()

    def restart(self) -> None:
        self._context = av.CodecContext.create(self._codec, "r")
        self._context.thread_count = 1
        self._size: tuple[int, int] | None = None
        self._number, self._stamps = -1, []

    def send(self, packet, stamp: int) -> list:
        self._number += 1
        if packet is not None and self._number in self.broken:
            return []
        sent = None
        if packet is not None:
            sent = av.Packet(bytes(packet))
            sent.pts = stamp
            heapq.heappush(self._stamps, stamp)
            if packet.is_keyframe:
                other = av.CodecContext.create(self._codec, "r")
                (frame,) = [*other.decode(sent), *other.decode(None)]
                if self._size not in (None, (frame.height, frame.width)):
                    raise RuntimeError("ReconfigureDecoder :\nError Type : Reconfigure Not supported\n")
                self._size = frame.height, frame.width
        frames = self._context.decode(sent)
        # As the parser of the hardware does it: pictures get the stamps in their order, whosever they are.
        return [(heapq.heappop(self._stamps), torch.from_numpy(frame.to_ndarray(format="nv12"))) for frame in frames]


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(nvdec, "Decoder", Fake)
    monkeypatch.setattr(nvdec, "_library", lambda: None)
    monkeypatch.setattr(Fake, "broken", ())
    return Fake


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".avi"])
@pytest.mark.parametrize("size", [None, (76, 100)])
def test_frames_times_and_pictures_are_the_host_s(suffix, size, fake, tmp_path):
    path = film(tmp_path / f"film{suffix}", max_b_frames=0 if suffix == ".avi" else 2)  # AVI tells no other times
    source = hardware(path, size=size)
    got, wanted = read(source), read(open_source(path, size))
    same(got, wanted, 1 if size is None else 255)
    assert np.abs(got[5][2].astype(int) - wanted[5][2]).mean() < (1 if size is None else 4)
    assert source.decoder == ("NVDEC", "")


def test_a_packet_that_nothing_comes_of_is_a_broken_frame_in_its_place(fake, tmp_path):
    path = film(tmp_path / "film.mp4", codec="libx264", max_b_frames=0, gop_size=1)
    fake.broken = (4,)
    found = read(hardware(path))
    assert [one[0] for one in found] == list(range(12))
    assert found[4][2] == "it cannot be decoded"
    assert [one[1] for one in found if not isinstance(one[2], str)] == [k / 10 for k in range(12) if k != 4]


def test_a_film_whose_last_packets_are_lost_says_so(fake, tmp_path):
    path = film(tmp_path / "film.mp4", max_b_frames=0)
    fake.broken = (10, 11)
    assert [one[2] for one in read(hardware(path))[10:]] == ["it cannot be decoded"] * 2


@pytest.mark.parametrize(
    ("size", "pix", "tags"),
    [
        ((150, 200), "yuv420p", {}),
        ((150, 200), "yuvj420p", {"colorspace": 5}),
        ((94, 70), "yuv420p", {"colorspace": 9, "color_range": 2}),  # lines of chroma that FFmpeg pads
    ],
)
def test_a_gpu_makes_the_colours_of_what_the_host_decodes(size, pix, tags, tmp_path):
    path = film(tmp_path / "film.mp4", size=size, pix=pix, **tags)
    wanted = read(open_source(path))
    frames = list(hardware(path, wanted="host"))
    for frame, one in zip(frames, wanted, strict=True):
        assert frame.surface.planes.shape == (3 * size[0] // 2, size[1])
        assert frame.size == size
        assert np.array_equal(frame.raw().numpy(), one[2])
        assert np.abs(frame.surface.rgb().numpy().astype(int) - one[2]).max() <= 1


@pytest.mark.parametrize(("size", "pix"), [((151, 201), "yuv420p"), ((150, 200), "yuv444p"), ((20, 24), "yuv420p")])
def test_the_host_makes_colours_that_it_alone_makes_to_the_bit(size, pix, tmp_path):
    path = film(tmp_path / "film.mkv", "ffv1", size=size, pix=pix, count=2)
    frames = list(hardware(path, wanted="host"))
    assert [frame.surface for frame in frames] == [None, None]
    same([(f.index, f.time, f.pixels) for f in frames], read(open_source(path)), 0)


@pytest.mark.parametrize(
    ("codec", "pix", "size", "reason"),
    [
        ("mpeg4", "yuv420p", (150, 200), "codec mpeg4"),
        ("libx264", "yuv444p", (150, 200), "pixels of yuv444p"),
        ("libx264", "yuv420p10le", (150, 200), "pixels of yuv420p10le"),
    ],
)
def test_what_it_does_not_serve_the_host_decodes(codec, pix, size, reason, fake, tmp_path):
    path = film(tmp_path / "film.mp4", codec, size, pix=pix)
    source = hardware(path)
    same(read(source), read(open_source(path)), 0)
    assert source.decoder[0] == "host"
    assert reason in source.decoder[1]
    with pytest.raises(PipelineError, match=f"film.mp4: nvdec: {reason}"):
        read(hardware(path, wanted="nvdec"))


def test_a_decoder_that_fails_at_the_first_frame_leaves_it_to_the_host(fake, monkeypatch, tmp_path):
    def fails(*_):
        raise RuntimeError("HandleVideoSequence :\nError code : 801\nError Type : Codec not supported on this GPU\n")

    path = film(tmp_path / "film.mp4")
    monkeypatch.setattr(fake, "send", fails)
    source = hardware(path)
    same(read(source), read(open_source(path)), 0)
    assert source.decoder == ("host", "Codec not supported on this GPU")


def test_without_the_package_the_host_decodes_and_the_reason_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(nvdec.importlib.util, "find_spec", lambda name: None)
    nvdec._library.cache_clear()
    path = film(tmp_path / "film.mp4", count=2)
    source = hardware(path)
    assert len(read(source)) == 2
    assert source.decoder == ("host", "PyNvVideoCodec is not installed: pip install 'sbnet[nvdec]'")


def test_frames_of_another_size_in_the_middle(fake, tmp_path):
    """As streams that are cut together have them: elementary ones need no container to say so."""
    parts = [film(tmp_path / f"{k}.h264", size=size, count=4) for k, size in enumerate([(150, 200), (96, 160)])]
    path = tmp_path / "both.h264"
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    shapes = [one[2].shape for one in read(hardware(path)) if not isinstance(one[2], str)]
    assert shapes == [one[2].shape for one in read(open_source(path))]


def test_a_name_that_is_no_decoder_is_refused(tmp_path):
    path = film(tmp_path / "film.mp4", count=2)
    with pytest.raises(PipelineError, match="decoder: expected one of auto, host, nvdec, got 'gpu'"):
        Pipeline(path, decoder="gpu", device="cpu")
    with pytest.raises(PipelineError, match="decoder: expected a device cuda for nvdec, got cpu"):
        Pipeline(path, decoder="nvdec", device="cpu")


def test_scaled_frames_are_the_host_s_unless_the_hardware_is_asked_for(fake, tmp_path):
    path = film(tmp_path / "film.mp4", count=3)
    source = open_source(path, (76, 100), decoding=Decoding("auto", CUDA))
    same(read(source), read(open_source(path, (76, 100))), 0)
    assert source.decoder == ("host", "the host scales frames in another way")


def test_a_stream_from_a_server(fake, tmp_path):
    path = film(tmp_path / "film.ts", max_b_frames=0, gop_size=5)
    handler = partial(Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            source = hardware(f"http://127.0.0.1:{server.server_port}/film.ts")
            got = read(source)
        finally:
            server.shutdown()
    same(got, read(open_source(path)))
    assert source.decoder == ("NVDEC", "")


def test_cameras_are_decoded_by_the_hardware_where_it_serves(fake, tmp_path):
    path = film(tmp_path / "film.mp4", count=2)
    run = Cameras([path, path], "motion", "contours", device="cpu")
    assert [camera.decoding.wanted for camera in run.cameras] == ["auto", "auto"]
    assert Pipeline(path, device="cpu").decoding.wanted == "host"
    assert Cameras([path], "motion", "contours", device="cpu", decoder="host").cameras[0].decoding.wanted == "host"


def broken_film(path: Path) -> Path:
    """30 frames, a key frame each 10; packets 12 and 13 are noise, in which no unit is found."""
    film(path, count=30, max_b_frames=0, gop_size=10)
    data = bytearray(path.read_bytes())
    with av.open(str(path)) as found:
        packets = [p for p in found.demux(video=0) if p.size]
    for k in (12, 13):
        at = packets[k].pos
        data[at : at + packets[k].size] = bytes(255 - v for v in data[at : at + packets[k].size])
    path.write_bytes(data)
    return path


def read_to_its_end(path: Path) -> None:
    """Frames that hang on the broken ones may be missing, or each decoder makes its own of them."""
    found, whole = read(hardware(path)), read(open_source(path))
    assert [one[0] for one in found] == list(range(30))
    assert {12, 13} <= {one[0] for one in found if isinstance(one[2], str)} <= set(range(12, 20))
    good = [one for one in found if not isinstance(one[2], str)]
    assert all(one[1] == pytest.approx(one[0] / 10) for one in good)
    pictures = {one[1]: one[2] for one in whole if not isinstance(one[2], str)}
    for _, time, pixels in good:
        if not 1.2 <= time < 2:
            assert np.abs(pixels.astype(int) - pictures[time]).max() <= 1


def test_a_broken_film_is_read_to_its_end(fake, tmp_path):
    read_to_its_end(broken_film(tmp_path / "film.mp4"))


# ---- on a GPU


@pytest.fixture
def decoder():
    """The hardware's, where it works."""
    try:
        nvdec._library.cache_clear()
        nvdec._library()
    except nvdec.UnservedError as error:
        pytest.skip(str(error))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("codec", "suffix", "tags"),
    [
        ("libx264", ".mp4", {}),
        ("libx264", ".mkv", {"colorspace": 1, "color_range": 2}),
        ("libx264", ".avi", {"colorspace": 9, "max_b_frames": 0}),
        ("libx265", ".mp4", {"colorspace": 5}),
        ("libx265", ".mkv", {"colorspace": 1, "color_range": 1}),
        ("libvpx-vp9", ".webm", {}),
    ],
)
def test_on_a_gpu_the_hardware_gives_the_host_s_frames(codec, suffix, tags, decoder, tmp_path):
    path = film(tmp_path / f"film{suffix}", codec, **tags)
    source = hardware(path)
    same(read(source), read(open_source(path)))
    assert source.decoder == ("NVDEC", "")


@pytest.mark.gpu
@pytest.mark.parametrize("waits", [True, False])
def test_who_reads_a_picture_waits_for_the_decoder(waits, decoder, monkeypatch, tmp_path):
    """The decoder's stream is held up for each packet. Without the wait the pictures are wrong, so this would tell."""
    path = film(tmp_path / "film.mp4", size=(1080, 1920), max_b_frames=0)
    wanted = read(open_source(path))
    plain = nvdec.Decoder.send

    def late(self, packet, number):
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(40_000_000)
        return plain(self, packet, number)

    monkeypatch.setattr(nvdec.Decoder, "send", late)
    if not waits:
        monkeypatch.setattr(Surface, "wait", lambda surface: surface.planes)
    got = read(hardware(path))
    torch.cuda.synchronize()
    wrong = [k for k, (a, b) in enumerate(zip(got, wanted, strict=True)) if np.abs(a[2].astype(int) - b[2]).max() > 1]
    assert not wrong if waits else wrong


@pytest.mark.gpu
def test_on_a_gpu_pictures_outlive_the_decoder_s_surface(decoder, tmp_path):
    path = film(tmp_path / "film.mp4", count=40)
    frames = list(hardware(path))
    wanted = read(open_source(path))
    for frame, (*_, pixels) in zip(frames, wanted, strict=True):
        assert np.abs(frame.raw().cpu().numpy().astype(int) - pixels).max() <= 1


@pytest.mark.gpu
def test_on_a_gpu_films_that_share_a_reader_have_their_own_pictures_to_the_bit(decoder, tmp_path):
    """While the device is busy. Decoders make the same pictures as FFmpeg, whose luma and chroma are compared."""
    codecs = ["libx264", "libx265", "libvpx-vp9", "libx264", "libx265"]
    paths = [film(tmp_path / f"{k}.mkv", codec, size=(540, 960), count=30 + k) for k, codec in enumerate(codecs)]
    reader = reader_for(CUDA)
    feeds = [Ahead(hardware(path), reader=reader) for path in paths]
    x, got = torch.randn(4096, 4096, device=CUDA), [[] for _ in paths]
    for _ in range(30):
        for feed, own in zip(feeds, got, strict=True):
            frame = next(feed)
            x = torch.tanh(x @ x)
            own.append(frame.surface.wait().clone())
    assert all(feed.shared for feed in feeds)
    for feed in feeds:
        feed.close()
    reader.close()
    for path, own in zip(paths, got, strict=True):
        with av.open(str(path)) as host:
            for planes, picture in zip(own, host.decode(video=0), strict=False):
                assert np.array_equal(planes.cpu().numpy(), picture.reformat(format="nv12").to_ndarray())


@pytest.mark.gpu
def test_on_a_gpu_a_broken_film_is_read_to_its_end(decoder, tmp_path):
    read_to_its_end(broken_film(tmp_path / "film.mp4"))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["masked", "cached", "dense"])
def test_on_a_gpu_pipelines_give_the_same_by_either_decoder(mode, decoder, tmp_path):
    path = film(tmp_path / "film.mp4")
    pictures, named = [], []
    for wanted in ("host", "nvdec"):
        found: list = []
        summary = Pipeline(path, "motion", "contours", lambda r, found=found: found.append(r.picture), mode=mode,
                           device="cuda", decoder=wanted, compare=0, check=0).run()  # fmt: skip
        pictures.append(np.stack(found).astype(int))
        named.append(next(row[1] for row in summary.rows() if row[0] == "decoder"))
    assert named == ["host", "NVDEC"]
    assert np.abs(pictures[0] - pictures[1]).max() <= 1


@pytest.mark.gpu
def test_on_a_gpu_cameras_give_the_same_by_either_decoder(decoder, tmp_path):
    paths = [film(tmp_path / f"{k}.mp4", count=6 + 3 * k) for k in range(3)]
    pictures = []
    for wanted in ("host", "nvdec"):
        found: list = [[] for _ in paths]
        run = Cameras(paths, "motion", "contours", lambda k, r, found=found: found[k].append(r.picture), device="cuda",
                      decoder=wanted, compare=0, check=0, patience=10.0)  # fmt: skip
        summary = run.run()
        assert summary.frames == 6 + 9 + 12
        assert summary.decoder[0] == ("NVDEC" if wanted == "nvdec" else "host")
        pictures.append([np.stack(one).astype(int) for one in found])
    for host, gpu in zip(*pictures, strict=True):
        assert np.abs(host - gpu).max() <= 1
