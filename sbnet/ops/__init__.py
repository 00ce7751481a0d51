"""torch.ops.sbnet.*, one file a family: typed wrapper, fake implementation and gradient side by side."""

from sbnet.ops.attention.attention import block_attention
from sbnet.ops.attention.layout import AttentionLayout
from sbnet.ops.attention.window_attention import window_attention_ as _window_attention_  # noqa: F401 (registers it)
from sbnet.ops.frames.components import connected_components as _connected_components  # noqa: F401 (registers it)
from sbnet.ops.frames.yuv_to_rgb import yuv_to_rgb_ as _yuv_to_rgb_  # noqa: F401 (registers it)
from sbnet.ops.lists.fringe import fringe
from sbnet.ops.lists.motion_mask import motion_mask, motion_mask_
from sbnet.ops.lists.pyramid import mask_pyramid
from sbnet.ops.lists.reduce_mask import reduce_mask
from sbnet.ops.masked.adaptive_pool import (
    sparse_adaptive_avg_pool2d,
    sparse_adaptive_avg_pool2d_,
    sparse_adaptive_max_pool2d,
    sparse_adaptive_max_pool2d_,
)
from sbnet.ops.masked.batch_norm import batch_norm2d as _batch_norm2d  # noqa: F401 (registers its ops)
from sbnet.ops.masked.bottleneck import sparse_bottleneck2d, sparse_bottleneck2d_
from sbnet.ops.masked.conv import pack_conv_weight, sparse_conv2d, sparse_conv2d_
from sbnet.ops.masked.conv_quantized import sparse_conv2d_quantized, sparse_conv2d_quantized_
from sbnet.ops.masked.conv_transpose import sparse_conv_transpose2d, sparse_conv_transpose2d_
from sbnet.ops.masked.fill import sparse_fill, sparse_fill_
from sbnet.ops.masked.gather_scatter import sparse_gather, sparse_scatter, sparse_scatter_
from sbnet.ops.masked.norm import (
    sparse_group_norm,
    sparse_group_norm_,
    sparse_instance_norm,
    sparse_layer_norm2d,
    sparse_layer_norm2d_,
    sparse_response_norm,
    sparse_response_norm_,
    sparse_softmax2d,
    sparse_softmax2d_,
)
from sbnet.ops.masked.pointwise import sparse_pointwise, sparse_pointwise_
from sbnet.ops.masked.pool import sparse_avg_pool2d, sparse_avg_pool2d_, sparse_max_pool2d, sparse_max_pool2d_
from sbnet.ops.masked.rearrange import (
    sparse_pixel_shuffle,
    sparse_pixel_unshuffle,
    sparse_rearrange,
    sparse_rearrange_,
)
from sbnet.ops.masked.resize import sparse_resize2d, sparse_resize2d_
from sbnet.ops.masked.squeeze_excite import sparse_squeeze_excite2d, sparse_squeeze_excite2d_
from sbnet.ops.masked.token_rows import pack_tokens as _pack_tokens  # noqa: F401 (registers its ops)
from sbnet.ops.weights.conv import blocksparse_conv, blocksparse_conv_active, blocksparse_deconv
from sbnet.ops.weights.conv1x1 import blocksparse_conv1x1
from sbnet.ops.weights.conv_layout import ConvLayout
from sbnet.ops.weights.conv_pack import pack_blocksparse_filters
from sbnet.ops.weights.layout import BlockLayout
from sbnet.ops.weights.matmul import blocksparse_matmul, blocksparse_weight_grad

__all__ = [
    "AttentionLayout",
    "BlockLayout",
    "ConvLayout",
    "block_attention",
    "blocksparse_conv",
    "blocksparse_conv1x1",
    "blocksparse_conv_active",
    "blocksparse_deconv",
    "blocksparse_matmul",
    "blocksparse_weight_grad",
    "fringe",
    "mask_pyramid",
    "motion_mask",
    "motion_mask_",
    "pack_blocksparse_filters",
    "pack_conv_weight",
    "reduce_mask",
    "sparse_adaptive_avg_pool2d",
    "sparse_adaptive_avg_pool2d_",
    "sparse_adaptive_max_pool2d",
    "sparse_adaptive_max_pool2d_",
    "sparse_avg_pool2d",
    "sparse_avg_pool2d_",
    "sparse_bottleneck2d",
    "sparse_bottleneck2d_",
    "sparse_conv2d",
    "sparse_conv2d_",
    "sparse_conv2d_quantized",
    "sparse_conv2d_quantized_",
    "sparse_conv_transpose2d",
    "sparse_conv_transpose2d_",
    "sparse_fill",
    "sparse_fill_",
    "sparse_gather",
    "sparse_group_norm",
    "sparse_group_norm_",
    "sparse_instance_norm",
    "sparse_layer_norm2d",
    "sparse_layer_norm2d_",
    "sparse_max_pool2d",
    "sparse_max_pool2d_",
    "sparse_pixel_shuffle",
    "sparse_pixel_unshuffle",
    "sparse_pointwise",
    "sparse_pointwise_",
    "sparse_rearrange",
    "sparse_rearrange_",
    "sparse_resize2d",
    "sparse_resize2d_",
    "sparse_response_norm",
    "sparse_response_norm_",
    "sparse_scatter",
    "sparse_scatter_",
    "sparse_softmax2d",
    "sparse_softmax2d_",
    "sparse_squeeze_excite2d",
    "sparse_squeeze_excite2d_",
]
