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
from sbnet.ops import *  # noqa: F403
from sbnet.ops import __all__ as _ops
from sbnet.version import __version__

build_info = _library.build_info
_SUBPACKAGES = ("attention", "engine", "export", "graph", "masks", "models", "nn", "weights")  # loaded at first use
_ENGINE = {  # likewise
    "accuracy": "accuracy",
    "explain": "explain",
    "masked": "eager",
    "quantize": "quantize",
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
    "BlockGrid",
    "Fringe",
    "MaskPyramid",
    "Window",
    "__version__",
    "build_info",
    "conv_output_size",
    "conv_transpose_output_size",
    "pool_output_size",
    "reference",
    "resize_output_size",
    "same_padding",
]
__all__ += _ops
