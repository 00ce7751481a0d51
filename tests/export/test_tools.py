"""The table "Tools" of docs/onnxruntime.md: what others' tools make of an exported model still runs, and how near."""

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import numpy as np
import onnx
import onnxruntime as ort

from sbnet import export
from sbnet.export import networks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")

SIZE = 48, 64
X = np.random.default_rng(0).random((1, 3, *SIZE), np.float32)
MASK = np.zeros((1, *SIZE), bool)
MASK[:, 12:24, 16:40] = True


def options() -> ort.SessionOptions:
    made = ort.SessionOptions()
    made.register_custom_ops_library(export.library_path())
    return made


def run(model, given=None, dtype=np.float32) -> np.ndarray:
    session = ort.InferenceSession(model, given or options(), providers=["CPUExecutionProvider"])
    return session.run(["y"], {"x": X.astype(dtype), "mask": MASK})[0].astype(np.float32)


@pytest.fixture(scope="module", params=[False, True], ids=["fixed", "dynamic"])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "net.onnx"
    networks.write(*networks.build("sbnet", 0, None, 10), path, SIZE, 1, request.param)
    return path


def near(got: np.ndarray, want: np.ndarray, share: float) -> bool:
    return float(np.sqrt(((got - want) ** 2).mean())) <= share * float(np.sqrt((want**2).mean()))


def test_quantize_dynamic(model, tmp_path):
    quantization = pytest.importorskip("onnxruntime.quantization")
    made = tmp_path / "quantized.onnx"
    # Seven bits: sums of pairs of products saturate on processors that have AVX2 and no VNNI.
    quantization.quantize_dynamic(model, made, reduce_range=True)
    assert "MatMulInteger" in {node.op_type for node in onnx.load(made).graph.node}
    assert near(run(made), run(model), 0.05)


def test_quantisation_is_prepared_without_symbolic_shapes(model, tmp_path):
    preparation = pytest.importorskip("onnxruntime.quantization.shape_inference")
    made = tmp_path / "prepared.onnx"
    preparation.quant_pre_process(model, made, skip_symbolic_shape=True, skip_optimization=True)
    assert np.array_equal(run(made), run(model))


@pytest.mark.parametrize("keep", [False, True])
def test_float16(model, keep, tmp_path):
    float16 = pytest.importorskip("onnxruntime.transformers.float16")
    made = tmp_path / "half.onnx"
    onnx.save(float16.convert_float_to_float16(onnx.load(model), keep_io_types=keep), made)
    weights = [w for w in onnx.load(made).graph.initializer if len(w.dims) == 4]
    assert {w.data_type for w in weights} == {onnx.TensorProto.FLOAT16}
    assert near(run(made, dtype=np.float32 if keep else np.float16), run(model), 0.01)


@pytest.mark.parametrize("form", ["ORT", "ONNX"])
def test_a_session_saves_what_it_optimised(model, form, tmp_path):
    made = str(tmp_path / f"saved.{form.lower()}")
    saving = options()
    saving.optimized_model_filepath = made
    saving.add_session_config_entry("session.save_model_format", form)
    want = run(model, saving)
    assert np.array_equal(run(made), want)


def test_symbolic_shapes(model):
    tool = pytest.importorskip("onnxruntime.tools.symbolic_shape_infer")
    pytest.importorskip("sympy")
    inferred = tool.SymbolicShapeInference.infer_shapes(onnx.load(model), auto_merge=True, guess_output_rank=True)
    known = {value.name for value in inferred.graph.value_info}
    assert all(out in known for node in inferred.graph.node for out in node.output if out and out != "y")


def test_part_of_a_model(model, tmp_path):
    made = tmp_path / "part.onnx"
    onnx.utils.extract_model(str(model), str(made), ["x", "mask"], ["y"])
    assert np.array_equal(run(made), run(model))


def test_weights_from_memory(tmp_path):
    path = tmp_path / "net.onnx"
    networks.write(*networks.build("sbnet", 0, None, 10), path, SIZE, 1, external_data=True)
    want, data = run(path), (tmp_path / "net.onnx.data").read_bytes()
    (tmp_path / "net.onnx.data").unlink()
    given = options()
    if not hasattr(given, "add_external_initializers_from_files_in_memory"):
        pytest.skip("this ONNX Runtime takes weights from files only")
    given.add_external_initializers_from_files_in_memory(["net.onnx.data"], [data], [len(data)])
    assert np.array_equal(run(path.read_bytes(), given), want)
