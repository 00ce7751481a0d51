"""A chain of convolutions under the masked contract as one nn.Module of functional ops: what is exported."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sbnet.blocks import BlockGrid
from sbnet.engine.runner import chain_layers
from sbnet.ops import reduce_mask, sparse_conv2d


class MaskedChain(nn.Module):
    """`MaskedConvNet` without buffers: for torch.export, ONNX and torch.compile.

    Args:
        net: as for `MaskedConvNet`. Parameters are copied.
        block: block size, an int or (height, width).
        dtype: of parameters and inputs.

    >>> chain = MaskedChain(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()))
    >>> y, block_map = chain(torch.rand(1, 3, 400, 704), torch.rand(1, 400, 704) > 0.999)
    """

    def __init__(self, net: nn.Sequential, block: int | Sequence[int] = 16, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.block = block
        self.layers = chain_layers(net, torch.device("cpu"), dtype)
        for at, layer in enumerate(self.layers):
            self.register_buffer(f"weight{at}", layer.weight)
            self.register_buffer(f"bias{at}", layer.bias)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """x [N,C,H,W], mask [N,H,W] bool -> [N,K,H,W], zeros outside the active blocks, and their block map."""
        active = reduce_mask(mask, BlockGrid.cover((x.shape[2], x.shape[3]), self.block))
        for at, layer in enumerate(self.layers):
            x = sparse_conv2d(
                x,
                self.get_buffer(f"weight{at}"),
                None if layer.bias is None else self.get_buffer(f"bias{at}"),
                active,
                padding=layer.padding,
                dilation=layer.dilation,
                groups=layer.groups,
                activation=layer.activation,
                negative_slope=layer.negative_slope,
            )
        return x, active.block_map
