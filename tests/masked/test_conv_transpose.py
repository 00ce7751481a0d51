"""sparse_conv_transpose2d against PyTorch's, by its phases and pixel by pixel."""

import pytest
import torch
import torch.nn.functional as F

from sbnet import (
    BlockGrid,
    Window,
    conv_transpose_output_size,
    fringe,
    reference,
    sparse_conv_transpose2d,
    sparse_conv_transpose2d_,
)
from sbnet._library import kernel_capability
from sbnet.select import conv_transpose2d_kernel
from support.helpers import assert_as_accurate_as_torch, assert_bitwise, random_active, tensor
from support.layer_checks import assert_gradients, assert_in_place, assert_window

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# name: C, K, kernel, options, block. "by pixel": the stride does not divide the block, or a phase has no taps; "at
# once": all phases in one launch on Hopper, weights channels_last.
CASES = {
    "2x2 s2": (16, 24, 2, {"stride": 2}, 8),
    "4x4 s2 p1": (16, 16, 4, {"stride": 2, "padding": 1}, 8),
    "3x3 s2 p1 op1": (24, 8, 3, {"stride": 2, "padding": 1, "output_padding": 1}, (8, 4)),
    "3x3 s1 p1": (16, 16, 3, {"padding": 1}, 8),
    "5x3 s3 s2 d2": (8, 12, (5, 3), {"stride": (3, 2), "padding": (2, 1), "dilation": (1, 2)}, (6, 8)),
    "4x4 s4": (8, 8, 4, {"stride": 4}, 8),
    "6x6 s2 p2 groups": (16, 8, 6, {"stride": 2, "padding": 2, "groups": 4}, 16),
    "depthwise": (16, 16, 4, {"stride": 2, "padding": 1, "groups": 16}, 8),
    "odd channels": (5, 7, 3, {"stride": 2, "padding": 1}, 4),
    "by pixel: block 10 of stride 4": (8, 8, 4, {"stride": 4}, 10),
    "by pixel: stride 3 of block 8": (6, 4, 3, {"stride": 3, "groups": 2, "dilation": 2, "padding": 1}, 8),
    "by pixel: no taps": (8, 8, 1, {"stride": 2}, 8),
    "by pixel: dilation like stride": (8, 8, 3, {"stride": 2, "dilation": 2, "padding": 1, "output_padding": 1}, 8),
    "past the input: 2x2 s2 op1": (16, 24, 2, {"stride": 2, "output_padding": 1}, 8),
    "past the input: 3x3 s3 p1 op2": (16, 24, 3, {"stride": 3, "padding": 1, "output_padding": 2}, 6),
    "past the input: 1x1 d2 op1": (16, 24, 1, {"dilation": 2, "output_padding": 1}, 8),
    "past the input: 3x3 s3 d2": (16, 24, 3, {"stride": 3, "dilation": 2}, 6),
    "padding beyond": (8, 8, 2, {"stride": 2, "padding": 5}, 8),
    "at once: 2x2 s2": (64, 64, 2, {"stride": 2}, 16),
    "at once: 4x4 s2 p1": (72, 40, 4, {"stride": 2, "padding": 1}, 16),
    "at once: 3x3 s2 p1 op1": (136, 64, 3, {"stride": 2, "padding": 1, "output_padding": 1}, (16, 32)),
    "at once: many channels": (320, 136, 4, {"stride": 2, "padding": 1}, 16),
    "at once: 4x5 s3x2": (24, 64, (4, 5), {"stride": (3, 2), "padding": (0, 3)}, (24, 16)),
}


def pair(v):
    return (v, v) if isinstance(v, int) else v


def make(name, device, dtype, density=0.5, plane=(13, 17), memory_format=torch.channels_last):
    channels, filters, kernel, options, block = CASES[name]
    x = tensor((2, channels, *plane), dtype, device).to(memory_format=memory_format)
    weight = tensor((channels, filters // options.get("groups", 1), *pair(kernel)), dtype, device) / 8
    if name.startswith("at once"):
        weight = weight.contiguous(memory_format=torch.channels_last)
    sizes = [options.get(k, v) for k, v in (("stride", 1), ("padding", 0), ("output_padding", 0), ("dilation", 1))]
    out = conv_transpose_output_size(plane, kernel, *sizes)
    active = random_active(BlockGrid.cover(out, block), 2, density, device)
    return x, weight, tensor((filters,), dtype, device), active, out, options


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_as_accurate_as_pytorch_in_both_forms(device, name, dtype):
    x, weight, bias, active, out, options = make(name, device, dtype)
    residual = tensor((2, bias.shape[0], *out), dtype, device)
    for more in ({}, {"activation": "silu", "residual": residual}):
        got = sparse_conv_transpose2d(x, weight, bias, active, **options, **more)
        wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in more.items()}
        exact = reference.sparse_conv_transpose2d(x.double(), weight.double(), bias.double(), active, **options, **wide)
        theirs = reference.sparse_conv_transpose2d(x, weight, bias, active, **options, **more)
        assert_as_accurate_as_torch(got, theirs, exact)
        assert got.stride() == torch.empty_like(got, memory_format=torch.channels_last).stride()
        args = x, weight, bias, active
        assert_in_place(lambda into: sparse_conv_transpose2d_(*args, into, **options, **more), got, active)  # noqa: B023


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("at once")])
def test_all_phases_are_one_launch(name):
    """The one that `sbnet info` names, and none before it."""
    if kernel_capability(0) != 90:
        pytest.skip("needs a Hopper GPU")
    channels, filters, kernel, options, block = CASES[name]
    said = conv_transpose2d_kernel((2, channels, 13, 17), filters, kernel, block, **options).kernel
    assert said == "Hopper transposed"
    x, weight, bias, active, out, options = make(name, "cuda", torch.float16)
    into = torch.empty((2, filters, *out), dtype=x.dtype, device="cuda", memory_format=torch.channels_last)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        sparse_conv_transpose2d_(x, weight, bias, active, into, **options)
        torch.cuda.synchronize()
    (launched,) = [e.key for e in profile.key_averages() if "kernel" in e.key and "sbnet" in e.key]
    assert "conv_transpose_kernel" in launched


@pytest.mark.parametrize("name", ["2x2 s2", "4x4 s2 p1", "by pixel: stride 3 of block 8"])
def test_any_memory(device, name):
    x, weight, bias, active, out, options = make(name, device, torch.float32, memory_format=torch.contiguous_format)
    want = sparse_conv_transpose2d(x.to(memory_format=torch.channels_last), weight, bias, active, **options)
    torch.testing.assert_close(sparse_conv_transpose2d(x, weight, bias, active, **options), want)
    wide = torch.full((2, 3 * bias.shape[0], *out), float("nan"), device=device)
    part = wide[:, bias.shape[0] : 2 * bias.shape[0]]
    part.zero_()
    weights = weight.transpose(2, 3).contiguous().transpose(2, 3)
    sparse_conv_transpose2d_(x, weights, bias, active, part, **options)
    torch.testing.assert_close(part, want)
    assert bool(wide[:, : bias.shape[0]].isnan().all() & wide[:, 2 * bias.shape[0] :].isnan().all())
    part.copy_(residual := torch.rand_like(part))
    sparse_conv_transpose2d_(x, weight, bias, active, part, **options, residual=part)
    inside = active.pixel_mask(out)
    torch.testing.assert_close(part, torch.where(inside, want + residual, residual))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["4x4 s2 p1", "by pixel: no taps", "at once: 4x4 s2 p1"])
@pytest.mark.parametrize("density", [0.0, 1.0])
def test_the_fringe_is_zeroed_and_the_rest_left(device, name, density, dtype):
    x, weight, bias, active, out, options = make(name, device, dtype, density)
    reader = random_active(BlockGrid.cover(out, 4), 2, 0.3, device)
    edge = fringe(active, reader, out, 3, 1, 1)
    into = torch.full((2, bias.shape[0], *out), 7.0, device=device, dtype=dtype)
    into = into.contiguous(memory_format=torch.channels_last)
    sparse_conv_transpose2d_(x, weight, bias, active, into, **options, fringe=edge)
    want = torch.full_like(into, 7.0).permute(0, 2, 3, 1).reshape(-1, bias.shape[0])
    want[edge.pixels[: int(edge.count)].long()] = 0
    want = want.view(2, *out, -1).permute(0, 3, 1, 2)
    got = sparse_conv_transpose2d(x, weight, bias, active, **options)
    assert_bitwise(into, torch.where(active.pixel_mask(out), got, want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", [n for n in CASES if n != "padding beyond"])
def test_its_window_holds_what_it_reads(device, name, dtype):
    x, weight, bias, active, out, options = make(name, device, dtype, 0.2)
    taken = {k: options.get(k, v) for k, v in (("stride", 1), ("padding", 0), ("dilation", 1))}
    window = Window.conv_transpose(tuple(weight.shape[2:]), **taken)
    assert_window(lambda x: sparse_conv_transpose2d(x, weight, bias, active, **options), x, active, window, out)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith("at once")])
def test_weights_that_are_no_numbers_show_where_pytorch_has_them(name, dtype, bad):
    """A tap that lies outside x for an output is not multiplied by zero."""
    x, weight, bias, active, _, options = make(name, "cpu", dtype, 1.0)
    weight[0, 0] = bad
    got = sparse_conv_transpose2d(x, weight, bias, active, **options)
    want = reference.sparse_conv_transpose2d(x.double(), weight.double(), bias.double(), active, **options)
    assert_bitwise(got.isfinite(), want.isfinite())


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("name", ["3x3 s2 p1 op1", "6x6 s2 p2 groups", "by pixel: no taps"])
def test_gradients(device, name, activation):
    x, weight, bias, active, out, options = make(name, device, torch.float64, plane=(5, 6))
    residual = tensor((2, bias.shape[0], *out), torch.float64, device)
    options = {**options, "activation": activation}
    ours, theirs = (
        lambda x, weight, bias, residual, op=op: op(x, weight, bias, active, residual=residual, **options)
        for op in (sparse_conv_transpose2d, reference.sparse_conv_transpose2d)
    )
    assert_gradients(ours, theirs, [x, weight, bias, residual])


@pytest.mark.parametrize("name", ["2x2 s2", "at once: 2x2 s2"])
def test_lists_that_are_wrong_are_skipped(device, name):
    x, weight, bias, active, _, options = make(name, device, torch.float16, 1.0)
    want = sparse_conv_transpose2d(x, weight, bias, active, **options)
    active.indices[0] = torch.tensor([5, 0, 0], dtype=torch.int32)
    active.indices[1] = torch.tensor([0, -1, 99], dtype=torch.int32)
    active.count.fill_(2**30)
    got = sparse_conv_transpose2d(x, weight, bias, active, **options)
    bh, bw = active.grid.bsize
    want[0, :, :bh, : 2 * bw] = 0
    assert_bitwise(got, want)


BAD = [
    ({"stride": 0}, "stride, dilation: expected 1 to 32767, got 0"),
    ({"padding": -1}, "padding: expected 0 to 2"),
    ({"output_padding": 2}, "output_padding: expected less than stride or dilation, 2, 1, got 2"),
    ({"groups": 3}, "groups: expected a divisor|weight|active|bias"),
    ({"padding": 40}, "x: expected a plane"),
    ({"activation": "tanh"}, "activation: expected .*, got 'tanh'"),
    ({"weight": torch.zeros(4, 24, 2, 2)}, "weight: expected the 16 channels of x first, got 4"),
    ({"weight": torch.zeros(16, 24, 2, 2).half()}, "weight: dtype: expected that of x"),
    ({"weight": torch.zeros(16, 24, 2)}, "weight: expected 4 dimensions, got 3"),
    ({"bias": torch.zeros(5)}, "bias: expected .*, got 5 elements in 1 dimensions"),
    ({"residual": torch.zeros(2, 24, 5, 5)}, "residual: shape: expected"),
]


@pytest.mark.parametrize(("changes", "pattern"), BAD, ids=[p for _, p in BAD])
def test_bad_input_names_the_op_that_was_called(device, changes, pattern):
    x, weight, bias, active, out, _ = make("2x2 s2", device, torch.float32)
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in changes.items()}
    arguments = {"x": x, "weight": weight, "bias": bias, "active": active, "stride": 2, **moved}
    errors = (RuntimeError, ValueError, TypeError)
    with pytest.raises(errors, match=f"sbnet::sparse_conv_transpose2d: ({pattern})"):
        sparse_conv_transpose2d(**arguments)
    with pytest.raises(errors, match=f"sbnet::sparse_conv_transpose2d_: ({pattern}|out)"):
        sparse_conv_transpose2d_(**arguments, out=torch.zeros(2, 24, *out, device=device))


def test_it_is_what_pytorch_says():
    """The oracle itself, once by hand."""
    x = torch.tensor([[[[1.0, 2.0]]]])
    y = F.conv_transpose2d(x, torch.tensor([[[[3.0, 5.0]]]]), stride=(1, 2))
    active = random_active(BlockGrid.cover((1, 4), 4), 1, 1.0, "cpu")
    assert_bitwise(sparse_conv_transpose2d(x, torch.tensor([[[[3.0, 5.0]]]]), None, active, stride=(1, 2)), y)
