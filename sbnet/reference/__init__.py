"""Every op in plain PyTorch, readable as its definition: the oracle that tests compare kernels with.

Same arguments and results as the ops of the same names. Slow on purpose: one Python step a block.
"""

from sbnet.reference.attention import block_attention, dropout_kept
from sbnet.reference.lists import fringe, mask_pyramid, motion_mask, reduce_mask
from sbnet.reference.masked import (
    activate,
    sparse_adaptive_avg_pool2d,
    sparse_adaptive_max_pool2d,
    sparse_avg_pool2d,
    sparse_bottleneck2d,
    sparse_conv2d,
    sparse_conv2d_quantized,
    sparse_conv_transpose2d,
    sparse_fill,
    sparse_fill_,
    sparse_gather,
    sparse_group_norm,
    sparse_instance_norm,
    sparse_layer_norm2d,
    sparse_max_pool2d,
    sparse_pointwise,
    sparse_rearrange,
    sparse_resize2d,
    sparse_scatter,
    sparse_scatter_,
    sparse_softmax2d,
)
from sbnet.reference.weights import (
    blocksparse_conv,
    blocksparse_conv1x1,
    blocksparse_conv_active,
    blocksparse_deconv,
    blocksparse_matmul,
    blocksparse_weight_grad,
)

__all__ = [
    "activate",
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
    "sparse_adaptive_avg_pool2d",
    "sparse_adaptive_max_pool2d",
    "sparse_avg_pool2d",
    "sparse_bottleneck2d",
    "sparse_conv2d",
    "sparse_conv2d_quantized",
    "sparse_conv_transpose2d",
    "sparse_fill",
    "sparse_fill_",
    "sparse_gather",
    "sparse_group_norm",
    "sparse_instance_norm",
    "sparse_layer_norm2d",
    "sparse_max_pool2d",
    "sparse_pointwise",
    "sparse_rearrange",
    "sparse_resize2d",
    "sparse_scatter",
    "sparse_scatter_",
    "sparse_softmax2d",
]
