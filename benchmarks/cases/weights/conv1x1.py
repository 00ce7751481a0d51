"""1x1 convolutions with block-sparse weights on active blocks, against either kind of zeros alone and neither."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sbnet
from sbnet.benchmarks.cases.weights.matmul import random_layout
from sbnet.benchmarks.harness import masks
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, close, short

NAME = "blocksparse_conv1x1"
BLOCK = 16  # pixels


def cases(setting: Setting) -> Iterator[Case]:
    side = setting.pick(32, 64, 128)
    for inputs, outputs in setting.pick(((64, 128),), ((256, 1024),), ((256, 1024), (1024, 256), (512, 2048))):
        for size in setting.pick((32,), (64,), (64, 32)):
            for density in setting.pick((0.5,), (0.25,), (0.5, 0.25)):
                facts = {"size": [1, side, side], "in": inputs, "out": outputs, "block": size, "density": density}
                facts |= {"active": 0.25, "dtype": short(setting.dtype)}
                yield Case(NAME, "weights", facts, partial(work, setting, facts))


def work(setting: Setting, facts: dict[str, Any]) -> Work:
    shape, size = facts["size"], facts["block"]
    layout = random_layout(facts["in"] // size, facts["out"] // size, size, facts["density"])
    options: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype}
    weight = torch.randn(layout.weight_shape, **options) / (facts["in"] * facts["density"]) ** 0.5
    dense = layout.to_dense(weight).t()[:, :, None, None].contiguous(memory_format=torch.channels_last)
    x = torch.randn(1, facts["in"], *shape[1:], **options).contiguous(memory_format=torch.channels_last)
    pixels = masks.pixels("random", tuple(shape), facts["active"], setting.device)
    active = sbnet.reduce_mask(pixels, sbnet.BlockGrid.cover(tuple(shape[1:]), BLOCK))
    inside = active.pixel_mask(tuple(shape[1:]))
    torchs, exact = F.conv2d(x, dense), F.conv2d(x.double(), dense.double())
    sides = {
        NAME: Side(lambda: sbnet.sparse_conv2d(x, weight, None, active, layout=layout), "ours"),
        "F.conv2d": Side(lambda: F.conv2d(x, dense)),
        "sparse_conv2d, dense weights": Side(lambda: sbnet.sparse_conv2d(x, dense, None, active), "peer"),
        "blocksparse_matmul, all pixels": Side(
            lambda: sbnet.blocksparse_matmul(x.permute(0, 2, 3, 1), weight, layout).permute(0, 3, 1, 2), "peer"
        ),
    }
    count = int(inside.sum())

    def check(side: str, got: Tensor) -> float:
        return close(got, torchs, exact, inside if side in (NAME, "sparse_conv2d, dense weights") else None)

    products = 2.0 * count * layout.blocks * size**2
    moved = float(setting.dtype.itemsize * (layout.blocks * size**2 + count * (facts["in"] + facts["out"])))
    return Work(sides, check, products, moved, setting.dtype, {"blocks": layout.blocks, "pixels": count})
