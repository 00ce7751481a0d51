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


@pytest.mark.parametrize(("size", "stride"), [((27, 27), 2), ((35, 22), 1)])
def test_first_layers_keep_infinities_in_their_windows(emulated, size, stride):
    """Taps past the last one of a step read zeros, not a pixel times zero. The pixel is a patch's first one."""
    case = {"channels": 3, "filters": 24, "size": size, "block": 8, "density": 1.0, "kernel": 7, "padding": 3}
    case |= {"seed": 4, "multiprocessors": 2, "activation": None, "residual": False, "dtype": torch.float16}
    assert emulate(emulated, "first layer", infinite=[1], stride=stride, **case)


@pytest.mark.parametrize("density", [0.1, 1.0])
def test_reductions_shared_by_two_sets_of_warps(emulated, density):
    """3x3 of many channels, whose small units are summed in halves."""
    case = {"channels": 200, "filters": 136, "size": (30, 36), "block": 16, "kernel": 3, "padding": 1, "stride": 1}
    case |= {"seed": 5, "multiprocessors": 6, "activation": "relu", "residual": True, "dtype": torch.float16}
    assert emulate(emulated, "3x3 by patches", density=density, **case)


@pytest.mark.parametrize("block", [16, 8])
@pytest.mark.parametrize(("channels", "filters"), [(32, 32), (16, 24), (24, 8), (40, 32), (96, 16)])
def test_few_output_channels(emulated, channels, filters, block):
    """3x3 of up to 32: weights that stay in shared memory where the input channels are few, too."""
    for dtype, density, multiprocessors in ((torch.float16, 1.0, 1), (torch.bfloat16, 0.4, 2), (torch.float32, 1.0, 1)):
        case = {"channels": channels, "filters": filters, "size": (37, 50), "block": block, "kernel": 3, "padding": 1}
        case |= {"stride": 1, "batch": 2, "seed": channels, "multiprocessors": multiprocessors, "dtype": dtype}
        more = {"activation": "silu", "residual": "after", "density": density}
        assert emulate(emulated, "3x3 by patches", **more, **case), (dtype, density)


@pytest.mark.parametrize("density", [0.1, 0.3, 1.0])
def test_few_cells_of_many_channels_in_blocks_of_eight(emulated, density):
    """3x3: units of 32 output channels, whose reduction two sets of two warps share."""
    for channels, filters, dtype in ((136, 72, torch.float16), (40, 136, torch.bfloat16), (24, 40, torch.float32)):
        case = {"channels": channels, "filters": filters, "size": (27, 36), "block": 8, "kernel": 3, "padding": 1}
        case |= {"seed": 6, "multiprocessors": 12, "activation": "relu", "residual": True, "stride": 1}
        assert emulate(emulated, "3x3 by patches", density=density, dtype=dtype, **case), (channels, dtype)
