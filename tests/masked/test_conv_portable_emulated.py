"""The convolution kernels of every GPU since sm_80, on the CPU (test_emulator.py says how): what is not finite."""

import pytest
import torch
from masked.test_emulator import ACTIVATIONS, emulate
from masked.test_emulator import emulated as emulated

LAYERS = {"3x3 by patches": {"kernel": 3, "padding": 1}, "1x1 by rows": {"kernel": 1, "padding": 0}}


@pytest.mark.parametrize("kernel", LAYERS)
def test_nan_of_any_payload_in_tf32(emulated, kernel):
    """NaN whose bits tf32 does not have, and the one that a rounding would carry to -0."""
    case = {"channels": 40, "filters": 72, "size": (20, 30), "block": 16, "density": 1.0, "dtype": torch.float32}
    case |= {"seed": 1, "multiprocessors": 4, "activation": None, "residual": False, "stride": 1, "dilation": 1}
    assert emulate(emulated, kernel, infinite=[3], nan=[17], **case, **LAYERS[kernel])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kernel", LAYERS)
def test_infinities(emulated, kernel, activation):
    """Sums of either sign, through every activation: PyTorch's gelu and silu of -inf are NaN."""
    for dtype in (torch.float16, torch.float32):
        case = {"channels": 24, "filters": 40, "size": (17, 20), "block": 16, "density": 1.0, "dtype": dtype}
        case |= {"seed": 2, "multiprocessors": 2, "residual": False, "stride": 1, "dilation": 1}
        assert emulate(emulated, kernel, activation=activation, infinite=[5], **case, **LAYERS[kernel])


@pytest.mark.parametrize("inputs", [4, 8, 16, 32])
def test_groups_keep_infinities_to_themselves(emulated, inputs):
    """Of four channels, two groups share the words that are multiplied."""
    case = {"channels": 64, "filters": 64, "groups": 64 // inputs, "size": (17, 20), "block": 8, "density": 1.0}
    case |= {"seed": 3, "multiprocessors": 3, "kernel": 3, "padding": 1, "dtype": torch.float16}
    for activation, residual, stride in ((None, False, 1), ("gelu", True, 2), ("relu", "after", 1)):
        more = {"activation": activation, "residual": residual, "stride": stride}
        assert emulate(emulated, "3x3 by groups", infinite=[5, 38], nan=[], **more, **case)
