"""torch -> ONNX: export with sbnet's ops, ONNX Runtime sessions, parity checks. Needs the extra `sbnet[onnx]`.

>>> path = sbnet.export.to_onnx(net, (x, mask), "net.onnx")
>>> sbnet.export.verify(path, net, (x, mask))
>>> y, = sbnet.export.run(sbnet.export.session(path), [x, mask])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sbnet.export.runtime import Bound, OutputError, default_providers, library_path, run, session, verify

if TYPE_CHECKING:
    from sbnet.export.convert import ExportError, check, to_onnx

__all__ = [
    "Bound",
    "ExportError",
    "OutputError",
    "check",
    "default_providers",
    "library_path",
    "run",
    "session",
    "to_onnx",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Exporting needs onnx and onnxscript, running a model does not: they are loaded at first use."""
    if name not in ("ExportError", "check", "to_onnx"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from sbnet.export import convert
    except ImportError as e:
        raise ImportError(f"sbnet.export.{name} needs the extra onnx: pip install 'sbnet[onnx]' ({e})") from e
    return getattr(convert, name)
