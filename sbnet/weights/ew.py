"""blocksparse's elementwise ops by its names, in PyTorch's own. torch.compile fuses them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

add, multiply, subtract, divide = torch.add, torch.mul, torch.sub, torch.div
maximum, minimum = torch.maximum, torch.minimum
negative, reciprocal, square, sqrt, exp, log = (
    torch.neg,
    torch.reciprocal,
    torch.square,
    torch.sqrt,
    torch.exp,
    torch.log,
)
sigmoid, tanh, relu = torch.sigmoid, torch.tanh, torch.relu


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """x where it is positive, else alpha (exp(x) - 1)."""
    return F.elu(x, alpha)


def gelu(x: Tensor) -> Tensor:
    """x times half of 1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)): the approximation that blocksparse computes."""
    return F.gelu(x, approximate="tanh")


def swish(x: Tensor, alpha: float = 1.0) -> Tensor:
    """x sigmoid(alpha x)."""
    return x * torch.sigmoid(alpha * x)


def fast_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x)."""
    return swish(x, 1.702)


def bias_relu(x: Tensor, b: Tensor, axis: int = -1, relu: bool = False, fast_gelu: bool = False) -> Tensor:
    """x + b along `axis`, through a ReLU or x sigmoid(1.702 x) on request. b [features]."""
    if relu and fast_gelu:
        raise ValueError("bias_relu: relu, fast_gelu: expected one of them at most, got both")
    y = x + _along("bias_relu", "b", b, x, axis)
    if fast_gelu:
        return swish(y, 1.702)
    return torch.relu(y) if relu else y


def cwise_linear(
    x: Tensor, a: Tensor | None = None, b: Tensor | None = None, relu: bool = False, bias_first: bool = False
) -> Tensor:
    """x a + b over dim 1 of x [N, C, ...], or (x + b) a with bias_first; a, b [C] or None; a ReLU on request."""
    if b is not None:
        b = _along("cwise_linear", "b", b, x, 1)
    if b is not None and bias_first:
        x = x + b
    if a is not None:
        x = x * _along("cwise_linear", "a", a, x, 1)
    if b is not None and not bias_first:
        x = x + b
    return torch.relu(x) if relu else x


def _along(op: str, name: str, v: Tensor, x: Tensor, axis: int) -> Tensor:
    if v.numel() != x.shape[axis]:
        raise ValueError(f"{op}: {name}: expected {x.shape[axis]} elements, got {v.numel()}")
    shape = [1] * x.dim()
    shape[axis] = v.numel()
    return v.reshape(shape)


def add_n8(xs: Sequence[Tensor]) -> Tensor:
    """The sum of one to eight tensors of one shape, from the first to the last."""
    if not 1 <= len(xs) <= 8:
        raise ValueError(f"add_n8: xs: expected 1 to 8 tensors, got {len(xs)}")
    return add_n(xs)


def add_n(xs: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one shape, from the first to the last."""
    if not xs or any(x.shape != xs[0].shape for x in xs):
        raise ValueError(f"add_n: xs: expected tensors of one shape, got {[list(x.shape) for x in xs]}")
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


def filter_tensor(
    x: Tensor, scale: float = 1.0, saturate: float = 0.0, zero_infs: bool = False, zero_nans: bool = False
) -> Tensor:
    """x scale, clamped to +-saturate unless that is 0; infinities and NaN become zeros before it on request."""
    if zero_infs:
        x = torch.where(x.isinf(), torch.zeros_like(x), x)
    if zero_nans:
        x = torch.where(x.isnan(), torch.zeros_like(x), x)
    if scale != 1.0:
        x = x * scale
    return x.clamp(-saturate, saturate) if saturate else x


def scale_tensor(x: Tensor, scale: float = 1.0) -> Tensor:
    """x scale."""
    return filter_tensor(x, scale)


def assign_add(y: Tensor, x: Tensor) -> Tensor:
    """y += x in place; y."""
    return y.add_(x)


def sparse_relu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """What of each row of x [..., K] exceeds its mean by more than alpha standard deviations (the biased one), less
    that; zeros elsewhere. The gradient passes where the result is not zero and knows nothing of what was subtracted,
    as in blocksparse."""
    variance, mean = torch.var_mean(x.detach().float(), -1, correction=0, keepdim=True)
    return torch.relu(x.float() - (mean + alpha * variance.sqrt())).to(x.dtype)


class _FloatCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, dx_dtype: torch.dtype) -> Tensor:
        ctx.dtypes = dx_dtype, x.dtype
        return x.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        rounded, own = ctx.dtypes
        return dy.to(rounded).to(own), None, None


def float_cast(x: Tensor, dtype: torch.dtype, dx_dtype: torch.dtype | None = None) -> Tensor:
    """x as dtype, its gradient rounded to dx_dtype (default: x's own) on the way back."""
    return _FloatCast.apply(x, dtype, dx_dtype or x.dtype)


def dropout(
    x: Tensor, keep_prob: float, mask: Tensor | None = None, mask_shape: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """(x kept / keep_prob, mask): a share keep_prob of the elements, the rest zeros.

    The mask is int32 words, 32 elements each in order, the first in the lowest bit; drawn where none is given, so that
    a call may use that of another. mask_shape (default: x's) broadcasts against x.
    """
    if not 0.0 < keep_prob <= 1.0:
        raise ValueError(f"dropout: keep_prob: expected more than 0 and at most 1, got {keep_prob}")
    shape = list(x.shape) if mask_shape is None else list(mask_shape)
    if len(shape) != x.dim() or any(m not in (1, n) for m, n in zip(shape, x.shape, strict=True)):
        raise ValueError(f"dropout: mask_shape: expected 1 or the size of x in {list(x.shape)}, got {shape}")
    elements = math.prod(shape)
    words, lanes = -(-elements // 32), torch.arange(32, device=x.device)
    if mask is None:
        kept = torch.rand(words, 32, device=x.device) < keep_prob
        mask = (kept.long() << lanes).sum(1).int()  # bit 31 is the sign
    if mask.dtype != torch.int32 or mask.shape != (words,):
        raise ValueError(f"dropout: mask: expected {words} int32, got {list(mask.shape)} {mask.dtype}")
    bits = (mask[:, None] >> lanes.int() & 1).flatten()[:elements].view(shape)
    return torch.where(bits.bool(), x / keep_prob, torch.zeros((), dtype=x.dtype, device=x.device)), mask


def concrete_gate(
    loga: Tensor, temperature: float = 2 / 3, limit_a: float = -0.1, limit_b: float = 1.1, epsilon: float = 1e-6
) -> Tensor:
    """A draw of the hard concrete distribution for each log alpha (Louizos et al., arXiv 1712.01312), in [0, 1]."""
    u = torch.rand_like(loga).clamp(epsilon, 1 - epsilon)
    gate = torch.sigmoid((u.log() - (-u).log1p() + loga) / temperature)
    return (gate * (limit_b - limit_a) + limit_a).clamp(0, 1)


def concrete_gate_infer(loga: Tensor, limit_a: float = -0.1, limit_b: float = 1.1) -> Tensor:
    """The gate for inference: no draw."""
    return (torch.sigmoid(loga) * (limit_b - limit_a) + limit_a).clamp(0, 1)
