"""Each pipeline's network as an ONNX file: ONNX Runtime gives what the pipeline's run gives, frame after frame."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from typer.testing import CliRunner

import sbnet.export
from sbnet.apps.pipeline import Network, PipelineError, open_network, trained
from sbnet.apps.pipeline.export import export_network
from sbnet.masks import Changed, Occupied
from sbnet.models import SRVGG, BirdsEyeDetector, UpConv7, resnet18
from sbnet_command import cli

SMALL = {  # what the registry builds, but for contours in small and with random weights
    "contours": lambda: open_network("contours"),
    "upscale": lambda: Network(SRVGG(2, 8, 1, shuffle=False), "srvgg", margin="halo", pad=1, mode="cached",
                               mask=Changed(8 / 255)),
    "waifu2x": lambda: Network(UpConv7((4, 8)), "upconv7", margin="halo", pad=7, mode="cached", mask=Changed(8 / 255)),
    "birdseye": lambda: Network(BirdsEyeDetector(3, (1, 1, 1, 1)), "birdseye", mask=Occupied()),
    "recognise": lambda: Network(resnet18(weights=0), "resnet", prepare=lambda x: x - 0.5, margin=16, mode="cached"),
}  # fmt: skip
QUICK = "contours", "upscale"


def same(network: Network, path, size=(48, 64), frames: int = 3) -> None:
    torch.manual_seed(0)
    run = export_network(network, path, size)
    session = sbnet.export.session(path, ["CPUExecutionProvider"])
    inputs = session.get_inputs()
    assert [v.name for v in inputs[:2]] == ["x", "mask"]
    states = [torch.full(v.shape, 7.0) for v in inputs[2:]]  # a full mask reads none of it
    assert bool(states) == (network.mode == "cached")
    frame = torch.rand(1, 3, *size)
    for k in range(frames):
        mask = torch.zeros(1, *size, dtype=torch.bool)
        mask[:, 8 * k : 8 * k + 8, 16:32] = True
        frame[:, :, 8 * k : 8 * k + 8, 16:32] += 0.1
        given = network.input(frame), network.widened_mask(mask | (k == 0))
        want = tree_leaves(run(*given))
        got = sbnet.export.run(session, [*given, *states])
        states = got[len(want) :]
        for own, wanted in zip(got, want, strict=False):
            scale = float(wanted.abs().max()) + 1e-6
            torch.testing.assert_close(own / scale, wanted / scale, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SMALL])
def test_small_networks(name, tmp_path):
    same(SMALL[name](), tmp_path / "net.onnx")


def test_the_command_writes_networks_of_run(tmp_path, monkeypatch):
    monkeypatch.setitem(trained.BUILDERS, "upscale", lambda which="2": SMALL["upscale"]())
    path = tmp_path / "net.onnx"
    result = CliRunner().invoke(cli.app, ["export", "upscale:2", "-o", str(path), "--size", "48x64"])
    assert result.exit_code == 0, result.output
    session = sbnet.export.session(path, ["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == [1, 3, 50, 66]
    refused = CliRunner().invoke(cli.app, ["export", "upscale:2", "-o", str(path), "--batch", "2"])
    assert refused.exit_code == 1
    assert "alone" in refused.output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["upscale:2", "upscale:waifu2x", "faces", "text"])
def test_trained_networks(name, tmp_path):
    try:
        network = open_network(name)
    except PipelineError as missing:
        pytest.skip(str(missing))
    same(network, tmp_path / "net.onnx", (64, 96), 2)
