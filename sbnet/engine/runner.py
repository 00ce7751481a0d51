"""Runs a chain of convolutions on the active blocks of each frame, and the same chain dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbnet.active import ActiveBlocks, BlockGrid
from sbnet.engine.capture import cuda_graph
from sbnet.engine.chain import MaskedChain
from sbnet.engine.masked import MaskedRunner
from sbnet.geometry import to_pair
from sbnet.reference import activate


class DenseConvNet:
    """The same network on whole planes, by PyTorch's convolutions: what a masked run is measured against.

    channels_last, activations in place or, on CUDA, ReLU fused into cuDNN's convolution; cuDNN picks its kernels by
    trying them; one CUDA graph. Arguments as for `MaskedConvNet`.
    """

    def __init__(
        self,
        net: nn.Sequential,
        size: Sequence[int],
        *,
        batch: int = 1,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        allow_tf32: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self._chain = MaskedChain(net, dtype=dtype).to(self.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if self.device.type == "cuda":
            shape = batch, *to_pair(size, "DenseConvNet: size"), self._chain.inputs
            self._x = torch.zeros(shape, dtype=dtype, device=self.device).permute(0, 3, 1, 2)
            with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=allow_tf32):
                self._graph, self._out = cuda_graph(lambda: self._run(self._x), self.device)

    def __call__(self, x: Tensor) -> Tensor:
        """The network's output, [N,K,H,W]; on CUDA the next call overwrites it."""
        if self._graph is None:
            return self._run(x)
        self._x.copy_(x.detach())
        self._graph.replay()
        return self._out

    @torch.no_grad()
    def _run(self, x: Tensor) -> Tensor:
        layers: Any = self._chain.convolutions
        for layer, options in zip(layers, self._chain.options, strict=True):
            geometry = layer.padding, layer.dilation, layer.groups
            if x.is_cuda and options["activation"] == "relu":
                x = torch.cudnn_convolution_relu(x, layer.weight, layer.bias, (1, 1), *geometry)
            else:
                x = F.conv2d(x, layer.weight, layer.bias, 1, *geometry)
                x = x.relu_() if options["activation"] == "relu" else activate(x, **options)
        return x


class MaskedConvNet:
    """Runs a chain of convolutions under the masked contract (docs/contracts.md), on active blocks only.

    `MaskedRunner` for a network of one plane, in plain PyTorch layers. On CUDA the whole call is one CUDA graph and the
    host waits for nothing.

    Args:
        net: nn.Sequential of nn.Conv2d (stride 1, padding that keeps the size), each with a normalisation and an
            activation after it or none, as it is in eval mode. Parameters are copied: later changes of the module are
            not seen.
        size: (H, W) of the input, and of every plane.
        block: block size, an int or (height, width).
        batch: images a call.
        device: where to run.
        dtype: float32, float16 or bfloat16.
        allow_tf32, mask_source: of `MaskedRunner`.

    Raises:
        ValueError: the network is no such chain.

    >>> runner = MaskedConvNet(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()), (400, 704))
    >>> y = runner(torch.rand(1, 3, 400, 704), torch.rand(1, 400, 704) > 0.999)  # [1, 8, 400, 704]

    Attributes:
        grid: where the blocks lie.
    """

    def __init__(
        self,
        net: nn.Sequential,
        size: Sequence[int],
        block: int | Sequence[int] = 16,
        *,
        batch: int = 1,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        allow_tf32: bool = False,
        mask_source: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.size = height, width = to_pair(size, "MaskedConvNet: size")
        self.grid = BlockGrid.cover(self.size, block)
        chain = MaskedChain(net, block, dtype).to(self.device)
        frame = torch.empty(batch, chain.inputs, height, width, dtype=dtype, device=self.device)
        self._runner = MaskedRunner(
            chain, frame, [(height, width, block)],
            call=chain.features, allow_tf32=allow_tf32, mask_source=mask_source,
        )  # fmt: skip

    @property
    def active(self) -> ActiveBlocks:
        """Active blocks of the last call, of every plane."""
        return self._runner.active[0]

    def __call__(self, x: Tensor, mask: Tensor | None = None, *, copy: bool = False) -> Tensor:
        """The network's output under the masked contract.

        Args:
            x: [N,C,H,W] of the runner's dtype, channels_last for speed.
            mask: [N,H,W] or [N,1,H,W]; bool, or set where greater than 0.5: blocks with a set pixel are active. Left
                out where there is a mask_source.
            copy: return a tensor of its own memory.

        Returns:
            [N,K,H,W] channels_last, zeros outside the active blocks. The next call overwrites it, unless it is a copy.
        """
        return self._runner(x, mask, copy=copy)
