"""sparse_resize2d against PyTorch's interpolation."""

import copy

import pytest
import torch
from torch import nn

from sbnet import BlockGrid, Window, reference, resize_output_size, sparse_resize2d, sparse_resize2d_, sparsify
from sbnet.geometry import to_scales
from sbnet.graph.oracle import PlaneMasks, masked_oracle
from sbnet.nn import SparseUpsample
from support.contract import assert_holds
from support.helpers import assert_as_accurate_as_torch, assert_bitwise, laid_out, random_active, tensor
from support.layer_checks import assert_in_place, assert_window

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PLANE = (9, 13)
SIZES = {
    "x2": {"scale_factor": 2}, "x3 and half": {"scale_factor": (3, 0.5)}, "x0.7": {"scale_factor": 0.7},
    "up to 17x30": {"size": (17, 30)}, "to one": {"size": 1}, "same": {"size": PLANE},
    "same by x1.05": {"scale_factor": 1.05}, "same rows by x1.1, columns x1.5": {"scale_factor": (1.1, 1.5)},
    "double by x2.03": {"scale_factor": 2.03}, "just below": {"scale_factor": 0.97},
}  # fmt: skip
MODES = {
    "nearest": {"mode": "nearest"},
    "nearest-exact": {"mode": "nearest-exact"},
    "bilinear": {"mode": "bilinear"},
    "bilinear corners": {"mode": "bilinear", "align_corners": True},
    "bicubic": {"mode": "bicubic", "align_corners": False},
    "bicubic corners": {"mode": "bicubic", "align_corners": True},
}


def output_size(by):
    size = by.get("size")
    return resize_output_size(PLANE, by["scale_factor"]) if size is None else (size, size) if size == 1 else size


def make(by, device, dtype, channels=8, density=0.5, layout="channels_last", block=4):
    out = output_size(by)
    x = laid_out(tensor((2, channels, *PLANE), dtype, device), layout)
    return x, random_active(BlockGrid.cover(out, block), 2, density, device), out


def check(x, active, out, **how):
    got = sparse_resize2d(x, active, **how)
    exact, theirs = reference.sparse_resize2d(x.double(), active, **how), reference.sparse_resize2d(x, active, **how)
    if how["mode"].startswith("nearest"):
        assert_bitwise(got, theirs)
    else:
        assert_as_accurate_as_torch(got, theirs, exact)
    by = {k: v for k, v in how.items() if k != "size"}
    assert_in_place(lambda into: sparse_resize2d_(x, active, into, **by), got, active)
    return got


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("by", SIZES)
def test_as_accurate_as_pytorch_in_both_forms(device, by, mode):
    for dtype in DTYPES:
        x, active, out = make(SIZES[by], device, dtype)
        got = check(x, active, out, **SIZES[by], **MODES[mode])
        assert got.stride() == torch.empty_like(got, memory_format=torch.channels_last).stride()


@pytest.mark.parametrize("layout", ["contiguous", "channel_slice", "channels_last"])
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_any_memory_and_channels(device, mode, layout):
    for channels in (1, 5, 16, 72):
        x, active, out = make(SIZES["x2"], device, torch.float16, channels, 0.4, layout, (3, 16))
        check(x, active, out, scale_factor=2, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("by", SIZES)
def test_its_window_holds_what_it_reads(device, by, mode):
    x, active, out = make(SIZES[by], device, torch.float32, density=0.2)
    how, scale = MODES[mode], SIZES[by].get("scale_factor")
    ratios = (0.0, 0.0) if scale is None else tuple(1 / s for s in to_scales(scale, "test"))
    window = Window.resize(PLANE, tuple(out), how["mode"], how.get("align_corners", False), ratios)
    assert_window(lambda x: sparse_resize2d(x, active, **SIZES[by], **how), x, active, window, out)


def test_windows_are_no_wider_than_known_ones():
    ones = {"num": (1, 1), "step": (1, 1)}
    assert Window.resize((5, 6), (10, 12), "nearest") == Window(den=(2, 2), lo=(0, 0), hi=(0, 0), **ones)
    assert Window.resize((5, 6), (10, 12), "bilinear") == Window(den=(2, 2), lo=(-1, -1), hi=(1, 1), **ones)
    assert Window.resize((5, 6), (5, 6), "bilinear") == Window.conv(1)
    assert Window.resize((8, 8), (4, 4), "nearest") == Window.conv(1, 2)
    assert Window.resize((8, 8), (4, 4), "bilinear") == Window.conv(2, 2)


@pytest.mark.parametrize("mode", MODES)
def test_windows_of_any_scale_are_windows(mode):
    """Lists take those alone whose first coordinate is not behind their last."""
    how = MODES[mode]
    for side in (5, 9, 20, 33):
        for k in range(60, 320, 7):
            scale = k / 100
            out = resize_output_size((side, side + 3), scale)
            window = Window.resize(
                (side, side + 3), out, how["mode"], how.get("align_corners", False), (1 / scale, 1 / scale)
            )
            assert all(lo <= hi for lo, hi in zip(window.lo, window.hi, strict=True)), (side, scale)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [1.04, 0.97, (1.04, 1.5), 2.03])
def test_sparsify_takes_any_scale(scale, mode):
    up = nn.Upsample(scale_factor=scale, **MODES[mode])
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), up, nn.Conv2d(8, 4, 3, padding=1)).eval()
    x, mask = torch.randn(1, 3, 20, 20), torch.zeros(1, 20, 20)
    mask[0, 7:14, 3:9] = 1
    run, exact = sparsify(net, x, block=4), copy.deepcopy(net).double()
    for pixels in (torch.ones_like(mask), mask):
        masks = PlaneMasks(pixels, 4)
        want = masked_oracle(exact, [x.double()], masks)
        assert_holds(run(x, pixels), masked_oracle(net, [x], masks), want, mode)


BAD = [
    ({"mode": "area"}, "mode: expected nearest"),
    ({"size": 4}, "size, scale_factor: expected one"),
    ({"scale_factor": 0}, "scale_factor: expected a number above 0"),
    ({"scale_factor": float("nan")}, "scale_factor: expected a number above 0"),
    ({"scale_factor": 1e-9}, "size: expected at least 1|active|scale_factor|out"),
    ({"align_corners": True}, "align_corners: expected None of mode nearest"),
]


@pytest.mark.parametrize(("changes", "pattern"), BAD, ids=[str(k) for k in range(len(BAD))])
def test_bad_input_names_the_op_that_was_called(device, changes, pattern):
    x, active, out = make(SIZES["x2"], device, torch.float32)
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in changes.items()}
    arguments = {"x": x, "active": active, "scale_factor": 2, **moved}
    errors = (RuntimeError, ValueError, TypeError)
    with pytest.raises(errors, match=f"sbnet::sparse_resize2d: ({pattern})"):
        sparse_resize2d(**arguments)
    if "size" not in arguments:
        with pytest.raises(errors, match=f"sbnet::sparse_resize2d_: ({pattern})"):
            sparse_resize2d_(**arguments, out=torch.zeros(2, 8, *out, device=device))


def test_raw_numbers_are_refused():
    x, active, out = make(SIZES["x2"], "cpu", torch.float32)
    lists = (x, active.indices, active.count, active.block_map, active.grid.numbers())
    op = torch.ops.sbnet.sparse_resize2d
    for arguments, pattern in (
        (([0, 5], "nearest", False, 0.0, 0.0), "size: expected at least 1"),
        (([18], "nearest", False, 0.0, 0.0), "size"),
        ((list(out), "nearest", False, -1.0, 0.0), "scale_factor: expected"),
        ((list(out), "nearest", False, float("nan"), 0.0), "scale_factor: expected"),
        ((list(out), "cubic", False, 0.0, 0.0), "mode: expected"),
        ((list(out), "nearest", True, 0.0, 0.0), "align_corners: expected false"),
        (([1 << 30, 26], "nearest", False, 0.0, 0.0), "active|size"),
    ):
        with pytest.raises(RuntimeError, match=f"sbnet::sparse_resize2d: ({pattern})"):
            op(*lists, *arguments)
    far = op(*lists, list(out), "bicubic", False, 1e6, 1e-6)  # no scale of these planes, but one that reads inside x
    assert bool(far.isfinite().all())


def test_the_module(device):
    x, active, _ = make(SIZES["x2"], device, torch.float32)
    layer = SparseUpsample(scale_factor=2, mode="bilinear")
    assert_bitwise(layer(x, active), sparse_resize2d(x, active, scale_factor=2, mode="bilinear"))
    assert_bitwise(layer(x, None), torch.nn.functional.interpolate(x, scale_factor=2, mode="bilinear"))
