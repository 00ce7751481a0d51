"""Convolutions with block-sparse weights, in place of PyTorch's dense ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sbnet.active import ActiveBlocks
from sbnet.ops import ConvLayout, blocksparse_conv, blocksparse_conv_active, blocksparse_deconv
from sbnet.ops.weights.conv_layout import covering_mask
from sbnet.ops.weights.conv_pack import KeptPack

Sides = int | Sequence[int]


class _BlockSparseConv(nn.Module):
    """What the layers share: a layout, the filters of its blocks, and how both come from a dense layer.

    state_dict carries the lists of channels (`lists`) beside weight and bias, and loads into a layer of other blocks,
    which then takes them over.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, bias: as in PyTorch's layer; padding also as
            "SAME" or "VALID", as `blocksparse_conv` has them.
        density: stored share of the blocks, drawn at random, if there is no layout. Every channel is in a block.
        block_size: channels on a side of a block; any number. The last block of a side may be smaller.
        layout: a `ConvLayout`, or [CB, KB] of 0 and 1 (rows: blocks of input channels).
    """

    lists: Tensor
    axes: int
    dense: Any  # PyTorch's layer
    transposed = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sides,
        stride: Sides = 1,
        padding: Sides | str = 0,
        dilation: Sides = 1,
        bias: bool = True,
        density: float = 0.5,
        block_size: int = 32,
        layout: Any = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._pack = KeptPack()
        name = type(self).__name__
        self.kernel_size = self._sides("kernel_size", kernel_size)
        self.stride, self.dilation = self._sides("stride", stride), self._sides("dilation", dilation)
        self.padding = padding if isinstance(padding, str) else self._sides("padding", padding)
        if layout is None:
            layout = covering_mask(torch.rand(-(-in_channels // block_size), -(-out_channels // block_size)), density)
        if not isinstance(layout, ConvLayout):
            layout = ConvLayout.from_mask(layout, in_channels, out_channels, block_size, self.kernel_size)
        wanted = in_channels, out_channels, self.kernel_size
        if (got := (layout.in_channels, layout.out_channels, layout.kernel_size)) != wanted:
            raise ValueError(f"{name}: layout: expected inputs, outputs and kernel {wanted}, got {got}")
        self.in_channels, self.out_channels, self.layout = in_channels, out_channels, layout
        self.weight = nn.Parameter(torch.empty(self._shape(layout), device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        self.register_buffer("lists", layout.lists.to(device) if device is not None else layout.lists.clone())
        self.reset_parameters()

    def _sides(self, argument: str, value: Sides) -> tuple[int, ...]:
        made = (value,) * self.axes if isinstance(value, int) else tuple(value)
        if len(made) != self.axes:
            raise ValueError(f"{type(self).__name__}: {argument}: expected 1 or {self.axes} numbers, got {len(made)}")
        return made

    def _shape(self, layout: ConvLayout) -> tuple[int, ...]:
        """Of the filters: those of a transposed convolution have their inputs first."""
        return layout.swapped().filter_shape if self.transposed else layout.filter_shape

    @property
    def density(self) -> float:
        return self.layout.density

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """PyTorch's own initial values, for as many inputs as an output has on average."""
        inputs = self.out_channels if self.transposed else self.in_channels
        bound = 1 / math.sqrt(max(1.0, inputs * math.prod(self.kernel_size) * self.density))
        self.weight.uniform_(-bound, bound)
        if self.bias is not None:
            self.bias.uniform_(-bound, bound)

    @classmethod
    def _options(cls, conv: Any) -> dict[str, Any]:
        """The arguments of a dense layer that are ours, too."""
        if not isinstance(conv, cls.dense):
            raise TypeError(
                f"{cls.__name__}.from_dense: conv: expected nn.{cls.dense.__name__}, got {type(conv).__name__}"
            )
        if not _plain(conv):
            raise ValueError(
                f"{cls.__name__}.from_dense: conv: expected one group and padding with zeros, in numbers, got "
                f"groups={conv.groups}, padding_mode={conv.padding_mode!r}, padding={conv.padding!r}"
            )
        return {name: getattr(conv, name) for name in ("stride", "padding", "dilation")}

    @classmethod
    def from_dense(
        cls, conv: Any, density: float = 0.5, block_size: int = 32, layout: Any = None, *, by: str = "magnitude"
    ) -> Any:
        """The blocks of a trained layer that are kept, with their values.

        Args:
            conv: PyTorch's layer of one group.
            layout: the blocks to keep, or None. Where some overlap, each has an equal share of a weight.
            by: without a layout: "magnitude" (those of largest norm) or "random".
        """
        options = cls._options(conv)
        weight, bias = conv.weight, conv.bias
        if by not in ("magnitude", "random"):
            raise ValueError(f"{cls.__name__}.from_dense: by: expected 'magnitude' or 'random', got {by!r}")
        if layout is None and by == "magnitude":
            forward = weight.transpose(0, 1) if cls.transposed else weight
            layout = ConvLayout.from_magnitude(forward, block_size, density)
        self = cls(
            conv.in_channels, conv.out_channels, conv.kernel_size, bias=bias is not None, density=density,
            block_size=block_size, layout=layout, device=weight.device, dtype=weight.dtype, **options,
        )  # fmt: skip
        with torch.no_grad():
            self.weight.copy_(self._kept(weight, self.layout))
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias)
        self.weight.requires_grad_(weight.requires_grad)
        return self.train(conv.training)

    def _kept(self, dense: Tensor, layout: ConvLayout) -> Tensor:
        """The filters whose sum a dense weight is, where it is not zero outside the blocks."""
        stored = layout.swapped() if self.transposed else layout
        times = stored.to_dense(torch.ones(stored.weights, device=dense.device))
        return stored.from_dense(dense.detach() / times.clamp(min=1).to(dense.dtype))

    def dense_weight(self) -> Tensor:
        """The weight as PyTorch's layer has it, overlapping blocks summed. Differentiable."""
        return (self.layout.swapped() if self.transposed else self.layout).to_dense(self.weight)

    def to_dense(self) -> nn.Module:
        """PyTorch's layer of the same values."""
        padding = self.padding
        if isinstance(padding, str):
            wide = [(k - 1) * d + 1 for k, d in zip(self.kernel_size, self.dilation, strict=True)]
            padding = tuple(w // 2 if padding.upper() == "SAME" else 0 for w in wide)
        conv = self.dense(
            self.in_channels, self.out_channels, self.kernel_size, self.stride, padding, dilation=self.dilation,
            bias=self.bias is not None, device=self.weight.device, dtype=self.weight.dtype, **self._more(),
        )  # fmt: skip
        with torch.no_grad():
            conv.weight.copy_(self.dense_weight())
            if self.bias is not None:
                conv.bias.copy_(self.bias)
        return conv

    def _more(self) -> dict[str, Any]:
        """Arguments that only this kind of layer has."""
        return {}

    @torch.no_grad()
    def set_layout(self, layout: ConvLayout) -> None:
        """Other blocks of the same channels: weights in both keep their values, new ones are zero."""
        own = self.layout
        for name in ("in_channels", "out_channels", "kernel_size"):
            if getattr(layout, name) != getattr(own, name):
                raise ValueError(
                    f"{type(self).__name__}.set_layout: layout: expected {name} {getattr(own, name)}, got "
                    f"{getattr(layout, name)}"
                )
        weight = self._kept(self.dense_weight(), layout)
        self._adopt(layout)
        self.weight.copy_(weight)

    def _adopt(self, layout: ConvLayout) -> None:
        self.layout = layout
        self.lists = layout.lists.to(self.lists.device, copy=True)
        if self.weight.shape != (shape := self._shape(layout)):
            self.weight.data = self.weight.data.new_empty(shape)
            self.weight.grad = None

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any, **kwargs: Any) -> None:
        lists = state_dict.get(f"{prefix}lists")
        if lists is not None:
            layout = ConvLayout.from_lists(lists.cpu(), self.kernel_size)
            same = (layout.in_channels, layout.out_channels) == (self.in_channels, self.out_channels)
            if same and layout != self.layout:
                self._adopt(layout)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _geometry(self) -> dict[str, Any]:
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}

    def _call(self) -> dict[str, Any]:
        reads_packs = self.axes < 3 and not (self.transposed and set(self.stride) != {1})
        pack = self._pack.of(self.weight, self.layout, self.transposed) if reads_packs else None
        return {**self._geometry(), "packed": pack}

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, bias={self.bias is not None}, "
            f"blocks={self.layout.blocks}, density={self.density:.3g}"
        )


class BlockSparseConv2d(_BlockSparseConv):
    """nn.Conv2d of which only some blocks (input channels x output channels) of the weight are stored.

    Arguments: those of nn.Conv2d as far as named, then density, block_size and layout as in `BlockSparseLinear`.

    >>> conv = sbnet.nn.BlockSparseConv2d(16, 32, 3, padding=1, density=0.25, block_size=8)
    >>> conv(x).shape
    torch.Size([1, 32, 48, 80])
    """

    axes, dense = 2, nn.Conv2d

    def forward(
        self,
        x: Tensor,
        active: ActiveBlocks | None = None,
        *,
        activation: str | None = None,
        negative_slope: float = 0.01,
    ) -> Tensor:
        """act(conv(x)): [N,C,H,W] -> [N,K,H',W']; with active blocks of the output zeros outside of them."""
        options: dict[str, Any] = {"negative_slope": negative_slope, **self._call()}
        if active is not None:
            return blocksparse_conv_active(x, self.weight, self.layout, active, self.bias, activation, **options)
        return blocksparse_conv(x, self.weight, self.layout, self.bias, activation, **options)


class BlockSparseConv3d(_BlockSparseConv):
    """nn.Conv3d of which only some blocks of the weight are stored; arguments as in `BlockSparseConv2d`.

    >>> conv = sbnet.nn.BlockSparseConv3d(16, 32, 3, padding=1, density=0.25, block_size=8)
    >>> conv(torch.rand(1, 16, 4, 12, 20)).shape
    torch.Size([1, 32, 4, 12, 20])
    """

    axes, dense = 3, nn.Conv3d

    def forward(self, x: Tensor, *, activation: str | None = None, negative_slope: float = 0.01) -> Tensor:
        """act(conv(x)): [N,C,D,H,W] -> [N,K,D',H',W']."""
        options: dict[str, Any] = {"negative_slope": negative_slope, **self._call()}
        return blocksparse_conv(x, self.weight, self.layout, self.bias, activation, **options)


class BlockSparseConvTranspose2d(_BlockSparseConv):
    """nn.ConvTranspose2d of which only some blocks of the weight are stored; its output has PyTorch's size.

    Args:
        output_padding: as in nn.ConvTranspose2d.
        others: as in `BlockSparseConv2d`.

    >>> up = sbnet.nn.BlockSparseConvTranspose2d(16, 8, 4, stride=2, padding=1, density=0.5, block_size=8)
    >>> up(x).shape
    torch.Size([1, 8, 96, 160])
    """

    axes, dense, transposed = 2, nn.ConvTranspose2d, True

    def __init__(self, *args: Any, output_padding: Sides = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.output_padding = self._sides("output_padding", output_padding)
        if isinstance(self.padding, str):
            raise ValueError(f"{type(self).__name__}: padding: expected numbers, got {self.padding!r}")

    @classmethod
    def _options(cls, conv: Any) -> dict[str, Any]:
        return {**super()._options(conv), "output_padding": conv.output_padding}

    def _more(self) -> dict[str, Any]:
        return {"output_padding": self.output_padding}

    def forward(self, x: Tensor, *, activation: str | None = None, negative_slope: float = 0.01) -> Tensor:
        """act(conv_transpose(x)): [N,C,H,W] -> [N,K,H',W']."""
        numbers = zip(
            x.shape[2:], self.kernel_size, self.stride, self.padding, self.dilation, self.output_padding, strict=True
        )
        size = [(side - 1) * s - 2 * p + d * (k - 1) + more + 1 for side, k, s, p, d, more in numbers]  # type: ignore[operator]
        options: dict[str, Any] = {"negative_slope": negative_slope, **self._call()}
        return blocksparse_deconv(x, self.weight, self.layout, self.bias, activation, output_size=size, **options)


KINDS: tuple[Any, ...] = (BlockSparseConv2d, BlockSparseConv3d, BlockSparseConvTranspose2d)


def layer_for(conv: nn.Module) -> Any:
    """The block-sparse class that stands for a dense convolution, or None."""
    kind = next((kind for kind in KINDS if isinstance(conv, kind.dense)), None)
    return kind if kind is not None and _plain(conv) else None


def _plain(conv: Any) -> bool:
    return conv.groups == 1 and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
