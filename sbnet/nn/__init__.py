"""Modules that own parameters and run on active blocks: PyTorch's layers with one more argument, parameter names kept.

Every module takes `active`, the active blocks of the plane it writes, and gives zeros elsewhere (docs/contracts.md, the
masked contract). Without it (`active=None`) it is PyTorch's dense layer: one set of parameters serves both.
"""

from sbnet.nn.attention import BlockSparseAttention
from sbnet.nn.blocksparse import BlockSparseConv1x1, BlockSparseLinear
from sbnet.nn.fold import fold_batch_norm
from sbnet.nn.layers import (
    SparseAvgPool2d,
    SparseBatchNorm2d,
    SparseChannelShuffle,
    SparseConstantPad2d,
    SparseConv2d,
    SparseConvTranspose2d,
    SparseMaxPool2d,
    SparsePixelShuffle,
    SparsePixelUnshuffle,
    SparseUpsample,
)
from sbnet.nn.residual import SparseBasicBlock, SparseBottleneck, SparseProjection

__all__ = [
    "BlockSparseAttention",
    "BlockSparseConv1x1",
    "BlockSparseLinear",
    "SparseAvgPool2d",
    "SparseBasicBlock",
    "SparseBatchNorm2d",
    "SparseBottleneck",
    "SparseChannelShuffle",
    "SparseConstantPad2d",
    "SparseConv2d",
    "SparseConvTranspose2d",
    "SparseMaxPool2d",
    "SparsePixelShuffle",
    "SparsePixelUnshuffle",
    "SparseProjection",
    "SparseUpsample",
    "fold_batch_norm",
]
