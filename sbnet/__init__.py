"""sbnet: run convolutional networks on the active blocks of an image only."""

import importlib
from typing import Any

from sbnet import _library, reference
from sbnet.blocks import ActiveBlocks, BlockGrid, Fringe, MaskPyramid, conv_output_size, pool_output_size, same_padding
from sbnet.ops import (
    fringe,
    mask_pyramid,
    pack_conv_weight,
    reduce_mask,
    sparse_avg_pool2d,
    sparse_avg_pool2d_,
    sparse_bottleneck2d,
    sparse_bottleneck2d_,
    sparse_conv2d,
    sparse_conv2d_,
    sparse_fill,
    sparse_fill_,
    sparse_gather,
    sparse_max_pool2d,
    sparse_max_pool2d_,
    sparse_scatter,
    sparse_scatter_,
)
from sbnet.version import __version__

build_info = _library.build_info
_SUBPACKAGES = ("engine", "export", "masks", "models", "nn")  # loaded at first use


def __getattr__(name: str) -> Any:
    """`import sbnet; sbnet.nn.SparseConv2d` works, and `import sbnet` alone stays light."""
    if name not in _SUBPACKAGES:
        raise AttributeError(f"module 'sbnet' has no attribute {name!r}")
    return importlib.import_module(f"sbnet.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBPACKAGES})


__all__ = [
    "ActiveBlocks",
    "BlockGrid",
    "Fringe",
    "MaskPyramid",
    "__version__",
    "build_info",
    "conv_output_size",
    "fringe",
    "mask_pyramid",
    "pack_conv_weight",
    "pool_output_size",
    "reduce_mask",
    "reference",
    "same_padding",
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
