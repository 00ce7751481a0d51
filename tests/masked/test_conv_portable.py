"""Convolutions by the kernels of every GPU since sm_80 (SBNET_GPU=portable): by patches, by rows and by groups, of
units of all sizes. All other tests may be run with that setting, too.
"""

import pytest
import torch

from sbnet.select import conv2d_kernel
from support.helpers import run_python

# Channels, filters, kernel, block, size, kernel, more: few and many channels, so that warps are four or eight;
# cells of 16x16 and of 8x8; tails of channels; planes that cut blocks; densities from a few blocks to several waves of
# units.
PATCHES, ROWS, GROUPS, FIRST = "3x3 by patches", "by rows", "3x3 by groups", "first layer"
LAYERS = [
    (64, 64, 3, 16, (75, 90), PATCHES, {}), (40, 72, 3, 16, (37, 61), PATCHES, {}),
    (128, 136, 3, (16, 32), (200, 352), PATCHES, {}), (256, 256, 3, 16, (128, 130), PATCHES, {}),
    (200, 96, 3, 16, (61, 50), PATCHES, {}), (64, 64, 3, 8, (75, 90), PATCHES, {}),
    (24, 200, 3, (8, 24), (37, 61), PATCHES, {}), (256, 128, 1, 16, (75, 90), ROWS, {}),
    (72, 40, 1, (7, 5), (37, 61), ROWS, {}), (64, 264, 1, 8, (150, 200), ROWS, {}),
    (72, 40, 1, (7, 5), (37, 61), ROWS, {"stride": 2}), (64, 264, 1, 8, (150, 200), ROWS, {"stride": 2}),
    (64, 136, 3, 16, (150, 200), ROWS, {"stride": 2}), (256, 72, 3, 4, (61, 50), ROWS, {"stride": 2}),
    (64, 64, 3, 10, (75, 90), ROWS, {}), (24, 64, 5, 16, (75, 90), ROWS, {}),
    (64, 136, 7, 8, (37, 61), ROWS, {"stride": 2}), (136, 136, 3, 16, (75, 90), ROWS, {"dilation": 2, "padding": 2}),
    (64, 64, (1, 3), 8, (75, 90), ROWS, {"padding": 0}), (168, 168, 3, 16, (75, 90), ROWS, {"groups": 7}),
    (448, 448, 3, 8, (37, 61), ROWS, {"groups": 8, "stride": 2}), (128, 128, 3, 16, (200, 352), GROUPS, {"groups": 32}),
    (256, 256, 3, 16, (75, 90), GROUPS, {"groups": 32}), (64, 64, 3, 8, (37, 61), GROUPS, {"groups": 8, "stride": 2}),
    (256, 256, 3, 8, (75, 90), GROUPS, {"groups": 16}),
    (192, 192, 3, (8, 24), (37, 61), GROUPS, {"groups": 12, "stride": 2}),
    (320, 320, 3, 16, (75, 90), GROUPS, {"groups": 10}),
    (64, 64, 3, 64, (37, 61), GROUPS, {"groups": 2, "stride": 2, "padding": 0}),
    (3, 64, 7, 16, (150, 200), FIRST, {"stride": 2}), (1, 24, 5, 8, (75, 90), FIRST, {"padding": 0}),
    (4, 40, 8, (8, 16), (61, 90), FIRST, {"stride": 2}),
]  # fmt: skip
CODE = """
import sys, torch
from support.conv_cases import check
torch.manual_seed(0)
terms = [dict(), dict(activation="relu", residual="channels_last"), dict(activation="gelu", bias=False),
         dict(activation="silu", residual="channels_last", after=True), dict(activation="leaky_relu")]
for number, (channels, filters, kernel, block, size, _, more) in enumerate({layers}):
    if (channels < 8 or "groups" in more) and torch.{dtype} == torch.float32:
        continue
    for k, density in enumerate((0.0, 0.03, 0.3, 1.0)):
        case = dict(channels=channels, filters=filters, kernel=kernel, block=block, size=size, density=density)
        case |= dict(padding=kernel // 2 if isinstance(kernel, int) else 0, dtype=torch.{dtype}) | more
        check("cuda", **case, **terms[(number + k) % len(terms)])
print("all")
"""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_layers_are_theirs(dtype):
    for channels, filters, kernel, block, size, which, more in LAYERS:
        if which == FIRST and dtype == torch.float32:
            which = "implicit GEMM" if channels == 4 else "float32"
        if which == GROUPS and dtype == torch.float32:
            which = ROWS if channels // more["groups"] > 16 else "implicit GEMM"
        padding = {"padding": kernel // 2 if isinstance(kernel, int) else 0}
        found = conv2d_kernel(
            (2, channels, *size), filters, kernel, block, dtype=dtype, allow_tf32=True, capability=86, **padding | more
        )
        assert found.kernel == which, (channels, filters, kernel, block, more)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_against_float64(dtype):
    result = run_python(CODE.format(layers=LAYERS, dtype=dtype), SBNET_GPU="portable")
    assert result.stdout == "all\n", result.stderr[-3000:]
