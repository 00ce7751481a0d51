"""Layers with block-sparse weights: linear, and 1x1 convolution on active blocks."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor, nn

from sbnet.nn.layers import Active, given
from sbnet.ops import BlockLayout, blocksparse_conv1x1, blocksparse_matmul
from sbnet.ops.weights.layout import require_block_size


class BlockSparseLinear(nn.Module):
    """nn.Linear of which only some blocks of the weight are stored.

    Features need not be multiples of the block. state_dict carries the pattern (`coords`) beside weight and bias, and
    loads into a layer of another pattern, which then takes it over.

    Args:
        in_features, out_features, bias: as in nn.Linear.
        density: stored share of the blocks, drawn at random, if there is no layout; at least one block.
        block_size: 8, 16, 32, 64 or 128.
        layout: a `BlockLayout`, or [CB, KB] of 0 and 1 (rows: blocks of inputs).
        allow_tf32: float32 on CUDA may use tf32 tensor cores.

    >>> layer = sbnet.nn.BlockSparseLinear(128, 256, density=0.25)
    >>> layer(torch.randn(8, 128)).shape
    torch.Size([8, 256])
    """

    coords: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        density: float = 0.5,
        block_size: int = 32,
        layout: Any = None,
        *,
        allow_tf32: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if layout is None:
            layout = random_mask(in_features, out_features, density, block_size)
        if not isinstance(layout, BlockLayout):
            layout = BlockLayout(layout, block_size, in_features=in_features, out_features=out_features)
        if layout.shape != (in_features, out_features):
            raise ValueError(
                f"BlockSparseLinear: layout: expected {in_features} x {out_features} features, got "
                f"{layout.in_features} x {layout.out_features}"
            )
        self.in_features, self.out_features, self.allow_tf32 = in_features, out_features, allow_tf32
        self.layout = layout
        self.weight = nn.Parameter(torch.empty(layout.weight_shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.register_buffer("coords", layout.coords.to(device) if device is not None else layout.coords.clone())
        self.reset_parameters()

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    @property
    def density(self) -> float:
        return self.layout.density

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """nn.Linear's own initial values, for as many inputs as an output has on average."""
        if self.weight.is_meta:
            return
        bound = 1 / math.sqrt(max(1.0, self.in_features * self.density))
        dense = torch.empty(self.layout.shape).uniform_(-bound, bound)
        self.weight.copy_(self.layout.from_dense(dense))
        if self.bias is not None:
            self.bias.uniform_(-bound, bound)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        density: float = 0.5,
        block_size: int = 32,
        layout: Any = None,
        *,
        by: str = "magnitude",
        allow_tf32: bool = False,
    ) -> BlockSparseLinear:
        """The blocks of a trained layer that are kept, with their values.

        Args:
            linear: an nn.Linear, or transformers' Conv1D, the linear layer of GPT-2.
            layout: the blocks to keep, or None.
            by: without a layout: "magnitude" (those of largest norm) or "random".
        """
        dense, bias = dense_weights(linear)
        if layout is None and by == "magnitude":
            layout = BlockLayout.from_magnitude(dense, block_size, density)
        elif by not in ("magnitude", "random"):
            raise ValueError(f"BlockSparseLinear.from_linear: by: expected 'magnitude' or 'random', got {by!r}")
        self = cls(
            dense.shape[0], dense.shape[1], bias is not None, density, block_size, layout,
            allow_tf32=allow_tf32, device=dense.device, dtype=dense.dtype,
        )  # fmt: skip
        with torch.no_grad():
            self.weight.copy_(self.layout.from_dense(dense))
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias)
        trained = linear.weight
        assert isinstance(trained, Tensor)
        self.weight.requires_grad_(trained.requires_grad)
        return self.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """A dense layer of the same values."""
        linear = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, self.weight.device, self.weight.dtype
        )
        with torch.no_grad():
            linear.weight.copy_(self.layout.to_dense(self.weight).t())
            if self.bias is not None:
                linear.bias.copy_(self.bias)
        return linear

    @torch.no_grad()
    def set_layout(self, layout: BlockLayout) -> None:
        """Another pattern of the same features: blocks in both keep their values, new ones are zero."""
        if layout.shape != self.layout.shape:
            raise ValueError(f"BlockSparseLinear.set_layout: expected {self.layout.shape}, got {layout.shape}")
        weight = layout.from_dense(self.layout.to_dense(self.weight))
        self._adopt(layout)
        self.weight.copy_(weight)

    def _adopt(self, layout: BlockLayout) -> None:
        self.layout = layout
        self.coords = layout.coords.to(self.coords.device, copy=True)
        if self.weight.shape != layout.weight_shape:
            self.weight.data = self.weight.data.new_empty(layout.weight_shape)
            self.weight.grad = None

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any, **kwargs: Any) -> None:
        coords, weight = state_dict.get(f"{prefix}coords"), state_dict.get(f"{prefix}weight")
        if coords is not None and weight is not None and weight.dim() == 3:
            size = weight.shape[1]
            shape = (-(-self.in_features // size), -(-self.out_features // size))
            features = {"in_features": self.in_features, "out_features": self.out_features}
            layout = BlockLayout.from_coords(coords, shape, size, **features)
            if layout != self.layout:
                self._adopt(layout)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        return blocksparse_matmul(x, self.weight, self.layout, bias=self.bias, allow_tf32=self.allow_tf32)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"block_size={self.block_size}, density={self.density:.3g}"
        )


class BlockSparseConv1x1(BlockSparseLinear):
    """A 1x1 nn.Conv2d of stride 1 of which only some blocks of the weight are stored, on active blocks of the plane.

    Arguments and state are those of `BlockSparseLinear`, features being channels.

    >>> conv = sbnet.nn.BlockSparseConv1x1(16, 32, density=0.25, block_size=8)
    >>> conv(x, active, activation="relu").shape
    torch.Size([1, 32, 48, 80])
    """

    @classmethod
    def from_conv(cls, conv: nn.Conv2d, density: float = 0.5, block_size: int = 32, **options: Any) -> Any:
        """The blocks of a trained 1x1 convolution that are kept; options as in `from_linear`."""
        if (conv.kernel_size, conv.stride, conv.padding, conv.groups) != ((1, 1), (1, 1), (0, 0), 1):
            raise ValueError(
                "BlockSparseConv1x1.from_conv: conv: expected a 1x1 convolution of stride 1, without padding, in one "
                f"group, got kernel_size={conv.kernel_size}, stride={conv.stride}, padding={conv.padding}, "
                f"groups={conv.groups}"
            )
        linear = nn.Linear(conv.in_channels, conv.out_channels, False, device="meta")
        linear.weight = nn.Parameter(conv.weight.detach().flatten(1), conv.weight.requires_grad)
        linear.bias = conv.bias  # type: ignore[assignment]
        return cls.from_linear(linear.train(conv.training), density, block_size, **options)

    def forward(  # type: ignore[override]
        self, x: Tensor, active: Active = ..., *, activation: str | None = None, negative_slope: float = 0.01
    ) -> Tensor:
        """act(conv(x)): x [N,C,H,W] -> [N,K,H,W]."""
        blocks = given(active, self)
        options: dict[str, Any] = {"negative_slope": negative_slope, "allow_tf32": self.allow_tf32}
        if blocks is not None:
            return blocksparse_conv1x1(x, self.weight, self.layout, blocks, None, self.bias, activation, **options)
        pixels = x.permute(0, 2, 3, 1)
        y = blocksparse_matmul(pixels, self.weight, self.layout, None, self.bias, activation, **options)
        return y.permute(0, 3, 1, 2)


def is_linear(module: nn.Module) -> bool:
    """An nn.Linear, or transformers' Conv1D, whose weight is [C, K]."""
    transformers = sys.modules.get("transformers.pytorch_utils")
    return isinstance(module, nn.Linear) or (transformers is not None and isinstance(module, transformers.Conv1D))


def dense_weights(linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    """W [C, K] and the bias of what is_linear accepts."""
    if not is_linear(linear):
        raise TypeError(f"BlockSparseLinear.from_linear: linear: expected an nn.Linear, got {type(linear).__name__}")
    weight, bias = linear.weight, linear.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    return weight.detach().t() if isinstance(linear, nn.Linear) else weight.detach(), bias


def random_mask(in_features: int, out_features: int, density: float, block_size: int) -> Tensor:
    """[CB, KB] with the share `density` of the blocks set, at least one."""
    if not 0 <= density <= 1:
        raise ValueError(f"BlockSparseLinear: density: expected 0 to 1, got {density}")
    require_block_size(block_size)
    rows, columns = -(-in_features // block_size), -(-out_features // block_size)
    count = max(1, round(density * rows * columns))
    mask = torch.zeros(rows * columns, dtype=torch.bool)
    mask[torch.randperm(rows * columns)[:count]] = True
    return mask.view(rows, columns)
