"""`sbnet run` and the files that it reads and writes: nothing half done under a name, nothing wrong passed as whole."""

import itertools
import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from sbnet.apps import video, writers
from sbnet.apps.pipeline import Frame, Pipeline, checks, compute, sources
from sbnet.benchmarks.harness import dense
from sbnet.engine import sparsify
from sbnet_command import cli
from support.films import pictures

pytest.importorskip("av")


@pytest.fixture(autouse=True)
def _quick_dense(monkeypatch):
    """The dense network as PyTorch runs it: its other forms have a test of their own."""
    monkeypatch.setattr(dense, "forms", lambda net, x: {"PyTorch": dense.form_of_torch(net, x.dtype)})


def film(path: Path, frames: int = 12, size: tuple[int, int] = (48, 64), **options: str) -> Path:
    """A bright square walks over noise; the index stands at the film's head where `options` say so."""
    import av

    rng = np.random.default_rng(0)
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream("libx264", rate=10)
        stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
        stream.options = {"g": "1", "crf": "1"}  # a large frame each
        for step in range(frames):
            picture = rng.integers(0, 60, (*size, 3), np.uint8)
            picture[16:32, 2 * step : 2 * step + 12] = 230
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def invoke(*arguments: object):
    return CliRunner().invoke(cli.app, ["run", *map(str, arguments), "--device", "cpu"])


def said(result) -> str:
    return " ".join((result.output + result.stderr).split())


# ---- reading
def test_a_film_that_was_cut_off_fails_with_the_table_of_its_frames(tmp_path):
    whole = film(tmp_path / "whole.mp4", movflags="faststart")
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    good = len(pictures(cut))
    assert 1 < good < 12
    result = invoke(cut, "-o", tmp_path / "out.mp4")
    assert result.exit_code == 1
    assert f"ends after {good} of 12 frames: the file is not complete" in said(result)
    assert "speed-up" in said(result)
    assert len(pictures(tmp_path / "out.mp4")) == good
    assert invoke(cut, "-o", tmp_path / "few.mp4", "--frames", 2).exit_code == 0


def test_a_film_that_cannot_be_decoded_further(tmp_path, monkeypatch):
    true = sources._decoded

    def broken(*arguments):
        yield from itertools.islice(true(*arguments), 3)
        yield Frame(3, None, "film.mp4, frame 3", fault="Invalid data")

    monkeypatch.setattr(sources, "_decoded", broken)
    result = invoke(film(tmp_path / "film.mp4"), "-o", tmp_path / "out.mp4")
    assert result.exit_code == 1
    assert "film.mp4, frame 3: cannot be read (Invalid data)" in said(result)
    assert "speed-up" in said(result)
    monkeypatch.undo()
    assert len(pictures(tmp_path / "out.mp4")) == 3


def test_phone_films_stand_upright(tmp_path):
    path = film(tmp_path / "film.mp4")
    stored = pictures(path)[0]
    data = bytearray(path.read_bytes())
    matrix = data.index(b"tkhd") + 4 + 40
    quarter = [0, 1 << 16, 0, -(1 << 16), 0, 0, 48 << 16, 0, 1 << 30]  # a quarter turn clockwise
    data[matrix : matrix + 36] = b"".join(v.to_bytes(4, "big", signed=True) for v in quarter)
    path.write_bytes(data)
    info = video.video_info(path)
    assert (info.height, info.width) == (64, 48)
    shown = pictures(path)[0]
    assert np.array_equal(shown, np.rot90(stored, -1))
    assert pictures(path, (32, 24))[0].shape == (32, 24, 3)
    assert invoke(path, "-o", tmp_path / "out.mp4").exit_code == 0
    assert pictures(tmp_path / "out.mp4")[0].shape == (64, 48, 3)


@pytest.mark.parametrize(
    ("name", "message"), [("", "expected pictures (.png"), ("none.mp4", "no such file"), ("pipe", "not a regular file")]
)
def test_what_is_no_film_is_named_for_what_it_is(name, message, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert message in said(invoke(tmp_path / name, "-o", tmp_path / "o"))


def test_a_stream_that_is_not_there():
    assert "cannot be opened" in said(invoke("http://127.0.0.1:9/film.mp4"))


def test_a_camera_by_its_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "/dev/video97: cannot be opened" in said(invoke("97"))
    film(tmp_path / "0.mp4").rename(tmp_path / "97")  # a film may be named like that
    assert invoke("97", "-o", "out.mp4", "--frames", 2).exit_code == 0


def test_a_sink_of_another_ending_is_told_which_there_are(tmp_path):
    found = said(invoke(film(tmp_path / "film.mp4"), "-o", tmp_path / "out.xyz"))
    assert all(ending in found for ending in (".mp4", ".gif", ".jsonl", "a folder"))


# ---- writing
@pytest.mark.parametrize("after", [0, 5])
def test_an_interrupt_leaves_whole_frames_or_the_earlier_film(after, tmp_path, monkeypatch):
    target = tmp_path / "out.mp4"
    target.write_bytes(b"earlier")
    true, calls = compute.Compute.__call__, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return true(*arguments)

    monkeypatch.setattr(compute.Compute, "__call__", interrupted)
    result = invoke(film(tmp_path / "film.mp4"), "-o", target, "--overwrite", "--compare", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["film.mp4", "out.mp4"]
    assert result.exit_code == 130
    if after:
        assert "ended by Ctrl-C" in said(result)
        assert len(pictures(target)) == after
    else:
        assert target.read_bytes() == b"earlier"


FULL_DISK = """
import resource, sys
from fractions import Fraction
import numpy as np
from sbnet.apps import video, writers
resource.setrlimit(resource.RLIMIT_FSIZE, (40000, 40000))
rng = np.random.default_rng(0)
for name in sys.argv[1:]:
    try:
        with writers.open_writer(__import__("pathlib").Path(name), Fraction(10)) as writer:
            for _ in range(200):
                writer.write(rng.integers(0, 255, (96, 128, 3), np.uint8))
    except video.VideoError as error:
        print(error)
"""


def test_a_full_disk_is_a_line_and_leaves_the_earlier_film(tmp_path):
    targets = [tmp_path / f"out.{kind}" for kind in ("avi", "gif", "mkv", "mp4")]
    for target in targets:
        target.write_bytes(b"earlier")
    child = subprocess.run([sys.executable, "-c", FULL_DISK, *targets], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout.splitlines() == [f"{target}: cannot be written (File too large)" for target in targets]
    assert all(target.read_bytes() == b"earlier" for target in targets)
    assert sorted(tmp_path.iterdir()) == targets


def test_a_disk_that_is_full_at_the_end_only(tmp_path, monkeypatch):
    """What the codec held back fails to be written: no exception on the way, one from the writer's end."""
    writer = writers.VideoWriter(tmp_path / "o.mp4", Fraction(5))
    writer.write(np.zeros((32, 32, 3), np.uint8))
    writer._sink.error = OSError(28, "No space left on device")
    with pytest.raises(video.VideoError, match="No space left"):
        writer.__exit__(None, None, None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["out.mp4", "pictures/00000.png"])
def test_symbolic_links_are_replaced_not_followed(name, tmp_path):
    precious, link = tmp_path / "precious", tmp_path / name
    precious.write_bytes(b"precious")
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(precious)
    with writers.open_writer(tmp_path / name.split("/")[0], Fraction(10)) as writer:
        writer.write(np.zeros((32, 32, 3), np.uint8))
    assert precious.read_bytes() == b"precious"
    assert not link.is_symlink()
    assert link.stat().st_size > 50


@pytest.mark.parametrize(
    ("target", "message"),
    [("/proc/o.mp4", "/proc/o.mp4: cannot be written"), ("file/o.mp4", "file is not a folder"),
     ("file", "file is not a folder"), ("file/o", "Not a directory"), ("pipe.mp4", "not a regular file")],
)  # fmt: skip
def test_an_output_that_cannot_be_written_is_said_before_the_work(target, message, tmp_path, monkeypatch):
    monkeypatch.setattr(compute, "SparseRun", None)  # no work
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe.mp4")
    result = invoke(film(tmp_path / "film.mp4", 2), "-o", tmp_path / target)
    assert result.exit_code == 1
    assert message in said(result)
    assert ".part" not in said(result)


# ---- the job
def test_too_little_memory_is_a_line(tmp_path, monkeypatch):
    path = film(tmp_path / "film.mp4")

    def refuse(*_, **__):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    with monkeypatch.context() as patch:
        patch.setattr(compute, "SparseRun", refuse)
        result = invoke(path, "-o", tmp_path / "out.mp4")
    assert result.exit_code == 1
    assert said(result).endswith("too little memory for frames of 48x64; expected a smaller size")
    assert not (tmp_path / "out.mp4").exists()
    true, calls = compute.compared, []

    def second(*arguments):
        calls.append(1)
        return true(*arguments) if len(calls) == 1 else refuse()

    with monkeypatch.context() as patch:
        patch.setattr(compute, "compared", second)
        result = invoke(path, "-o", tmp_path / "out.mp4")
    assert result.exit_code == 1
    assert "speed-up" in said(result)
    assert len(pictures(tmp_path / "out.mp4")) == 2
    with monkeypatch.context() as patch:
        patch.setattr(checks, "compare", refuse)
        result = invoke(path, "-o", tmp_path / "whole.mp4", "--check", 1000)
    assert result.exit_code == 0
    assert "too little memory" in " ".join(said(result).replace("│", "").split())


def test_the_bar_says_what_takes_long(tmp_path, monkeypatch):
    said_so = []

    def told(module, name):
        true = getattr(module, name)

        def call(*arguments, **options):
            said_so.append(pipeline.summary.stage)
            return true(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    told(compute, "SparseRun")
    told(checks, "compare")
    pipeline = Pipeline(film(tmp_path / "film.mp4", 4), device="cpu", check=1000)
    pipeline.run(lambda *_: said_so.append(pipeline.summary.stage))
    assert said_so == ["setting up", *["running"] * 4, *["checking in float64"] * 3]


def test_the_dense_network_runs_in_its_fastest_form(monkeypatch):
    """Halves on a CPU are slow: float32 is among the forms, and the least time wins."""
    monkeypatch.undo()
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 3, 3, padding=1)).eval()
    x = torch.rand(1, 3, 40, 56)
    for dtype in (torch.float32, torch.float16):
        found = dense.forms(net, x.to(dtype), compiled=False)
        installed = {n for n, module in (("ONNX Runtime", "onnxruntime"), ("OpenVINO", "openvino")) if has(module)}
        own = {"PyTorch"} | installed
        assert set(found) == (own if dtype == torch.float32 else {"PyTorch, float16"} | {f"{n}, float32" for n in own})
        wanted = net(x)
        for name, form in found.items():
            got = form.run(form.prepare(x.to(dtype))).float()
            assert (got - wanted).norm() <= (
                1e-2 if "float16" in name or dtype == torch.float16 else 1e-5
            ) * wanted.norm()

    def slow(seconds):
        import time

        return dense.Form(lambda x: x, lambda x: time.sleep(seconds) or x)

    assert dense.fastest({"a": slow(0.02), "b": slow(0.001), "c": slow(0.04)}, x) == "b"


def has(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


# ---- export
def test_an_export_that_differs_fails_and_leaves_the_earlier_model(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    from sbnet.export import convert, networks

    target = tmp_path / "net.onnx"
    arguments = ["export", "-o", str(target), "--size", "40x56"]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    earlier = target.read_bytes()
    true = convert.memory_format.optimise

    def spoil(model, fuse):
        true(model, fuse)
        value = next(v for v in model.graph.initializers.values() if len(v.shape) == 4)
        import onnx_ir as ir

        value.const_value = ir.Tensor(value.const_value.numpy() * np.float32(1.001), name=value.name)

    monkeypatch.setattr(convert.memory_format, "optimise", spoil)
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 1
    assert "twice PyTorch's own" in said(result)
    assert target.read_bytes() == earlier
    assert list(tmp_path.iterdir()) == [target]
    for model in ("resnet18", "sbnet"):
        with pytest.raises(networks.ExportError, match="expected an rms error of at most"):
            networks.write(*networks.build(model, classes=0), tmp_path / "r.onnx", (40, 56))
    assert list(tmp_path.iterdir()) == [target]


def test_an_export_tests_its_folder_first_and_takes_stale_weights_away(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    from sbnet import export
    from sbnet.models import contour_net

    inputs = torch.rand(1, 3, 32, 32), torch.ones(1, 32, 32, dtype=torch.bool)
    chain = sparsify(contour_net(1), inputs[0], block=16).as_module()
    path = tmp_path / "net.onnx"
    export.to_onnx(chain, inputs, path, external_data=True)
    assert {p.name for p in tmp_path.iterdir()} == {"net.onnx", "net.onnx.data"}
    export.verify(path, chain, inputs, ["CPUExecutionProvider"], quiet=True)
    export.to_onnx(chain, inputs, path)
    assert list(tmp_path.iterdir()) == [path]
    export.verify(path, chain, inputs, ["CPUExecutionProvider"], quiet=True)
    monkeypatch.setattr(torch.export, "export", None)  # no work
    for wrong, message in ((tmp_path, "is a folder"), (tmp_path / "none" / "a.onnx", "its folder is missing")):
        with pytest.raises(export.ExportError, match=message):
            export.to_onnx(chain, inputs, wrong)


# ---- bench
def test_bench_fails_where_a_result_is_wrong(tmp_path, monkeypatch):
    from sbnet.benchmarks.harness import command, measure

    row = {"group": "ops", "name": "a", "facts": {}, "ours": "ours", "us": {"ours": 1.0}, "spread us": 0.0}
    monkeypatch.setattr(measure, "start", lambda *_: measure.Session({"device": "d"}, {"cache": "warm"}, {}))
    monkeypatch.setattr(command, "cases", lambda *_: ["case"])
    for wrong, code in (({}, 0), ({"wrong": {"peer": "1 elements differ"}}, 1)):
        monkeypatch.setattr(measure, "run", lambda cases, session, *_, w=wrong: session.rows.append(row | w) or True)
        output = tmp_path / "r.json"
        result = CliRunner().invoke(cli.app, ["bench", "--device", "cpu", "-o", str(output)])
        assert result.exit_code == code, said(result)
    assert json.dumps(row)
