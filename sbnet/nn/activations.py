"""The activations that a convolution's epilogue takes, by PyTorch's modules."""

from __future__ import annotations

from torch import nn

ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.LeakyReLU: "leaky_relu",
    nn.SiLU: "silu",
    nn.GELU: "gelu",
    nn.Hardswish: "hardswish",
}


def activation_module(activation: str | None, negative_slope: float = 0.01) -> list[nn.Module]:
    """The module that ACTIVATIONS names so, in place where it can be; none for None."""
    for kind, name in ACTIVATIONS.items():
        if name == activation:
            if kind is nn.LeakyReLU:
                return [nn.LeakyReLU(negative_slope, inplace=True)]
            return [kind() if kind is nn.GELU else kind(inplace=True)]
    return []
