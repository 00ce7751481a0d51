"""Every op in plain PyTorch, readable as its definition: the oracle that tests compare kernels with.

Same arguments and results as the ops of the same names. Slow on purpose: one Python step a block.
"""

from sbnet.reference.attention import block_attention, dropout_kept
from sbnet.reference.lists import fringe, mask_pyramid, motion_mask, reduce_mask
from sbnet.reference.masked import *  # noqa: F403
from sbnet.reference.weights import (
    blocksparse_conv,
    blocksparse_conv1x1,
    blocksparse_conv_active,
    blocksparse_deconv,
    blocksparse_matmul,
    blocksparse_weight_grad,
)

__all__ = [
    "block_attention",
    "blocksparse_conv",
    "blocksparse_conv1x1",
    "blocksparse_conv_active",
    "blocksparse_deconv",
    "blocksparse_matmul",
    "blocksparse_weight_grad",
    "dropout_kept",
    "fringe",
    "mask_pyramid",
    "motion_mask",
    "reduce_mask",
]
__all__ += [name for name in globals() if name.startswith("sparse_") or name == "activate"]
