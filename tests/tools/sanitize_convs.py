"""Convolutions on small shapes, one for each kernel and way through it: families of sanitize.py."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import sbnet
from sbnet import BlockGrid, reference


def some_active(size: tuple[int, int, int], grid: BlockGrid, density: float, device: str) -> sbnet.ActiveBlocks:
    mask = torch.rand(size, device=device) < density
    mask[0, 0, 0] = True
    return sbnet.reduce_mask(mask, grid)


CONVS = {  # dtype, kernel, stride, groups, channels, block
    "conv3x3_c32": (torch.bfloat16, 3, 1, 1, 32, 16),
    "conv3x3_c64": (torch.float16, 3, 1, 1, 64, 16),
    "conv3x3_c128": (torch.float16, 3, 1, 1, 128, 16),
    "conv3x3_squares": (torch.bfloat16, 3, 1, 1, 128, 8),
    "conv1x1": (torch.bfloat16, 1, 1, 1, 64, 16),
    "conv1x1_stride2": (torch.float16, 1, 2, 1, 1024, 4),
    "conv3x3_stride2": (torch.float16, 3, 2, 1, 24, 16),
    "conv3x3_stride2_squares": (torch.bfloat16, 3, 2, 1, 128, 8),
    "conv_portable": (torch.float32, 3, 1, 1, 16, 10),
    "conv_portable_elements": (torch.float32, 3, 1, 1, 17, 10),
    "conv_grouped": (torch.float16, 3, 1, 8, 32, 16),
    "conv_groups_of_four": (torch.float16, 3, 1, 16, 64, 16),
    "conv_groups_of_eight": (torch.bfloat16, 3, 2, 8, 64, 8),
    "conv_groups_of_sixteen": (torch.float16, 3, 2, 4, 64, 8),
    "conv_groups_of_thirty_two": (torch.bfloat16, 3, 1, 4, 128, 16),
    "conv_depthwise": (torch.float16, 3, 1, 64, 64, 16),
    "conv_depthwise_slices": (torch.float16, 7, 1, 72, 72, 8),
    "conv_depthwise_small_tiles": (torch.bfloat16, 5, 2, 200, 200, 4),
    "conv_depthwise_float32": (torch.float32, 5, 1, 40, 40, 8),
    "conv_patches": (torch.float16, 2, 2, 1, 64, 8),
    "conv_few_channels_patches": (torch.bfloat16, 4, 4, 1, 3, 16),
    "conv_general": (torch.float16, 5, 1, 1, 60, 10),
    "conv_general_elements": (torch.bfloat16, 5, 2, 1, 3, 16),
    "conv_general_groups": (torch.float16, 3, 1, 8, 64, 12),
    "conv_general_shared": (torch.float16, 3, 1, 1, 256, 12),
    "conv_tf32": (torch.float32, 3, 1, 1, 64, 16),
    "conv_tf32_groups": (torch.float32, 3, 1, 8, 32, 16),
    "conv_few_channels": (torch.float16, 3, 2, 1, 3, 16),
    "conv_few_channels_small_blocks": (torch.bfloat16, 3, 1, 1, 4, 3),
    "conv_first": (torch.float16, 7, 1, 1, 3, 8),
    "conv_first_of_four_channels": (torch.bfloat16, 5, 2, 1, 4, 16),
    "conv_stem": (torch.float16, 7, 2, 1, 3, 16),
    "conv_stem_cells": (torch.bfloat16, 7, 2, 1, 3, 10),
}


def conv(name: str, device: str) -> None:
    dtype, kernel, stride, groups, channels, block = CONVS[name]
    size, filters = (50, 64), channels if groups > 1 else 64
    if name.startswith(("conv3x3", "conv1x1")):  # room for more tiles than conv_few.cu takes
        size = (98 * stride, 104 * stride)
    x = torch.randn(1, channels, *size, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(filters, channels // groups, kernel, kernel, device=device)
    weight = (weight / (channels * kernel**2 / groups) ** 0.5).to(dtype)
    padding = 0 if kernel == stride else kernel // 2
    geometry = {"stride": stride, "padding": padding, "groups": groups}
    pairs = [(v, v) for v in (kernel, stride, padding, 1)]
    out = sbnet.conv_output_size(size, *pairs)
    active = some_active((1, *out), BlockGrid.cover(out, block), 0.005, device)
    right(name, x, weight, active, allow_tf32="tf32" in name, **geometry)


def right(name: str, x: torch.Tensor, weight: torch.Tensor, active: sbnet.ActiveBlocks, **geometry: int) -> None:
    more: dict[str, Any] = {"activation": "relu"}
    for _ in range(2):
        got = sbnet.sparse_conv2d(x, weight, None, active, **more, **geometry)
        wide = {name: v.float() if isinstance(v, torch.Tensor) else v for name, v in more.items()}
        with torch.backends.cudnn.flags(enabled=False):  # racecheck finds hazards in cuDNN's kernels
            want = reference.sparse_conv2d(x.float(), weight.float(), None, active, **wide, **geometry)
        error = float((got.float() - want).norm() / want.norm())
        assert error < 1e-2, (name, more["activation"], error)
        more = {"activation": "silu", "residual": torch.randn_like(got), "residual_after": True}


def whole_tiles(device: str) -> None:
    """A tile for each SM: in conv3x3_c128 CTAs share tiles through st.async, where racecheck comes to no end."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count if device == "cuda" else 2
    x = torch.randn(1, 128, 16, 16 * sms, device=device).half().contiguous(memory_format=torch.channels_last)
    weight = (torch.randn(128, 128, 3, 3, device=device) / 34).half()
    active = some_active((1, 16, 16 * sms), BlockGrid.cover((16, 16 * sms), 16), 1.0, device)
    right("whole_tiles", x, weight, active, padding=1)


def conv1x1_wide(device: str) -> None:
    """A list with room for many tiles that holds few."""
    for (channels, filters), block in itertools.product(((128, 1024), (64, 1280), (320, 1024), (512, 896)), (4, 16)):
        x = torch.randn(1, channels, 136, 160, device=device).half().contiguous(memory_format=torch.channels_last)
        weight = (torch.randn(filters, channels, 1, 1, device=device) / channels**0.5).half()
        active = some_active((1, 136, 160), BlockGrid.cover((136, 160), block), 0.001, device)
        right("conv1x1_wide", x, weight, active)


def conv1x1_of_all_blocks(device: str) -> None:
    """Blocks reach over the plane: taken as one row of pixels, by each of the 1x1 kernels."""
    wide = ((64, 72, 8), (512, 896, 16), (320, 1024, 4))
    split = ((1536, 128, 8), (1536, 128, 4), (1536, 1024, 8))  # of the last one a multiprocessor has a single job
    for channels, filters, block in wide + split:
        size = (50, 44) if filters == 1024 and channels == 1536 else (98, 92) if channels == 1536 else (134, 132)
        x = torch.randn(1, channels, *size, device=device).half().contiguous(memory_format=torch.channels_last)
        weight = (torch.randn(filters, channels, 1, 1, device=device) / channels**0.5).half()
        active = some_active((1, *size), BlockGrid.cover(size, block), 1.0, device)
        right("conv1x1_of_all_blocks", x, weight, active)


def conv1x1_split(device: str) -> None:
    """Jobs of two and four CTAs, and whole ones."""
    for filters, density, block in ((128, 0.002, 8), (512, 0.02, 8), (640, 1.0, 8), (256, 0.002, 4)):
        x = torch.randn(1, 1536, 96, 96, device=device).half().contiguous(memory_format=torch.channels_last)
        weight = (torch.randn(filters, 1536, 1, 1, device=device) / 40).half()
        active = some_active((1, 96, 96), BlockGrid.cover((96, 96), block), density, device)
        right("conv1x1_split", x, weight, active)


def few_tiles_alone(device: str) -> None:
    """Reductions that no other CTA has a part of: racecheck comes to no end where sums travel."""
    for filters, block in ((64, 8), (24, 4)):
        x = torch.randn(1, 64, 40, 36, device=device).half().contiguous(memory_format=torch.channels_last)
        weight = (torch.randn(filters, 64, 1, 1, device=device) / 8).half()
        right("few_tiles_alone", x, weight, some_active((1, 40, 36), BlockGrid.cover((40, 36), block), 0.01, device))


def few_tiles(device: str) -> None:
    """Two to eight CTAs a tile; tiles of 32 and 64 channels."""
    for channels, filters, kernel, stride in ((128, 64, 3, 1), (256, 32, 3, 1), (128, 96, 3, 2), (1024, 128, 1, 1)):
        size = (40, 36)
        x = torch.randn(1, channels, *(stride * s for s in size), device=device)
        x = x.bfloat16().contiguous(memory_format=torch.channels_last)
        weight = (torch.randn(filters, channels, kernel, kernel, device=device) / channels**0.5 / kernel).bfloat16()
        active = some_active((1, *size), BlockGrid.cover(size, 8), 0.01, device)
        right("few_tiles", x, weight, active, stride=stride, padding=kernel // 2)


def conv3x3_stride2_of_many_tiles(device: str) -> None:
    """As conv1x1_wide."""
    for channels, filters, dtype in ((64, 1088, torch.float16), (136, 1024, torch.bfloat16)):
        x = torch.randn(1, channels, 150, 160, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
        weight = (torch.randn(filters, channels, 3, 3, device=device) / (9 * channels) ** 0.5).to(dtype)
        active = some_active((1, 75, 80), BlockGrid.cover((75, 80), 16), 0.002, device)
        right("conv3x3_stride2_of_many_tiles", x, weight, active, stride=2, padding=1)


def conv_quantized(device: str) -> None:
    """int8 by tensor cores (on Hopper; in narrow and wide tiles), in words of four channels and one by one, in groups,
    depthwise, to int8 and float32."""
    layers = (  # channels, filters, groups, block
        (64, 80, 1, 8), (64, 70, 1, 4), (48, 128, 1, 4), (12, 9, 1, 4), (5, 3, 1, 8), (24, 36, 3, 8), (35, 70, 35, 8)
    )  # fmt: skip
    for (channels, filters, groups, block), (kernel, stride, padding), out_scale in itertools.product(
        layers, ((3, 1, 1), (3, 2, 1), (1, 1, 0)), (None, 0.05)
    ):
        size = (260, 272) if filters == 128 else (13, 18)  # a list with room for many tiles that holds few
        options = {"stride": stride, "padding": padding, "groups": groups, "out_scale": out_scale}
        x, weight = (
            torch.randint(-128, 128, shape, dtype=torch.int8, device=device).contiguous(
                memory_format=torch.channels_last
            )
            for shape in ((1, channels, *size), (filters, channels // groups, kernel, kernel))
        )
        scale = torch.rand(filters, device=device) / (100 * channels // groups)
        out = sbnet.conv_output_size(size, kernel, stride, padding)
        active = some_active((1, *out), BlockGrid.cover(out, block), 0.5 if size == (13, 18) else 0.0005, device)
        edge = sbnet.fringe(active, active, out, 3, 1, 1)
        want = reference.sparse_conv2d_quantized(x.cpu(), weight.cpu(), scale.cpu(), None, active.to("cpu"), **options)
        got = torch.zeros_like(want, device=device)
        sbnet.sparse_conv2d_quantized_(x, weight, scale, None, active, got, **options, fringe=edge)
        torch.testing.assert_close(got.float().cpu(), want.float(), rtol=1e-5, atol=0 if out_scale is None else 1)
        again = torch.zeros_like(got)  # rounded into a workspace first, where channels allow it
        sbnet.sparse_conv2d_quantized_(x / 4, weight, scale, None, active, again, **options, fringe=edge, x_scale=0.25)
        assert torch.equal(again, got)


def conv_float8(device: str) -> None:
    """float8 of long and short reductions, in whole words and not, to every dtype."""
    float8 = torch.float8_e4m3fn
    for (channels, filters), (kernel, stride, padding), dtype in itertools.product(
        ((64, 80), (288, 64), (36, 5), (3, 7)),
        ((3, 1, 1), (3, 2, 1), (1, 1, 0)),
        (float8, torch.float16, torch.bfloat16, torch.float32),
    ):
        x, weight = (
            torch.randn(shape, device=device).to(float8).contiguous(memory_format=torch.channels_last)
            for shape in ((1, channels, 13, 18), (filters, channels, kernel, kernel))
        )
        out = sbnet.conv_output_size((13, 18), kernel, stride, padding)
        active = some_active((1, *out), BlockGrid.cover(out, 8), 0.5, device)
        edge, scale = sbnet.fringe(active, active, out, 3, 1, 1), torch.rand(filters, device=device) / channels
        more = {"stride": stride, "padding": padding} | ({"out_scale": 0.05} if dtype == float8 else {})
        residual = torch.randn(1, filters, *out, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
        got = torch.zeros_like(residual)
        call = x, weight, scale, None, active
        sbnet.sparse_conv2d_quantized_(*call, got, **more, residual=residual, fringe=edge)
        want = reference.sparse_conv2d_quantized(
            *(t.cpu() for t in call[:3]), None, active.to("cpu"), **more, residual=residual.cpu()
        )
        torch.testing.assert_close(got.float().cpu(), want.float(), rtol=0.13, atol=0.02)


def conv_transpose(device: str) -> None:
    """All phases in one launch, phase by phase, whose blocks may lie past their plane, and pixel by pixel."""
    windows = ((2, 2, 0, 0, 8), (4, 2, 1, 0, 16), (3, 2, 1, 1, 8), (3, 3, 1, 0, 8), (1, 2, 0, 0, 8))
    for dtype, (channels, filters), (kernel, stride, padding, extra, block) in itertools.product(
        (torch.float16, torch.bfloat16, torch.float32), ((136, 40), (24, 24), (17, 5)), windows
    ):
        size, options = (13, 18), {"stride": stride, "padding": padding, "output_padding": extra}
        x = torch.randn(1, channels, *size, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
        weight = (torch.randn(channels, filters, kernel, kernel, device=device) / channels**0.5).to(dtype)
        weight = weight.contiguous(memory_format=torch.channels_last)
        out = sbnet.conv_transpose_output_size(size, kernel, **options)
        active = some_active((1, *out), BlockGrid.cover(out, block), 0.5, device)
        edge = sbnet.fringe(active, active, out, 3, 1, 1)
        got = torch.zeros(1, filters, *out, device=device, dtype=dtype)
        sbnet.sparse_conv_transpose2d_(x, weight, None, active, got, **options, fringe=edge)
        with torch.backends.cudnn.flags(enabled=False):  # racecheck finds hazards in cuDNN's kernels
            want = reference.sparse_conv_transpose2d(x.float(), weight.float(), None, active, **options)
        torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


def bottleneck(device: str) -> None:
    """In one kernel where there is one: blocks of 8 and 16, cut off and whole, few and many; and else as layers."""
    for dtype, (channels, width), block, density in itertools.product(
        (torch.float16, torch.bfloat16, torch.float32),
        ((256, 64), (136, 96), (64, 24), (20, 5)),
        (8, 16, 5),
        (0.005, 1.0),
    ):
        if dtype == torch.float32 and block != 8:
            continue  # layers, which have cases of their own
        size = (50, 44)
        x = torch.randn(1, channels, *size, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
        shapes = (width, channels, 1, 1), (width, width, 3, 3), (channels, width, 1, 1)
        weights = [(torch.randn(s, device=device) / (s[1] * s[2] * s[3]) ** 0.5).to(dtype) for s in shapes]
        active = some_active((1, *size), BlockGrid.cover(size, block), density, device)
        edge = sbnet.fringe(active, active, size, 3, 1, 1)
        got = torch.zeros_like(x)
        sbnet.sparse_bottleneck2d_(x, weights, None, active, got, fringe=edge)
        with torch.backends.cudnn.flags(enabled=False):  # racecheck finds hazards in cuDNN's kernels
            want = reference.sparse_bottleneck2d(x.float(), [w.float() for w in weights], None, active)
        error = float((got.float() - want).norm() / want.norm())
        assert error < 1e-2, (dtype, channels, block, density, error)


TILES = (
    whole_tiles, few_tiles, few_tiles_alone, conv1x1_wide, conv1x1_of_all_blocks, conv1x1_split,
    conv3x3_stride2_of_many_tiles,
)  # fmt: skip
