"""Random ONNX models of all opsets against ONNX Runtime: none wrong, at most one in twenty refused, in one of a hundred
the last bit decides."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from tools import fuzz_onnx

from support import onnx_models


@pytest.fixture(autouse=True)
def one_thread():
    """Planes are tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_held(counts, reports: list[str]) -> None:
    ran = sum(counts[k] for k in ("equal", "wrong", "rounding", "refused"))
    assert not counts["wrong"], "\n".join(r for r in reports if r.startswith("wrong"))
    assert counts["rounding"] <= 0.01 * ran, "\n".join(reports)
    assert counts["equal"] >= 0.95 * ran, "\n".join(reports)


def test_some_models_of_one_op():
    reports: list[str] = []
    assert_held(fuzz_onnx.single_ops(120, 0, onnx_models.names(), reports.append), reports)


def test_some_graphs():
    reports: list[str] = []
    assert_held(fuzz_onnx.graphs(40, 0, reports.append), reports)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_models_of_one_op(seed):
    reports: list[str] = []
    assert_held(fuzz_onnx.single_ops(500, seed, onnx_models.names(), reports.append), reports)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_graphs(seed):
    """2,000 of them."""
    reports: list[str] = []
    assert_held(fuzz_onnx.graphs(500, seed, reports.append), reports)
