"""Compiling and exporting convolutions with block-sparse weights."""

import pytest
import torch
from torch import nn

import sbnet
from sbnet import ConvLayout, blocksparse_conv, blocksparse_deconv
from support.blockconv_cases import UNEVEN
from support.helpers import tensor

LAYOUT, LINE = ConvLayout(UNEVEN, (3, 3)), ConvLayout(UNEVEN, 4)
WIDE = ConvLayout(UNEVEN, (2, 3, 1))


class Network(nn.Module):
    """Every axis count, both directions, active blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.plane, self.line, self.wide = (nn.Parameter(torch.randn(n.weights) / 4) for n in (LAYOUT, LINE, WIDE))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor, mask: torch.Tensor):
        y = blocksparse_conv(x, self.plane, LAYOUT, self.bias, "gelu", stride=(1, 2), dilation=(2, 1))
        up = blocksparse_deconv(x, self.plane, LAYOUT, self.bias, stride=2, padding=(0, 1))
        line = blocksparse_conv(x.flatten(2), self.line, LINE, stride=3)
        volume = blocksparse_deconv(x[:, :, None], self.wide, WIDE, output_size=(2, 14, 15), stride=(1, 2, 2))
        active = sbnet.reduce_mask(mask, sbnet.BlockGrid.cover(x.shape[2:], 4))
        return y, up, line, volume, sbnet.sparse_conv2d(x, self.plane, self.bias, active, layout=LAYOUT, padding=1)


def inputs(device):
    return tensor((2, 6, 8, 9), device=device), torch.rand(2, 8, 9, device=device) < 0.1


def test_compile(device):
    torch.manual_seed(0)
    network = Network().to(device)
    x, mask = inputs(device)
    want = network(x, mask)
    for got, eager in zip(torch.compile(network, backend="aot_eager", fullgraph=True)(x, mask), want, strict=True):
        torch.testing.assert_close(got, eager)


def test_exported_network_runs_in_onnx_runtime(device, tmp_path):
    pytest.importorskip("onnxruntime")
    from support.ort_models import skip_without

    skip_without(device)
    from support.export_cases import same_as_torch

    torch.manual_seed(0)
    network = Network().to(device).eval()
    path = sbnet.export.to_onnx(network, inputs(device), tmp_path / "m.onnx")
    same_as_torch(path, network, inputs(device), device)


@pytest.mark.parametrize("as_ranges", [True, False])
def test_compile_with_lists(device, as_ranges):
    """No layout object: lists of channels as they are, constants of the program; forward and backward."""
    torch._dynamo.reset()
    BCK = [(range(8), range(4)), (range(8, 16), range(4, 8))]
    BCK = BCK if as_ranges else [[list(side) for side in block] for block in BCK]

    def network(x, filters):
        y = blocksparse_conv(x, filters, BCK, activation="relu", padding=1)
        return blocksparse_deconv(y, filters, [pair[::-1] for pair in BCK], padding=1)

    x = torch.randn(2, 16, 7, 6, device=device, requires_grad=True)
    filters = torch.randn(2, 4, 8, 3, 3, device=device, requires_grad=True)
    got, want = torch.compile(network, fullgraph=True, backend="aot_eager")(x, filters), network(x, filters)
    torch.testing.assert_close(got, want)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), (x, filters)) for y in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
