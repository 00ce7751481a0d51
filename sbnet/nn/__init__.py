"""Modules that own parameters and run on active blocks: PyTorch's layers with one more argument, parameter names kept.

Every module takes `active`, the active blocks of the plane it writes, and gives zeros elsewhere (docs/contracts.md, the
masked contract). Without it (`active=None`) it is PyTorch's dense layer: one set of parameters serves both.
"""

from sbnet.nn.attention import BlockSparseAttention
from sbnet.nn.blocksparse import BlockSparseConv1x1, BlockSparseLinear
from sbnet.nn.blocksparse_conv import BlockSparseConv2d, BlockSparseConv3d, BlockSparseConvTranspose2d
from sbnet.nn.fold import fold_batch_norm
from sbnet.nn.layers import (
    SparseAdaptiveAvgPool2d,
    SparseAdaptiveMaxPool2d,
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
from sbnet.nn.lstm import BlockSparseLSTM, BlockSparseLSTMCell
from sbnet.nn.norms import (
    SparseGroupNorm,
    SparseInstanceNorm2d,
    SparseLayerNorm2d,
    SparsePointwise,
    SparsePReLU,
    SparseSoftmax2d,
)
from sbnet.nn.residual import SparseBasicBlock, SparseBottleneck, SparseProjection

__all__ = [
    "BlockSparseAttention",
    "BlockSparseConv1x1",
    "BlockSparseConv2d",
    "BlockSparseConv3d",
    "BlockSparseConvTranspose2d",
    "BlockSparseLSTM",
    "BlockSparseLSTMCell",
    "BlockSparseLinear",
    "SparseAdaptiveAvgPool2d",
    "SparseAdaptiveMaxPool2d",
    "SparseAvgPool2d",
    "SparseBasicBlock",
    "SparseBatchNorm2d",
    "SparseBottleneck",
    "SparseChannelShuffle",
    "SparseConstantPad2d",
    "SparseConv2d",
    "SparseConvTranspose2d",
    "SparseGroupNorm",
    "SparseInstanceNorm2d",
    "SparseLayerNorm2d",
    "SparseMaxPool2d",
    "SparsePReLU",
    "SparsePixelShuffle",
    "SparsePixelUnshuffle",
    "SparsePointwise",
    "SparseProjection",
    "SparseSoftmax2d",
    "SparseUpsample",
    "fold_batch_norm",
]
