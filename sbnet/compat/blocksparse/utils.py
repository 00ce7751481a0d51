"""blocksparse.utils: layouts of convolutions for `BlocksparseTransformer`, random numbers, small arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from sbnet.attention.images import conv_pixels, deconv_pixels

Callback = Callable[..., np.ndarray]


def bst_conv_layout(
    input_h: int = 1,
    input_w: int = 1,
    filter_h: int = 1,
    filter_w: int = 1,
    stride: int = 1,
    blk_size: int = 32,
    autoregressive: bool = True,
) -> tuple[np.ndarray, Callback]:
    """(layout, mask_callback) for `BlocksparseTransformer`: queries are a convolution's outputs, keys its inputs.

    `sbnet.attention.conv_layout` says more, and gives the same for `sbnet.block_attention`.
    """
    return _blocks(
        conv_pixels("bst_conv_layout", input_h, input_w, filter_h, filter_w, stride, blk_size, autoregressive), blk_size
    )


def bst_deconv_layout(
    output_h: int = 1,
    output_w: int = 1,
    filter_h: int = 1,
    filter_w: int = 1,
    stride: int = 1,
    blk_size: int = 32,
    autoregressive: bool = True,
) -> tuple[np.ndarray, Callback]:
    """The same of the transposed convolution."""
    return _blocks(
        deconv_pixels("bst_deconv_layout", output_h, output_w, filter_h, filter_w, stride, blk_size, autoregressive),
        blk_size,
    )


def _blocks(visible: torch.Tensor, size: int) -> tuple[np.ndarray, Callback]:
    pixels = visible.numpy()
    tiles = pixels.reshape(pixels.shape[0] // size, size, pixels.shape[1] // size, size).swapaxes(1, 2)

    def callback(blk_shape: tuple[int, int], head_idx: int, qry_idx: int, key_idx: int, blk_idx: int) -> np.ndarray:
        return tiles[qry_idx, key_idx]

    return np.asarray(tiles.any((2, 3))), callback


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def reduce_mul(vals: Iterable[int], init: int = 1) -> int:
    """The product of numbers."""
    return math.prod(vals, start=init)


def set_entropy(init: Any = None) -> None:
    """Seeds PyTorch's random numbers: from `init`, an integer, or anew."""
    torch.seed() if init is None else torch.manual_seed(init)


def get_entropy() -> torch.Tensor:
    """The state of PyTorch's random numbers on the CPU."""
    return torch.random.get_rng_state()
