"""sbnet: run convolutional networks on the active blocks of an image only."""

import importlib
from typing import Any

from sbnet import _library, reference
from sbnet.active import ActiveBlocks, BlockGrid, Fringe, MaskPyramid
from sbnet.geometry import (
    Window,
    conv_output_size,
    conv_transpose_output_size,
    pool_output_size,
    resize_output_size,
    same_padding,
)
from sbnet.ops import (
    AttentionLayout,
    BlockLayout,
    ConvLayout,
    block_attention,
    blocksparse_conv,
    blocksparse_conv1x1,
    blocksparse_conv_active,
    blocksparse_deconv,
    blocksparse_matmul,
    blocksparse_weight_grad,
    fringe,
    mask_pyramid,
    motion_mask,
    motion_mask_,
    pack_conv_weight,
    reduce_mask,
    sparse_avg_pool2d,
    sparse_avg_pool2d_,
    sparse_bottleneck2d,
    sparse_bottleneck2d_,
    sparse_conv2d,
    sparse_conv2d_,
    sparse_conv2d_quantized,
    sparse_conv2d_quantized_,
    sparse_conv_transpose2d,
    sparse_conv_transpose2d_,
    sparse_fill,
    sparse_fill_,
    sparse_gather,
    sparse_max_pool2d,
    sparse_max_pool2d_,
    sparse_pixel_shuffle,
    sparse_pixel_unshuffle,
    sparse_pointwise,
    sparse_pointwise_,
    sparse_rearrange,
    sparse_rearrange_,
    sparse_resize2d,
    sparse_resize2d_,
    sparse_scatter,
    sparse_scatter_,
)
from sbnet.version import __version__

build_info = _library.build_info
_SUBPACKAGES = ("attention", "engine", "export", "graph", "masks", "models", "nn", "weights")  # loaded at first use
_ENGINE = {  # likewise
    "accuracy": "accuracy",
    "explain": "explain",
    "masked": "eager",
    "sparsify": "sparsify",
    "tune": "tune",
}
_APPS = {"Cameras": "pipeline", "Pipeline": "pipeline"}  # likewise


def __getattr__(name: str) -> Any:
    """`import sbnet; sbnet.nn.SparseConv2d` works, and `import sbnet` alone stays light."""
    if name in _ENGINE:
        return getattr(importlib.import_module(f"sbnet.engine.{_ENGINE[name]}"), name)
    if name in _APPS:
        return getattr(importlib.import_module(f"sbnet.apps.{_APPS[name]}"), name)
    if name not in _SUBPACKAGES:
        raise AttributeError(f"module 'sbnet' has no attribute {name!r}")
    return importlib.import_module(f"sbnet.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBPACKAGES, *_ENGINE, *_APPS})


__all__ = [
    "ActiveBlocks",
    "AttentionLayout",
    "BlockGrid",
    "BlockLayout",
    "ConvLayout",
    "Fringe",
    "MaskPyramid",
    "Window",
    "__version__",
    "block_attention",
    "blocksparse_conv",
    "blocksparse_conv1x1",
    "blocksparse_conv_active",
    "blocksparse_deconv",
    "blocksparse_matmul",
    "blocksparse_weight_grad",
    "build_info",
    "conv_output_size",
    "conv_transpose_output_size",
    "fringe",
    "mask_pyramid",
    "motion_mask",
    "motion_mask_",
    "pack_conv_weight",
    "pool_output_size",
    "reduce_mask",
    "reference",
    "resize_output_size",
    "same_padding",
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
    "sparse_scatter",
    "sparse_scatter_",
]
