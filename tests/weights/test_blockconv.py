"""Convolutions with block-sparse weights and their transposes against dense ones of each block."""

import contextlib
import pickle

import pytest
import torch

from sbnet import (
    BlockGrid,
    ConvLayout,
    blocksparse_conv,
    blocksparse_conv_active,
    blocksparse_deconv,
    reference,
    sparse_conv2d,
)
from sbnet.ops.weights.conv_layout import HEADER
from support.blockconv_cases import B4, B8, CASES, UNEVEN
from support.helpers import FLOATS, assert_as_accurate_as_torch, laid_out, random_active, tensor
from support.refusals import refused


def inputs(case, device, dtype=torch.float32, batch=2):
    layout = ConvLayout(case.BCK, case.kernel)
    x = tensor((batch, layout.in_channels, *case.image), dtype, device)
    weight = (torch.randn(layout.filter_shape) / 8).to(device, dtype)
    return layout, x, weight, tensor((layout.out_channels,), dtype, device)


def options_of(case):
    return {"stride": case.stride, "padding": case.padding, "dilation": case.dilation}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_convolution(device, name, dtype):
    layout, x, w, b = inputs(CASES[name], device, dtype)
    options = options_of(CASES[name])
    want = reference.blocksparse_conv(x, w, layout, b, **options)
    exact = reference.blocksparse_conv(x.double(), w.double(), layout, b.double(), **options)
    got = blocksparse_conv(x, w, layout, b, **options)
    assert got.shape == exact.shape
    assert_as_accurate_as_torch(got, want, exact)
    if x.dim() > 3:  # the same numbers of the other memory format
        last = x.contiguous(memory_format=[torch.channels_last, torch.channels_last_3d][x.dim() - 4])
        y = blocksparse_conv(last, w, layout, b, **options)
        assert y.stride(1) == 1 or y.shape[1] == 1
        assert torch.equal(y, got)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_the_convolution(device, name):
    layout, x, w, b = inputs(CASES[name], device)
    options = options_of(CASES[name])

    def gradients(f, *tensors):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        y = f(*leaves[:2], layout, leaves[2], **options)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device, y.dtype)
        return torch.autograd.grad(y, leaves, dy)

    got, want = gradients(blocksparse_conv, x, w, b), gradients(reference.blocksparse_conv, x, w, b)
    exact = gradients(reference.blocksparse_conv, x.double(), w.double(), b.double())
    for mine, torchs, true in zip(got, want, exact, strict=True):
        assert_as_accurate_as_torch(mine, torchs, true)


DECONVS = {
    "1d_stride": ("1d_3_stride", None), "2d": ("2d", None), "2d_uneven": ("2d_uneven_stride", (32, 24)),
    "3d": ("3d", None), "overlap": ("2d_overlap_valid", None),
}  # fmt: skip


@pytest.mark.parametrize("name", DECONVS)
def test_deconvolution_and_its_gradients(device, name):
    """The exact transpose, of the default output size and of a given one."""
    case, size = CASES[DECONVS[name][0]], DECONVS[name][1]
    layout, x, w, b = inputs(case, device)
    if len(layout.filter_shape) > 1:
        w = w.transpose(1, 2).contiguous()  # [blocks, inputs, outputs, ...]
    options = options_of(case)

    def gradients(f, size, *tensors):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        y = f(*leaves[:2], layout, leaves[2], output_size=size, **options)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device, y.dtype)
        return y, *torch.autograd.grad(y, leaves, dy)

    got = gradients(blocksparse_deconv, size, x, w, b)
    if size is None:
        pads = [
            case.padding if isinstance(case.padding, int) else {"SAME": k // 2, "VALID": 0}[case.padding]
            for k in case.kernel
        ]
        size = [s * case.stride + k - 2 * p - k % 2 for s, k, p in zip(case.image, case.kernel, pads, strict=True)]
    want = gradients(reference.blocksparse_deconv, size, x, w, b)
    exact = gradients(reference.blocksparse_deconv, size, x.double(), w.double(), b.double())
    for mine, torchs, true in zip(got, want, exact, strict=True):
        assert_as_accurate_as_torch(mine, torchs, true)


@pytest.mark.parametrize("layout_name", ["plane_slice", "odd_channel_slice", "permuted", "batch_slice"])
def test_any_strides(device, layout_name):
    layout, x, w, b = inputs(CASES["2d_uneven"], device)
    got = blocksparse_conv(laid_out(x, layout_name), w, layout, b, "silu", padding=(2, 0))
    assert torch.equal(got, blocksparse_conv(x, w, layout, b, "silu", padding=(2, 0)))


@pytest.mark.parametrize("batch", [0, 1, 28])
def test_batches(device, batch):
    layout, x, w, _ = inputs(CASES["1d_3"], device, batch=batch)
    assert_as_accurate_as_torch(
        blocksparse_conv(x, w, layout), reference.blocksparse_conv(x, w, layout),
        reference.blocksparse_conv(x.double(), w.double(), layout),
    )  # fmt: skip


def test_second_gradients(device):
    layout, x, w, b = inputs(CASES["2d_uneven"], device)
    leaves = [t.requires_grad_() for t in (x, w, b)]

    def second(f):
        y = f(x, w, layout, b, "silu", padding=1)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    for got, want in zip(second(blocksparse_conv), second(reference.blocksparse_conv), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


def test_an_output_size_beyond_the_padding_reads_zeros(device):
    layout, x, w, _ = inputs(CASES["1d_3_stride"], device)
    wide = blocksparse_conv(x, w, layout, stride=2, output_size=20)
    more = blocksparse_conv(torch.nn.functional.pad(x, (0, 8)), w, layout, stride=2)
    assert torch.equal(wide, more)


# ---- both kinds of zeros at once
@pytest.mark.parametrize(("stride", "padding", "kernel"), [(1, 1, (3, 3)), (2, 0, (3, 2))])
def test_on_active_blocks(device, stride, padding, kernel):
    for BCK in (B8, UNEVEN):
        layout = ConvLayout(BCK, kernel)
        x, w = tensor((2, layout.in_channels, 13, 17), device=device), torch.randn(layout.filter_shape, device=device)
        b = tensor((layout.out_channels,), device=device)
        options = {"stride": stride, "padding": padding, "activation": "relu"}
        plane = reference.blocksparse_conv(x, w, layout, stride=stride, padding=padding).shape[2:]
        active = random_active(BlockGrid.cover(plane, 4), 2, 0.4, device)
        got = sparse_conv2d(x, w, b, active, layout=layout, **options)
        want = reference.blocksparse_conv_active(x, w, layout, active, b, **options)
        exact = reference.blocksparse_conv_active(x.double(), w.double(), layout, active, b.double(), **options)
        assert_as_accurate_as_torch(got, want, exact)
        assert not got[~active.pixel_mask(plane).expand_as(got)].any()


def test_gradients_on_active_blocks(device):
    layout = ConvLayout(UNEVEN, (3, 3))
    x, w = tensor((2, 6, 9, 10), device=device), torch.randn(layout.filter_shape, device=device)
    b = tensor((5,), device=device)
    active = random_active(BlockGrid.cover((9, 10), 4), 2, 0.4, device)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    grads = [
        torch.autograd.grad(f(x, w, layout, active, b, padding=1).square().sum(), leaves)
        for f in (blocksparse_conv_active, reference.blocksparse_conv_active)
    ]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


# ---- layouts
def test_layout():
    layout = ConvLayout(B8, (3, 3))
    assert (layout.in_channels, layout.out_channels, layout.filter_shape) == (72, 144, (8, 32, 16, 3, 3))
    assert pickle.loads(pickle.dumps(layout)) == layout == ConvLayout.from_lists(layout.lists, (3, 3))
    assert hash(layout) == hash(ConvLayout(B8, (3, 3)))
    assert layout != ConvLayout(B4, (3, 3))
    w = torch.randn(layout.filter_shape)
    x = torch.randn(1, 72, 5, 6)
    dense = torch.nn.functional.conv2d(x, layout.to_dense(w), padding=1)
    torch.testing.assert_close(reference.blocksparse_conv(x, w, layout), dense, rtol=1e-4, atol=1e-4)
    part = ConvLayout(UNEVEN, 3)
    assert part.filter_shape == (part.weights,) == (3 * (6 + 12 + 1),)
    assert torch.equal(part.collapse(part.split(torch.arange(57))), torch.arange(57))


@pytest.mark.parametrize(
    ("BCK", "text"),
    [
        ([([0, 1], [0, 0])], "expected a channel once in a list"), ([([0, 2], [0])], "expected every input channel"),
        ([([0], [1])], "expected every output channel"), ([([-1, 0], [0])], "expected input channels below"),
        ([([], [0])], "expected channels on both sides"), ([([0],)], "expected inputs and outputs"),
        ([], "expected channels"),
    ],
)  # fmt: skip
def test_bad_layouts(BCK, text):
    with pytest.raises(ValueError, match=text):
        ConvLayout(BCK, 3)


def test_bad_input(device):
    layout, x, w, b = inputs(CASES["2d"], device)
    refused("x: expected 4 dimensions", blocksparse_conv, x[0], w, layout)
    refused("filters: expected", blocksparse_conv, x, w[:3], layout)
    refused("x: expected 32 channels, got 31", blocksparse_conv, x[:, 1:], w, layout)
    refused("weight: expected float32", blocksparse_conv, x, w.double(), layout)
    refused("x: expected float32, float16", blocksparse_conv, x.double(), w.double(), layout)
    refused("bias: expected", blocksparse_conv, x, w, layout, b[1:])
    refused("padding: expected 'SAME'", blocksparse_conv, x, w, layout, padding="half")
    refused("padding: expected 0 to", blocksparse_conv, x, w, layout, padding=-1)
    refused("expected .* or more along an axis", blocksparse_conv, x[..., :2], w, layout, padding=0)
    refused("stride: expected 1 to", blocksparse_conv, x, w, layout, stride=0, output_size=(3, 3))
    refused("output_size: expected", blocksparse_conv, x, w, layout, output_size=(-1, 3))
    refused("dilation: expected 1 or 2 numbers", blocksparse_conv, x, w, layout, dilation=(1, 1, 1))
    refused("kernel_size: expected one", blocksparse_conv, x, w.flatten(), CASES["2d"].BCK)


@pytest.mark.parametrize("size", [16, 64])
def test_halves_of_a_grid(device, size):
    """What Hopper has a kernel for: forward, transposed as the gradient of x, and on active blocks."""
    layout = ConvLayout.from_mask(torch.tensor([[1, 0], [0, 1], [1, 1]]), 3 * size, 2 * size, size, (3, 3))
    x = laid_out(tensor((2, 3 * size, 11, 9), torch.float16, device), "channels_last").requires_grad_()
    w = (torch.randn(layout.filter_shape) / 8).to(device, torch.float16)
    b = tensor((2 * size,), torch.float16, device)

    def both(of):
        y = of(x, w, b)
        return y, torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0]

    def plain(*tensors):
        return reference.blocksparse_conv(tensors[0], tensors[1], layout, tensors[2], "relu", padding=1)

    got = both(lambda x, w, b: blocksparse_conv(x, w, layout, b, "relu", padding=1))
    want, exact = both(plain), both(lambda *t: plain(*(v.double() for v in t)))
    for mine, torchs, true in zip(got, want, exact, strict=True):
        assert_as_accurate_as_torch(mine, torchs, true)
    active = random_active(BlockGrid.cover((11, 9), 8), 2, 0.5, device)
    inside = active.pixel_mask((11, 9)).expand_as(got[0])
    y = sparse_conv2d(x.detach(), w, b, active, layout=layout, padding=1, activation="relu")
    assert_as_accurate_as_torch(y[inside], want[0][inside], exact[0][inside])
    assert not y[~inside].any()


def test_blocks_of_a_grid():
    """What the Hopper kernel follows is made of such blocks alone; the header has their size and pieces of a side."""
    square, other = (range(16), range(16)), (range(16, 32), range(16))
    mask = torch.tensor([[1, 0], [0, 1], [1, 1]])
    for size, pieces in ((8, (0, 0)), (16, (1, 1)), (32, (2, 2)), (64, (4, 4)), (128, (16, 16))):
        layout = ConvLayout.from_mask(mask, 3 * size, 2 * size, size, 3)
        assert layout.block_size == (size if size > 8 else 0)
        assert tuple(layout.on(torch.device("cpu"))[1][11:]) == pieces
    for BCK in (B4, B8, UNEVEN, [square, square], [square, (range(8, 24), range(16))]):
        assert ConvLayout(BCK, 3).block_size == 0
    assert ConvLayout([other, square], 3).block_size == 16


def test_bad_tables(device):
    """Numbers and tables that do not belong together are refused, or nothing is touched beyond what is there."""
    layout, x, w, _ = inputs(CASES["2d"], device)
    tables, numbers = layout.on(x.device)
    conv, x5 = torch.ops.sbnet.blocksparse_conv, x.unsqueeze(2)
    rest = ([1, 3, 3, 1, 1, 1, 0, 1, 1, 1, 1, 1], [1, 8, 8], False, "none", 0.0)
    refused("tables", conv, x5, w.flatten(), None, tables[:-1], numbers, *rest)
    refused("layout", conv, x5, w.flatten(), None, tables, [0] * HEADER, *rest)
    refused("geometry", conv, x5, w.flatten(), None, tables, numbers, [1], *rest[1:])
    for seed in range(8):
        torch.manual_seed(seed)
        hostile = tables.clone()
        hostile[torch.randint(HEADER, len(tables), (6,))] = torch.randint(
            -(2**31), 2**31 - 1, (6,), dtype=torch.int32, device=device
        )
        if device == "cpu":
            with contextlib.suppress(RuntimeError):  # what is out of bounds is refused
                conv(x5, w.flatten(), None, hostile, numbers, *rest)
        else:  # ... or skipped
            conv(x5, w.flatten(), None, hostile, numbers, *rest)
            torch.cuda.synchronize()
