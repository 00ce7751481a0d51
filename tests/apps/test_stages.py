"""Where the time of a pipeline goes: its stages, what bounds it, and what reading, drawing and writing cost."""

import threading
import time
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from sbnet.apps import video, writers
from sbnet.apps.pipeline import Network, Pipeline, PipelineError
from sbnet.apps.pipeline.stages import Ahead, Reader
from support.films import pictures, walking_square

pytest.importorskip("av")
pytest.importorskip("PIL")


class Slow:
    """A sink that takes its time with every frame, and at the end."""

    def __init__(self, frame: float = 0.0, end: float = 0.0):
        self.frame, self.end = frame, end

    def write(self, result):
        time.sleep(self.frame)

    def close(self, whole):
        time.sleep(self.end)


def frames(count: int = 4, pause: float = 0.0):
    for k in range(count):
        time.sleep(pause)
        yield np.full((16, 24, 3), 40 * k, np.uint8)


def run(source, sink, pause: float = 0.0, **options):
    def finish(output: torch.Tensor, frame: object):
        time.sleep(pause)
        return output, []

    network = Network(nn.Conv2d(3, 3, 3, padding=1).eval(), "one", finish=finish)
    return Pipeline(source, "motion", network, sink, device="cpu", compare=0, **options).run()


def test_the_time_of_a_run_holds_what_an_encoder_held_back():
    summary = run(frames(), Slow(end=0.4))
    assert summary.seconds >= 0.4
    assert summary.busy["write"] >= 0.4
    assert summary.fps <= 4 / 0.4


@pytest.mark.parametrize("stage", ["read", "compute", "write"])
def test_the_stage_that_bounds_a_run_is_named(stage):
    pauses = {name: 0.1 * (name == stage) for name in ("read", "compute", "write")}
    summary = run(frames(pause=pauses["read"]), Slow(pauses["write"]), pauses["compute"])
    assert summary.bound == stage
    (row,) = (row for row in summary.rows() if row[0] == "bound by")
    assert row[1] == stage
    assert row[2]
    (share,) = (int(row[2].split()[1].rstrip("%")) for row in summary.rows() if row[0].strip() == stage)
    assert 50 < share <= 100


@pytest.mark.gpu
def test_waiting_for_a_gpu_is_no_work_of_the_host():
    """A network that keeps the device busy: it bounds the run, and neither thread behind it seems to."""
    net = nn.Sequential(*(nn.Conv2d(3 if not k else 256, 256, 3, padding=1) for k in range(4)), nn.Conv2d(256, 3, 1))
    film = [np.full((512, 768, 3), k, np.uint8) for k in range(48)]
    summary = Pipeline(film, None, net.eval(), Slow(), device="cuda", mode="dense").run()
    assert summary.bound == "device"
    assert summary.busy["device"] == pytest.approx(1e-3 * summary.ms.total)
    assert summary.busy["finish"] + summary.busy["write"] < summary.busy["device"] / 2


def test_frames_of_any_kind_through_one_conversion(tmp_path):
    """What a frame is converted to does not depend on those before it."""
    import av

    upright = video.Upright()
    rng = np.random.default_rng(0)
    for size, kind in (((32, 48), "yuv420p"), ((20, 30), "yuv444p"), ((32, 48), "gray"), ((32, 48), "yuv420p")):
        given = av.VideoFrame.from_ndarray(rng.integers(0, 255, (*size, 3), np.uint8), format="rgb24")
        given = given.reformat(format=kind)
        assert np.array_equal(upright(given), given.to_ndarray(format="rgb24"))
        assert np.array_equal(upright(given, (16, 24)), given.to_ndarray(format="rgb24", height=16, width=24))


def test_films_are_encoded_several_frames_at_a_time(tmp_path):
    with writers.VideoWriter(tmp_path / "film.mp4", Fraction(10)) as writer:
        for k in range(9):
            writer.write(np.full((32, 48, 3), 20 * k, np.uint8))
        if writer._stream.codec_context.codec.name != "libx264":
            pytest.skip("needs x264")
        assert writer._stream.codec_context.thread_type.name == "FRAME"
    levels = [int(picture.mean()) for picture in pictures(tmp_path / "film.mp4")]
    assert levels == pytest.approx([20 * k for k in range(9)], abs=3)


def test_a_picture_that_is_written_may_change_afterwards(tmp_path):
    """A film's writer copies none, so it has to be done with it when it returns."""
    picture = np.zeros((32, 48, 3), np.uint8)
    with writers.VideoWriter(tmp_path / "film.mp4", Fraction(10)) as writer:
        for k in range(9):
            picture[:] = 20 * k
            writer.write(picture)
    levels = [int(one.mean()) for one in pictures(tmp_path / "film.mp4")]
    assert levels == pytest.approx([20 * k for k in range(9)], abs=3)


def test_pictures_that_cannot_be_written_are_said(tmp_path):
    film = walking_square(tmp_path / "film.mp4", 3 * writers.PACKERS)
    out = tmp_path / "out"
    (out / "00001.png").mkdir(parents=True)
    with pytest.raises(video.VideoError, match=r"00001\.png: cannot be written"):
        run(film, str(out))
    assert not list(out.glob(".*"))
    with pytest.raises((video.VideoError, PipelineError), match=r"00001\.png: cannot be written"):
        run(film, str(out), limit=2)  # said at the end
    assert len(list(tmp_path.glob("out/*.png"))) >= 2


class Prompt:
    """A source whose items are there at once. threads: which read them."""

    prompt = True

    def __init__(self, count: int, fault: bool = False):
        self.count, self.fault, self.threads, self.closed = count, fault, set(), False

    def __iter__(self):
        try:
            for k in range(self.count):
                self.threads.add(threading.current_thread())
                yield k
            if self.fault:
                raise OSError("cable")
        finally:
            self.closed = True


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sbnet-decode"]


def test_one_thread_reads_many_sources_each_in_its_order():
    shared, sources = Reader(), [Prompt(50, fault=k == 3) for k in range(9)]
    feeds = [Ahead(source, reader=shared) for source in sources]
    assert [next(feed) for feed in feeds] == [0] * 9
    assert [next(feed) for feed in feeds] == [1] * 9
    found = [[] for _ in feeds]
    for k in range(2, 50):
        for feed, own in zip(feeds, found, strict=True):
            own.append(next(feed))
        assert len(readers()) <= 1 or k < 8
    assert found == [list(range(2, 50))] * 9
    for k, feed in enumerate(feeds):
        for _ in range(2):  # asked again, it ends again
            with pytest.raises(OSError if k == 3 else StopIteration):
                next(feed)
    for feed in feeds:
        feed.close()
    shared.close()
    assert not readers()
    assert all(source.closed for source in sources)
    later = set().union(*(source.threads for source in sources))
    assert len(later) <= 9 + 1  # its own for the first item, then the shared one


def test_sources_that_nobody_reads_to_the_end_are_closed():
    shared, sources = Reader(), [Prompt(10**9) for _ in range(5)]
    feeds = [Ahead(source, reader=shared) for source in sources]
    for feed in feeds:
        next(feed)
    deadline = time.perf_counter() + 10
    while not all(feed.shared for feed in feeds) and time.perf_counter() < deadline:
        next(feeds[0], None)
        time.sleep(1e-3)
    for feed in feeds:
        feed.close()
    shared.close()
    assert not readers()
    assert all(source.closed for source in sources)


def test_a_source_that_may_wait_keeps_its_thread():
    release = threading.Event()

    def waits():
        yield 0
        release.wait(10)
        yield 1

    shared = Reader()
    slow, quick = Ahead(waits(), reader=shared), Ahead(Prompt(40), reader=shared)
    assert next(slow) == 0
    assert [next(quick) for _ in range(40)] == list(range(40))
    assert slow.poll(0) is None
    assert quick.shared
    assert not slow.shared
    release.set()
    assert next(slow) == 1
    for feed in (slow, quick):
        feed.close()
    shared.close()


def test_a_source_that_hangs_does_not_hold_the_others(monkeypatch):
    """It is late, and read on once it answers."""
    monkeypatch.setattr(Reader, "STUCK", 0.05)
    answers = threading.Event()

    class Hangs(Prompt):
        def __iter__(self):
            yield from range(20)
            answers.wait(60)
            yield from range(20, 40)

    shared = Reader()
    stuck, *_ = feeds = [Ahead(source, reader=shared) for source in (Hangs(40), Prompt(200), Prompt(200))]
    found: list[list[int]] = [[] for _ in feeds]
    deadline = time.perf_counter() + 30

    def take(feed, own):
        item = feed.poll(0.01)
        own += [] if item is None else [item]

    while min(map(len, found[1:])) < 200 and time.perf_counter() < deadline:
        for feed, own in zip(feeds, found, strict=True):
            if len(own) < 200:
                take(feed, own)
    assert [len(own) for own in found] == [20, 200, 200]
    assert not answers.is_set()
    answers.set()
    while len(found[0]) < 40 and time.perf_counter() < deadline:
        take(stuck, found[0])
    assert found == [list(range(40)), list(range(200)), list(range(200))]
    for feed in feeds:
        feed.close()
    shared.close()
    assert not readers()
