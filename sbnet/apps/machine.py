"""What this machine has: versions, devices, and why CUDA cannot be used where it cannot."""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
import re
from typing import Any

import torch

import sbnet
from sbnet import _library, needs


def driver_version() -> int | None:
    """The newest CUDA that the installed driver serves, 1000*major + 10*minor; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None


def cuda_obstacle() -> str:
    """Why CUDA cannot be used, in a line; empty where it can."""
    built = sbnet.build_info()["cuda"]
    if not built:
        return "this sbnet was built for the CPU only (see SBNET_CUDA in CONTRIBUTING.md)"
    driver = driver_version()
    if driver is None:
        return "no CUDA driver was found (libcuda.so.1)"
    if driver // 1000 < int(built.split(".")[0]):
        return (
            f"the CUDA driver is too old: it serves CUDA {driver // 1000}.{driver % 1000 // 10}, "
            f"and the kernels were built with CUDA {built}"
        )
    if torch.version.cuda is None:
        return f"this PyTorch ({torch.__version__}) was built for the CPU only"
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    return ""


def device_name(device: torch.device) -> str:
    """As titles name it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gather_info() -> dict[str, Any]:
    """Versions, build flags, devices and library paths, as `sbnet info --json` prints them."""
    packages = ("numpy", "onnxruntime", "onnxruntime-gpu", "av")
    return {
        "sbnet": sbnet.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{package: version for package in packages if (version := _installed(package))},
        "build": sbnet.build_info(),
        "devices": ["cpu", *(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))],
        "cpu_threads": torch.get_num_threads(),
        "cpu_instructions": _library.cpu_isa(),
        "cuda": cuda_obstacle() or "usable",
        "libraries": [str(_library.KERNEL_LIBRARY), str(_library.TORCH_LIBRARY)],
        "needs": [needs.summary(library) for library in (_library.KERNEL_LIBRARY, _library.TORCH_LIBRARY)],
    }


def kernel_of(layer: str, capability: int | None = None) -> str:
    """Lines: the kernel of a layer on each device that is there, and why those before it in the table do not serve it.

    Args:
        layer: in words, as `sbnet.select.layer_kernel` takes them; one with "cpu" is asked of the CPU alone.
        capability: ask for a GPU of this compute capability instead, whether it is there or not.

    Raises:
        ValueError: other words; a layer of which a device has no table.
    """
    words = layer.split()
    if capability is not None:
        return _kernel_on(f"a GPU of compute capability {capability / 10:g}", layer, capability)
    told = [f"CPU, {torch.get_num_threads()} threads, {_library.cpu_isa()}"]
    if words[:1] == ["conv_transpose"] and "cpu" not in words:
        lines = [f"{told[0]}: the one that there is for transposed convolutions"]
    else:
        lines = [_kernel_on(told[0], layer if "cpu" in words else _on_cpu(layer))]
    if "cpu" in words:
        return lines[0]
    if cuda_obstacle():
        return "\n".join([*lines, f"no GPU: {cuda_obstacle()}; --capability 90 asks for one"])
    for k in range(torch.cuda.device_count()):
        lines.append(_kernel_on(torch.cuda.get_device_name(k), layer, _library.kernel_capability(k)))
    return "\n".join(lines)


def _on_cpu(layer: str) -> str:
    """The layer's words with "cpu" in its place: after the size and, where there is one, the dtype."""
    return re.sub(r"^(\s*\S+\s+\S+\s+\S+\s+\S+(?:\s+(?:fp32|tf32|fp16|bf16|int8|fp8))?)", r"\1 cpu", layer, count=1)


def _kernel_on(device: str, layer: str, capability: int = 90) -> str:
    from sbnet.select import layer_kernel

    found = layer_kernel(layer, capability)
    kernel = f"{found.kernel}: {found.cut}" if found.cut else found.kernel
    return "\n".join([f"{device}: {kernel}", *(f"  not {name}: {why}" for name, why in found.declined)])
