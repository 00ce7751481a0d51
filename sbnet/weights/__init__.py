"""Block-sparse weights: layouts, layers made from dense ones, and blocks that move while a network trains."""

from sbnet.nn.blocksparse import BlockSparseLinear
from sbnet.ops import BlockLayout, blocksparse_matmul, blocksparse_weight_grad
from sbnet.weights.functional import block_reduced_full_dw, blocksparse_l2_decay, blocksparse_norm, l2_normalize
from sbnet.weights.optimizer import SparseOptimizer
from sbnet.weights.patch import patch, prune
from sbnet.weights.saved import register_transformers

__all__ = [
    "BlockLayout",
    "BlockSparseLinear",
    "SparseOptimizer",
    "block_reduced_full_dw",
    "blocksparse_l2_decay",
    "blocksparse_matmul",
    "blocksparse_norm",
    "blocksparse_weight_grad",
    "l2_normalize",
    "patch",
    "prune",
    "register_transformers",
]
