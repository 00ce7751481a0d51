"""Attention over the pixels that a convolution reads: layouts against the convolution's own gradient."""

import pytest
import torch
import torch.nn.functional as F

from sbnet import block_attention
from sbnet.attention import conv_layout, deconv_layout
from support.helpers import assert_bitwise

CASES = [  # height, width, filter, stride, padding
    (8, 8, (3, 3), 1, (1, 1)),
    (8, 8, (5, 3), 1, (2, 1)),
    (8, 16, (4, 4), 2, (1, 1)),
    (16, 8, (3, 3), 2, (1, 1)),
    (1, 64, (1, 7), 1, (0, 3)),
    (1, 64, (1, 8), 2, (0, 3)),
]


def joined(h, w, kernel, stride, padding):
    """[outputs, inputs]: the Jacobian of a convolution of ones."""
    stride = (1 if h == 1 else stride, stride)

    def convolve(x):
        return F.conv2d(x.view(1, 1, h, w), torch.ones(1, 1, *kernel), None, stride, padding).flatten()

    return torch.autograd.functional.jacobian(convolve, torch.zeros(h * w)) > 0


def own(h, w, stride):
    rows = torch.arange(0, h, stride if h > 1 else 1)[:, None] * w
    return (rows + torch.arange(0, w, stride)).flatten()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("autoregressive", [False, True])
def test_conv_and_deconv(case, autoregressive):
    h, w, kernel, stride, _ = case
    reads, at = joined(*case), own(h, w, stride)
    small, large = reads.shape
    pixels = torch.arange(large)
    options = {"stride": stride, "block_size": 8, "autoregressive": autoregressive}
    layout = conv_layout(h, w, *kernel, **options)
    want = reads & (pixels <= at[:, None]) if autoregressive else reads
    assert_bitwise(layout.visible(1, small, large).view(small, large), want)
    layout = deconv_layout(h, w, *kernel, **options)
    want = reads.T & (pixels[:, None] >= at) if autoregressive else reads.T
    assert_bitwise(layout.visible(1, large, small).view(large, small), want)


def test_in_attention(device):
    layout = conv_layout(8, 8, 3, 3, block_size=16)
    q, k, v = torch.randn(3, 2, 3, 64, 16, device=device).unbind(0)
    mask = layout.visible(3, 64, 64).to(device)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask.expand(2, 3, 64, 64))
    torch.testing.assert_close(block_attention(q, k, v, layout).double(), exact, rtol=1e-4, atol=1e-5)


def test_refuses():
    for arguments, text in (
        ((8, 8, 4, 4, 1, 8), "filter_h: expected a size for which 8 pixels give 8 / 1"),
        ((9, 8, 3, 3, 2, 8), "filter_h: expected"),
        ((1, 9, 1, 3, 1, 8), "block_size: expected a divisor of 9 and 9"),
    ):
        for function in (conv_layout, deconv_layout):
            with pytest.raises(ValueError, match=text):
                function(*arguments)
