"""Several cameras in one call: each as if it were alone, whatever the others do."""

import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import sbnet
from sbnet import masks
from sbnet.apps.pipeline import Cameras, Network, Pipeline, PipelineError
from sbnet.apps.pipeline.batch import Batch
from sbnet.apps.pipeline.compute import Compute
from sbnet.apps.pipeline.stages import DEPTH
from sbnet.benchmarks.harness import dense

SIZE = (32, 48)


@pytest.fixture(autouse=True)
def _quick_dense(monkeypatch):
    """The dense network as PyTorch runs it: its other forms have a test of their own (test_run_files.py)."""
    monkeypatch.setattr(dense, "forms", lambda net, x: {"PyTorch": dense.form_of_torch(net, x.dtype)})


def frames(count: int, row: int = 8, step: int = 4) -> list[np.ndarray]:
    """A bright square walks over a dark floor."""
    found = []
    for k in range(count):
        picture = np.full((*SIZE, 3), 40, np.uint8)
        picture[row : row + 8, step * k % 40 : step * k % 40 + 8] = 230
        found.append(picture)
    return found


def edges() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1)).eval()


def together(sources, mask="motion", sinks=None, **options):
    options = {"device": "cpu", "compare": 0, "mode": "exact", "block": 8, "patience": 5.0} | options
    return Cameras(sources, mask, Network(edges(), "edges"), sinks, **options)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mode", ["exact", "cached"])
def test_each_camera_is_as_alone(mode, device):
    """Of different lengths, with a mask and a memory each."""
    sources = [frames(6), frames(4, 16), frames(5, 0, 8)]
    own = [masks.MotionMask(), masks.Boxes([[4, 4, 20, 20]]), masks.MotionMask() | masks.Boxes([[30, 0, 40, 9]])]
    seen = [[] for _ in sources]
    order = {"mode": mode, "margin": 2, "block": 8, "device": device, "dtype": torch.float32, "compare": 0}
    run = together(sources, own, lambda k, result: seen[k].append(result), **order)
    summary = run.run()
    assert summary.frames == 15
    assert summary.title.startswith("3 sources, 32x48: edges")
    assert run.faults == ["", "", ""]
    for source, mask, results in zip(sources, own, seen, strict=True):
        alone = []
        Pipeline(source, mask, Network(edges()), alone.append, **order).run()
        assert [r.frame.index for r in results] == list(range(len(source)))
        for got, wanted in zip(results, alone, strict=True):
            if mode == "exact" or got.frame.index:  # of a first frame in cached mode all is computed, masked or not
                assert np.array_equal(got.active, wanted.active)
            assert np.abs(got.picture.astype(int) - wanted.picture).max() <= 1


def test_one_call_of_the_network_serves_all():
    shapes = []

    class Seen(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = edges()

        def forward(self, x):
            return self.net(x)

    def prepare(x):
        shapes.append(tuple(x.shape))
        return x

    Cameras(
        [frames(3), frames(3)], "motion", Network(Seen().eval(), prepare=prepare), device="cpu", compare=0, patience=5.0
    ).run()
    assert set(shapes) == {(2, 3, *SIZE)}
    assert len(shapes) == 3 + 1  # one to plan it


def test_the_dense_network_beside_and_a_page(tmp_path):
    run = together([frames(4), frames(4, 16)], "changed", mode="cached", margin="halo", compare=2,
                   sinks=[tmp_path / "a.jsonl", tmp_path / "b.jsonl"], report=tmp_path / "r.html")  # fmt: skip
    summary = run.run()
    assert summary.errors.count
    assert summary.errors.mean < 1e-5
    assert 0 < summary.densities.mean < 0.7
    for name in "ab":
        assert len((tmp_path / f"{name}.jsonl").read_text().splitlines()) == 4
    assert "2 sources" in (tmp_path / "r.html").read_text()


def test_a_source_that_stalls_does_not_stop_the_others():
    """It is waited for once, and its later frames count."""
    release, seen = threading.Event(), [[], []]

    def stalls():
        yield from frames(2)
        release.wait(60)
        yield from frames(1)

    def steady():
        for k, picture in enumerate(frames(12)):
            if k == 8:  # four calls or more after the other one's last frame
                release.set()
            yield picture

    run = together([steady(), stalls()], sinks=lambda k, r: seen[k].append(r.frame.index), patience=0.1)
    run.run()
    assert [len(found) for found in seen] == [12, 3]
    assert run.faults == ["", ""]


def test_a_source_that_never_comes_back_has_ended():
    forever, seen = threading.Event(), [0, 0]

    def stalls():
        yield from frames(2)
        forever.wait(60)

    def see(camera, _):
        seen[camera] += 1

    run = together([frames(12), stalls()], sinks=see, patience=0.5, give_up=0.5)
    try:
        run.run()
    finally:
        forever.set()
    assert seen == [12, 2]
    assert run.faults == ["", "no frame for 0.5 s"]
    assert "no frame for 0.5 s" in run.summary.fault


def test_a_source_that_fails_is_named_and_ends_alone(tmp_path):
    def breaks():
        yield from frames(2)
        raise OSError("cable")

    other = [np.zeros((16, 16, 3), np.uint8)]
    kept = []
    run = together([frames(5), breaks(), other], sinks=lambda k, r: kept.append(k))
    summary = run.run()
    assert [kept.count(k) for k in range(3)] == [5, 2, 0]
    assert run.faults[0] == ""
    assert run.faults[1] == "cable"
    assert "expected a frame of 32x48 and 3 channels, got 16x16" in run.faults[2]
    assert "cable" in summary.fault
    with pytest.raises(PipelineError, match="cable"):
        together([iter_of_nothing("cable")]).run()
    with pytest.raises(LookupError, match="sink"):
        together([frames(3)], sinks=fails).run()
    assert not [t for t in threading.enumerate() if t.name.startswith("sbnet-")]


def iter_of_nothing(what):
    raise OSError(what)
    yield


def fails(*_):
    raise LookupError("sink")


@pytest.mark.parametrize("newest", [False, True])
def test_few_frames_are_held(newest):
    """Two sources of any length, and a sink that is slower: the readers wait, or frames are left out."""
    read, written, most = [0], [0], [0]

    def source():
        for picture in frames(40):
            read[0] += 1
            yield picture

    def sink(camera, _):
        time.sleep(1e-3)
        written[0] += 1
        most[0] = max(most[0], read[0] - written[0])

    together([source(), source()], sinks=sink, newest=newest).run()
    assert read[0] == 80
    if newest:
        assert written[0] <= 80
    else:
        assert written[0] == 80
        assert most[0] <= 4 * (DEPTH + 2) + 2


def test_the_next_call_begins_while_results_of_many_cameras_are_written(monkeypatch):
    """Writing the first call's waits for the second; more cameras than results that may wait."""
    calls, second, waited = [], threading.Event(), []
    tick = Batch.tick

    def ticked(self, frames):
        calls.append(len(frames))
        if len(calls) == 2:
            second.set()
        return tick(self, frames)

    def sink(camera, result):
        if result.frame.index == 0:
            waited.append(second.wait(10))

    monkeypatch.setattr(Batch, "tick", ticked)
    sources = [[np.full((16, 24, 3), 9 * k, np.uint8) for k in range(3)] for _ in range(12)]
    Cameras(sources, "all", nn.Conv2d(3, 3, 1).eval(), sink, device="cpu", compare=0, patience=10.0).run()
    assert calls == [12] * 3
    assert waited == [True] * 12


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("cameras", [True, False])
def test_what_a_run_held_goes_when_it_ends(cameras, device, monkeypatch):
    """Without Python's collector: a second run needs the memory."""
    made = []
    kind = Batch if cameras else Compute
    plain = kind._set_up

    def set_up(self, given):
        made.append(weakref.ref(self))
        return plain(self, given)

    monkeypatch.setattr(kind, "_set_up", set_up)
    gc.collect()
    gc.disable()
    try:
        order = {"mode": "cached", "margin": 2, "block": 8, "device": device, "dtype": torch.float32, "compare": 0}
        if cameras:
            Cameras([frames(4), frames(4, 16)], "motion", Network(edges(), "edges"), patience=5.0, **order).run()
        else:
            Pipeline(frames(4), "motion", Network(edges(), "edges"), **order).run()
        assert made
        assert [one() for one in made] == [None] * len(made)
    finally:
        gc.enable()


def test_ctrl_c_and_limits(tmp_path):
    def told(summary):
        told.calls += 1
        if told.calls == 3:
            raise KeyboardInterrupt  # as it reaches the main thread

    told.calls = 0
    run = together([frames(9), frames(9)], sinks=[tmp_path / "a.jsonl", None])
    assert run.run(told).interrupted
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 3
    assert together([frames(9), frames(2)], limit=4).run().frames == 6
    assert sbnet.Cameras is Cameras


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": []}, "sources: expected at least one"),
        ({"mask": ["motion"]}, "mask: expected one for each of 2 sources, got 1"),
        ({"sinks": [None]}, "sinks: expected one for each"),
        ({"sinks": "out.mp4"}, "sinks: expected a list or a function, got str"),
        ({"mode": "dense"}, "expected masked, exact or cached"),
        ({"mask": "nonsense"}, "mask: expected one of all"),
        ({"sources": [[], []]}, "have no frames"),
    ],
)
def test_bad_orders_are_one_line(change, message):
    with pytest.raises(PipelineError, match=message):
        together(**({"sources": [frames(1), frames(1)]} | change)).run()
