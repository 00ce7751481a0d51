"""A network on whole planes, in every form that a CPU has: the fastest is what a masked network is measured against.

PyTorch as it is, torch.compile with frozen weights, ONNX Runtime and OpenVINO (the last two where they are installed),
all in float32 or in the network's own dtype, with as many threads as PyTorch has, and no input or output is converted
in the time.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = "PyTorch"


@dataclass(frozen=True)
class Form:
    """prepare: x as the form takes it. run: what was prepared -> the output, NCHW-shaped, valid until the next call."""

    prepare: Callable[[Tensor], Tensor]
    run: Callable[[Tensor], Tensor]


def forms(net: nn.Module, x: Tensor, compiled: bool = False) -> dict[str, Form]:
    """Every form of `net`, in eval mode with normalisations folded, for inputs like x [N,C,H,W] on the CPU.

    compiled: torch.compile among them; it takes a minute to compile.
    """
    wide = _forms(net, x.float(), compiled)
    if x.dtype == torch.float32:
        return wide
    own = _eager(net, x.dtype)
    return {of_dtype(x.dtype): own} | {f"{k}, float32": f for k, f in wide.items()}


def form_of_torch(net: nn.Module, dtype: torch.dtype) -> Form:
    """PyTorch as it is, for networks that cannot be exported."""
    return _eager(net, dtype)


def of_dtype(dtype: torch.dtype) -> str:
    """The name of PyTorch as it is, in a half type."""
    return f"{PLAIN}, {str(dtype).removeprefix('torch.')}"


def _forms(net: nn.Module, x: Tensor, compiled: bool) -> dict[str, Form]:
    found = {PLAIN: _eager(net, x.dtype)}
    if compiled:
        found["torch.compile"] = _compiled(net, x)
    with tempfile.TemporaryDirectory() as folder:
        for name, make in (("ONNX Runtime", _onnxruntime), ("OpenVINO", _openvino)):
            try:
                found[name] = make(net, x, Path(folder) / f"{make.__name__}.onnx")
            except ImportError:  # an extra
                continue
    return found


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _eager(net: nn.Module, dtype: torch.dtype) -> Form:
    own = copy.deepcopy(net).to(dtype=dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Form(lambda x: _last(x.to(dtype)), torch.no_grad()(own))


def _compiled(net: nn.Module, x: Tensor) -> Form:
    import torch._inductor.config as inductor

    eager = _eager(net, x.dtype)
    with torch.no_grad(), inductor.patch(freezing=True):
        run = torch.compile(eager.run)
        run(eager.prepare(x))
    return Form(eager.prepare, torch.no_grad()(run))


def _exported(net: nn.Module, x: Tensor, path: Path) -> Path:
    from sbnet import export

    return export.to_onnx(copy.deepcopy(net).float(), (x.contiguous(),), path)


def _onnxruntime(net: nn.Module, x: Tensor, path: Path) -> Form:
    import onnxruntime

    from sbnet import export

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # its threads must not wait in a loop while another form is timed
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = export.session(_exported(net, x, path), ["CPUExecutionProvider"], options=options)
    (out,) = export.run(session, [x])
    return Form(lambda x: x.float().contiguous(), lambda x: export.run(session, [x], [out])[0])


def _openvino(net: nn.Module, x: Tensor, path: Path) -> Form:
    import openvino

    settings: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = openvino.compile_model(_exported(net, x, path), "CPU", settings).create_infer_request()

    def run(x: Tensor) -> Tensor:
        request.infer([x.numpy()], share_inputs=True, share_outputs=True)
        return torch.from_numpy(request.get_output_tensor(0).data)

    return Form(lambda x: x.float().contiguous(), run)


def fastest(found: dict[str, Form], x: Tensor, rounds: int = 3) -> str:
    """The name of the form whose best time is the least; all take turns."""
    given = {name: form.prepare(x) for name, form in found.items()}
    times = dict.fromkeys(found, float("inf"))
    for _ in range(1 + rounds):  # whatever the first sets up is in none but its own time
        for name, form in found.items():
            begin = time.perf_counter()
            form.run(given[name])
            times[name] = min(times[name], time.perf_counter() - begin)
    return min(times, key=times.__getitem__)
