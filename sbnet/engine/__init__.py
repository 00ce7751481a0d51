"""Runs networks on active blocks."""

from sbnet.engine.chain import MaskedChain
from sbnet.engine.masked import MaskedRunner
from sbnet.engine.onnx_net import OnnxConvNet
from sbnet.engine.oracle import Agreement, compare, masked_oracle, plane_masks
from sbnet.engine.runner import DenseConvNet, MaskedConvNet

__all__ = [
    "Agreement",
    "DenseConvNet",
    "MaskedChain",
    "MaskedConvNet",
    "MaskedRunner",
    "OnnxConvNet",
    "compare",
    "masked_oracle",
    "plane_masks",
]
