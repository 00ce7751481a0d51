"""Devices that ONNX Runtime has."""

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """bfloat16 where this ONNX Runtime's Python cannot hand such tensors in or out: `export.run` says so."""
    try:
        return (yield)
    except RuntimeError as error:
        if str(error).startswith("sbnet.export") and "bfloat16" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    export = pytest.importorskip("sbnet.export")
    if request.param == "cuda" and "CUDAExecutionProvider" not in export.default_providers():
        pytest.skip("needs onnxruntime-gpu and a libsbnet.so with CUDA")
    return request.param
