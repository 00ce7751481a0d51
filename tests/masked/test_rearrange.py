"""sparse_rearrange against PyTorch's shuffles and padding: bits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sbnet import (
    BlockGrid,
    Window,
    reference,
    sparse_pixel_shuffle,
    sparse_pixel_unshuffle,
    sparse_rearrange,
    sparse_rearrange_,
)
from sbnet.nn import SparseChannelShuffle, SparseConstantPad2d, SparsePixelShuffle, SparsePixelUnshuffle
from support.helpers import assert_bitwise, laid_out, random_active, tensor
from support.layer_checks import assert_gradients, assert_in_place, assert_network, assert_window

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PLANE = (12, 18)
MAPS = {
    "nothing": {}, "shuffle": {"up": 2}, "unshuffle": {"down": 3}, "groups": {"groups": 6},
    "pad": {"pad": (1, 2, 3, 0), "value": -1.5}, "crop": {"pad": (-5, -2, 0, -7)},
    "pad and crop": {"pad": (-15, 30, 40, -10), "value": 0.25},
    "all": {"up": 3, "down": 2, "groups": 4, "pad": (1, -3, -2, 5), "value": 7.0},
    "unshuffle of groups": {"down": 2, "groups": 9}, "shuffle of groups": {"up": 2, "groups": 3},
}  # fmt: skip
PYTORCH = {
    "shuffle": lambda x: F.pixel_shuffle(x, 2),
    "unshuffle": lambda x: F.pixel_unshuffle(x, 3),
    "groups": lambda x: F.channel_shuffle(x, 6),
    "pad": lambda x: F.pad(x, (1, 2, 3, 0), value=-1.5),
    "crop": lambda x: x[..., :5, 5:-2],
}


def make(how, device, dtype=torch.float32, channels=72, density=0.5, layout="channels_last", block=4):
    x = laid_out(tensor((2, channels, *PLANE), dtype, device), layout)
    up, down, pad = how.get("up", 1), how.get("down", 1), how.get("pad", (0, 0, 0, 0))
    out = PLANE[0] * up // down + pad[2] + pad[3], PLANE[1] * up // down + pad[0] + pad[1]
    return x, random_active(BlockGrid.cover(out, block), 2, density, device), out


def check(x, active, out, **how):
    got = sparse_rearrange(x, active, **how)
    assert_bitwise(got, reference.sparse_rearrange(x, active, **how))
    assert_in_place(lambda into: sparse_rearrange_(x, active, into, **how), got, active)
    return got


@pytest.mark.parametrize("name", MAPS)
def test_bits_of_pytorch_in_both_forms(device, name):
    for dtype in DTYPES:
        x, active, out = make(MAPS[name], device, dtype)
        got = check(x, active, out, **MAPS[name])
        assert got.stride() == torch.empty_like(got, memory_format=torch.channels_last).stride()
        if name in PYTORCH:
            assert_bitwise(got, torch.where(active.pixel_mask(out), PYTORCH[name](x), 0))


@pytest.mark.parametrize("layout", ["contiguous", "channel_slice", "channels_last"])
@pytest.mark.parametrize("name", MAPS)
def test_any_memory_and_blocks(device, name, layout):
    for channels, block in ((36, (3, 16)), (72, 64)):
        x, active, out = make(MAPS[name], device, torch.float16, channels, 0.4, layout, block)
        check(x, active, out, **MAPS[name])


def test_a_channel_a_group(device):
    x, active, out = make({}, device, channels=7)
    for groups in (1, 7):
        assert_bitwise(check(x, active, out, groups=groups), torch.where(active.pixel_mask(out), x, 0))


def test_short_names(device):
    x, active, _ = make(MAPS["shuffle"], device)
    assert_bitwise(sparse_pixel_shuffle(x, active, 2), sparse_rearrange(x, active, up=2))
    x, active, _ = make(MAPS["unshuffle"], device)
    assert_bitwise(sparse_pixel_unshuffle(x, active, 3), sparse_rearrange(x, active, down=3))


@pytest.mark.parametrize("name", MAPS)
def test_its_window_holds_what_it_reads(device, name):
    how = MAPS[name]
    x, active, out = make(how, device, density=0.2)
    window = Window.rearrange(how.get("up", 1), how.get("down", 1), how.get("pad", (0, 0, 0, 0)))
    assert_window(lambda x: sparse_rearrange(x, active, **how), x, active, window, out)


@pytest.mark.parametrize("name", MAPS)
def test_gradients(device, name):
    x, active, _ = make(MAPS[name], device, torch.float64)
    both = sparse_rearrange, reference.sparse_rearrange
    ours, theirs = (lambda x, op=op: op(x, active, **MAPS[name]) for op in both)
    assert_gradients(ours, theirs, [x])


BAD = [
    ({"up": 0}, "up, down(, groups)?: expected"), ({"up": 5}, "up: expected channels that"),
    ({"up": 2**20}, "up, down, groups: expected"), ({"up": 2**40}, "up: expected numbers of 32 bits"),
    ({"down": 5}, "down: expected a plane"), ({"down": -1}, "up, down(, groups)?: expected"),
    ({"groups": 5}, "groups: expected a divisor of 72"), ({"groups": 1.5}, "groups: expected an int"),
    ({"pad": 3}, "pad: expected left, right, top, bottom"), ({"pad": (1, 2)}, "pad: expected left, right, top, bottom"),
    ({"pad": (0, -18, 0, 0)}, "pad: expected an output plane"),
    ({"pad": (30, -19, 0, 0)}, "pad: expected to crop at most"),
    ({"pad": (0, 2**40, 0, 0)}, "pad: expected numbers of 32 bits"),
    ({"pad": (0, 2**30, 0, 0)}, "pad: expected numbers below"), ({"pad": (9, 0, 0, 0)}, "active|out"),
    ({"value": "x"}, "value: expected a number"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "pattern"), BAD, ids=[str(k) for k in range(len(BAD))])
def test_bad_input_names_the_op_that_was_called(device, changes, pattern):
    x, active, _ = make({}, device)
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in changes.items()}
    arguments = {"x": x, "active": active, **moved}
    errors = (RuntimeError, ValueError, TypeError)
    with pytest.raises(errors, match=f"sbnet::sparse_rearrange: ({pattern})"):
        sparse_rearrange(**arguments)
    with pytest.raises(errors, match=f"sbnet::sparse_rearrange_: ({pattern})"):
        sparse_rearrange_(**arguments, out=torch.zeros_like(x))
    with pytest.raises(RuntimeError, match="sbnet::sparse_rearrange_: out: expected memory of its own, got that of x"):
        sparse_rearrange_(x, active, x)


MODULES = {
    "shuffle": (SparsePixelShuffle(2), nn.PixelShuffle(2)),
    "unshuffle": (SparsePixelUnshuffle(3), nn.PixelUnshuffle(3)),
    "groups": (SparseChannelShuffle(6), nn.ChannelShuffle(6)),
    "pad": (SparseConstantPad2d((1, 2, 3, 0), -1.5), nn.ConstantPad2d((1, 2, 3, 0), -1.5)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(device, name):
    x, active, _ = make(MAPS[name], device)
    sparse, dense = MODULES[name]
    assert_bitwise(sparse(x, active), sparse_rearrange(x, active, **MAPS[name]))
    assert_bitwise(sparse(x, None), dense(x))
    out = torch.zeros_like(dense(x))
    sparse.run_(x, active, out, None)
    assert_bitwise(out, sparse(x, active))


# ---- networks


class Shuffles(nn.Module):
    """What super-resolution, ShuffleNet and TensorFlow's padding put between convolutions."""

    def __init__(self):
        super().__init__()
        self.stem, self.grouped = nn.Conv2d(12, 16, 3), nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.up, self.last = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.stem(F.pad(F.pixel_unshuffle(x, 2), (0, 2, 0, 2))))
        n, c, h, w = x.shape
        y = self.grouped(x).view(n, 4, c // 4, h, w).transpose(1, 2).reshape(n, c, h, w)
        y = F.relu(F.channel_shuffle(y, 2))
        return self.last(F.pad(F.pixel_shuffle(self.up(y), 2), (-2, 1, 1, -2), value=0.5))


@pytest.mark.parametrize("mode", ["masked", "exact", "cached"])
def test_networks_run_them(device, mode):
    assert_network(Shuffles(), mode, device, {"rearrange": 6, "aten": 0})
