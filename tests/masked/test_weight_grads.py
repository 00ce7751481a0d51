"""sparse_conv2d_weight_grads: several layers' gradients of weights in one call, as each alone has them."""

import pytest
import torch
import torch.nn.functional as F

from sbnet import BlockGrid
from sbnet.geometry import conv_output_size
from support.helpers import assert_as_accurate_as_torch, assert_bitwise, laid_out, random_active, tensor

OPS = torch.ops.sbnet
# channels, filters, taps, stride, padding, groups, block
LAYERS = [
    (64, 72, 1, 1, 0, 1, 8), (40, 64, 3, 1, 1, 1, 8), (16, 264, 1, 1, 0, 1, (4, 8)), (3, 24, 7, 2, 3, 1, 8),
    (64, 136, 1, 2, 0, 1, 4), (24, 24, 3, 1, 1, 24, 8), (32, 32, 3, 2, 1, 1, (7, 12)), (40, 48, 3, 1, 1, 1, 8),
    (256, 64, 1, 1, 0, 1, 8), (6, 10, 3, 1, 1, 2, 8), (136, 72, 1, 1, 0, 1, 8), (16, 40, 5, 1, 2, 1, 8),
]  # fmt: skip


def made(layer, dtype, device, density, batch=2, bias=False, wide=True, size=(21, 30)):
    """The tensors of a layer and its numbers. What its gradient must not read of dy is NaN."""
    channels, filters, taps, stride, padding, groups, block = layer
    out = conv_output_size(size, (taps, taps), [stride] * 2, [padding] * 2, [1, 1])
    active = random_active(BlockGrid.cover(out, block), batch, density, device)
    x = laid_out(tensor((batch, channels, *size), dtype, device), "channels_last")
    dy = tensor((batch, filters, *out), dtype, device)
    dy = laid_out(torch.where(active.pixel_mask(out), dy, float("nan")), "channels_last")
    window = [taps, taps, stride, stride, padding, padding, 1, 1]
    numbers = [*active.grid.numbers(), *window, groups, 0, 1, int(bias), int(wide)]
    return x, dy, active.indices, active.count, numbers


def together(layers):
    columns = [list(column) for column in zip(*layers, strict=True)]
    found = OPS.sparse_conv2d_weight_grads(*columns[:4], [n for numbers in columns[4] for n in numbers])
    return list(zip(found[: len(layers)], found[len(layers) :], strict=True))


def alone(x, dy, indices, count, numbers):
    pairs = [numbers[k : k + 2] for k in (8, 10, 12, 14)]
    flags = [bool(n) for n in numbers[17:]]
    return OPS.sparse_conv2d_weight_grad(x, dy, indices, count, numbers[:8], *pairs, numbers[16], *flags)


def exact(x, dy, indices, count, numbers, dtype=torch.float64):
    given = [torch.nan_to_num(t).to(dtype) for t in (x, dy)]
    taps, groups = numbers[8], numbers[16]
    shape = dy.shape[1], x.shape[1] // groups, taps, taps
    weight = torch.zeros(shape, dtype=dtype, device=x.device, requires_grad=True)
    y = F.conv2d(given[0], weight, None, numbers[10], numbers[12], 1, groups)
    return torch.autograd.grad(y, weight, given[1])[0], given[1].sum((0, 2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_layers(device, dtype):
    """With lists that are full, of few blocks and empty; twice, for the same bits."""
    for round in range(3):
        layers = [
            made(layer, dtype, device, (1.0, 0.3, 0.0)[(k + round) % 3], bias=k % 4 == 1, wide=k % 5 != 2)
            for k, layer in enumerate(LAYERS * (1 + round % 2))
        ]
        found, again = together(layers), together(layers)
        for layer, (weight, bias), (weight_again, bias_again) in zip(layers, found, again, strict=True):
            assert_bitwise(weight, weight_again)
            assert_bitwise(bias, bias_again)
            right, right_bias = exact(*layer)
            theirs, theirs_bias = exact(*layer, dtype=torch.float32)
            assert_as_accurate_as_torch(weight, theirs.to(weight.dtype), right)
            if bias.numel():
                assert_as_accurate_as_torch(bias, theirs_bias, right_bias)


def test_one_layer_is_the_op_of_one(device):
    for layer in LAYERS:
        one = made(layer, torch.float16, device, 0.5, bias=True)
        for a, b in zip(together([one])[0], alone(*one), strict=True):
            assert_bitwise(a, b)


def test_many_layers_and_no_pictures(device):
    assert together([made(LAYERS[0], torch.bfloat16, device, 0.5, batch=0)] * 3)[2][0].abs().sum() == 0
    layers = [made((16, 16, 1, 1, 0, 1, 8), torch.bfloat16, device, 0.5, size=(9, 9))] * 100
    found = together(layers)
    assert all(torch.equal(weight, found[0][0]) for weight, _ in found[:96])
    with pytest.raises(RuntimeError, match=r"expected up to 256 layers, got 300"):
        together(layers * 3)
    with pytest.raises(RuntimeError, match="as many layers each"):
        OPS.sparse_conv2d_weight_grads([layers[0][0]], [], [], [], [])
