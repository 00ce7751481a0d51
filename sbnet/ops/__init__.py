"""torch.ops.sbnet.*, one file a family: typed wrapper, fake implementation and gradient side by side."""

from sbnet.ops.blocks import reduce_mask, sparse_gather, sparse_scatter, sparse_scatter_
from sbnet.ops.bottleneck import sparse_bottleneck2d, sparse_bottleneck2d_
from sbnet.ops.conv import pack_conv_weight, sparse_conv2d, sparse_conv2d_
from sbnet.ops.fill import sparse_fill, sparse_fill_
from sbnet.ops.fringe import fringe
from sbnet.ops.pool import sparse_avg_pool2d, sparse_avg_pool2d_, sparse_max_pool2d, sparse_max_pool2d_
from sbnet.ops.pyramid import mask_pyramid

__all__ = [
    "fringe",
    "mask_pyramid",
    "pack_conv_weight",
    "reduce_mask",
    "sparse_avg_pool2d",
    "sparse_avg_pool2d_",
    "sparse_bottleneck2d",
    "sparse_bottleneck2d_",
    "sparse_conv2d",
    "sparse_conv2d_",
    "sparse_fill",
    "sparse_fill_",
    "sparse_gather",
    "sparse_max_pool2d",
    "sparse_max_pool2d_",
    "sparse_scatter",
    "sparse_scatter_",
]
