"""Convolutions with block-sparse weights and their transposes against dense ones of the same weights, zeros and all;
and such a convolution on active blocks, against either kind of zeros alone and neither."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbnet
from sbnet.benchmarks.harness import dense as forms
from sbnet.benchmarks.harness import masks
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, close, short
from sbnet.ops.weights.conv_layout import covering_mask

FORWARD, DECONV, ACTIVE = "blocksparse_conv", "blocksparse_deconv", "blocksparse_conv_active"
BLOCK = 16  # pixels of an active block
Sides = dict[str, Side]


def cases(setting: Setting) -> Iterator[Case]:
    large = ((1, 56, 56, 512), (8, 28, 28, 512))
    shapes = setting.pick(((1, 9, 10, 32),), ((1, 28, 28, 128),), large)
    for shape in shapes:
        for density in setting.pick((0.5,), (1.0, 0.25), (1.0, 0.5, 0.25, 0.1)):
            for name in (FORWARD, DECONV):
                facts = {"size": list(shape), "kernel": 3, "block": setting.pick(8, 32, 32), "density": density}
                facts["dtype"] = short(setting.dtype)
                yield Case(name, "weights", facts, partial(work, setting, name, facts))
    for shape in shapes[:1]:
        facts = {"size": list(shape), "kernel": 3, "block": setting.pick(8, 32, 32), "density": 0.25, "active": 0.25}
        facts["dtype"] = short(setting.dtype)
        yield Case(ACTIVE, "weights", facts, partial(work, setting, ACTIVE, facts))


def work(setting: Setting, name: str, facts: dict[str, Any]) -> Work:
    n, h, w, channels = facts["size"]
    options: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype}
    blocks = channels // facts["block"]
    mask = covering_mask(torch.rand(blocks, blocks), facts["density"])
    layout = sbnet.ConvLayout.from_mask(mask, channels, channels, facts["block"], (3, 3))
    filters = torch.randn(layout.filter_shape, **options) / (9 * channels * facts["density"]) ** 0.5
    dense = layout.to_dense(filters).contiguous(memory_format=torch.channels_last)
    x = torch.randn(n, channels, h, w, **options).contiguous(memory_format=torch.channels_last)
    products = 2.0 * n * h * w * layout.weights
    moved = float(setting.dtype.itemsize * (layout.weights + 2 * x.numel()))
    notes = {"blocks": layout.blocks}
    if name == ACTIVE:
        return active_work(setting, facts, layout, filters, dense, x)
    if name == DECONV:  # [inputs, outputs, 3, 3]: the forward one's weights, the other way
        back = layout.swapped()
        pack = sbnet.pack_blocksparse_filters(filters, back, transposed=True)
        ours = partial(sbnet.blocksparse_deconv, x, filters, back, padding=1, output_size=(h, w), packed=pack)
        dense, own = turned(dense), dense
        sides: Sides = {name: Side(ours, "ours")}
        sides["F.conv_transpose2d"] = Side(lambda: F.conv_transpose2d(x, own, padding=1))
    else:
        pack = sbnet.pack_blocksparse_filters(filters, layout)
        sides = {name: Side(lambda: sbnet.blocksparse_conv(x, filters, layout, padding=1, packed=pack), "ours")}
        if pack.numel():
            packing = partial(sbnet.blocksparse_conv, x, filters, layout, padding=1)
            sides["blocksparse_conv, packs"] = Side(packing, "peer")
    sides |= dense_sides(setting, dense, x)
    torchs, exact = F.conv2d(x, dense, padding=1), F.conv2d(x.double(), dense.double(), padding=1)
    return Work(sides, lambda _, got: close(got, torchs, exact), products, moved, setting.dtype, notes)


def turned(weight: Tensor) -> Tensor:
    """The weights of the convolution that a transposed one of stride 1 is."""
    return weight.transpose(0, 1).flip(2, 3).contiguous(memory_format=torch.channels_last)


def dense_sides(setting: Setting, weight: Tensor, x: Tensor) -> Sides:
    """The dense layer: PyTorch's, and on a CPU that of ONNX Runtime and OpenVINO."""
    sides = {"F.conv2d": Side(lambda: F.conv2d(x, weight, padding=1))}
    if setting.cuda or setting.level != "full":
        return sides
    conv = nn.Conv2d(weight.shape[1], weight.shape[0], 3, padding=1, bias=False).eval()
    conv.weight.data.copy_(weight)
    for name, form in forms.forms(conv, x).items():
        if name != forms.PLAIN:
            sides[name] = Side(partial(form.run, form.prepare(x)), "dense", "wall")
    return sides


def active_work(
    setting: Setting, facts: dict[str, Any], layout: sbnet.ConvLayout, filters: Tensor, dense: Tensor, x: Tensor
) -> Work:
    n, h, w, channels = facts["size"]
    pixels = masks.pixels("random", (n, h, w), facts["active"], setting.device)
    active = sbnet.reduce_mask(pixels, sbnet.BlockGrid.cover((h, w), min(BLOCK, h)))
    inside = active.pixel_mask((h, w))
    torchs, exact = F.conv2d(x, dense, padding=1), F.conv2d(x.double(), dense.double(), padding=1)
    sides: Sides = {
        ACTIVE: Side(lambda: sbnet.sparse_conv2d(x, filters, None, active, layout=layout, padding=1), "ours"),
        **dense_sides(setting, dense, x),
        "sparse_conv2d, dense weights": Side(lambda: sbnet.sparse_conv2d(x, dense, None, active, padding=1), "peer"),
        "blocksparse_conv, all pixels": Side(lambda: sbnet.blocksparse_conv(x, filters, layout, padding=1), "peer"),
    }

    def check(side: str, got: Tensor) -> float:
        return close(got, torchs, exact, inside if side.split(",")[0] in (ACTIVE, "sparse_conv2d") else None)

    count = int(inside.sum())
    moved = float(setting.dtype.itemsize * (layout.weights + 2 * count * channels))
    notes = {"blocks": layout.blocks, "pixels": count}
    return Work(sides, check, 2.0 * count * layout.weights, moved, setting.dtype, notes)
