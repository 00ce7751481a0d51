"""Run by test_ort_runtimes.py: the same model in Python's ONNX Runtime and in a second copy of it in this process.

The second one is the C library beside the Python module, spoken to through its C ABI, as a program that embeds both
would have it.
"""

import ctypes
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from sbnet import export

MODEL = Path(sys.argv[1]).read_bytes()
X = np.load(sys.argv[2])


def first() -> np.ndarray:
    (y,) = export.session(MODEL, ["CPUExecutionProvider"]).run(None, {"x0": X, **LISTS})
    return y


class Second:
    """Just enough of the C ABI: slots of OrtApi, none of which ever moves."""

    def __init__(self) -> None:
        (path,) = Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*")
        library = ctypes.CDLL(str(path))
        library.OrtGetApiBase.restype = ctypes.POINTER(ctypes.c_void_p)
        self.base = library.OrtGetApiBase()
        get_api = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint32)(self.base[0])
        self.slots = get_api(18)
        self.env, self.options = ctypes.c_void_p(), ctypes.c_void_p()
        self.call(3, 3, b"second", ctypes.byref(self.env))  # CreateEnv
        self.call(10, ctypes.byref(self.options))  # CreateSessionOptions
        kernels = ctypes.CDLL(export.library_path())
        kernels.RegisterCustomOps.restype = ctypes.c_void_p
        self.check(kernels.RegisterCustomOps(self.options, self.base))

    def call(self, slot: int, *arguments: object) -> None:
        self.check(ctypes.CFUNCTYPE(ctypes.c_void_p)(self.slots[slot])(*arguments))

    def check(self, status: int | None) -> None:
        if status:
            message = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(self.slots[2])
            raise RuntimeError(message(status).decode())

    def value(self, array: np.ndarray, element_type: int) -> ctypes.c_void_p:
        info, value = ctypes.c_void_p(), ctypes.c_void_p()
        self.call(69, 1, 0, ctypes.byref(info))  # CreateCpuMemoryInfo
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        where = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        # CreateTensorWithDataAsOrtValue
        self.call(49, info, *where, shape, ctypes.c_size_t(array.ndim), element_type, ctypes.byref(value))
        return value

    def run(self, like: np.ndarray) -> np.ndarray:
        session = ctypes.c_void_p()
        # CreateSessionFromArray
        self.call(8, self.env, MODEL, ctypes.c_size_t(len(MODEL)), self.options, ctypes.byref(session))
        given = {"x0": X, **LISTS}
        names = (ctypes.c_char_p * len(given))(*(name.encode() for name in given))
        values = (ctypes.c_void_p * len(given))(
            *(self.value(a, 1 if a.dtype == np.float32 else 6) for a in given.values())
        )
        out = np.full_like(like, np.nan)
        outputs = (ctypes.c_void_p * 1)(self.value(out, 1))
        # Run
        count = ctypes.c_size_t(len(given))
        self.call(9, session, None, names, values, count, (ctypes.c_char_p * 1)(b"y0"), ctypes.c_size_t(1), outputs)
        return out


LISTS = dict(np.load(sys.argv[3]))
want = first()
second = Second()
assert np.array_equal(second.run(want), want)
assert np.array_equal(first(), want)  # and the first one still works
assert np.array_equal(second.run(want), want)
X = X[:, :-1]
with pytest.raises(RuntimeError, match="sbnet::sparse_conv2d"):  # its text comes from the runtime that asked
    second.run(want)
print("both right")
