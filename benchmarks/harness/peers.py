"""Other people's sparse convolutions, where they are installed (the extra `sbnet[peers]`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.benchmarks.harness.layers import Layer
from sbnet.benchmarks.harness.registry import Side, close


def spconv_sides(layer: Layer, inside: Tensor) -> dict[str, Side]:
    """SubMConv2d of spconv on the pixels of the active blocks, with and without building its indices; {} without it.

    Its result differs from ours by contract: it reads 0 outside of the active pixels, ours reads x as it is. Not on a
    CPU: there the threads of spconv 2.3.8 add to the same rows at once, and some sums come out wrong. It has no
    bfloat16.
    """
    if not layer.x.is_cuda or layer.dtype == torch.bfloat16:
        return {}
    try:
        import spconv.pytorch as spconv
    except ImportError:
        return {}
    n, h, w = layer.size
    conv = spconv.SubMConv2d(layer.x.shape[1], layer.x.shape[1], 3, bias=True, indice_key="3x3")
    conv = conv.to(layer.x.device, layer.dtype)
    with torch.no_grad():
        conv.weight.copy_(layer.weight.permute(0, 2, 3, 1))  # [K,R,S,C]
        conv.bias.copy_(layer.bias)
    features = layer.x.permute(0, 2, 3, 1)[inside[:, 0]].contiguous()
    pixels = inside[:, 0].nonzero().int().contiguous()

    def fresh() -> spconv.SparseConvTensor:
        return spconv.SparseConvTensor(features, pixels, [h, w], n)

    with torch.no_grad():
        known = conv(fresh()).indice_dict

    def indexed() -> Tensor:
        return conv(fresh()).features.relu_()

    def alone() -> Tensor:
        x = fresh()
        x.indice_dict = known
        return conv(x).features.relu_()

    return {
        "spconv SubMConv2d": Side(alone, "peer", "eager"),
        "spconv with index building": Side(indexed, "peer", "eager"),
    }


def check_spconv(layer: Layer, inside: Tensor, got: Tensor) -> float:
    """Its features [pixels, C] against a convolution of the masked x."""
    wide = layer.exact.dtype
    x = torch.where(inside, layer.x, 0)
    exact = F.conv2d(x.to(wide), layer.weight.to(wide), layer.bias.to(wide), padding=1).relu()
    torchs = F.conv2d(x, layer.weight, layer.bias, padding=1).relu()
    return close(got, *(y.permute(0, 2, 3, 1)[inside[:, 0]] for y in (torchs, exact)))
