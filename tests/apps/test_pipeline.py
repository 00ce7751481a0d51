"""`sbnet.Pipeline`: what goes in comes out, in order, whole, and no more of it is held than a few frames."""

import importlib
import json
import threading
import time
from fractions import Fraction
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import sbnet
from sbnet.apps import video, writers
from sbnet.apps.pipeline import Network, Pipeline, PipelineError, Result, open_source, stages
from sbnet.apps.pipeline.dense_side import dense_side
from sbnet.apps.pipeline.summary import POINTS, Series
from sbnet.benchmarks.harness import dense
from sbnet_command import cli
from support.films import pictures

pytest.importorskip("av")
pytest.importorskip("PIL")
SIZE = (32, 48)


@pytest.fixture(autouse=True)
def _quick_dense(monkeypatch):
    """The dense network as PyTorch runs it: its other forms have a test of their own (test_run_files.py)."""
    monkeypatch.setattr(dense, "forms", lambda net, x: {"PyTorch": dense.form_of_torch(net, x.dtype)})


def frames(count: int = 6) -> list[np.ndarray]:
    """A bright square walks over a dark floor."""
    found = []
    for step in range(count):
        picture = np.full((*SIZE, 3), 40, np.uint8)
        picture[8:16, 4 * step : 4 * step + 8] = 230
        found.append(picture)
    return found


class Edges(nn.Module):
    """Two layers; three channels out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))

    def forward(self, x):
        return self.layers(x)


class Nothing(nn.Module):
    """Forgets what it computes."""

    def forward(self, x):
        x.mean()


def edges() -> nn.Module:
    return Edges().eval()


def tensor(picture: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(picture)[None].permute(0, 3, 1, 2).float() / 255


def run(source, sink=None, network=None, **options):
    return Pipeline(source, network=network or edges(), sink=sink, **{"device": "cpu", "compare": 0} | options)


@pytest.fixture(scope="session")
def film(tmp_path_factory):
    path = tmp_path_factory.mktemp("film") / "square.mp4"
    with writers.VideoWriter(path, Fraction(10)) as writer:
        for picture in frames():
            writer.write(picture)
    return path


@pytest.mark.gpu
def test_the_dense_side_keeps_its_weights():
    """A CUDA graph reads weights where they lay when it was captured."""
    x = tensor(frames()[0]).cuda()
    run = dense_side(edges().cuda(), x)
    torch.cuda.synchronize()
    taken = [torch.full((4096,), torch.nan, device="cuda") for _ in range(64)]  # memory that is not held any more
    with torch.no_grad():
        torch.testing.assert_close(run(x), edges().cuda()(x), rtol=1e-3, atol=1e-3)
    assert taken


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["masked", "exact", "cached"])
def test_pipelines_on_a_gpu(mode):
    run_ = run(frames(), network=edges(), mask=lambda x: x.mean(1) > 0.5, mode=mode, device="cuda", compare=2)
    summary = run_.run()
    assert 0 < summary.densities.mean < 1
    assert summary.errors.mean < (1 if mode == "masked" else 0.2)  # NaN is not less


def test_exact_results_of_every_frame_in_order():
    net, seen = edges(), []

    def see(result: Result):
        inside = mask(tensor(result.frame.pixels))[0]
        with torch.no_grad():
            exact = net(tensor(result.frame.pixels))[0].movedim(0, 2)
        wanted = (255 * exact).add(0.5).clamp(0, 255).byte()
        got = torch.from_numpy(result.picture)
        assert (got[inside].int() - wanted[inside].int()).abs().max() <= 1
        seen.append(result.frame.index)

    mask = sbnet.masks.Boxes([[4, 4, 20, 20]])
    summary = run(frames(), see, net, mask=mask, mode="exact", compare=2).run()
    assert seen == list(range(6))
    assert summary.frames == 6
    assert summary.errors.mean < 1e-5
    assert summary.errors.count == 4  # frames 0 to 2, and 4


def test_cached_with_its_halo_is_the_dense_film(device):
    """Recomputing what changed, as far as the network sees, leaves nothing wrong anywhere."""
    net, apart = edges(), []

    def see(result: Result):
        with torch.no_grad():
            wanted = (255 * net(tensor(result.frame.pixels))[0].movedim(0, 2)).add(0.5).clamp(0, 255).byte()
        apart.append(int((torch.from_numpy(result.picture).int() - wanted.int()).abs().max()))

    order = {"mask": "changed", "mode": "cached", "margin": "halo", "block": 4, "compare": 2}
    summary = run(frames(), see, net, device=device, dtype=torch.float32, **order).run()
    assert len(apart) == 6
    assert max(apart) <= 1
    assert summary.densities.mean < 0.6
    assert summary.errors.mean < 1e-5


def test_a_film_becomes_a_film_and_lines(film, tmp_path):
    summary = run(film, [tmp_path / "o.mp4", tmp_path / "o.jsonl", tmp_path / "png"], view="side").run()
    assert len(pictures(tmp_path / "o.mp4")) == 6
    assert (video.video_info(tmp_path / "o.mp4").width) == 96
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [line["frame"] for line in lines] == list(range(6))
    assert lines[0]["density"] == 1
    assert lines[3]["density"] < 1
    assert len(list((tmp_path / "png").iterdir())) == 6
    for word in ("frames", "mean density", "frames a second", "read", "compute", "write"):
        assert word in str(summary)
    assert not list(tmp_path.glob(".*"))


def test_pictures_of_a_folder_a_glob_and_one(tmp_path):
    from PIL import Image

    for k, picture in enumerate(frames(3)):
        Image.fromarray(picture).save(tmp_path / f"{k}.png")
    assert run(tmp_path).run().frames == 3
    assert run(str(tmp_path / "[01].png")).run().frames == 2
    assert run(tmp_path / "2.png").run().frames == 1
    assert open_source(tmp_path).length == 3
    scaled = next(iter(open_source(tmp_path / "2.png", (16, 20))))
    assert scaled.pixels.shape == (16, 20, 3)


def test_pictures_of_16_bits_keep_their_grey(tmp_path):
    image = pytest.importorskip("PIL.Image")
    grey = np.arange(0, 256, dtype=np.uint8).reshape(8, 32)
    image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "grey.png")
    (frame,) = open_source(tmp_path / "grey.png")
    assert frame.pixels.shape == (8, 32, 3)
    assert np.array_equal(frame.picture()[..., 0], grey)
    assert frame.pixels.dtype == np.float32
    assert np.array_equal(frame.pixels[..., 0], grey.astype(np.float32) * 257 / np.float32(65535))


def test_a_stream_by_its_address(film):
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(film.parent)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}/square.mp4"
        assert run(address).run().frames == 6
        with pytest.raises(PipelineError, match="cannot be opened"):
            run(address.replace("square", "none"))
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_programs_of_torch_export(tmp_path, dtype):
    """Of one size, and of any: what the module gives, in the dtype of the run; another size is one line."""
    net, size = Edges().eval(), (40, 56)
    free = {2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
    for name, shapes in {"fixed": None, "free": (free,)}.items():
        program = torch.export.export(net, (torch.rand(1, 3, *SIZE),), dynamic_shapes=shapes)
        torch.export.save(program, tmp_path / f"{name}.pt2")
    results = []
    options = {"mask": "all", "device": "cpu", "dtype": dtype, "compare": 2}
    done = Pipeline(frames(), network=tmp_path / "fixed.pt2", sink=results.append, **options).run()
    assert done.largest < (1e-5 if dtype == torch.float32 else 5e-3)
    for frame, result in zip(frames(), results, strict=True):
        given = torch.from_numpy(frame).movedim(2, 0)[None].float() / 255
        with torch.no_grad():
            wanted = net(given)[0].movedim(0, 2).clamp(0, 1) * 255
        assert np.abs(result.picture - wanted.numpy()).max() <= (0.51 if dtype == torch.float32 else 1.5)
    other = [np.zeros((*size, 3), np.uint8)]
    with pytest.raises(PipelineError, match=r"fixed.*size"):
        Pipeline(other, network=str(tmp_path / "fixed.pt2"), **options).run()
    assert Pipeline(other, network=str(tmp_path / "free.pt2"), **options).run().frames == 1
    (tmp_path / "bad.pt2").write_bytes(b"no zip")
    for name, message in (("bad", "not a program of torch.export"), ("none", "no such file")):
        with pytest.raises(PipelineError, match=message):
            Pipeline(frames(), network=str(tmp_path / f"{name}.pt2"))


def test_no_more_than_a_few_frames_are_held():
    """A source of any length, and a sink that is slower than it: the reader waits."""
    read, written, most = [0], [0], [0]

    def source():
        for picture in frames(4) * 10:
            read[0] += 1
            yield picture

    def sink(_):
        time.sleep(0.002)
        written[0] += 1
        most[0] = max(most[0], read[0] - written[0])

    assert run(source(), sink).run().frames == 40
    assert written[0] == 40
    assert most[0] <= 2 * stages.DEPTH + 4


def test_a_broken_frame_is_named_and_skipped_by_choice(tmp_path):
    from PIL import Image

    for k, picture in enumerate(frames(4)):
        Image.fromarray(picture).save(tmp_path / f"{k}.png")
    (tmp_path / "1.png").write_bytes(b"no picture")
    kept = []
    summary = run(tmp_path, lambda r: kept.append(r.frame.name), skip_broken=True).run()
    assert kept == ["0.png", "2.png", "3.png"]
    assert summary.skipped == 1
    assert "1.png" in summary.broken[0]
    summary = run(tmp_path, tmp_path / "out.jsonl").run()
    assert summary.frames == 1
    assert "1.png: cannot be read" in summary.fault
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1


def test_ctrl_c_leaves_a_whole_film(tmp_path):
    def told(summary, _):
        told.calls += 1
        if told.calls == 4:
            raise KeyboardInterrupt  # as it reaches the main thread

    told.calls = 0
    summary = run(frames(30), [tmp_path / "o.mp4", tmp_path / "o.jsonl"]).run(told)
    assert summary.interrupted
    assert len(pictures(tmp_path / "o.mp4")) == summary.frames == 4
    assert len((tmp_path / "o.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("where", ["source", "mask", "network", "sink"])
def test_what_raises_is_raised_and_leaves_nothing_behind(where, tmp_path):
    def fail(*_):
        raise LookupError(where)

    def source():
        yield from frames(2)
        if where == "source":
            fail()

    network = Network(edges(), finish=fail) if where == "network" else edges()
    mask = fail if where == "mask" else "motion"
    sinks = [tmp_path / "o.mp4", fail] if where == "sink" else tmp_path / "o.mp4"
    with pytest.raises(LookupError, match=where):
        run(source(), sinks, network, mask=mask).run()
    assert not list(tmp_path.iterdir())
    assert not [t for t in threading.enumerate() if t.name.startswith("sbnet-")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": 1.5}, "source: expected a path"),
        ({"source": "none.mp4"}, "no such file"),
        ({"source": "/none/*.png"}, "expected pictures"),
        ({"network": "nonsense"}, "expected one of contours"),
        ({"network": "none.onnx"}, "no such file"),
        ({"network": "nomodule:net"}, "No module named"),
        ({"mask": "nonsense"}, "mask: expected one of all"),
        ({"mask": "motion:x"}, "mask: motion:x"),
        ({"mode": "quick"}, "mode: expected one of masked"),
        ({"margin": -1}, "margin: expected"),
        ({"view": "x"}, "view: expected"),
        ({"sink": 3}, "sink: expected"),
        ({"source": []}, "has no frames"),
        ({"source": [np.zeros(3)]}, "source: item 0"),
        ({"mask": "motion:300"}, "mask: motion:300: MotionMask: threshold: expected 0 to 1"),
        ({"network": Nothing()}, "network Nothing: sparsify: the network: expected layers whose pixels"),
    ],
)
def test_bad_orders_are_one_line(change, message):
    order = {"source": frames(1), "network": edges(), "device": "cpu"} | change
    with pytest.raises((PipelineError, video.VideoError), match=message):
        Pipeline(**order).run()


def test_curves_do_not_grow():
    series = Series()
    for k in range(10_000):
        series.add(k)
    assert len(series.curve) < POINTS
    assert series.count == 10_000
    assert series.mean == 4999.5
    assert series.curve[0] < series.curve[-1]


def test_free_memory_goes_back_now_and_then(monkeypatch):
    module, calls = importlib.import_module("sbnet.apps.pipeline.pipeline"), []
    monkeypatch.setattr(module, "TRIMMED", 2)
    monkeypatch.setattr(module, "give_back_memory", lambda: calls.append(True))
    Pipeline(frames(5), network=edges(), device="cpu", compare=0).run()
    assert len(calls) == 2


def net_for_the_command() -> Network:
    return Network(edges(), "edges", finish=lambda y, frame: (y, [{"box": [1, 2, 3, 4]}]))


def test_the_command(film, tmp_path, monkeypatch):
    import sys

    module = type(sys)("users_module")
    module.net = net_for_the_command
    monkeypatch.setitem(sys.modules, "users_module", module)
    arguments = [
        "run", film, "--network", "users_module:net", "--mask", "motion:8 + 2", "--mode", "cached", "--margin", "halo",
        "-o", tmp_path / "o.mp4", "-o", tmp_path / "o.jsonl", "--device", "cpu", "--compare", 3, "--block", 8,
    ]  # fmt: skip
    result = CliRunner().invoke(cli.app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    for word in ("mean density", "speed-up", "rms error", "wrote"):
        assert word in result.output
    assert json.loads((tmp_path / "o.jsonl").read_text().splitlines()[0])["records"] == [{"box": [1, 2, 3, 4]}]
    own = CliRunner().invoke(
        cli.app, ["run", str(film), "--mask", "all", "-o", str(tmp_path / "n.mp4"), "--device", "cpu"]
    )
    assert own.exit_code == 0, own.output
    assert "contours" in own.output
    assert "100.0%" in own.output
    itself = CliRunner().invoke(cli.app, ["run", str(film), "--network", "contours", "-o", str(film)])
    assert itself.exit_code == 1
    assert "expected another name than the source" in itself.output


@pytest.mark.slow
def test_memory_and_speed_hold_over_a_long_film():
    """Resident memory and the time of a frame, early and at the end."""
    picture = frames(12)
    count, marks = 1600, []

    def source():
        for k in range(count):
            yield picture[k % 12]

    def told(summary, _):
        told.calls += 1
        if told.calls in (400, 600, count - 201, count - 1):
            with open("/proc/self/statm") as file:
                marks.append((int(file.read().split()[1]) * 4096, time.perf_counter()))

    told.calls = 0
    summary = run(source(), lambda result: None, mode="cached").run(told)
    assert summary.frames == count
    assert len(marks) == 4
    assert marks[-1][0] - marks[0][0] < 8e6
    early, late = marks[1][1] - marks[0][1], marks[-1][1] - marks[-2][1]
    assert late < 3 * early


def test_missing_records_are_reported(tmp_path):
    """A network of one's own without a decoder: JSON lines without records, and a line that says why."""
    told = [note for note in run(frames(), tmp_path / "o.jsonl").run().notes if "no decoder is set" in note]
    assert len(told) == 1
    assert "finish" in told[0]
    assert not run(frames(), [lambda result: None]).run().notes
    found = Network(edges(), finish=lambda y, frame: (None, [{"box": [0, 0, 1, 1]}]))
    assert not run(frames(), tmp_path / "p.jsonl", found).run().notes
