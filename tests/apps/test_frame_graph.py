"""All of a frame in one CUDA graph; without a GPU, in a stand-in that keeps a graph's rule: a replay writes where the
capture wrote."""

from contextlib import suppress

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

import sbnet
from sbnet.apps.pipeline import Frame, Network, PipelineError, Summary, frame_graph
from sbnet.apps.pipeline.compute import Compute, Settings
from sbnet.apps.pipeline.stages import Behind
from sbnet.benchmarks.harness import frame_times
from sbnet.engine import capture
from sbnet.masks import Boxes, Changed, MotionMask, Tracks

SIZE = (40, 56)
MASKS = {
    "motion": lambda: MotionMask(),
    "composed": lambda: (MotionMask() | Changed(0.2)).dilate(3).hold(2),
    "changed": lambda: Changed(8 / 255),
}


class Replayed:
    """What `cuda_graph` gives, on any device."""

    def __init__(self, run):
        self.run = run
        self.made = None

    def replay(self):
        new, old = (pytree.tree_leaves(v) for v in (self.run(), self.made))
        for given, own in zip(new, old, strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(given)


def stand_in(run, device):
    graph = Replayed(run)
    for _ in range(3):
        run()
    graph.made = pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, run())
    return graph, graph.made


def frames(count: int = 6) -> list[Frame]:
    """A square that moves over noise that does not."""
    still = np.random.default_rng(3).integers(0, 90, (*SIZE, 3), dtype=np.uint8)
    found = []
    for k in range(count):
        picture = still.copy()
        picture[6 + 3 * k : 16 + 3 * k, 10:22] = 220
        found.append(Frame(k, picture))
    return found


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1), nn.Sigmoid()).eval()


def network(**options) -> Network:
    return Network(net(), "net", captured=True, **options)


def results(mask, mode, graphed, device="cpu", compare=2, **options):
    settings = Settings(mode, 8, 2, torch.device(device), torch.float32, compare)
    summary = Summary("", mode)
    run = Compute(network(**options), mask, settings, summary)
    run._graphed = graphed
    if graphed and device == "cpu":
        run._inside = None
    found = []
    for frame in frames():
        pinned = frame.raw().pin_memory() if device == "cuda" else frame.raw()
        result = run(frame, pinned)
        result.land()
        found.append((result.picture.copy(), None if result.active is None else result.active.copy()))
    assert bool(run._graph) == graphed
    return found, summary


@pytest.fixture(autouse=True)
def _graphs(monkeypatch, request):
    if "gpu" not in request.keywords:
        monkeypatch.setattr(frame_graph, "cuda_graph", stand_in)


def same(one, two, apart=0):
    for (a, active), (b, other) in zip(one, two, strict=True):
        assert a.shape == b.shape
        assert np.abs(a.astype(int) - b.astype(int)).max() <= apart
        assert np.array_equal(active, other)


@pytest.mark.parametrize("mode", ["masked", "exact", "cached"])
@pytest.mark.parametrize("name", MASKS)
def test_one_graph_gives_what_its_steps_give(name, mode):
    options = {"pad": 4, "prepare": lambda x: 2 * x, "finish": lambda y, frame: (y[:, :, 4:-4, 4:-4], [])}
    (got, one), (want, two) = (results(MASKS[name](), mode, graphed, **options) for graphed in (True, False))
    same(got, want)
    assert 0 < got[-1][1].mean() < 1
    assert one.errors.count == two.errors.count == 4
    assert one.largest == pytest.approx(two.largest, abs=1e-6)
    assert one.dense_ms.count == two.dense_ms.count


def test_dense_frames_in_one_graph():
    got, _ = results(MotionMask(), "dense", True)
    with torch.no_grad():
        for frame, (picture, active) in zip(frames(), got, strict=True):
            wanted = net()(frame.tensor(torch.device("cpu"), torch.float32))[0].movedim(0, 2)
            assert np.abs((255 * wanted).numpy() - picture).max() <= 0.51
            assert active is None


def test_a_network_that_says_so_has_to_give_a_picture():
    with pytest.raises(PipelineError, match="expected a picture and no records"):
        results(MotionMask(), "masked", True, finish=lambda y, frame: (y, [{"box": [0, 0, 1, 1]}]))


class Detector(nn.Module):
    """Maps of an odd size, and two vectors of a frame."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.maps, self.head = nn.Conv2d(3, 5, 3, padding=1), nn.Linear(5, 3)

    def forward(self, x):
        maps = self.maps(x).relu()
        vector = maps.mean((2, 3))
        return maps[:, :, 1:], self.head(vector), vector


def boxes(found, frame):
    maps, vector = found
    assert maps.device.type == vector.device.type == "cpu"
    assert maps.shape == (1, 5, SIZE[0] - 1, SIZE[1])
    return None, [{"sum": float(maps.double().sum()), "vector": vector[0].tolist(), "frame": frame.index}]


def landed(model, mode, graphed, device="cpu", dtype=torch.float32, **options):
    """Records of each frame, and which thread's call made them: True, after the network's."""
    settings = Settings(mode, 8, 2, torch.device(device), dtype, 2)
    summary = Summary("", mode)
    run = Compute(Network(model, "net", **options), MotionMask(), settings, summary)
    run._graphed = graphed
    run._inside = None if graphed and device == "cpu" else run._inside
    found = []
    for frame in frames():
        result = run(frame, frame.raw().pin_memory() if device == "cuda" else frame.raw())
        late = not result.records
        result.land()
        assert (result.picture, result.finish) == (None, None)
        found.append((late, result.active if mode != "dense" else None, result.records))
    assert bool(run._graph) == graphed
    return found, summary


def same_records(got, want, **tolerance):
    for (late, active, mine), (early, other, theirs) in zip(got, want, strict=True):
        assert (late, early) == (True, False)
        assert np.array_equal(active, other)
        assert mine[0]["frame"] == theirs[0]["frame"]
        assert mine[0]["sum"] == pytest.approx(theirs[0]["sum"], **tolerance)
        assert mine[0]["vector"] == pytest.approx(theirs[0]["vector"], **tolerance)
    assert len({record["sum"] for _, _, (record,) in got}) > 1  # frames differ


LANDING = {"prepare": lambda x: 2 * x, "finish": boxes, "landing": lambda output, size: output[:2]}


@pytest.mark.parametrize("mode", ["masked", "exact", "cached", "dense"])
def test_what_lands_is_finished_on_the_host(mode):
    (got, one), (want, two) = (landed(Detector().eval(), mode, graphed, **LANDING) for graphed in (True, False))
    same_records(got, want, rel=1e-6)
    assert one.errors.count == two.errors.count
    assert one.dense_ms.count == two.dense_ms.count


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mode", ["masked", "cached"])
def test_a_mask_that_follows_boxes_reads_them_where_they_are(mode, device):
    """A box around what is brightest: the blocks of a graph are those of a mask that learns from records."""

    def landing(output, size):
        at = output[0, 0].flatten().argmax()
        x, y = (at % size[1]).float(), (at // size[1]).float()
        return torch.stack([x - 6.04, y - 5.04, x + 6.04, y + 5.04])

    found = []
    for graphed in (True, False):
        mask = Tracks(0.5, 4)
        settings = Settings(mode, 4, 0, torch.device(device), torch.float32, 0)
        first = Network(nn.Conv2d(3, 1, 1).eval(), "net", landing=landing, finish=lambda box, frame: (
            None, [{"box": [round(v, 1) for v in box.tolist()]}]
        ), located=lambda box, size: (box[None], torch.ones(1, dtype=torch.bool, device=box.device)))  # fmt: skip
        with torch.no_grad():
            first.model.weight.fill_(1.0)
        run = Compute(first, mask, settings, Summary("", mode))
        run._graphed = graphed
        mask.expect_boxes(graphed)
        seen = []
        for frame in frames(9):
            result = run(frame, frame.raw().pin_memory() if device == "cuda" else frame.raw())
            result.land()
            seen.append((result.records, result.active.tobytes()))
        assert bool(run._graph) == graphed
        found.append(seen)
    assert [records for records, _ in found[0]] == [records for records, _ in found[1]]
    assert found[0][mode == "cached" :] == found[1][mode == "cached" :]
    assert len({active for _, active in found[0]}) > 3


def test_a_stage_between_the_device_and_the_writer():
    """Items in their order, each after its work; what either raises, who puts or closes sees, and both have ended."""
    done, written = [], []
    stage = Behind(lambda k: done.append(k), Behind(lambda k: written.append((k, k in done))))
    for k in range(20):
        stage.put(k)
    stage.close()
    assert done == list(range(20))
    assert written == [(k, True) for k in range(20)]

    def refuse(k):
        raise OSError(f"{k} is refused")

    for works in ((refuse, written.append), (done.append, refuse)):
        stage = Behind(works[0], last := Behind(works[1]))
        with suppress(OSError):  # one of these may be told already
            for k in range(50):
                stage.put(k)
        with pytest.raises(OSError, match="0 is refused"):
            stage.close()
        assert not stage._thread.is_alive()
        assert not last._thread.is_alive()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["masked", "exact", "cached", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_lands_is_finished_on_the_host_of_a_gpu(mode, dtype):
    got, want = (landed(Detector().eval(), mode, graphed, "cuda", dtype, **LANDING)[0] for graphed in (True, False))
    error = 4 * torch.finfo(dtype).eps
    same_records(got, want, rel=error, abs=error)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_output_without_a_picture_lands(device):
    """Of a network that says nothing of itself: its class."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    (got, _), (want, _) = (landed(model, "masked", graphed, device) for graphed in (True, False))
    for (late, active, (mine,)), (early, other, (theirs,)) in zip(got, want, strict=True):
        assert (late, early) == (True, False)
        assert np.array_equal(active, other)
        assert mine["class"] == theirs["class"]
        assert mine["score"] == pytest.approx(theirs["score"], abs=1e-5)
    assert got[0][1].all()  # the mask has seen no frame before


def test_an_output_without_a_picture_goes_step_by_step():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1)).eval()
    settings = Settings("masked", 8, 0, torch.device("cpu"), torch.float32, 0)
    run = Compute(Network(model), MotionMask(), settings, Summary("", "masked"))
    run._graphed, run._inside = True, None
    (frame,) = frames(1)
    result = run(frame, frame.raw())
    assert (result.picture, result.records) == (None, [])
    assert result.active.all()  # the mask has seen no frame before
    assert run._graph is None


def test_tensors_of_all_kinds_in_one_row_of_bytes():
    torch.manual_seed(1)
    maps = torch.randn(1, 3, 5, 7).contiguous(memory_format=torch.channels_last)
    parts = [
        torch.rand(5, 3) > 0.5, maps.half(), None, maps, maps[:, :2, ::2], torch.randn(3, dtype=torch.double), "text",
        torch.arange(3, dtype=torch.uint8), torch.zeros(2, 0), torch.tensor(7), maps.contiguous().bfloat16(),
    ]  # fmt: skip
    packing = frame_graph.Packing(parts)
    packed = packing.packed(parts)
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    assert packed.shape == (sum(part.numel() * part.element_size() for part in tensors),)
    for got, wanted in zip(packing.unpacked(packed.clone()), parts, strict=True):
        if isinstance(wanted, torch.Tensor):
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
            assert torch.equal(got, wanted)
        else:
            assert got is wanted


def test_the_dense_side_of_an_onnx_file_in_one_graph(tmp_path):
    """Its layers on all blocks."""
    pytest.importorskip("onnx")
    path = tmp_path / "net.onnx"
    torch.onnx.export(net(), (torch.zeros(1, 3, *SIZE),), path, dynamo=False)
    settings = Settings("dense", 8, 0, torch.device("cpu"), torch.float32, 0)
    run = Compute(Network(str(path), "net", captured=True), MotionMask(), settings, Summary("", "dense"))
    run._graphed = True
    with torch.no_grad():
        for frame in frames():
            result = run(frame, frame.raw())
            result.land()
            wanted = net()(frame.tensor(torch.device("cpu"), torch.float32))[0].movedim(0, 2)
            assert np.abs((255 * wanted).numpy() - result.picture).max() <= 0.51
    assert run._graph is not None
    assert run._dense_name == "sbnet, all blocks"


def test_frames_of_another_size_get_a_graph_of_their_own():
    settings = Settings("masked", 8, 0, torch.device("cpu"), torch.float32, 0)
    run = Compute(network(), Changed(), settings, Summary("", "masked"))
    run._graphed, run._inside = True, None
    for size in ((16, 24), (24, 16), (16, 24)):
        frame = Frame(0, np.full((*size, 3), 90, np.uint8))
        result = run(frame, frame.raw())
        result.land()
        assert result.picture.shape == (*size, 3)
        assert result.active.all()


def test_masks_that_look_beyond_the_frame_stay_outside():
    settings = Settings("masked", 8, 0, torch.device("cuda"), torch.float32, 0)
    net_on_cpu = Network("none.onnx", captured=True)
    for mask, graphed in ((MotionMask(), True), (Boxes([[0, 0, 8, 8]]), False)):
        assert Compute(net_on_cpu, mask, settings, Summary("", "masked"))._graphed == graphed


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["masked", "exact", "cached", "dense"])
@pytest.mark.parametrize("name", MASKS)
def test_one_graph_on_a_gpu(name, mode):
    got, one = results(MASKS[name](), mode, True, "cuda")
    want, _ = results(MASKS[name](), mode, False, "cuda")
    same(got, want, apart=1)
    assert one.ms.count == 0  # the pipeline's writer adds them
    pipeline = sbnet.Pipeline([f.pixels for f in frames()], MASKS[name](), network(), mode=mode, device="cuda")
    summary = pipeline.run()
    assert summary.frames == 6
    assert summary.ms.mean > 0


@pytest.mark.gpu
def test_a_frame_is_one_upload_one_replay_one_download():
    from sbnet.benchmarks.harness.frame_calls import count

    calls = count([f.pixels for f in frames()] * 20, network(), mode="cached", mask=Changed(8 / 255))
    assert (calls["uploads"], calls["downloads"], calls["replays"], calls["launches"]) == (1, 1, 1, 0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mode", ["masked", "cached"])
def test_times_of_a_frame_and_its_mask_path(mode, device, monkeypatch):
    """The mask path finds, frame after frame, what the frame's graph finds."""
    seen = []

    def compute(*args):
        run = Compute(*args)
        run._graphed, run._inside = True, None
        return run

    def lapse(run):
        seen.append(run.__self__)
        return float(run() is None) + len(seen)

    if device == "cpu":
        monkeypatch.setattr(capture, "cuda_graph", stand_in)
        monkeypatch.setattr(frame_times, "Compute", compute)
        monkeypatch.setattr(sbnet.Pipeline, "_loaded", lambda self: ((f, f.raw()) for f in self.source))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(frame_times, "lapse", lapse)
    monkeypatch.setattr(frame_times, "FIRST", 2)
    found = frame_times.times([f.pixels for f in frames()], network(), 3, mode=mode, mask=MotionMask(), device=device)
    assert set(found["us"]) == {"replay", "mask path", "dense replay"}
    assert min(found["us"].values()) > 0
    assert found["frames"] == 3
    assert 0 < found["density"] < 1
    if device == "cpu":
        graph, path, _ = seen[-3:]
        lists, _ = path._graph.made
        active = graph.download()[1]
        assert np.array_equal(lists[0].block_map[0] >= 0, active)
