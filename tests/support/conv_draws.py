"""Random small convolutions that one kernel may take: for tests/masked/test_emulator.py."""

import random

import torch

from support.conv_cases import pair

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def some_patch(rng: random.Random) -> dict:
    """A small 3x3 convolution: cells of 8x8 and of 16x16, units of all sizes."""
    return {
        "channels": rng.choice([8, 24, 32, 40, 64, 72, 192, 200, 224]), "filters": rng.choice([8, 40, 64, 72, 96, 136]),
        "kernel": 3, "stride": 1, "padding": 1, "size": (rng.randint(1, 50), rng.randint(1, 50)),
        "batch": rng.choice([1, 1, 2]), "block": rng.choice([8, 16, 16, 24, 32, (8, 16), (16, 8), (16, 32), (48, 16)]),
        "density": rng.choice([0.0, 0.1, 0.4, 0.8, 1.0, 1.0]), "dtype": rng.choice(DTYPES),
    }  # fmt: skip


def some_groups(rng: random.Random) -> dict:
    """A small 3x3 convolution of small groups."""
    inputs, many = rng.choice([4, 8, 8, 16, 32]), rng.choice([1, 1, 2])
    channels = (64 if inputs > 8 else 32) * many
    return {
        "channels": channels, "filters": channels, "groups": channels // inputs, "kernel": 3,
        "stride": rng.choice([1, 1, 2]), "padding": rng.choice([1, 1, 1, 0, 2]), "batch": rng.choice([1, 1, 2]),
        "size": (rng.randint(3, 40), rng.randint(3, 40)), "block": rng.choice([8, 8, 16, 24, (8, 16), 64]),
        "density": rng.choice([0.0, 0.1, 0.4, 0.8, 1.0, 1.0]), "dtype": rng.choice([torch.float16, torch.bfloat16]),
    }  # fmt: skip


def some_rows(rng: random.Random) -> dict:
    """A small 1x1 convolution, of any blocks and strides."""
    return {
        "channels": rng.choice([8, 24, 64, 72, 128, 200]), "filters": rng.choice([8, 40, 64, 72, 96, 136, 264]),
        "kernel": 1, "stride": rng.choice([1, 1, 2, 3]), "padding": 0, "size": (rng.randint(1, 50), rng.randint(1, 50)),
        "batch": rng.choice([1, 1, 2]), "block": rng.choice([1, 3, 4, 8, 16, (7, 5), (8, 16), 64]),
        "density": rng.choice([0.0, 0.1, 0.4, 0.8, 1.0, 1.0]), "dtype": rng.choice(DTYPES),
    }  # fmt: skip


def some_taps(rng: random.Random) -> dict:
    """What rows take beside 1x1: kernels, strides, dilations, paddings, groups."""
    groups, kernel = rng.choice([1, 1, 1, 1, 2, 3]), rng.choice([3, 3, 3, 1, 2, 5, 7, 8, (1, 3), (3, 1), (2, 5)])
    dilation = rng.choice([1, 1, 1, 2, 3, 6])
    reach = tuple(dilation * (side - 1) + 1 for side in pair(kernel))
    inputs, outputs = rng.choice([8, 8, 16, 24, 64, 72, 136]), rng.choice([8, 24, 40, 64, 72, 136])
    if groups > 1:
        inputs, outputs = rng.choice([8, 24, 40, 64]), rng.choice([24, 40, 64, 72])
    return {
        "channels": groups * inputs, "filters": groups * outputs, "groups": groups, "kernel": kernel,
        "size": (max(rng.randint(1, 40), reach[0]), max(rng.randint(1, 40), reach[1])), "dilation": dilation,
        "padding": rng.choice([0, 1, 1, 2, max(reach)]), "stride": rng.choice([1, 2, 2, 3]),
        "batch": rng.choice([1, 1, 2]), "block": rng.choice([3, 4, 8, 8, 16, 10, (7, 5), (8, 16), 64]),
        "density": rng.choice([0.0, 0.1, 0.4, 0.8, 1.0, 1.0]), "dtype": rng.choice(DTYPES),
    }  # fmt: skip


def some_first(rng: random.Random) -> dict:
    """Of up to four channels and more than sixteen taps, 7x7 most of all."""
    kernel, dilation = rng.choice([7, 7, 7, 5, 6, 8, (3, 7)]), rng.choice([1, 1, 1, 2])
    reach = tuple(dilation * (side - 1) + 1 for side in pair(kernel))
    return {
        "channels": rng.choice([1, 2, 3, 3, 3, 4]), "filters": rng.choice([8, 24, 32, 40, 64]), "kernel": kernel,
        "stride": rng.choice([1, 2, 2, 2, 3]), "dilation": dilation, "padding": rng.choice([0, 2, 3, 3]),
        "size": (max(rng.randint(1, 60), reach[0]), max(rng.randint(1, 60), reach[1])), "batch": rng.choice([1, 1, 2]),
        "block": rng.choice([8, 8, 16, 24, (8, 16), 64]), "density": rng.choice([0.0, 0.1, 0.4, 0.8, 1.0, 1.0]),
        "dtype": rng.choice([torch.float16, torch.bfloat16]),
    }  # fmt: skip


def some_other(rng: random.Random) -> dict:
    """What only the implicit GEMM takes: channels of any number, merged groups, many taps."""
    groups, kernel = rng.choice([1, 1, 2, 5, 8]), rng.choice([1, 3, 3, 3, 5, 9, (1, 3), (2, 5)])
    reach = tuple(side for side in pair(kernel))
    inputs, outputs = rng.choice([5, 12, 20, 24, 60, 64]), rng.choice([1, 3, 8, 20, 60, 64])
    if groups > 1:
        inputs, outputs = rng.choice([2, 3, 4, 8, 12, 24]), rng.choice([1, 3, 4, 8, 16])
    return {
        "channels": groups * inputs, "filters": groups * outputs, "groups": groups, "kernel": kernel,
        "size": (max(rng.randint(1, 40), reach[0]), max(rng.randint(1, 40), reach[1])), "dilation": 1,
        "padding": rng.randint(0, 2), "stride": rng.choice([1, 1, 2, 3]), "batch": rng.choice([1, 1, 2]),
        "block": rng.choice([3, 8, 10, 16, (8, 16), 64]), "density": rng.choice([0.0, 0.1, 0.4, 0.8, 1.0, 1.0]),
        "dtype": rng.choice(DTYPES),
    }  # fmt: skip


def some_few_tiles(rng: random.Random) -> dict:
    """1x1 and 3x3, reductions of one chunk to a few dozen, tiles of 32 and 64 channels, some not all there."""
    kernel = rng.choice([1, 3, 3])
    return {
        "channels": rng.choice([64, 96, 128, 256] if kernel == 3 else [64, 72, 160, 512, 1024]),
        "filters": rng.choice([8, 32, 64, 72, 96, 128]), "kernel": kernel, "padding": kernel // 2,
        "size": (rng.randint(2, 40), rng.randint(2, 40)), "batch": rng.choice([1, 1, 2]), "stride": rng.choice([1, 2]),
        "block": rng.choice([8, 8, 16, (8, 16)] if kernel == 3 else [4, 8, (4, 12), 16]),
        "density": rng.choice([0.0, 0.1, 0.4, 0.8, 1.0, 1.0]), "dtype": rng.choice([torch.float16, torch.bfloat16]),
    }  # fmt: skip


SOME_OF = {
    "few tiles": some_few_tiles, "3x3 by patches": some_patch, "1x1 by rows": some_rows, "by rows": some_taps,
    "3x3 by groups": some_groups, "first layer": some_first, "implicit GEMM": some_other,
}  # fmt: skip
