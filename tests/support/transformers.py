"""Small transformers in plain PyTorch, for machines without the libraries that have them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    """Attention and two linear layers; tokens [N,T,C], or in windows of a plane [N,H,W,C], shifted and with a bias."""

    def __init__(self, channels: int, heads: int, window: int = 0, shift: int = 0) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.bias = nn.Parameter(torch.randn(1, heads, window**2, window**2) / 2) if window else None

    def attend(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, self.bias)
        return self.proj(y.transpose(1, 2).reshape(n, t, c))

    def in_windows(self, x: Tensor) -> Tensor:
        (n, h, w, c), side, by = x.shape, self.window, self.shift
        x = torch.roll(x, (-by, -by), (1, 2)) if by else x
        x = x.view(n, h // side, side, w // side, side, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, side**2, c)
        x = self.attend(x).view(n, h // side, w // side, side, side, c).permute(0, 1, 3, 2, 4, 5)
        x = x.reshape(n, h, w, c)
        return torch.roll(x, (by, by), (1, 2)) if by else x

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + (self.in_windows(normed) if self.window else self.attend(normed))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """[N,3,side,side] to [N,1 + tokens,C]."""

    def __init__(self, side: int, channels: int = 96, heads: int = 3, patch: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, channels, patch, patch)
        self.first = nn.Parameter(torch.randn(1, 1, channels))
        self.places = nn.Parameter(torch.randn(1, 1 + (side // patch) ** 2, channels))
        self.layers = nn.Sequential(Layer(channels, heads), Layer(channels, heads))

    def tokens(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.places

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.tokens(x))


class Windows(nn.Module):
    """[N,3,H,W] to [N,C,H/4,W/4], of sides that windows of 7 divide."""

    def __init__(self, channels: int = 96, heads: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, channels, 4, 4)
        self.layers = nn.Sequential(Layer(channels, heads, 7), Layer(channels, heads, 7, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.patches(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class WrittenNorm(nn.Module):
    """RMSNorm as arithmetic; `squared` writes the square as a product."""

    def __init__(self, channels: int, squared: bool = False) -> None:
        super().__init__()
        self.weight, self.squared = nn.Parameter(torch.rand(channels) + 0.5), squared

    def forward(self, x: Tensor) -> Tensor:
        squares = x * x if self.squared else x.pow(2)
        return self.weight * (x * torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-5))
