"""Block-sparse weights: layouts, layers made from dense ones, and blocks that move while a network trains."""

from sbnet.nn.blocksparse import BlockSparseLinear
from sbnet.ops import BlockLayout, blocksparse_matmul, blocksparse_weight_grad
from sbnet.weights import ew, lstm, norms, quantize, rows, training
from sbnet.weights.conv import (
    BlocksparseConv,
    BlocksparseDeconv,
    EdgeBias,
    conv_edge_bias_init,
    deconv_edge_bias_init,
)
from sbnet.weights.functional import block_reduced_full_dw, blocksparse_l2_decay, blocksparse_norm, l2_normalize
from sbnet.weights.matmul import BlocksparseMatMul, SparseProj
from sbnet.weights.optimizer import SparseOptimizer
from sbnet.weights.patch import BlockSparseModelPatcher, patch, prune

__all__ = [
    "BlockLayout",
    "BlockSparseLinear",
    "BlockSparseModelPatcher",
    "BlocksparseConv",
    "BlocksparseDeconv",
    "BlocksparseMatMul",
    "EdgeBias",
    "SparseOptimizer",
    "SparseProj",
    "block_reduced_full_dw",
    "blocksparse_l2_decay",
    "blocksparse_matmul",
    "blocksparse_norm",
    "blocksparse_weight_grad",
    "conv_edge_bias_init",
    "deconv_edge_bias_init",
    "ew",
    "l2_normalize",
    "lstm",
    "norms",
    "patch",
    "prune",
    "quantize",
    "rows",
    "training",
]
