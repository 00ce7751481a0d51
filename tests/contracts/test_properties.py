"""Random shapes, grids, dtypes and densities against the reference."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sbnet import (
    BlockGrid,
    conv_output_size,
    conv_transpose_output_size,
    fringe,
    reduce_mask,
    reference,
    sparse_conv2d,
    sparse_conv2d_,
    sparse_conv_transpose2d,
    sparse_conv_transpose2d_,
    sparse_gather,
    sparse_scatter,
    sparse_scatter_,
)
from support.helpers import (
    ACTIVATIONS,
    COPIES,
    FLOATS,
    LAYOUTS,
    assert_as_accurate_as_torch,
    assert_bitwise,
    assert_conv,
    assert_layout,
    assert_same_active,
    laid_out,
    poison,
    random_active,
    tensor,
)

CPU_EXAMPLES, CUDA_EXAMPLES = 60, 40


def on_each_device(test):
    """The property as two tests: CPU, and CUDA with fewer examples."""

    def run(device, examples):
        quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
        given(st.data())(
            settings(max_examples=examples, suppress_health_check=quiet)(lambda data: test(data.draw, device))
        )()

    @pytest.mark.parametrize(
        ("device", "examples"), [("cpu", CPU_EXAMPLES), pytest.param("cuda", CUDA_EXAMPLES, marks=pytest.mark.gpu)]
    )
    def wrapper(device, examples):
        run(device, examples)

    wrapper.__name__, wrapper.__doc__ = test.__name__, test.__doc__
    return wrapper


small = st.integers(1, 40)
densities = st.sampled_from([0.0, 0.05, 0.3, 0.7, 1.0])
seeds = st.integers(0, 2**31 - 1)


@st.composite
def grids(draw, separate=False):
    """Any grid: overlaps, gaps, blocks off the plane on every side, no blocks at all."""
    size = draw(st.tuples(st.integers(1, 20), st.integers(1, 20)))
    stride = tuple(draw(st.integers(b if separate else 1, 25)) for b in size)
    offset = draw(st.tuples(st.integers(-30, 20), st.integers(-30, 20)))
    return BlockGrid(size, stride, offset, draw(st.tuples(st.integers(0, 6), st.integers(0, 6))))


@on_each_device
def test_reduce_mask(draw, device):
    torch.manual_seed(draw(seeds))
    shape, grid = (draw(st.integers(0, 3)), draw(small), draw(small)), draw(grids())
    dtype = draw(st.sampled_from([torch.bool, torch.uint8, torch.float64, *FLOATS]))
    hits = torch.rand(shape, device=device) < draw(densities) * 0.2
    mask = (torch.where(hits, torch.randn(shape, device=device), 0.0) if dtype.is_floating_point else hits).to(dtype)
    mask = draw(
        st.sampled_from([lambda m: m, lambda m: m[:, None], lambda m: m[..., None], lambda m: m.mT.contiguous().mT])
    )(mask)
    if mask.dim() == 4 and mask.shape[3] == 1 and mask.shape[1] == 1:
        mask = mask.reshape(shape)  # [N,1,W,1] is read as [N,1,H,1]: no way to tell
    avgpool = draw(st.booleans())
    tol = draw(st.sampled_from([-0.5, 0.0, 0.1, 0.5, 1.0])) * (0.01 if avgpool else 1)
    capacity = draw(st.none() | st.integers(0, 50))
    want = reference.reduce_mask(mask, grid, tol, avgpool, capacity)
    assert_same_active(reduce_mask(mask, grid, tol, avgpool, capacity), want)


def plane(draw, device, dtypes, batch):
    channels = draw(st.sampled_from([1, 2, 3, 4, 7, 8, 16, 20, 33, 64]))
    x = tensor((batch, channels, draw(small), draw(small)), draw(st.sampled_from(dtypes)), device)
    return laid_out(x, draw(st.sampled_from(LAYOUTS)))


@on_each_device
def test_gather(draw, device):
    torch.manual_seed(draw(seeds))
    batch = draw(st.integers(1, 3))
    x, transpose = plane(draw, device, COPIES, batch), draw(st.booleans())
    active = random_active(draw(grids()), batch, draw(densities), device, draw(st.none() | st.integers(0, 30)))
    blocks = sparse_gather(x, active, transpose)
    assert_bitwise(blocks, reference.sparse_gather(x, active))
    assert_layout(blocks, (x.stride(1) == 1 and not x.is_contiguous()) != transpose)
    assert_bitwise(sparse_gather(x, active.trim()), blocks[: int(active.count)])


@on_each_device
def test_scatter(draw, device):
    torch.manual_seed(draw(seeds))
    batch = draw(st.integers(1, 3))
    base = plane(draw, device, COPIES, batch)
    active = random_active(
        draw(grids(separate=True)), batch, draw(densities), device, draw(st.none() | st.integers(0, 30))
    )
    rows = draw(st.integers(0, active.capacity))
    stack = tensor((rows, base.shape[1], *active.grid.bsize), base.dtype, device)
    stack = laid_out(stack, draw(st.sampled_from(LAYOUTS)))
    before, want = base.clone(), reference.sparse_scatter(stack, active, base)
    assert_bitwise(sparse_scatter(stack, active, base), want)
    assert_bitwise(base, before)
    assert sparse_scatter_(stack, active, base) is base
    assert_bitwise(base, want)


@on_each_device
def test_scatter_add(draw, device):
    torch.manual_seed(draw(seeds))
    batch = draw(st.integers(1, 3))
    base = plane(draw, device, FLOATS, batch)
    active = random_active(draw(grids()), batch, draw(densities), device, draw(st.none() | st.integers(0, 30)))
    rows, atomic = draw(st.integers(0, active.capacity)), draw(st.booleans())
    stack = tensor((rows, base.shape[1], *active.grid.bsize), base.dtype, device)
    stack = laid_out(stack, draw(st.sampled_from(LAYOUTS)))
    torchs = reference.sparse_scatter(stack, active, base, add=True)
    exact = reference.sparse_scatter(stack.double(), active, base.double(), add=True)
    got = sparse_scatter(stack, active, base, add=True, atomic=atomic)
    assert_as_accurate_as_torch(got, torchs, exact)
    assert_bitwise(got[exact == base.double()], base[exact == base.double()])


@st.composite
def convolutions(draw):
    """(kernel, stride, padding, dilation) and a plane that they fit."""
    pairs = st.tuples
    kernel, stride = draw(pairs(*[st.integers(1, 7)] * 2)), draw(pairs(*[st.integers(1, 3)] * 2))
    dilation, padding = draw(pairs(*[st.integers(1, 3)] * 2)), draw(pairs(*[st.integers(0, 9)] * 2))
    size = tuple(
        draw(st.integers(max(1, d * (k - 1) + 1 - 2 * p), 40))
        for k, p, d in zip(kernel, padding, dilation, strict=True)
    )
    return size, kernel, stride, padding, dilation


@on_each_device
def test_fringe(draw, device):
    torch.manual_seed(draw(seeds))
    size, *geometry = draw(convolutions())
    batch, blocks = draw(st.integers(0, 3)), st.tuples(st.integers(1, 17), st.integers(1, 17))
    producer = random_active(BlockGrid.cover(size, draw(blocks)), batch, draw(densities), device)
    consumer = random_active(
        BlockGrid.cover(conv_output_size(size, *geometry), draw(blocks)), batch, draw(densities), device
    )
    capacity = draw(st.none() | st.integers(0, 100))
    got = fringe(producer, consumer, size, *geometry, capacity=capacity)
    want = reference.fringe(producer, consumer, size, *geometry, capacity=capacity)
    assert_bitwise(got.count, want.count)
    assert_bitwise(got.pixels, want.pixels)


def conv_property(draw, device, size, geometry, channels, filters, groups, block, dtype):
    torch.manual_seed(draw(seeds))
    kernel, stride, padding, dilation = geometry
    batch, layouts = draw(st.integers(1, 2)), st.sampled_from(LAYOUTS)
    x = laid_out(tensor((batch, channels, *size), dtype, device), draw(layouts))
    out = conv_output_size(size, *geometry)
    shape = (batch, filters, *out)
    weight = tensor((filters, channels // groups, *kernel), torch.float32, device)
    weight = (weight / (channels // groups * kernel[0] * kernel[1]) ** 0.5).to(dtype)
    bias = draw(st.sampled_from([None, dtype, torch.float32]))
    bias = None if bias is None else tensor((filters,), bias, device)
    active = random_active(
        BlockGrid.cover(out, block), batch, draw(densities), device, draw(st.none() | st.integers(0, 9))
    )
    residual = laid_out(tensor(shape, dtype, device), draw(layouts)) if draw(st.booleans()) else None
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "residual": residual}
    options["activation"] = draw(st.sampled_from(ACTIVATIONS))
    into = poison(shape, dtype, device, draw(layouts))
    sparse_conv2d_(x, weight, bias, active, into, **options)
    nan = torch.full((), float("nan"), dtype=dtype, device=device)
    assert_conv(into, x, weight, bias, active, nan, **options)
    mask = active.pixel_mask(out).expand(shape)
    got, zero = sparse_conv2d(x, weight, bias, active, **options), torch.zeros((), dtype=dtype, device=device)
    if got.stride() == into.stride():
        assert_bitwise(got, torch.where(mask, into, zero))
    else:  # another memory format, another order of additions
        assert_conv(got, x, weight, bias, active, zero, **options)


@on_each_device
def test_conv(draw, device):
    size, *geometry = draw(convolutions())
    groups = draw(st.sampled_from([1, 1, 2, 3, 8]))
    channels, filters = (groups * draw(st.sampled_from([1, 2, 3, 8, 16])) for _ in range(2))
    block = draw(st.tuples(st.integers(1, 20), st.integers(1, 20)))
    conv_property(draw, device, size, geometry, channels, filters, groups, block, draw(st.sampled_from(FLOATS)))


@on_each_device
def test_conv_3x3_with_blocks_of_eights(draw, device):
    """The fast Hopper case, and its near misses in channels."""
    size, block = draw(st.tuples(small, small)), draw(st.tuples(*[st.sampled_from([8, 16, 24, 32])] * 2))
    channels, filters = (draw(st.sampled_from([8, 16, 24, 64, 72, 128, 12, 60])) for _ in range(2))
    geometry = ((3, 3), (1, 1), (1, 1), (1, 1))
    conv_property(draw, device, size, geometry, channels, filters, 1, block, draw(st.sampled_from(FLOATS[1:])))


@on_each_device
def test_conv_transpose(draw, device):
    """Kernels smaller than strides and dilations, output that reaches past what the input covers."""
    torch.manual_seed(draw(seeds))
    pairs = st.tuples
    kernel, stride = draw(pairs(*[st.integers(1, 5)] * 2)), draw(pairs(*[st.integers(1, 4)] * 2))
    kernel = draw(st.sampled_from([kernel, stride]))
    dilation = draw(pairs(*[st.integers(1, 3)] * 2))
    more = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    spans = [d * (k - 1) + 1 + m for k, d, m in zip(kernel, dilation, more, strict=True)]
    padding = tuple(draw(st.integers(0, min(4, (span - 1) // 2))) for span in spans)
    size, batch = draw(pairs(*[st.integers(1, 20)] * 2)), draw(st.integers(1, 2))
    groups = draw(st.sampled_from([1, 1, 2, 8]))
    channels, filters = (groups * draw(st.sampled_from([1, 2, 3, 8, 12, 16, 33])) for _ in range(2))
    dtype, layouts = draw(st.sampled_from(FLOATS)), st.sampled_from(LAYOUTS)
    x = laid_out(tensor((batch, channels, *size), dtype, device), draw(layouts))
    weight = (tensor((channels, filters // groups, *kernel), torch.float32, device) / channels**0.5).to(dtype)
    out = conv_transpose_output_size(size, kernel, stride, padding, more, dilation)
    block = draw(st.sampled_from([4, 6, 8, 12, (5, 12)]))
    active = random_active(BlockGrid.cover(out, block), batch, draw(densities), device)
    options = {"stride": stride, "padding": padding, "output_padding": more, "dilation": dilation, "groups": groups}
    residual = laid_out(tensor((batch, filters, *out), dtype, device), draw(layouts)) if draw(st.booleans()) else None
    options["activation"] = draw(st.sampled_from(ACTIVATIONS))
    wide = None if residual is None else residual.double()
    exact = reference.sparse_conv_transpose2d(x.double(), weight.double(), None, active, **options, residual=wide)
    theirs = reference.sparse_conv_transpose2d(x, weight, None, active, **options, residual=residual)
    into = poison(exact.shape, dtype, device, draw(layouts))
    sparse_conv_transpose2d_(x, weight, None, active, into, **options, residual=residual)
    mask = active.pixel_mask(out).expand(exact.shape)
    assert_as_accurate_as_torch(into[mask], theirs[mask], exact[mask])
    assert bool(into[~mask].isnan().all())
    got = sparse_conv_transpose2d(x, weight, None, active, **options, residual=residual)
    assert_bitwise(got, torch.where(mask, into, torch.zeros_like(into)))
