"""A chain of convolutions that keep the plane's size, as layers of sbnet.nn: what the demo runs and exports.

It computes what the chain does in eval mode: normalisations are folded into the convolutions before them, and what does
nothing then (dropout, nn.Identity) is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sbnet.active import ActiveBlocks, BlockGrid
from sbnet.geometry import to_pair
from sbnet.nn.fold import fold_pair
from sbnet.nn.layers import SparseConv2d
from sbnet.ops import reduce_mask

ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.LeakyReLU: "leaky_relu",
    nn.SiLU: "silu",
    nn.GELU: "gelu",
    nn.Hardswish: "hardswish",
}
NOTHING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d)  # in eval mode


def activation_module(activation: str | None, negative_slope: float = 0.01) -> list[nn.Module]:
    """The module that ACTIVATIONS names so, in place where it can be; none for None."""
    for kind, name in ACTIVATIONS.items():
        if name == activation:
            if kind is nn.LeakyReLU:
                return [nn.LeakyReLU(negative_slope, inplace=True)]
            return [kind() if kind is nn.GELU else kind(inplace=True)]
    return []


class MaskedChain(nn.Module):
    """An nn.Sequential of convolutions, each with a normalisation and an activation after it or none, on active blocks
    of its one plane.

    Args:
        net: nn.Sequential of nn.Conv2d (stride 1, padding that keeps the size), nn.BatchNorm2d with running statistics,
            which is folded, and activations; dropout and nn.Identity are left out. Parameters are copied.
        block: block size, an int or (height, width).
        dtype: of parameters and inputs.

    Raises:
        ValueError: the network is no such chain.

    >>> chain = MaskedChain(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()))
    >>> y, block_map = chain(torch.rand(1, 3, 400, 704), torch.rand(1, 400, 704) > 0.999)
    """

    def __init__(self, net: nn.Sequential, block: int | Sequence[int] = 16, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise TypeError(f"sbnet: network: {type(net).__name__}; an nn.Sequential is wanted")
        self.block = block
        self.convolutions = nn.ModuleList()
        self.options: list[dict[str, Any]] = []  # of each convolution: its activation
        for path, module in net.named_modules(remove_duplicate=False):
            name = path or "(the whole)"
            if type(module) in (nn.Sequential, *NOTHING):
                continue
            bare = bool(self.options) and self.options[-1]["activation"] is None
            if isinstance(module, nn.Conv2d):
                self.convolutions.append(_convolution(name, module))
                self.options.append({"activation": None})
            elif isinstance(module, nn.BatchNorm2d) and bare:
                self.convolutions[-1] = _normalised(name, self.convolutions[-1], module)
            elif type(module) in ACTIVATIONS and bare:
                if isinstance(module, nn.GELU) and module.approximate != "none":
                    raise ValueError(f"sbnet: network: layer {name} is {module}; the exact GELU is wanted")
                self.options[-1] = {"activation": ACTIVATIONS[type(module)]}
                if isinstance(module, nn.LeakyReLU):
                    self.options[-1]["negative_slope"] = module.negative_slope
            else:
                raise ValueError(
                    f"sbnet: network: layer {name} is {module}; a chain of convolutions, each with at most a "
                    f"BatchNorm2d and one of {', '.join(kind.__name__ for kind in ACTIVATIONS)} after it, is wanted "
                    "(other networks: layers of sbnet.nn and sbnet.engine.MaskedRunner)"
                )
        if not self.options:
            raise ValueError("sbnet: network: no layers; at least one convolution is wanted")
        self.requires_grad_(False).to(dtype)

    def features(self, x: Tensor, active: ActiveBlocks | None = None) -> Tensor:
        """x [N,C,H,W] -> [N,K,H,W]: zeros outside the active blocks, or dense."""
        for conv, options in zip(self.convolutions, self.options, strict=True):
            x = conv(x, active, **options)
        return x

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """x [N,C,H,W], mask [N,H,W] bool -> [N,K,H,W], zeros outside the active blocks, and their block map."""
        active = reduce_mask(mask, BlockGrid.cover((x.shape[2], x.shape[3]), self.block))
        return self.features(x, active), active.block_map

    def dense(self) -> nn.Sequential:
        """The same chain in PyTorch's own modules, normalisations folded, activations in place. Shares parameters."""
        modules: list[nn.Module] = []
        for conv, options in zip(self.convolutions, self.options, strict=True):
            own: Any = conv
            plain = nn.Conv2d(
                own.in_channels, own.out_channels, own.kernel_size, own.stride, own.padding, own.dilation, own.groups,
                own.bias is not None, device="meta",
            )  # fmt: skip
            plain.weight, plain.bias = own.weight, own.bias
            modules += [plain, *activation_module(**options)]
        return nn.Sequential(*modules).eval()

    @property
    def inputs(self) -> int:
        """Channels of x."""
        first: Any = self.convolutions[0]
        return first.in_channels


def _normalised(name: str, conv: Any, norm: nn.BatchNorm2d) -> SparseConv2d:
    if norm.running_mean is None or norm.num_features != conv.out_channels:
        raise ValueError(
            f"sbnet: network: layer {name} is {norm}; running statistics of {conv.out_channels} channels are wanted"
        )
    return fold_pair(conv, norm)


def _convolution(name: str, conv: nn.Conv2d) -> SparseConv2d:
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
    own = SparseConv2d(
        conv.in_channels, conv.out_channels, kernel, 1, (same[0], same[1]), dilation, conv.groups,
        conv.bias is not None, device=conv.weight.device, dtype=conv.weight.dtype,
    )  # fmt: skip
    own.load_state_dict(conv.state_dict())
    own.weight.data = own.weight.data.contiguous(memory_format=torch.channels_last)
    return own
