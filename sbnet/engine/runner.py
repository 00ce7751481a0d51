"""Runs a chain of convolutions on the active blocks of each frame, in buffers that stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbnet.blocks import BlockGrid, Fringe, Pair, to_pair
from sbnet.ops import fringe, reduce_mask, sparse_conv2d_
from sbnet.reference import activate

ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.LeakyReLU: "leaky_relu",
    nn.SiLU: "silu",
    nn.GELU: "gelu",
    nn.Hardswish: "hardswish",
}

Geometry = tuple[Pair, Pair, Pair]  # kernel size, padding, dilation


@dataclass
class _Layer:
    """A convolution that keeps the plane's size, and the activation after it."""

    weight: Tensor  # [K,C/groups,R,S], channels_last
    bias: Tensor | None
    padding: Pair
    dilation: Pair
    groups: int
    activation: str | None
    negative_slope: float

    @property
    def geometry(self) -> Geometry:
        """What decides which pixels the layer reads."""
        kernel = self.weight.shape[2], self.weight.shape[3]
        return kernel, self.padding, self.dilation


def chain_layers(net: nn.Sequential, device: torch.device, dtype: torch.dtype) -> list[_Layer]:
    """The layers of a chain, parameters copied."""
    layers: list[_Layer] = []
    for name, module in net.named_modules(remove_duplicate=False):
        if type(module) is nn.Sequential:
            continue
        if isinstance(module, nn.Conv2d):
            layers.append(_convolution(name, module, device, dtype))
        elif type(module) in ACTIVATIONS and layers and layers[-1].activation is None:
            if isinstance(module, nn.GELU) and module.approximate != "none":
                raise ValueError(f"sbnet: network: layer {name} is {module}; the exact GELU is wanted")
            layers[-1].activation = ACTIVATIONS[type(module)]
            layers[-1].negative_slope = getattr(module, "negative_slope", 0.0)
        else:
            raise ValueError(
                f"sbnet: network: layer {name} is {module}; a chain of convolutions, each with at most one of "
                f"{', '.join(kind.__name__ for kind in ACTIVATIONS)} after it, is wanted"
            )
    if not layers:
        raise ValueError("sbnet: network: no layers; at least one convolution is wanted")
    return layers


def _convolution(name: str, conv: nn.Conv2d, device: torch.device, dtype: torch.dtype) -> _Layer:
    kernel, dilation = to_pair(conv.kernel_size, "kernel_size"), to_pair(conv.dilation, "dilation")
    same = tuple((k - 1) * d // 2 for k, d in zip(kernel, dilation, strict=True))
    given = conv.padding if conv.padding != "same" else same
    if (
        tuple(conv.stride) != (1, 1)
        or given != same
        or conv.padding_mode != "zeros"
        or any((k - 1) * d % 2 for k, d in zip(kernel, dilation, strict=True))
    ):
        raise ValueError(
            f"sbnet: network: layer {name} is {conv}; stride 1 and zero padding that keeps the plane's size are wanted"
        )
    weight = conv.weight.detach().to(device, dtype, copy=True, memory_format=torch.channels_last)
    bias = None if conv.bias is None else conv.bias.detach().to(device, dtype, copy=True)
    return _Layer(weight, bias, (same[0], same[1]), dilation, conv.groups, None, 0.0)


def _capture(run: Callable[[], Tensor], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A CUDA graph of `run`, and the tensor that each replay writes."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up outside the capture
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
    return graph, out


def _check(name: str, given: Tensor | None, wanted: Tensor) -> None:
    """Is an argument of a call what the runner was built for?"""
    if given is None:
        raise ValueError(f"sbnet: MaskedConvNet: {name}: missing; {tuple(wanted.shape)} {wanted.dtype} is wanted")
    if given.shape != wanted.shape or given.dtype != wanted.dtype or given.device != wanted.device:
        raise ValueError(
            f"sbnet: MaskedConvNet: {name}: {tuple(given.shape)} {given.dtype} on {given.device}; "
            f"{tuple(wanted.shape)} {wanted.dtype} on {wanted.device} is wanted"
        )


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
        self._layers = chain_layers(net, self.device, dtype)
        self._graph: torch.cuda.CUDAGraph | None = None
        if self.device.type == "cuda":
            channels = self._layers[0].weight.shape[1] * self._layers[0].groups
            shape = batch, *to_pair(size, "DenseConvNet: size"), channels
            self._x = torch.zeros(shape, dtype=dtype, device=self.device).permute(0, 3, 1, 2)
            with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=allow_tf32):
                self._graph, self._out = _capture(lambda: self._run(self._x), self.device)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """The network's output, [N,K,H,W]; on CUDA the next call overwrites it."""
        if self._graph is None:
            return self._run(x)
        with torch.cuda.device(self.device):
            self._x.copy_(x)
            self._graph.replay()
        return self._out

    def _run(self, x: Tensor) -> Tensor:
        for layer in self._layers:
            geometry = layer.padding, layer.dilation, layer.groups
            if x.is_cuda and layer.activation == "relu":
                x = torch.cudnn_convolution_relu(x, layer.weight, layer.bias, (1, 1), *geometry)
            else:
                x = F.conv2d(x, layer.weight, layer.bias, 1, *geometry)
                x = x.relu_() if layer.activation == "relu" else activate(x, layer.activation, layer.negative_slope)
        return x


class MaskedConvNet:
    """Runs a chain of convolutions under the masked contract (docs/contracts.md), on active blocks only.

    Each call turns a pixel mask into active blocks, runs every layer on those and zeroes of its buffers what is read or
    returned but was not computed. No feature map is allocated, copied or cleared after construction. On CUDA the whole
    call is one CUDA graph and the host waits for nothing.

    Args:
        net: nn.Sequential of nn.Conv2d (stride 1, padding that keeps the size), each with an activation after it or
            none. Parameters are copied: later changes of the module are not seen.
        size: (H, W) of the input, and of every plane.
        block: block size, an int or (height, width).
        batch: images a call.
        device: where to run.
        dtype: float32, float16 or bfloat16.
        allow_tf32: float32 on CUDA may use tf32 tensor cores.
        mask_source: makes the mask from x, inside the CUDA graph; calls then take x alone. Building the graph calls it
            a few times on zeros: one with a memory wants a reset afterwards.

    Raises:
        ValueError: the network is no such chain.

    >>> runner = MaskedConvNet(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()), (400, 704))
    >>> y = runner(torch.rand(1, 3, 400, 704), torch.rand(1, 400, 704) > 0.999)  # [1, 8, 400, 704]

    Attributes:
        active: active blocks of the last call, of every plane.
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
        self.size = to_pair(size, "MaskedConvNet: size")
        self.grid = BlockGrid.cover(self.size, block)
        self.allow_tf32 = allow_tf32
        self.mask_source = mask_source
        self._layers = chain_layers(net, self.device, dtype)
        first = self._layers[0]
        self._x = self._buffer(batch, first.weight.shape[1] * first.groups, dtype)
        self._mask = torch.zeros(batch, *self.size, dtype=torch.bool, device=self.device)
        self._buffers = self._plan(batch, dtype)
        # Active blocks of the last call. `_previous` stays where it is, and only its block map follows.
        self.active = reduce_mask(self._mask, self.grid)
        self._previous = reduce_mask(self._mask, self.grid)
        self._graph: torch.cuda.CUDAGraph | None = None
        if self.device.type == "cuda":
            self._graph, _ = _capture(lambda: self._run(self._x, self._mask), self.device)

    def _buffer(self, batch: int, channels: int, dtype: torch.dtype) -> Tensor:
        shape = batch, *self.size, channels
        return torch.zeros(shape, dtype=dtype, device=self.device).permute(0, 3, 1, 2)

    def _plan(self, batch: int, dtype: torch.dtype) -> list[Tensor]:
        """The tensor each layer writes: layers take turns with two buffers a width; the output has its own."""
        shared: dict[tuple[int, int], Tensor] = {}
        buffers = []
        for turn, layer in enumerate(self._layers[:-1]):
            key = turn % 2, layer.weight.shape[0]
            if key not in shared:
                shared[key] = self._buffer(batch, key[1], dtype)
            buffers.append(shared[key])
        return [*buffers, self._buffer(batch, self._layers[-1].weight.shape[0], dtype)]

    @torch.no_grad()
    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The network's output under the masked contract.

        Args:
            x: [N,C,H,W] of the runner's dtype, channels_last for speed.
            mask: [N,H,W] bool: blocks with a set pixel are active. Left out where there is a mask_source.

        Returns:
            [N,K,H,W] channels_last, zeros outside the active blocks. The next call overwrites it.
        """
        _check("x", x, self._x)
        if self.mask_source is None:
            _check("mask", mask, self._mask)
        elif mask is not None:
            raise ValueError(
                "sbnet: MaskedConvNet: mask: given, but the runner has a mask_source; one of them is wanted"
            )
        if self._graph is None:
            return self._run(x, mask)
        with torch.cuda.device(self.device):
            self._x.copy_(x)
            if mask is not None:
                self._mask.copy_(mask)
            self._graph.replay()
        return self._buffers[-1]

    def _run(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.mask_source is not None:
            mask = self.mask_source(x)
        assert mask is not None
        active = self.active = reduce_mask(mask, self.grid)
        fringes: dict[Geometry, Fringe | None] = {((1, 1), (0, 0), (1, 1)): None}  # reads no pixel beside its own
        consumers: list[_Layer | None] = [*self._layers[1:], None]
        for layer, consumer, out in zip(self._layers, consumers, self._buffers, strict=True):
            if consumer is None:
                # Zero what the call before wrote and this one does not: what a 1x1 layer on its blocks would read.
                stale: Fringe | None = fringe(active, self._previous, self.size, 1)
            else:
                # Zero what the consumer reads beside the active blocks.
                kernel, padding, dilation = geometry = consumer.geometry
                if geometry not in fringes:
                    fringes[geometry] = fringe(active, active, self.size, kernel, padding=padding, dilation=dilation)
                stale = fringes[geometry]
            sparse_conv2d_(
                x,
                layer.weight,
                layer.bias,
                active,
                out,
                padding=layer.padding,
                dilation=layer.dilation,
                groups=layer.groups,
                activation=layer.activation,
                negative_slope=layer.negative_slope,
                allow_tf32=self.allow_tf32,
                fringe=stale,
            )
            x = out
        self._previous.block_map.copy_(active.block_map)
        return x
