"""Recordings of the kernels that a CPU runs: what a CUDA graph is to a GPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from sbnet._library import TORCH_LIBRARY


class Recording:
    """Kernels of sbnet's ops, run again on the same tensors by one call: `with recording.noting(): ...`, `recording()`.

    A call skips the dispatcher and the ops' checks of tensors, and allocates nothing. The recording keeps the tensors
    and the ops' results alive, and writes to their memory again. PyTorch ops are not recorded. If the block raises,
    the recording is discarded.
    """

    def __init__(self) -> None:
        self._handle: int | None = None
        self._library = _library()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record what this thread's ops do, in place of the recording before."""
        library = self._library
        library.sbnet_recording_begin()
        try:
            yield
        except BaseException:
            library.sbnet_recording_free(library.sbnet_recording_end())
            raise
        self._free()
        self._handle = library.sbnet_recording_end()

    def join(self, kernels: int) -> bool:
        """While noting: may the last `kernels` run tile by tile, as one? They are convolutions noted one after
        the other, and nothing else reads what lies between them, which may then not be written."""
        return bool(self._library.sbnet_recording_join(kernels))

    def __call__(self) -> None:
        wrong = self._library.sbnet_recording_run(self._handle)
        if wrong:
            raise RuntimeError(wrong.decode())

    def _free(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.sbnet_recording_free(handle)

    def __del__(self) -> None:
        self._free()

    def __reduce__(self) -> NoReturn:  # a copy would free the kernels twice
        raise TypeError("sbnet: a recording of kernels is of the tensors of one run: clone() the run")


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL(str(TORCH_LIBRARY))
    library.sbnet_recording_end.restype = ctypes.c_void_p
    library.sbnet_recording_run.restype = ctypes.c_char_p
    library.sbnet_recording_join.restype = ctypes.c_bool
    library.sbnet_recording_join.argtypes = [ctypes.c_int32]
    for name in ("sbnet_recording_run", "sbnet_recording_free"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    return library
