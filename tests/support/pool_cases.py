"""What tests of pools share."""

import torch
import torch.nn.functional as F

import sbnet
from sbnet import BlockGrid, pool_output_size
from support.helpers import (
    assert_as_accurate_as_torch,
    assert_bitwise,
    laid_out,
    one_block,
    poison,
    random_active,
    tensor,
)

NAN = float("nan")
KINDS = ["max", "avg"]


def ops(kind):
    return getattr(sbnet, f"sparse_{kind}_pool2d"), getattr(sbnet, f"sparse_{kind}_pool2d_")


def dense(kind, x, window):
    """PyTorch's pool of the whole plane. (Its CPU kernels differ in what they support: float32 holds every half.)"""
    wide = x.float() if x.dtype.itemsize == 2 and x.device.type == "cpu" else x
    return getattr(F, f"{kind}_pool2d")(wide, **window).to(x.dtype)


def output_size(size, window):
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    return pool_output_size(size, **{k: window[k] for k in names if k in window})


def assert_values(got, want):
    """Equal, NaN where NaN: a maximum is one of the inputs."""
    assert got.dtype == want.dtype
    same = (got == want) | (got.isnan() & want.isnan())
    assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} differ"


def assert_pool(kind, got, x, active, outside, window):
    torchs = dense(kind, x, window)
    assert got.shape == torchs.shape, f"shape {tuple(got.shape)}, PyTorch's is {tuple(torchs.shape)}"
    mask = active.pixel_mask(torchs.shape[2:]).expand_as(torchs)
    assert_bitwise(got[~mask], outside.expand_as(torchs)[~mask], "outside the active blocks")
    if kind == "max":
        assert_values(got[mask], torchs[mask])
    else:
        exact = F.avg_pool2d(x.double(), **window)
        assert_as_accurate_as_torch(got[mask], torchs[mask], exact[mask], "on the active blocks")


def check(
    device, kind, window, *, dtype=torch.float32, channels=8, size=(21, 26), block=8, batch=2, density=0.5,
    layout="channels_last", out_layout="channels_last", x=None,
):  # fmt: skip
    """Both forms: zeros outside, and NaN kept outside. Returns the functional result."""
    if x is None:
        x = tensor((batch, channels, *size), dtype, device)
    x = laid_out(x, layout)
    batch, channels = x.shape[:2]
    out = output_size(x.shape[2:], window)
    grid = BlockGrid.cover(out, block)
    active = one_block(grid, batch, device) if density == "one" else random_active(grid, batch, density, device)
    functional, mutating = ops(kind)
    y = functional(x, active, **window)
    assert_pool(kind, y, x, active, torch.zeros((), dtype=x.dtype, device=device), window)
    into = poison((batch, channels, *out), x.dtype, device, out_layout)
    assert mutating(x, active, into, **window) is None
    assert_pool(kind, into, x, active, torch.full((), NAN, dtype=x.dtype, device=device), window)
    mask = active.pixel_mask(out).expand(y.shape)
    assert_bitwise(into[mask], y[mask], "the two forms")
    return y


def window(kernel, stride=None, padding=0, **more):
    return {"kernel_size": kernel, "stride": stride, "padding": padding, **more}
