"""Films as people have them: what a film says of its times, colours, pixels and sound is kept."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from sbnet.apps import video
from sbnet.apps.pipeline import Frame, PipelineError, open_source
from support.films import run, times_of

av = pytest.importorskip("av")

COVER = av.stream.Disposition.attached_pic
CORNERS = np.zeros((48, 64, 3), np.uint8)  # four quarters of different brightness and shape: no orientation is another
CORNERS[:12, :40], CORNERS[:12, 40:], CORNERS[12:, :40], CORNERS[12:, 40:] = 30, 90, 150, 220


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
@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".mov", ".gif"])
def test_frames_keep_their_times(suffix, tmp_path):
    times = [0, 40, 400, 440, 1500, 1520, 3000]
    path = film(tmp_path / "film.mkv", times=times, base=Fraction(1, 1000))
    run(path, tmp_path / f"o{suffix}")
    assert times_of(tmp_path / f"o{suffix}") == pytest.approx([t / 1000 for t in times], abs=1e-3)
    late = [Frame(k, CORNERS, str(k), 5000 + t / 1000) for k, t in enumerate(times)]  # as of a stream that ran before
    run(late, tmp_path / f"late{suffix}")
    assert times_of(tmp_path / f"late{suffix}") == pytest.approx([t / 1000 for t in times], abs=1e-3)


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


# ---- broken ones
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
