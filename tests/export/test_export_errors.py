"""Options of to_onnx, what it refuses, and the sessions that run its models."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnx
import onnxruntime
import torch
from torch import nn

import sbnet
from sbnet import BlockGrid, export
from sbnet.export import convert
from support.export_cases import Chain, plane_inputs, planes, same_as_torch
from support.helpers import assert_bitwise
from support.ort_models import PROVIDER

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


# ---- files
def version(text):
    return tuple(int(part) for part in text.split(".")[:2])


def test_an_opset_that_the_exporter_does_not_reach(monkeypatch, tmp_path):
    """PyTorch 2.10 writes opset 18 in the place of 26, and does not say so."""
    made = torch.onnx.export
    monkeypatch.setattr(torch.onnx, "export", lambda *args, **how: made(*args, **{**how, "opset_version": 18}))
    with pytest.raises(
        export.ExportError, match=r"opset_version: expected one that torch .* got 26, which it left at 18"
    ):
        export.to_onnx(Chain(), plane_inputs("cpu"), tmp_path / "m.onnx", opset_version=26)
    assert not (tmp_path / "m.onnx").exists()


@pytest.mark.parametrize("opset", [18, 20, 23, 26])
def test_opsets(opset, tmp_path):
    if opset > 21 and version(onnxruntime.__version__) < (1, 31):
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} may not know opset {opset}")
    module = Chain()
    path = export.to_onnx(module, plane_inputs("cpu"), tmp_path / "m.onnx", opset_version=opset)
    assert {o.domain: o.version for o in onnx.load(path).opset_import} == {"": opset, "sbnet": 1}
    same_as_torch(path, module, plane_inputs("cpu"))


def test_large_weights_go_into_a_second_file(tmp_path, monkeypatch):
    module = Chain()
    assert not (export.to_onnx(module, plane_inputs("cpu"), tmp_path / "a.onnx").parent / "a.onnx.data").exists()
    monkeypatch.setattr(convert, "INLINE_BYTES", 1000)
    path = export.to_onnx(module, plane_inputs("cpu"), tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx.data").stat().st_size > 1000
    assert path.stat().st_size < (tmp_path / "a.onnx").stat().st_size
    same_as_torch(path, module, plane_inputs("cpu"))


def test_names(tmp_path):
    path = export.to_onnx(
        Chain(), plane_inputs("cpu"), tmp_path / "m.onnx", input_names=["image", "mask"], output_names=["features"]
    )
    s = export.session(path)
    assert [v.name for v in s.get_inputs()] == ["image", "mask"]
    assert [v.name for v in s.get_outputs()] == ["features"]


# ---- errors
def module_of(function):
    class Module(nn.Module):
        def forward(self, x, mask):
            return function(x, mask)

    return Module()


def test_in_place_ops_are_refused(tmp_path):
    def conv(x, mask):
        active = sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8))
        out = torch.empty_like(x)
        sbnet.sparse_conv2d_(x, torch.ones(8, 8, 1, 1), None, active, out)
        return out

    def fill(x, mask):
        return sbnet.sparse_fill_(x * 2, sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8)))

    for function, name in ((conv, "sparse_conv2d"), (fill, "sparse_fill")):
        with pytest.raises(export.ExportError, match=rf"{name}_ works in place .* use {name} ") as caught:
            export.to_onnx(module_of(function), plane_inputs("cpu"), tmp_path / "m.onnx")
        assert "test_export_errors.py" in str(caught.value), "does not say where"


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            lambda x, mask: sbnet.reduce_mask(mask, BlockGrid(8, 8, 0, (x.shape[2] // 8, x.shape[3] // 8))).count,
            "grid: expected BlockGrid.cover .*a block count",
        ),
        (
            lambda x, mask: sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8), capacity=x.shape[0] * 10).count,
            "capacity: .*depends on a dynamic",
        ),
    ],
)
def test_dynamic_attributes_are_refused(function, text, tmp_path):
    with pytest.raises(export.ExportError, match=text):
        export.to_onnx(module_of(function), plane_inputs("cpu"), tmp_path / "m.onnx", planes())


def test_other_errors(tmp_path):
    with pytest.raises(export.ExportError, match="opset_version: expected .*, got 27"):
        export.to_onnx(Chain(), plane_inputs("cpu"), tmp_path / "m.onnx", opset_version=27)
    with pytest.raises(ValueError, match="cuda_graph"):
        export.session(tmp_path / "m.onnx", ["CPUExecutionProvider"], cuda_graph=True)
    path = export.to_onnx(Chain(), plane_inputs("cpu"), tmp_path / "m.onnx")
    with pytest.raises(ValueError, match="inputs: expected .*, got 1 tensors"):
        export.run(export.session(path), [torch.zeros(1)])
    with pytest.raises(TypeError, match="inputs: expected tensors in the model's order, got ndarray, ndarray"):
        export.run(export.session(path), [t.numpy() for t in plane_inputs("cpu")])
    with pytest.raises(ValueError, match=r"providers: expected .*, got \['Other'\]"):
        export.session(path, ["Other"])
    with pytest.raises(TypeError, match="module: expected an nn.Module, got function"):
        export.to_onnx(lambda x: x, plane_inputs("cpu"), tmp_path / "m.onnx")
    with pytest.raises(AttributeError, match="no attribute"):
        _ = export.nothing


@pytest.mark.parametrize(
    "lists",
    [
        lambda mask: sbnet.reduce_mask(mask.double(), BlockGrid.cover(mask.shape[1:], 8)),
        lambda mask: sbnet.mask_pyramid(mask.double(), [(*mask.shape[1:], 8)]).planes[0],
    ],
    ids=["reduce_mask", "mask_pyramid"],
)
def test_masks_of_doubles_are_refused(lists, tmp_path):
    module = module_of(lambda x, mask: sbnet.sparse_fill(x, lists(mask)))
    with pytest.raises(export.ExportError, match="mask: expected bool, uint8.*, got torch.float64"):
        export.to_onnx(module, plane_inputs("cpu"), tmp_path / "m.onnx")


def test_sizes_that_follow_from_values_are_refused(tmp_path):
    def trimmed(x, mask):
        return sbnet.sparse_gather(x, sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8)).trim())

    with pytest.raises(export.ExportError, match="a fixed capacity"):
        export.to_onnx(module_of(trimmed), plane_inputs("cpu"), tmp_path / "m.onnx")


def test_session_options_serve_many_sessions(tmp_path):
    import onnxruntime

    path, options = export.to_onnx(Chain(), plane_inputs("cpu"), tmp_path / "m.onnx"), onnxruntime.SessionOptions()
    for _ in range(2):
        assert export.run(export.session(path, ["CPUExecutionProvider"], options=options), plane_inputs("cpu"))


def test_bound_tensors(device, tmp_path):
    """A call runs on what the bound tensors hold by then; only tensors that can be read in place are taken."""
    module = Chain().to(device)
    x, mask = plane_inputs(device)
    x = x.contiguous()
    path = export.to_onnx(module, (x, mask), tmp_path / "m.onnx")
    s, y = export.session(path, [PROVIDER[device]]), torch.full((2, 24, 16, 20), float("nan"), device=device)
    call = export.Bound(s, [x, mask], [y])
    for density in (0.03, 1.0, 0.0):
        x.normal_()
        mask.copy_(torch.rand_like(x[:, 0]) < density)
        assert call()[0] is y
        assert_bitwise(y, module(x.to(memory_format=torch.channels_last), mask).detach())  # as inside the graph
    with pytest.raises(ValueError, match="contiguous"):
        export.Bound(s, [x.mT, mask], [y])
    with pytest.raises(ValueError, match="got one on meta"):
        export.Bound(s, [x.to("meta"), mask], [y])
    with pytest.raises(ValueError, match="got meta"):
        export.Bound(s, [x, mask], [y.to("meta")])
    with pytest.raises(ValueError, match="outputs: expected .*, got 2 tensors"):
        export.Bound(s, [x, mask], [y, y])


@pytest.mark.parametrize(
    ("types", "given", "want"),
    [
        (["tensor(float)", "tensor(bool)"], {}, "0"),
        (["tensor(float16)", "tensor(bool)"], {}, "1"),
        (["tensor(bfloat16)"], {}, "1"),
        (["tensor(float16)", "tensor(float)"], {}, "0"),
        (["tensor(int32)"], {}, "0"),
        (["tensor(float16)"], {"use_tf32": "0"}, "0"),
        (["tensor(float)"], {"use_tf32": "1"}, "1"),
    ],
)
def test_use_tf32(types, given, want, monkeypatch):
    """Off for float32's sake; off, it would keep convolutions of halves off the tensor cores."""

    class Session:
        def __init__(self, model, options, providers):
            self.options = dict(providers)["CUDAExecutionProvider"]

        def get_inputs(self):
            return [SimpleNamespace(type=t) for t in types]

    class Options:
        def register_custom_ops_library(self, path):
            pass

    runtime = SimpleNamespace(
        InferenceSession=Session, SessionOptions=Options, get_available_providers=lambda: ["CUDAExecutionProvider"]
    )
    monkeypatch.setattr(export.runtime, "_onnxruntime", lambda: runtime)
    made = export.session(b"", [("CUDAExecutionProvider", given)], cuda_graph=True)
    assert made.options == {"use_tf32": want, "enable_cuda_graph": "1"}


def test_training_mode_is_kept(tmp_path):
    module = Chain().train()
    export.to_onnx(module, plane_inputs("cpu"), tmp_path / "m.onnx")
    assert module.training


def test_verify_prints_and_finds_a_difference(tmp_path, capsys):
    module = Chain()
    inputs = plane_inputs("cpu")
    path = export.to_onnx(module, inputs, tmp_path / "m.onnx")
    (error,) = export.verify(path, module, inputs, ["CPUExecutionProvider"])
    assert error.equal
    assert error.shape == (2, 24, 16, 20)
    assert "same bits" in capsys.readouterr().out
    with torch.no_grad():
        module.d += 0.01
    (error,) = export.verify(path, module, inputs, ["CPUExecutionProvider"])
    assert not error.equal
    assert 0 < error.rms < error.largest


def test_library_path():
    assert Path(export.library_path()).name == "libsbnet.so"
    assert Path(export.library_path()).is_file()
