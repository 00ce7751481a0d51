"""Runs exported models: a session with sbnet's ops, torch tensors in and out, parity with the module."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet import _library

if TYPE_CHECKING:
    import onnxruntime as ort

    Path = str | os.PathLike[str]


def library_path() -> str:
    """libsbnet.so: what ONNX Runtime registers as a custom op library, from any language."""
    return str(_library.KERNEL_LIBRARY)


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as e:
        raise ImportError(
            "sbnet.export: ONNX Runtime is missing: pip install onnxruntime (CPU) or onnxruntime-gpu (CUDA)"
        ) from e
    return onnxruntime


def default_providers() -> list[str]:
    """CUDA first where this machine, ONNX Runtime and libsbnet.so all have it; the CPU last."""
    usable = (
        "CUDAExecutionProvider" in _onnxruntime().get_available_providers()
        and torch.cuda.is_available()
        and bool(_library.build_info()["cuda"])
    )
    return [*(["CUDAExecutionProvider"] if usable else []), "CPUExecutionProvider"]


_with_ops: weakref.WeakSet[ort.SessionOptions] = weakref.WeakSet()


def session(
    path: Path | bytes,
    providers: Sequence[str | tuple[str, dict[str, Any]]] | None = None,
    cuda_graph: bool = False,
    options: ort.SessionOptions | None = None,
) -> ort.InferenceSession:
    """An onnxruntime.InferenceSession of a model with sbnet's ops.

    float32 keeps float32 accuracy on CUDA, as in torch: `use_tf32`, on by default in ONNX Runtime, is off unless the
    provider's options ask for it. (It stays on where all floating inputs are float16 or bfloat16: off, it would keep
    ONNX Runtime's own convolutions of halves off the tensor cores, too.)

    Args:
        path: file, or the bytes of a model.
        providers: execution providers, by name or as (name, options); default: CUDA where it is usable, then the CPU.
        cuda_graph: capture the first run as a CUDA graph and replay it from then on. Inputs and outputs must stay where
            they are: call `run` with the same tensors (their values may change, masks included) and with `outputs`.
        options: session options to start from; sbnet's ops are added to them.

    Raises:
        ValueError: none of the providers is there; a CUDA graph without CUDA.

    >>> y, = sbnet.export.run(sbnet.export.session("m.onnx"), [x, mask])
    """
    onnxruntime = _onnxruntime()
    chosen = [p if isinstance(p, tuple) else (p, {}) for p in (default_providers() if providers is None else providers)]
    names, known = [name for name, _ in chosen], onnxruntime.get_available_providers()
    if not set(names) & set(known):
        raise ValueError(f"sbnet.export.session: providers: expected those of this ONNX Runtime, {known}, got {names}")
    if cuda_graph and "CUDAExecutionProvider" not in names:
        raise ValueError(f"sbnet.export.session: cuda_graph: expected CUDAExecutionProvider, got {names}")
    if "CUDAExecutionProvider" in names and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()  # cuDNN and cuBLAS of torch's or pip's nvidia-* packages
    graph = {"enable_cuda_graph": "1"} if cuda_graph else {}
    options = options if options is not None else onnxruntime.SessionOptions()
    if options not in _with_ops:  # a library goes into options once
        options.register_custom_ops_library(library_path())
        _with_ops.add(options)
    model = path if isinstance(path, bytes) else os.fspath(path)

    def made(use_tf32: str) -> Any:
        cuda = {"use_tf32": use_tf32}
        providers = [(n, {**cuda, **given, **graph} if n == "CUDAExecutionProvider" else given) for n, given in chosen]
        return onnxruntime.InferenceSession(model, options, providers=providers)

    found = made("0")
    open_choice = any(n == "CUDAExecutionProvider" and "use_tf32" not in given for n, given in chosen)
    if not (open_choice and _halves(found)):
        return found
    del found  # its copy of the weights, before there is another
    return made("1")


def _halves(session: ort.InferenceSession) -> bool:
    """Are all floating inputs of a model float16 or bfloat16, at least one?"""
    floating = {value.type for value in session.get_inputs() if "float" in value.type}
    return bool(floating) and floating <= {"tensor(float16)", "tensor(bfloat16)"}


class Bound:
    """A session with its inputs and outputs bound: a call runs it on what the tensors hold, and binds nothing anew.

    Args:
        session: of `session`.
        inputs: one contiguous tensor a model input, in the model's order, on the session's device.
        outputs: contiguous tensors to write, one a model output.

    Raises:
        RuntimeError: (a call) a tensor's memory is not the one that was bound, as after `x.data = y`.

    >>> call = Bound(session("m.onnx", cuda_graph=True), [x, mask], [y])
    >>> y, = call()  # after new values were copied into x and mask
    """

    def __init__(self, session: ort.InferenceSession, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self._session, self._tensors = session, (list(inputs), list(outputs))
        self._cuda = _device(session) == "cuda"
        self._binding = _bind(session, inputs, outputs)
        self._memory = self._places()

    def __call__(self) -> list[Tensor]:
        """The outputs, written when it returns."""
        if self._places() != self._memory:
            raise RuntimeError(
                "sbnet.export.Bound: expected the memory that was bound, got "
                "other memory: copy values into it (x.copy_(y)), or make a new Bound"
            )
        if self._cuda:
            torch.cuda.current_stream().synchronize()  # ORT's stream does not wait for torch's
        self._session.run_with_iobinding(self._binding)
        return self._tensors[1]

    def _places(self) -> list[int]:
        return [t.data_ptr() for tensors in self._tensors for t in tensors]


def run(
    session: ort.InferenceSession, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Runs a session on torch tensors, without copies where they are contiguous and on the session's device.

    Args:
        inputs: one tensor a model input, in the model's order.
        outputs: contiguous tensors to write, one a model output; default: ORT allocates them.

    Returns:
        The outputs, on the device of the session.
    """
    wrong = [type(t).__name__ for t in inputs if not isinstance(t, Tensor)]
    if wrong:
        raise TypeError(f"sbnet.export.run: inputs: expected tensors in the model's order, got {', '.join(wrong)}")
    device = _device(session)
    keep = [t.detach().to(device).contiguous() for t in inputs]
    binding = _bind(session, keep, outputs)
    if device == "cuda":
        torch.cuda.current_stream().synchronize()  # ORT's stream does not wait for torch's
    session.run_with_iobinding(binding)
    if outputs is not None:
        return list(outputs)
    made = binding.get_outputs()
    # OrtValues of ONNX Runtime before 1.26 know no DLPack, and NumPy no bfloat16.
    for value, v in zip(session.get_outputs(), made, strict=True):
        if v.data_type() == "tensor(bfloat16)" and not hasattr(v, "__dlpack__"):
            raise RuntimeError(f"sbnet.export.run: {value.name}: bfloat16 outputs need ONNX Runtime 1.26 or newer")
    tensors = [torch.from_dlpack(v) if hasattr(v, "__dlpack__") else torch.from_numpy(v.numpy()) for v in made]
    return [t.view(torch.bool) if v.data_type() == "tensor(bool)" else t for t, v in zip(tensors, made, strict=True)]


def _device(session: ort.InferenceSession) -> str:
    return "cuda" if "CUDAExecutionProvider" in session.get_providers() else "cpu"


def _bind(session: ort.InferenceSession, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None) -> Any:
    wanted, made = session.get_inputs(), session.get_outputs()
    for kind, given, values in (("inputs", inputs, wanted), ("outputs", outputs, made)):
        if given is not None and len(given) != len(values):
            names = [v.name for v in values]
            raise ValueError(f"sbnet.export: {kind}: expected {names}, got {len(given)} tensors")
    device, binding = _device(session), session.io_binding()
    for value, t in zip(wanted, inputs, strict=True):
        if t.device.type != device:
            raise ValueError(
                f"sbnet.export: {value.name}: expected a tensor on "
                f"the session's device, {device}, got one on {t.device}"
            )
        _bind_buffer(binding.bind_input, value.name, t)
    for k, value in enumerate(made):
        if outputs is None or not outputs[k].numel():  # nothing to write: ORT refuses null pointers
            binding.bind_output(value.name, device)
        elif outputs[k].device.type not in (device, "cpu"):
            raise ValueError(
                f"sbnet.export: {value.name}: expected an output on {device} or cpu, got {outputs[k].device}"
            )
        else:
            _bind_buffer(binding.bind_output, value.name, outputs[k])
    return binding


def _bind_buffer(bind: Callable[..., None], name: str, t: Tensor) -> None:
    buffer = _buffer(t)
    try:
        bind(name, *buffer)
    except RuntimeError as error:
        if t.dtype not in _FOREIGN or "numpy" not in str(error).lower():
            raise
        dtype = str(t.dtype).removeprefix("torch.")
        raise RuntimeError(f"sbnet.export: {name}: {dtype} tensors are not bound by this ONNX Runtime") from error


# TensorProto.DataType
ELEMENT_TYPES = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
    torch.float8_e4m3fn: 17,
}

_FOREIGN = (torch.bfloat16, torch.float8_e4m3fn)  # to NumPy
_NUMPY = {dtype: np.dtype(str(dtype).removeprefix("torch.")) for dtype in ELEMENT_TYPES if dtype not in _FOREIGN}


def _buffer(t: Tensor) -> tuple[str, int, Any, list[int], int]:
    """What IOBinding needs to know of memory that it is to use in place."""
    if not t.is_contiguous() or t.dtype not in ELEMENT_TYPES:
        raise ValueError(f"sbnet.export: expected a contiguous real tensor, got {t.dtype} of strides {t.stride()}")
    # The first versions that are served take NumPy's types alone.
    element = ELEMENT_TYPES[t.dtype] if t.dtype in _FOREIGN else _NUMPY[t.dtype]
    return t.device.type, t.device.index or 0, element, list(t.shape), t.data_ptr()


@dataclass(frozen=True)
class OutputError:
    """How far ONNX Runtime's output is from torch's."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    largest: float
    rms: float
    rms_of_torch: float
    equal: bool  # bit for bit, NaN equal to NaN


def verify(
    path: Path | bytes,
    module: torch.nn.Module,
    inputs: Sequence[Any],
    providers: Sequence[str | tuple[str, dict[str, Any]]] | None = None,
    quiet: bool = False,
) -> list[OutputError]:
    """Runs a model in ONNX Runtime and the module in torch on the same inputs; prints and returns the error per output.

    Args:
        path: the model.
        module: what it was exported from; runs where its parameters are.
        inputs: arguments of the module, tensors or pytrees of them, as given to `to_onnx`.
        providers: of `session`.
        quiet: print nothing.
    """
    s = session(path, providers)
    tensors = [t for t in pytree.tree_leaves(tuple(inputs)) if isinstance(t, Tensor)]
    got = run(s, tensors)
    training = module.training
    with torch.no_grad():
        try:
            wanted = [t for t in pytree.tree_leaves(module.eval()(*inputs)) if isinstance(t, Tensor)]
        finally:
            module.train(training)
    if len(got) != len(wanted):
        raise ValueError(f"sbnet.export.verify: outputs: expected the module's {len(wanted)}, got {len(got)}")
    errors = []
    for value, g, w in zip(s.get_outputs(), got, wanted, strict=True):
        if g.shape != w.shape or g.dtype != w.dtype:
            raise ValueError(
                f"sbnet.export.verify: {value.name}: expected torch's "
                f"{w.dtype} {tuple(w.shape)}, got {g.dtype} {tuple(g.shape)}"
            )
        a, b = g.to(w.device).double(), w.double()
        difference = torch.where(a.isnan() & b.isnan() | (a == b), 0.0, (a - b).abs())
        errors.append(
            OutputError(
                value.name,
                tuple(w.shape),
                w.dtype,
                float(difference.max()) if difference.numel() else 0.0,
                _rms(difference),
                _rms(b),
                not bool(difference.any()),
            )
        )
    if not quiet:
        _print(errors, s.get_providers()[0])
    return errors


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def _print(errors: Sequence[OutputError], provider: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"ONNX Runtime ({provider}) against torch")
    for column in ("output", "shape", "dtype", "largest error", "rms error", "rms of torch"):
        table.add_column(column, justify="left" if column in ("output", "dtype") else "right")
    for e in errors:
        shape, dtype = "x".join(map(str, e.shape)), str(e.dtype).removeprefix("torch.")
        numbers = ("same bits", "0") if e.equal else (f"{e.largest:.3g}", f"{e.rms:.3g}")
        table.add_row(e.name, shape, dtype, *numbers, f"{e.rms_of_torch:.3g}")
    Console().print(table)
