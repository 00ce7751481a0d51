"""torch -> ONNX: export with sbnet's ops, ONNX Runtime sessions, parity checks. Needs the extra `sbnet[onnx]`."""

from sbnet.export.runtime import default_providers, library_path, run, session

__all__ = ["default_providers", "library_path", "run", "session"]
