"""Ops on active blocks that read x and numbers alone (csrc/core/masked/plain_layers.h): their results by PyTorch, and
numbers to try. Samples for torch (op_samples.py) and ONNX (ort_models.py) are made of these;
tests/masked/test_plain_layers.py holds both forms of every op to them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from sbnet.ops.masked.rearrange import rearrange_whole

WINDOW = {"kernel_size": [3, 3], "stride": [1, 1], "padding": [1, 1]}
HALVED = {"kernel_size": [2, 2], "stride": [2, 2], "padding": [0, 0]}


class Plain(NamedTuple):
    whole: Callable[..., Tensor]  # of x [N,C,H,W], C a multiple of 8, and numbers
    numbers: list[dict[str, Any]]  # by the schema's names, all of them, in its order; the last one are ONNX's sample
    copies: bool = True  # it moves or picks elements: bits, of every dtype
    others: int = 0  # further planes of x's shape that it reads, in both schemas; whole takes them behind x

    def further(self, x: Tensor) -> list[Tensor]:
        return [x.flip(k % 4).contiguous() / (k + 2) for k in range(self.others)]


def _halves(pool: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """PyTorch's CPU kernels differ in what they support: float32 holds every half."""
    # Contiguous: PyTorch's gradient of padded average pools in channels_last is wrong on CUDA before 2.14.
    return lambda x, **numbers: pool((x.float() if x.dtype.itemsize == 2 else x).contiguous(), **numbers).to(x.dtype)


PLAIN = {
    "sparse_max_pool2d": Plain(
        _halves(F.max_pool2d),
        [
            {**HALVED, "dilation": [1, 1], "ceil_mode": True},
            {**WINDOW, "dilation": [1, 1], "ceil_mode": True},
            {**WINDOW, "dilation": [1, 1], "ceil_mode": False},
        ],
    ),
    "sparse_avg_pool2d": Plain(
        _halves(F.avg_pool2d),
        [
            {**HALVED, "ceil_mode": True, "count_include_pad": True, "divisor_override": 3},
            {**WINDOW, "ceil_mode": False, "count_include_pad": False, "divisor_override": None},
            {**WINDOW, "ceil_mode": False, "count_include_pad": True, "divisor_override": 7},
        ],
        copies=False,
    ),
    "sparse_rearrange": Plain(
        rearrange_whole,
        [
            {"up": 1, "down": 1, "groups": 2, "pad": [1, -1, 0, 0], "value": 0.5},
            {"up": 1, "down": 3, "groups": 4, "pad": [0, 1, 0, 0], "value": -1.0},
            {"up": 2, "down": 1, "groups": 2, "pad": [1, -2, -1, 1], "value": 0.5},
        ],
    ),
}
