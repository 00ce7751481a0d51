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

from sbnet.engine.capture import cuda_graph
from sbnet.nn import fold_batch_norm
from sbnet.nn.activations import ACTIVATIONS
from sbnet.nn.fold import Folded

PLAIN = "PyTorch"
NOTHING = (nn.Sequential, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, Folded)  # in eval mode


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


def cudnn_chain(net: nn.Sequential, x: Tensor) -> Callable[[Tensor], Tensor]:
    """A chain of convolutions for inputs like x [N,C,H,W] on CUDA: ReLU fused into cuDNN's convolutions, all else
    PyTorch's own.

    Raises:
        ValueError: the network is no such chain.
    """
    folded = fold_batch_norm(net).to(x.device, x.dtype)
    layers: list[Any] = [m for _, m in folded.named_modules(remove_duplicate=False) if type(m) not in NOTHING]
    for layer in layers:
        if type(layer) not in (nn.Conv2d, *ACTIVATIONS):
            raise ValueError(f"sbnet: dense form: expected convolutions and activations, got {type(layer).__name__}")

    @torch.no_grad()
    def run(y: Tensor) -> Tensor:
        before = False
        for layer, after in zip(layers, [*layers[1:], None], strict=True):
            plain = isinstance(layer, nn.Conv2d) and layer.padding_mode == "zeros" and layer.padding != "same"
            fused = plain and isinstance(after, nn.ReLU)
            if fused:
                geometry = layer.stride, layer.padding, layer.dilation, layer.groups
                y = torch.cudnn_convolution_relu(y, layer.weight, layer.bias, *geometry)
            elif not before:
                y = layer(y)
            before = fused
        return y

    return run


def cudnn(net: nn.Sequential, x: Tensor, allow_tf32: bool = False) -> Form:
    """`cudnn_chain` as one CUDA graph, of the kernels that cuDNN finds fastest by trying them."""
    chain = cudnn_chain(net, x)
    own = torch.zeros_like(x, memory_format=torch.channels_last)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=allow_tf32):
        graph, out = cuda_graph(lambda: chain(own), x.device)

    def replay(x: Tensor, _weights: Any = chain) -> Tensor:  # which the graph reads: kept as long as it
        own.copy_(x.detach())
        graph.replay()
        return out

    return Form(lambda x: x, replay)


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


def exported(net: nn.Module, x: Tensor, path: Path) -> Path:
    from sbnet import export

    return export.to_onnx(copy.deepcopy(net).float(), (x.contiguous(),), path)


def _onnxruntime(net: nn.Module, x: Tensor, path: Path) -> Form:
    import onnxruntime

    from sbnet import export

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # its threads must not wait in a loop while another form is timed
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = export.session(exported(net, x, path), ["CPUExecutionProvider"], options=options)
    (out,) = export.run(session, [x])
    return Form(lambda x: x.float().contiguous(), lambda x: export.run(session, [x], [out])[0])


def _openvino(net: nn.Module, x: Tensor, path: Path) -> Form:
    import openvino

    settings: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = openvino.compile_model(exported(net, x, path), "CPU", settings).create_infer_request()

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
