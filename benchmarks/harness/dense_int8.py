"""A network on whole planes in int8, as other people run it on a CPU: ONNX Runtime's static quantisation, a scale for
each output channel of the weights, and the same file by OpenVINO."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sbnet.benchmarks.harness.dense import Form, exported


def forms(net: nn.Module, frames: Sequence[Tensor]) -> dict[str, Form]:
    """Both, where they are installed, for inputs like the frames, which scales are read off."""
    found: dict[str, Form] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "int8.onnx"
        try:
            _quantized(exported(net, frames[0], Path(folder) / "float.onnx"), path, frames)
            found["ONNX Runtime, int8"] = _onnxruntime(path, frames[0])
            found["OpenVINO, int8"] = _openvino(path)
        except ImportError:  # an extra
            pass
    return found


def _quantized(floats: Path, to: Path, frames: Sequence[Tensor]) -> None:
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.frames: Iterator[Tensor] = iter(frames)

        def get_next(self) -> dict[str, Any] | None:
            frame = next(self.frames, None)
            return None if frame is None else {name: frame.contiguous().numpy()}

    import onnx

    name = onnx.load(floats).graph.input[0].name
    narrow = "vnni" not in Path("/proc/cpuinfo").read_text()  # weights of 7 bits: products of 8 saturate in 16
    form = quantization.QuantFormat.QDQ
    quantization.quantize_static(floats, to, Reader(), per_channel=True, reduce_range=narrow, quant_format=form)


def _onnxruntime(path: Path, x: Tensor) -> Form:
    import onnxruntime

    from sbnet import export

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.force_spinning_stop", "1")  # as of the float form
    session = export.session(path, ["CPUExecutionProvider"], options=options)
    (out,) = export.run(session, [x])
    return Form(lambda x: x.contiguous(), lambda x: export.run(session, [x], [out])[0])


def _openvino(path: Path) -> Form:
    import openvino

    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.compile_model(path, "CPU", settings).create_infer_request()

    def run(x: Tensor) -> Tensor:
        request.infer([x.numpy()], share_inputs=True, share_outputs=True)
        return torch.from_numpy(request.get_output_tensor(0).data)

    return Form(lambda x: x.contiguous(), run)
