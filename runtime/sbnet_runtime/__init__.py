"""libsbnet.so for ONNX Runtime: masked convolutional networks on machines without PyTorch."""

import ctypes
from pathlib import Path

from sbnet_runtime import needs
from sbnet_runtime.version import __version__

__all__ = ["__version__", "build_info", "lacking", "library_path"]


def library_path() -> str:
    """What `SessionOptions.register_custom_ops_library` takes, and OrtApi's RegisterCustomOpsLibrary_V2."""
    return str(Path(__file__).parent / "libsbnet.so")


def build_info() -> dict[str, str]:
    """What the library was built with: version, compiler, cuda (empty: CPU only), archs."""
    function = ctypes.CDLL(library_path()).sbnet_build_info
    function.restype = ctypes.c_char_p
    return dict(item.split("=", 1) for item in function().decode().split(";"))


def lacking() -> list[str]:
    """What this machine lacks to load the library, a line each; empty where it lacks nothing."""
    return needs.lacking(library_path())
