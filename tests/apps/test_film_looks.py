"""Films and pictures as people have them: what a film says of its times, colours, pixels and sound is kept."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from sbnet.apps import video
from sbnet.apps.pipeline import Network, Pipeline, PipelineError, open_source

av = pytest.importorskip("av")
image = pytest.importorskip("PIL.Image")

COVER = av.stream.Disposition.attached_pic
CORNERS = np.zeros((48, 64, 3), np.uint8)  # four quarters of different brightness and shape: no orientation is another
CORNERS[:12, :40], CORNERS[:12, 40:], CORNERS[12:, :40], CORNERS[12:, 40:] = 30, 90, 150, 220


class Same(nn.Module):
    def forward(self, x):
        return nn.functional.avg_pool2d(x, 1)


def identity() -> Network:
    net = nn.Conv2d(3, 3, 1, bias=False).eval()
    net.weight.data = torch.eye(3)[:, :, None, None].clone()
    return Network(net, "identity")


def run(source, sink, mask="all", **options):
    return Pipeline(source, mask, identity(), sink, **{"mode": "masked", "device": "cpu", "compare": 0} | options).run()


def film(path: Path, picture=CORNERS, times=range(4), base=Fraction(1, 10), sound="", like=None, cover=False) -> Path:
    """Frames of one picture at times of a base; like: sets what there is on the codec; sound: a codec's name."""
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=10)
        stream.height, stream.width, stream.pix_fmt = *picture.shape[:2], "yuv420p"
        stream.options = {"crf": "4"}
        stream.codec_context.time_base = base
        for name, value in (like or {}).items():
            setattr(stream.codec_context, name, value)
        tone = out.add_stream(sound, rate=48000, layout="mono") if sound else None
        front = out.add_stream("mjpeg", rate=1) if cover else None
        if front is not None:
            front.height, front.width, front.pix_fmt = 200, 300, "yuvj420p"
            front.disposition = COVER
        for k, at in enumerate(times):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = at, base
            out.mux(stream.encode(frame))
            if front is not None and k == 0:
                out.mux(front.encode(av.VideoFrame.from_ndarray(np.full((200, 300, 3), 9, np.uint8), format="rgb24")))
                out.mux(front.encode())
        out.mux(stream.encode())
        if tone is not None:
            wave = (8000 * np.sin(np.arange(48000) / 20)).astype(np.int16)[None]
            sample = av.AudioFrame.from_ndarray(wave, format="s16", layout="mono")
            sample.sample_rate, sample.pts = 48000, 0
            out.mux(tone.encode(sample))
            out.mux(tone.encode())
    return path


def first(path: Path) -> np.ndarray:
    return next(iter(open_source(path))).pixels


def times_of(path: Path) -> list[float]:
    with av.open(str(path)) as found:
        return [round(float(frame.pts * frame.time_base), 6) for frame in found.decode(video=0)]


# ---- orientation
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("a", [-1, 1])
@pytest.mark.parametrize("b", [-1, 1])
def test_all_eight_orientations_are_shown_as_players_show_them(turned, a, b, tmp_path):
    """The matrix takes a point (x, y) of the film to where it is shown, (a x + c y, b x + d y)."""
    path = film(tmp_path / "film.mp4")
    stored = first(path)
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 4 + 40
    one = 1 << 16
    numbers = [0, a * one, 0, b * one, 0, 0, 0, 0, 1 << 30] if turned else [a * one, 0, 0, 0, b * one, 0, 0, 0, 1 << 30]
    data[at : at + 36] = b"".join(v.to_bytes(4, "big", signed=True) for v in numbers)
    path.write_bytes(data)
    height, width = stored.shape[:2]
    wanted = np.zeros((width, height, 3) if turned else (height, width, 3), np.uint8)
    y, x = np.mgrid[:height, :width]
    shown_x, shown_y = (b * y, a * x) if turned else (a * x, b * y)
    wanted[shown_y - shown_y.min(), shown_x - shown_x.min()] = stored
    assert np.array_equal(first(path), wanted)
    info = video.video_info(path)
    assert (info.height, info.width) == wanted.shape[:2]
    run(path, tmp_path / "o.mp4")
    assert np.abs(first(tmp_path / "o.mp4").astype(int) - wanted).mean() < 3


# ---- colours and pixels
@pytest.mark.parametrize("matrix", [1, 5, 6, 9])
@pytest.mark.parametrize("full", [False, True])
def test_colours_are_read_by_their_matrix_and_kept_with_their_tags(matrix, full, tmp_path):
    like = {"colorspace": matrix, "color_primaries": 9, "color_trc": 14, "color_range": 2 if full else 1}
    path = film(tmp_path / "film.mp4", like=like)
    run(path, tmp_path / "o.mkv")
    planes = []
    for name in ("film.mp4", "o.mkv"):
        with av.open(str(tmp_path / name)) as found:
            frame = next(found.decode(video=0))
            assert int(frame.colorspace) == matrix
            assert (int(frame.color_primaries), int(frame.color_trc)) == (9, 14)
            assert (int(frame.color_range) == 2) == full
            planes.append([np.frombuffer(p, np.uint8).reshape(-1, p.line_size)[: p.height, : p.width].astype(int)
                           for p in frame.planes])  # fmt: skip
    for before, after in zip(*planes, strict=True):
        assert np.abs(before - after).mean() < 2.5


@pytest.mark.parametrize(("size", "matrix"), [((48, 64), 6), ((720, 1280), 1), ((540, 1280), 1), ((640, 480), 6)])
def test_films_without_tags_are_taken_for_what_players_take_them_for(size, matrix, tmp_path):
    red = np.full((*size, 3), (200, 60, 40), np.uint8)
    path = tmp_path / "film.mp4"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=10)
        stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
        frame = av.VideoFrame(size[1], size[0], "yuv420p")
        levels = (92, 105, 190) if matrix == 1 else (102, 98, 191)  # of this red by BT.709 and BT.601
        for plane, level in zip(frame.planes, levels, strict=True):
            plane.update(bytes([level]) * (plane.height * plane.line_size))
        for _ in range(2):
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    assert np.abs(first(path).astype(int) - red).max() <= 3
    run(path, tmp_path / "o.mp4")
    with av.open(str(tmp_path / "o.mp4")) as found:
        frame = next(found.decode(video=0))
        assert int(frame.colorspace) == matrix
        got = [int(np.frombuffer(p, np.uint8)[p.line_size * 9 + 9]) for p in frame.planes]
    assert np.abs(np.subtract(got, levels)).max() <= 2


@pytest.mark.parametrize("size", [None, (48, 96)])
def test_pixels_that_are_no_squares_keep_their_shape(size, tmp_path):
    path = film(tmp_path / "film.mp4", like={"sample_aspect_ratio": Fraction(4, 3)})
    run(path, tmp_path / "o.mp4", size=size)
    with av.open(str(tmp_path / "o.mp4")) as found:
        stream = found.streams.video[0]
        shape = Fraction(stream.width, stream.height) * stream.sample_aspect_ratio
    assert shape == Fraction(64, 48) * Fraction(4, 3)


# ---- times
@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".mov"])
def test_frames_keep_their_times(suffix, tmp_path):
    times = [0, 40, 400, 440, 1500, 1501, 3000]
    path = film(tmp_path / "film.mkv", times=times, base=Fraction(1, 1000))
    run(path, tmp_path / f"o{suffix}")
    assert times_of(tmp_path / f"o{suffix}") == pytest.approx([t / 1000 for t in times], abs=1e-3)


def test_a_format_of_one_rate_refuses_other_times(tmp_path):
    path = film(tmp_path / "film.mkv", times=[0, 40, 400, 440, 1500], base=Fraction(1, 1000))
    with pytest.raises(video.VideoError, match=r"o\.avi: expected frames at one rate.*\.mkv"):
        run(path, tmp_path / "o.avi")
    assert not (tmp_path / "o.avi").exists()
    run(film(tmp_path / "even.mp4", times=range(12)), tmp_path / "even.avi")
    assert len(times_of(tmp_path / "even.avi")) == 12


def test_skipped_and_scaled_frames_stay_where_they_were(tmp_path):
    path = film(tmp_path / "film.mp4", times=range(20))
    run(path, tmp_path / "o.mp4", limit=7, size=(24, 32))
    assert times_of(tmp_path / "o.mp4") == pytest.approx([k / 10 for k in range(7)], abs=1e-4)


# ---- streams
def test_a_cover_picture_is_not_the_film(tmp_path):
    path = film(tmp_path / "film.mp4", cover=True)
    with av.open(str(path)) as found:
        if len(found.streams.video) < 2:
            pytest.skip("this FFmpeg writes no cover")
    source = open_source(path)
    assert len(list(source)) == 4
    assert first(path).shape == CORNERS.shape


def test_a_cover_alone_is_no_film(tmp_path, monkeypatch):
    path = film(tmp_path / "film.mp4", cover=True)
    true = video.film_of

    class Covers:
        """The container without its film."""

        def __init__(self, container):
            self.streams = type("Streams", (), {"best": lambda *_: None})()
            self.streams.video = [s for s in container.streams.video if s.disposition & COVER]

    monkeypatch.setattr(video, "film_of", lambda container: true(Covers(container)))
    with pytest.raises(video.VideoError, match="no video stream"):
        open_source(path)


@pytest.mark.parametrize("target", ["o.mp4", "o.mkv", "o.mov"])
def test_the_sound_comes_along(target, tmp_path):
    path = film(tmp_path / "film.mp4", times=range(12), sound="aac")
    done = run(path, tmp_path / target)
    assert not done.notes

    def packets(name):
        with av.open(str(name)) as found:
            return [bytes(p) for p in found.demux(audio=0) if p.size], float(found.streams.audio[0].duration or 0)

    assert packets(path)[0] == packets(tmp_path / target)[0]
    run(path, tmp_path / f"quiet-{target}", audio=False)
    with av.open(str(tmp_path / f"quiet-{target}")) as found:
        assert not found.streams.audio


def test_the_sound_ends_with_the_pictures(tmp_path):
    path = film(tmp_path / "film.mp4", times=range(12), sound="aac")
    run(path, tmp_path / "o.mp4", limit=5)
    with av.open(str(tmp_path / "o.mp4")) as found:
        ends = [float((p.pts + p.duration) * p.time_base) for p in found.demux(audio=0) if p.size]
    assert 0.4 < max(ends) < 0.6


def test_sound_that_a_format_cannot_hold_is_told(tmp_path):
    path = film(tmp_path / "film.mkv", times=range(12), sound="pcm_u8")
    done = run(path, tmp_path / "o.mp4")
    assert any("sound left out" in note and "pcm_u8" in note for note in done.notes)
    assert any("sound left out" in cell for row in done.rows() for cell in row)
    assert len(times_of(tmp_path / "o.mp4")) == 12


# ---- pictures
def test_numbered_pictures_come_in_the_order_in_which_a_person_counts(tmp_path):
    for k in (1, 2, 10, 9, 100):
        image.fromarray(np.full((8, 8, 3), k, np.uint8)).save(tmp_path / f"frame{k}.png")
    wanted = [f"frame{k}.png" for k in (1, 2, 9, 10, 100)]
    for source in (tmp_path, tmp_path / "*.png"):
        assert [frame.name for frame in open_source(source)] == wanted


@pytest.mark.parametrize("name", ["a.png", "a.webp", "a.gif", "a.tif"])
def test_animations_are_films(name, tmp_path):
    shown = [image.fromarray(np.full((40, 60, 3), 60 * k, np.uint8)) for k in range(4)]
    options = {} if name.endswith("tif") else {"duration": [40, 80, 200, 40]}
    options |= {"lossless": True} if name.endswith("webp") else {}
    shown[0].save(tmp_path / name, save_all=True, append_images=shown[1:], **options)
    frames = list(open_source(tmp_path / name))
    assert [int(frame.picture()[5, 5, 0]) for frame in frames] == pytest.approx([0, 60, 120, 180], abs=6)
    assert [frame.index for frame in frames] == [0, 1, 2, 3]
    if options:
        assert [frame.time for frame in frames] == pytest.approx([0, 0.04, 0.12, 0.32], abs=1e-6)
    run(tmp_path / name, tmp_path / "o.mp4")
    assert len(times_of(tmp_path / "o.mp4")) == 4


def test_an_opacity_is_kept_and_made_as_large_as_the_picture(tmp_path):
    icon = np.zeros((48, 64, 4), np.uint8)
    icon[..., 0], icon[10:30, 10:40, 3] = 200, 255
    image.fromarray(icon).save(tmp_path / "icon.png")

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return nn.functional.interpolate(self.conv(x), scale_factor=2.0)

    Pipeline(tmp_path / "icon.png", "all", Network(Twice().eval(), "twice"), tmp_path / "o", device="cpu").run()
    made = image.open(tmp_path / "o" / "00000.png")
    assert (made.mode, made.size) == ("RGBA", (128, 96))
    alpha = np.asarray(made)[..., 3]
    assert alpha[0, 0] == 0
    assert (alpha[22:58, 22:78] == 255).all()
    run(tmp_path / "icon.png", tmp_path / "same")
    assert np.array_equal(np.asarray(image.open(tmp_path / "same" / "00000.png"))[..., 3], icon[..., 3])


@pytest.mark.parametrize(
    ("kind", "top"),
    [(np.uint16, 65535), (np.int32, 255), (np.int32, 65535), (np.float32, 1), (">u2", 65535), (">f4", 1)],
)
def test_numbers_of_any_kind_are_0_to_1(kind, top, tmp_path):
    """A ramp in a TIFF, and as an array: what the network gets, and what is seen."""
    ramp = np.linspace(0, 1, 60)[None].repeat(40, 0)
    array = (ramp * top).round().astype(kind) if top > 1 else ramp.astype(kind)
    sources = [[array, array]]
    if np.dtype(kind).isnative:
        image.fromarray(array).save(tmp_path / "ramp.tif")
        sources.append(tmp_path / "ramp.tif")
    for source in sources:
        frame = next(iter(open_source(source)))
        x = frame.tensor(torch.device("cpu"), torch.float32)
        assert x[0, 0].numpy() == pytest.approx(ramp, abs=0.51 / max(top, 255) if top > 1 else 1e-6)
        assert np.abs(frame.picture()[..., 0] - 255 * ramp).max() <= 1.01


def test_floats_and_numbers_below_0_stay_what_they_are():
    for array in (np.array([[-3.0, 400.0]], np.float64), np.array([[-3, 400]], np.int16)):
        x = next(iter(open_source([array]))).tensor(torch.device("cpu"), torch.float32)
        assert x.flatten().tolist() == [-3, 400]
    with pytest.raises(PipelineError, match="expected whole numbers, floats or bool, got complex64"):
        next(iter(open_source([np.zeros((4, 4), np.complex64)]))).tensor(torch.device("cpu"), torch.float32)


def test_pictures_of_one_name_in_two_folders_are_two(tmp_path):
    for folder, level in (("a", 50), ("b", 200)):
        (tmp_path / folder).mkdir()
        image.fromarray(np.full((8, 8, 3), level, np.uint8)).save(tmp_path / folder / "x.png")
    run(tmp_path / "*" / "x.png", tmp_path / "o.jsonl")
    names = [json.loads(line)["name"] for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert names == ["a/x.png", "b/x.png"]


def test_a_picture_of_too_many_pixels_is_a_line(tmp_path, monkeypatch):
    image.fromarray(np.zeros((40, 60, 3), np.uint8)).save(tmp_path / "large.png")
    image.fromarray(np.zeros((4, 6, 3), np.uint8)).save(tmp_path / "small.png")
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(PipelineError, match=r"large\.png: cannot be read \(more than 200 pixels; run_large"):
        run(tmp_path / "large.png", tmp_path / "o")
    assert run(tmp_path, None, skip_broken=True).frames == 1


def test_a_pipe_in_a_folder_is_a_broken_frame(tmp_path):
    import os

    image.fromarray(np.zeros((4, 6, 3), np.uint8)).save(tmp_path / "a.png")
    os.mkfifo(tmp_path / "b.png")
    (tmp_path / "c.png").mkdir()
    done = run(tmp_path, None, skip_broken=True)
    assert (done.frames, done.skipped) == (1, 1)
    assert "b.png: cannot be read (not a regular file)" in done.broken[0]


def test_broken_headers_are_a_line(tmp_path):
    """Every byte of a small film's head in turn, and of a picture: never a traceback."""
    path, bad = film(tmp_path / "film.mp4"), tmp_path / "bad.mp4"
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    head = data.index(b"moov")
    for _ in range(200):
        spoiled = bytearray(data)
        for at in rng.integers(head, len(data), 4):
            spoiled[at] = rng.integers(256)
        bad.write_bytes(spoiled)
        try:
            for _frame in open_source(bad):
                pass
        except (PipelineError, video.VideoError) as error:
            assert "\n" not in str(error)  # noqa: PT017


# ---- going on
@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".mov"])
def test_a_run_goes_on_after_what_its_outputs_hold(suffix, tmp_path):
    """In two steps, with sound: times, pictures, sound and lines are those of a run in one piece."""
    path = film(tmp_path / "film.mp4", times=[*range(10), *range(12, 32)], sound="aac")
    sinks = [tmp_path / f"o{suffix}", tmp_path / "o.jsonl", tmp_path / "pictures"]
    for limit in (11, 17, None):
        run(path, sinks, limit=limit, resume=True)
    run(path, [tmp_path / f"whole{suffix}", tmp_path / "whole.jsonl", tmp_path / "all"])
    assert times_of(sinks[0]) == pytest.approx(times_of(tmp_path / f"whole{suffix}"), abs=1.1e-3)
    got, wanted = (list(open_source(p)) for p in (sinks[0], tmp_path / f"whole{suffix}"))
    assert len(got) == len(wanted) == 30
    assert max(np.abs(a.pixels.astype(int) - b.pixels).max() for a, b in zip(got, wanted, strict=True)) <= 4
    lines = [
        [json.loads(line)["frame"] for line in p.read_text().splitlines()] for p in (sinks[1], tmp_path / "whole.jsonl")
    ]
    assert lines[0] == lines[1]
    assert sorted(p.name for p in sinks[2].iterdir()) == sorted(p.name for p in (tmp_path / "all").iterdir())
    sounds = []
    for name in (sinks[0], tmp_path / f"whole{suffix}"):
        with av.open(str(name)) as found:
            sounds.append([bytes(p) for p in found.demux(audio=0) if p.size])
    assert sounds[0] == sounds[1]
    with pytest.raises(PipelineError, match="all 30 frames are done"):
        run(path, sinks, resume=True)


def test_what_cannot_be_gone_on_with_is_refused(tmp_path):
    path = film(tmp_path / "film.mp4", times=range(12))
    run(path, [tmp_path / "o.mp4", tmp_path / "o.jsonl"], limit=5)
    (tmp_path / "o.jsonl").write_text("{}\n")
    with pytest.raises(PipelineError, match=r"same number of frames, got .*o\.mp4 5, .*o\.jsonl 1"):
        run(path, [tmp_path / "o.mp4", tmp_path / "o.jsonl"], resume=True)
    before = (tmp_path / "o.mp4").read_bytes()
    with pytest.raises(video.VideoError, match="expected a film of the same size and settings"):
        run(path, tmp_path / "o.mp4", resume=True, size=(24, 32))
    assert (tmp_path / "o.mp4").read_bytes() == before
    with pytest.raises(PipelineError, match="expected one of .mp4"):
        run(path, tmp_path / "o.gif", resume=True)
