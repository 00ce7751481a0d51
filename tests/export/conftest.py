"""Devices that ONNX Runtime has."""

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    export = pytest.importorskip("sbnet.export")
    if request.param == "cuda" and "CUDAExecutionProvider" not in export.default_providers():
        pytest.skip("needs onnxruntime-gpu and a libsbnet.so with CUDA")
    return request.param
