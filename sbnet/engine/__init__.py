"""Runs networks on active blocks."""

from sbnet.engine.oracle import Agreement, compare, masked_oracle
from sbnet.engine.runner import DenseConvNet, MaskedConvNet

__all__ = ["Agreement", "DenseConvNet", "MaskedConvNet", "compare", "masked_oracle"]
