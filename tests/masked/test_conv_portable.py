"""Convolutions by the kernels of every GPU since sm_80 (SBNET_GPU=portable): by patches and by rows, of units of all
sizes. All other tests may be run with that setting, too.
"""

import pytest
import torch

from sbnet.select import conv2d_kernel
from support.helpers import run_python

# Channels, filters, kernel, block, size: few and many channels, so that warps are four or eight; cells of 16x16 and of
# 8x8; tails of channels; planes that cut blocks; densities from a few blocks to several waves of units.
LAYERS = [
    (64, 64, 3, 16, (75, 90)),
    (40, 72, 3, 16, (37, 61)),
    (128, 136, 3, (16, 32), (200, 352)),
    (256, 256, 3, 16, (128, 130)),
    (200, 96, 3, 16, (61, 50)),
    (64, 64, 3, 8, (75, 90)),
    (24, 200, 3, (8, 24), (37, 61)),
    (256, 128, 1, 16, (75, 90)),
    (72, 40, 1, (7, 5), (37, 61)),
    (64, 264, 1, 8, (150, 200)),
]
CODE = """
import sys, torch
from support.conv_cases import check
torch.manual_seed(0)
terms = [dict(), dict(activation="relu", residual="channels_last"), dict(activation="gelu", bias=False),
         dict(activation="silu", residual="channels_last", after=True), dict(activation="leaky_relu")]
for number, (channels, filters, kernel, block, size) in enumerate({layers}):
    for k, density in enumerate((0.0, 0.03, 0.3, 1.0)):
        more = terms[(number + k) % len(terms)]
        case = dict(channels=channels, filters=filters, kernel=kernel, block=block, size=size, density=density)
        check("cuda", dtype=torch.{dtype}, padding=kernel // 2, **case, **more)
        if kernel == 1:
            check("cuda", dtype=torch.{dtype}, padding=0, stride=2, **case, **more)
print("all")
"""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_layers_are_theirs(dtype):
    for channels, filters, kernel, block, size in LAYERS:
        found = conv2d_kernel(
            (2, channels, *size), filters, kernel, block, padding=kernel // 2, dtype=dtype, allow_tf32=True,
            capability=86,
        )  # fmt: skip
        assert found.kernel == ("3x3 by patches" if kernel == 3 else "1x1 by rows")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_against_float64(dtype):
    result = run_python(CODE.format(layers=LAYERS, dtype=dtype), SBNET_GPU="portable")
    assert result.stdout == "all\n", result.stderr[-3000:]
