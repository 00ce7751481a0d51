"""Runs networks on active blocks."""

from sbnet.engine.accuracy import accuracy
from sbnet.engine.explain import explain
from sbnet.engine.oracle import Agreement, compare, masked_oracle, plane_masks
from sbnet.engine.quantize import QuantizedRun, quantize
from sbnet.engine.sparsify import SparseRun, sparsify
from sbnet.engine.tune import tune

__all__ = [
    "Agreement",
    "QuantizedRun",
    "SparseRun",
    "accuracy",
    "compare",
    "explain",
    "masked_oracle",
    "plane_masks",
    "quantize",
    "sparsify",
    "tune",
]
