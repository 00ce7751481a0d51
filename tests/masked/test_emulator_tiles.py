"""How convolution kernels of GPUs cut their work, on the CPU (test_emulator.py says how)."""

import random

import pytest
import torch
from masked.test_emulator import ACTIVATIONS, RESIDUALS, WITH_SLOPES, emulate
from masked.test_emulator import emulated as emulated


@pytest.mark.parametrize("seed", range(3))
def test_few_cells_of_many_channels(emulated, seed):
    """3x3: two or four CTAs sum a part of the channels each, up to so many cells; beyond, the other code."""
    rng = random.Random(f"few {seed}")
    layers = [(128, 64, 12), (128, 128, 16), (256, 64, 12), (512, 64, 8), (512, 128, 16)]
    for channels, filters, multiprocessors in layers:
        case = {"channels": channels, "filters": filters, "batch": rng.choice([1, 1, 2]), "block": 8, "stride": 1}
        case |= {"size": (rng.randint(1, 33), rng.randint(1, 33)), "density": rng.choice([0.0, 0.1, 0.3, 1.0])}
        more = {"activation": rng.choice(list(WITH_SLOPES)), "residual": rng.choice(RESIDUALS)}
        more |= {"multiprocessors": multiprocessors, "seed": rng.randrange(2**31)}
        more["dtype"] = rng.choice([torch.float16, torch.bfloat16])
        torch.manual_seed(more["seed"])
        assert emulate(emulated, "3x3", kernel=3, padding=1, **more, **case), case


@pytest.mark.parametrize("multiprocessors", [1, 16, 132])
@pytest.mark.parametrize(("channels", "kernel", "stride"), [(256, 3, 1), (128, 3, 2), (1024, 1, 1), (72, 1, 2)])
def test_few_tiles(emulated, channels, kernel, stride, multiprocessors):
    """One to eight CTAs sum a part of a tile's chunks each; lists of no cell, of some, of all."""
    rng = random.Random(f"{channels} {kernel} {stride} {multiprocessors}")
    for density, block, side in ((0.0, 8, 9), (0.2, 8, 20), (1.0, 8 if kernel == 3 else 4, 24)):
        case = {"channels": channels, "filters": rng.choice([32, 64, 72, 160]), "batch": 1, "block": block}
        case |= {"size": (side * stride, (side + 3) * stride), "density": density, "stride": stride, "kernel": kernel}
        more = {"activation": rng.choice(list(ACTIVATIONS if kernel == 1 else WITH_SLOPES))}
        more |= {"residual": rng.choice(RESIDUALS), "seed": rng.randrange(2**31), "multiprocessors": multiprocessors}
        more["dtype"] = rng.choice([torch.float16, torch.bfloat16])
        if more["activation"] == "prelu" and stride == 2:
            more["activation"] = "relu"
        torch.manual_seed(more["seed"])
        assert emulate(emulated, "few tiles", padding=kernel // 2, again=True, **more, **case), (more, case)


@pytest.mark.parametrize(("block", "size"), [(8, (72, 80)), (4, (40, 60))])
def test_more_tiles_than_are_looked_up_at_once(emulated, block, size):
    """A warp's lanes find 32 tiles, or 8 of four cells, and then the next ones."""
    torch.manual_seed(block)
    case = {"channels": 64, "filters": 8, "batch": 1, "block": block, "kernel": 1, "padding": 0, "stride": 1}
    more = {"seed": block, "multiprocessors": 1, "activation": "relu", "residual": True, "dtype": torch.float16}
    assert emulate(emulated, "few tiles", size=size, density=1.0, **more, **case)


# Channels, output channels, multiprocessors: tiles of 32, 64, 80 and 96.
SHARED = [(256, 20, 8), (256, 64, 4), (136, 80, 2), (256, 96, 4)]


@pytest.mark.parametrize("dtypes", [[torch.float16, torch.bfloat16], [torch.float32]], ids=["halves", "tf32"])
@pytest.mark.parametrize(("channels", "filters", "multiprocessors"), SHARED)
def test_tiles_whose_channels_are_shared(emulated, channels, filters, multiprocessors, dtypes):
    """General: one, two or four CTAs sum a part of a tile's channels each, always in the same order."""
    rng = random.Random(f"shared {channels} {filters}")
    for dilation, block, density in ((2, 16, 1.0), (15, 16, 0.6), (12, 8, 0.6), (1, 10, 0.1)):
        more = {"activation": rng.choice(list(WITH_SLOPES)), "residual": rng.choice(RESIDUALS)}
        more |= {"seed": rng.randrange(2**31), "dtype": rng.choice(dtypes)}
        case = {"size": (rng.randint(9, 28), rng.randint(9, 28)), "density": density, "batch": 1, "block": block}
        case |= {"kernel": 3, "padding": dilation, "dilation": dilation, "stride": 1, "channels": channels}
        torch.manual_seed(more["seed"])
        more |= {"multiprocessors": multiprocessors, "again": True, "filters": filters}
        assert emulate(emulated, "general", **more, **case), (more, case)


@pytest.mark.parametrize(("groups", "inputs", "outputs"), [(32, 4, 4), (13, 8, 8), (5, 3, 3), (11, 2, 6), (9, 12, 8)])
def test_small_groups_side_by_side(emulated, groups, inputs, outputs):
    """One multiprocessor: weights of the next groups come where others were; the last tile may have fewer."""
    torch.manual_seed(groups)
    case = {"channels": groups * inputs, "filters": groups * outputs, "groups": groups, "batch": 1, "block": 16}
    case |= {"kernel": 3, "padding": 1, "stride": 1, "size": (20, 36), "density": 1.0, "dtype": torch.float16}
    assert emulate(emulated, "general", seed=groups, multiprocessors=1, activation=None, residual=False, **case)


@pytest.mark.parametrize("residual", [True, "after"])
@pytest.mark.parametrize("activation", ["relu", "silu", "prelu"])
@pytest.mark.parametrize("kernel", ["general", "tf32"])
def test_infinities_stay_in_their_group(emulated, kernel, activation, residual):
    torch.manual_seed(0)
    case = {"channels": 40, "filters": 40, "groups": 5, "batch": 1, "block": 16, "kernel": 3, "padding": 1, "stride": 1}
    case |= {"size": (20, 20), "density": 1.0, "dtype": torch.float32 if kernel == "tf32" else torch.float16}
    more = {"seed": 0, "multiprocessors": 2, "activation": activation, "residual": residual}
    assert emulate(emulated, kernel, infinite=[3, 20], **more, **case)


@pytest.mark.parametrize("kernel", ["3x3", "few tiles", "general"])
def test_slopes_a_channel(emulated, kernel):
    """Of kernels whose rows are channels, whose columns are, and whose few cells or tiles are cut over clusters."""
    for seed, (channels, filters, density) in enumerate([(64, 64, 1.0), (24, 96, 0.5), (60, 20, 0.5), (128, 128, 0.1)]):
        if kernel != "general" and filters % 8:
            continue
        torch.manual_seed(seed)
        case = {"channels": channels, "filters": filters, "batch": 1, "block": 8}
        case |= {"kernel": 3, "padding": 1, "stride": 1}
        more = {"seed": seed, "multiprocessors": 12, "activation": "prelu", "size": (19, 20), "density": density}
        for residual, dtype in ((False, torch.float16), (True, torch.bfloat16)):
            taken = emulate(emulated, kernel, residual=residual, dtype=dtype, **more, **case)
            assert taken or (kernel != "general" and (channels % 8 or channels < 64)), case


@pytest.mark.parametrize("block", [8, 16])
@pytest.mark.parametrize("kernel", ["3x3 by patches", "1x1 by rows"])
def test_infinities_reach_what_reads_them_alone(emulated, kernel, block):
    """Channels and outputs that fill a tile up are zeros, or others again: nothing of them may come through."""
    torch.manual_seed(0)
    case = {"channels": 24, "filters": 40, "batch": 1, "block": block, "kernel": int(kernel[0]), "stride": 1}
    case |= {"padding": case["kernel"] // 2, "size": (21, 26), "density": 0.7, "dtype": torch.float16}
    for activation in ("relu", "silu", "prelu"):
        more = {"seed": 0, "multiprocessors": 2, "activation": activation, "residual": True}
        assert emulate(emulated, kernel, infinite=[3, 20], **more, **case)
