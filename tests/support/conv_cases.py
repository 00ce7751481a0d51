"""Cases of sparse_conv2d: how its test files make one and check it."""

import torch

from sbnet import BlockGrid, conv_output_size, sparse_conv2d, sparse_conv2d_
from sbnet._library import kernel_capability
from support.helpers import assert_bitwise, assert_conv, laid_out, one_block, poison, random_active, tensor

HALF = [torch.float16, torch.bfloat16]


def pair(v):
    return (v, v) if isinstance(v, int) else tuple(v)


def make(
    device, dtype=torch.float32, channels=8, filters=8, size=(21, 26), block=8, kernel=3, batch=2, density=0.4,
    bias=True, layout="channels_last", stride=1, padding=1, dilation=1, groups=1,
):  # fmt: skip
    """x, weight, bias, active, conv options: unit-variance outputs, so that an error has a scale."""
    r, s = pair(kernel)
    x = laid_out(tensor((batch, channels, *size), dtype, device), layout)
    weight = tensor((filters, channels // groups, r, s), torch.float32, device) / (channels // groups * r * s) ** 0.5
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    out = conv_output_size(size, (r, s), pair(stride), pair(padding), pair(dilation))
    grid = BlockGrid.cover(out, block)
    active = one_block(grid, batch, device) if density == "one" else random_active(grid, batch, density, device)
    return x, weight.to(dtype), tensor((filters,), dtype, device) if bias else None, active, options


def check(device, *, out_layout="channels_last", activation=None, residual=None, slope=None, after=False, **case):
    """Both forms: zeros outside, and NaN kept outside. Returns the functional result."""
    x, weight, bias, active, options = make(device, **case)
    out = conv_output_size(
        x.shape[2:], weight.shape[2:], *(pair(options[k]) for k in ("stride", "padding", "dilation"))
    )
    shape = (x.shape[0], weight.shape[0], *out)
    options |= {"activation": activation, "slope": slope, "residual_after": after}
    if residual is not None:
        options["residual"] = laid_out(tensor(shape, x.dtype, device), residual)
    y = sparse_conv2d(x, weight, bias, active, **options)
    assert_conv(y, x, weight, bias, active, torch.zeros((), dtype=x.dtype, device=device), **options)
    into = poison(shape, x.dtype, device, out_layout)
    assert sparse_conv2d_(x, weight, bias, active, into, **options) is None
    nan = torch.full((), float("nan"), dtype=x.dtype, device=device)
    assert_conv(into, x, weight, bias, active, nan, **options)
    mask = active.pixel_mask(out).expand(shape)
    # A memory format may have a kernel of its own, whose sums have another order (docs/contracts.md).
    if device == "cpu" or kernel_capability(0) == 90 or into.stride() == y.stride():
        assert_bitwise(into[mask], y[mask], "the two forms")
    return y
