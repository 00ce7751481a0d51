"""Block-sparse weights: layouts, layers made from dense ones, and blocks that move while a network trains."""

from sbnet.nn.blocksparse import BlockSparseLinear
from sbnet.ops import BlockLayout, blocksparse_matmul, blocksparse_weight_grad
from sbnet.weights import ew, lstm, norms
from sbnet.weights.functional import block_reduced_full_dw, l2_normalize
from sbnet.weights.matmul import BlocksparseMatMul, SparseProj
from sbnet.weights.optimizer import SparseOptimizer
from sbnet.weights.patch import BlockSparseModelPatcher, patch, prune

__all__ = [
    "BlockLayout",
    "BlockSparseLinear",
    "BlockSparseModelPatcher",
    "BlocksparseMatMul",
    "SparseOptimizer",
    "SparseProj",
    "block_reduced_full_dw",
    "blocksparse_matmul",
    "blocksparse_weight_grad",
    "ew",
    "l2_normalize",
    "lstm",
    "norms",
    "patch",
    "prune",
]
