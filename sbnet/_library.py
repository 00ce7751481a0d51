"""Loads libsbnet_torch.so (and with it libsbnet.so), which registers torch.ops.sbnet.*."""

import ctypes
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sbnet import needs

HERE = Path(__file__).parent
KERNEL_LIBRARY = HERE / "libsbnet.so"  # also what ONNX Runtime registers
TORCH_LIBRARY = HERE / "libsbnet_torch.so"

DEBUG = os.environ.get("SBNET_DEBUG", "0") not in ("", "0")
# On a Hopper GPU: keep to the kernels of every GPU since sm_80 (csrc/cuda/capability.cu reads it, too).
PORTABLE = os.environ.get("SBNET_GPU", "") == "portable"
if os.environ.get("SBNET_GPU", "") not in ("", "portable"):
    raise ImportError(f"sbnet: SBNET_GPU: expected portable or nothing, got {os.environ['SBNET_GPU']!r}")


def _load() -> None:
    for library in (KERNEL_LIBRARY, TORCH_LIBRARY):
        if not library.exists():
            raise ImportError(
                f"sbnet: {library} is missing: the package is not built. Install it with "
                "'pip install --no-build-isolation .' (a source checkout on sys.path shadows an installed wheel)."
            )
    try:
        torch.ops.load_library(str(TORCH_LIBRARY))
    except OSError as fault:
        lacking = [line for library in (KERNEL_LIBRARY, TORCH_LIBRARY) for line in needs.lacking(library)]
        reason = "; ".join(line for line in lacking if "libtorch" not in line) or str(fault)
        raise ImportError(f"sbnet: {TORCH_LIBRARY.name} cannot be loaded on this machine: {reason}") from fault


def kernel_capability(device: torch.device | int) -> int:
    """The compute capability, as 90, that a CUDA device's kernels are chosen by; 0: those of every GPU since sm_80."""
    major, minor = torch.cuda.get_device_capability(device)
    return 0 if PORTABLE else 10 * major + minor


def build_info() -> dict[str, str]:
    """What libsbnet.so was built with: version, compiler, cuda (empty: CPU only), archs."""
    function = ctypes.CDLL(str(KERNEL_LIBRARY)).sbnet_build_info
    function.restype = ctypes.c_char_p
    return dict(item.split("=", 1) for item in function().decode().split(";"))


def ort_schemas() -> list[dict[str, Any]]:
    """What each op of ONNX Runtime takes and gives.

    Each: name, inputs, outputs, attributes with their defaults, and types, what its type variables stand for together.
    """
    return json.loads(_of_text("sbnet_ort_schemas")())


def ort_shapes(node: str) -> list[list[int | str | None] | None]:
    """Shapes of the outputs of a node, told as csrc/ort_binding/describe.cpp reads it.

    Raises:
        ValueError: what is wrong with the node.
    """
    text = _of_text("sbnet_ort_shapes")(node.encode()).decode()
    if text.startswith("sbnet"):
        raise ValueError(text)
    return json.loads(text)


@functools.cache
def _of_text(name: str) -> Any:
    function = getattr(ctypes.CDLL(str(KERNEL_LIBRARY)), name)
    function.restype = ctypes.c_char_p
    return function


def window_attention_takes(
    is_float: bool, dim: int, value_dim: int, keys: int, table_rows: int, table_columns: int
) -> bool:
    """Do the kernels take heads and windows of these numbers? See core/attention/window_attention.h."""
    numbers = is_float, dim, value_dim, keys, table_rows, table_columns
    return bool(_window_attention()(*map(int, numbers)))


@functools.cache
def _window_attention() -> Any:
    return ctypes.CDLL(str(KERNEL_LIBRARY)).sbnet_window_attention_takes


def cpu_isa() -> str:
    """The instruction set of the CPU's convolutions: generic, avx2, avx512, amx (bfloat16) or amx-fp16."""
    function = ctypes.CDLL(str(KERNEL_LIBRARY)).sbnet_cpu_isa
    function.restype = ctypes.c_char_p
    return str(function().decode())


def settle_inputs(settled: bool) -> None:
    """Tells the CUDA launches that follow on this thread whether weights and lists may be read before the launch ahead
    has ended (csrc/core/settled.h)."""
    _settle()(int(settled))


@functools.cache
def _settle() -> Any:
    return ctypes.CDLL(str(KERNEL_LIBRARY)).sbnet_settle_inputs


@contextmanager
def reading_through(addresses: Mapping[int, int]) -> Iterator[Callable[[int], int]]:
    """Within it, CUDA launches of this thread that can read a tensor at one of these places find its address in device
    memory, {place: where} (csrc/core/through.h). Gives what counts them, by place."""
    library = ctypes.CDLL(str(KERNEL_LIBRARY))
    tell, count = library.sbnet_read_through, library.sbnet_reads_through
    tell.argtypes, tell.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_bool
    count.argtypes, count.restype = [ctypes.c_void_p], ctypes.c_int64
    told = []
    try:
        told = [place for place, address in addresses.items() if tell(place, address)]
        yield lambda place: int(count(place))
    finally:
        for place in told:
            tell(place, None)


@functools.cache
def host_functions() -> Any:
    """Functions of libsbnet_torch.so that take less than to release the GIL and take it again (planned_call.cpp)."""
    library, pointer, integer = ctypes.PyDLL(str(TORCH_LIBRARY)), ctypes.c_void_p, ctypes.c_int64
    library.sbnet_count_writes.argtypes, library.sbnet_count_writes.restype = [pointer, integer], integer
    library.sbnet_copy_inputs.argtypes = [pointer, pointer, pointer, integer, ctypes.c_int32]
    library.sbnet_copy_inputs.restype = ctypes.c_char_p
    library.sbnet_items_are.argtypes = [pointer, pointer, pointer, pointer, integer]
    library.sbnet_items_are.restype = library.sbnet_ran_in_parallel.restype = ctypes.c_bool
    return library


def _single_threaded_child() -> None:
    """A forked child has no threads of OpenMP's, and waits forever for those that its parent had: it computes alone."""
    if host_functions().sbnet_ran_in_parallel() and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


_load()
os.register_at_fork(after_in_child=_single_threaded_child)
