"""blocksparse.ewops: elementwise ops, in PyTorch's own. torch.compile fuses them.

Arguments that steer the reference's kernels or name TensorFlow's ops (`name`, `bench`, `atomics`, `use_tf`) are taken
and change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sbnet.compat.blocksparse.gates import concat4 as concat4
from sbnet.compat.blocksparse.gates import fused_lstm_gates as fused_lstm_gates
from sbnet.compat.blocksparse.gates import sparse_relu as sparse_relu
from sbnet.compat.blocksparse.gates import split4 as split4


def _narrow(f: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """f(x, y) in the dtype of the larger operand (of x where both are alike), computed in the wider one.

    A float32 parameter beside half activations leaves the activations half, as the reference's kernels do.
    """
    return f(x, y).to(y.dtype if y.numel() > x.numel() else x.dtype)


def add(x: Tensor, y: Tensor, name: str | None = None) -> Tensor:
    """x + y, broadcast, of the dtype of the larger operand."""
    return _narrow(torch.add, x, y)


def multiply(x: Tensor, y: Tensor, name: str | None = None) -> Tensor:
    """x y, broadcast, of the dtype of the larger operand."""
    return _narrow(torch.mul, x, y)


def subtract(x: Tensor, y: Tensor, name: str | None = None) -> Tensor:
    """x - y, broadcast, of the dtype of the larger operand."""
    return _narrow(torch.sub, x, y)


def divide(x: Tensor, y: Tensor, name: str | None = None) -> Tensor:
    """x / y, broadcast, of the dtype of the larger operand."""
    return _narrow(torch.div, x, y)


class _Extreme(torch.autograd.Function):
    """maximum or minimum whose gradient goes to both operands where they are equal; PyTorch's own halves it there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, largest: bool) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.largest = largest
        return torch.maximum(x, y) if largest else torch.minimum(x, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors
        zero = dz.new_zeros(())
        dx = torch.where(x >= y if ctx.largest else x <= y, dz, zero)
        dy = torch.where(y >= x if ctx.largest else y <= x, dz, zero)
        return dx.sum_to_size(x.shape), dy.sum_to_size(y.shape), None


def maximum(x: Tensor, y: Tensor, name: str | None = None) -> Tensor:
    """The larger of x and y, broadcast. Where they are equal the whole gradient goes to both."""
    return _narrow(lambda x, y: _Extreme.apply(x, y, True), x, y)


def minimum(x: Tensor, y: Tensor, name: str | None = None) -> Tensor:
    """The smaller of x and y, broadcast. Where they are equal the whole gradient goes to both."""
    return _narrow(lambda x, y: _Extreme.apply(x, y, False), x, y)


def negative(x: Tensor, name: str | None = None) -> Tensor:
    """-x."""
    return torch.neg(x)


def reciprocal(x: Tensor, name: str | None = None) -> Tensor:
    """1 / x."""
    return torch.reciprocal(x)


def square(x: Tensor, name: str | None = None) -> Tensor:
    """x x."""
    return torch.square(x)


def sqrt(x: Tensor, name: str | None = None) -> Tensor:
    """The square root of x."""
    return torch.sqrt(x)


def exp(x: Tensor, name: str | None = None) -> Tensor:
    """e to the power of x."""
    return torch.exp(x)


def log(x: Tensor, name: str | None = None) -> Tensor:
    """The natural logarithm of x."""
    return torch.log(x)


def sigmoid(x: Tensor, name: str | None = None) -> Tensor:
    """1 / (1 + exp(-x))."""
    return torch.sigmoid(x)


def tanh(x: Tensor, name: str | None = None) -> Tensor:
    """The hyperbolic tangent of x."""
    return torch.tanh(x)


def relu(x: Tensor, name: str | None = None) -> Tensor:
    """The larger of x and 0."""
    return torch.relu(x)


def elu(x: Tensor, alpha: float = 1.0, name: str | None = None) -> Tensor:
    """x where it is positive, else alpha (exp(x) - 1)."""
    return F.elu(x, alpha)


def gelu(x: Tensor, alpha: float = 0.044715, name: str | None = None) -> Tensor:
    """x times half of 1 + tanh(sqrt(2 / pi) (x + alpha x^3))."""
    if alpha == 0.044715:
        return F.gelu(x, approximate="tanh")
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + alpha * x**3)))


def swish(x: Tensor, alpha: float = 1.0, name: str | None = None) -> Tensor:
    """x sigmoid(alpha x)."""
    return x * torch.sigmoid(alpha * x)


def fast_gelu(x: Tensor, name: str | None = None) -> Tensor:
    """x sigmoid(1.702 x)."""
    return swish(x, 1.702)


def bias_relu(
    x: Tensor,
    b: Tensor,
    axis: int = -1,
    relu: bool = False,
    fast_gelu: bool = False,
    atomics: bool = True,
    bench: int = 0,
    use_tf: bool = False,
) -> Tensor:
    """x + b along `axis`, through a ReLU or x sigmoid(1.702 x) on request, in x's dtype. b: one number a feature."""
    if relu and fast_gelu:
        raise ValueError("bias_relu: relu, fast_gelu: expected one of them at most, got both")
    y = x + along("bias_relu", "b", b, x, axis)
    if fast_gelu:
        y = swish(y, 1.702)
    elif relu:
        y = torch.relu(y)
    return y.to(x.dtype)


def cwise_linear(
    x: Tensor,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = False,
    bias_first: bool = False,
    use_tf: bool = False,
) -> Tensor:
    """x gain + bias over dim 1 of x [N, C, ...], or (x + bias) gain with bias_first, in x's dtype; a ReLU on request.

    gain and bias hold C numbers each, in any shape, or are None.
    """
    y = x
    shift = None if bias is None else along("cwise_linear", "bias", bias, x, 1)
    if shift is not None and bias_first:
        y = y + shift
    if gain is not None:
        y = y * along("cwise_linear", "gain", gain, x, 1)
    if shift is not None and not bias_first:
        y = y + shift
    return (torch.relu(y) if relu else y).to(x.dtype)


def along(op: str, name: str, v: Tensor, x: Tensor, axis: int) -> Tensor:
    """v, as many numbers as x has along `axis` and in any shape, so that it broadcasts against x."""
    if v.numel() != x.shape[axis]:
        raise ValueError(f"{op}: {name}: expected {x.shape[axis]} elements, got {v.numel()}")
    shape = [1] * x.dim()
    shape[axis] = v.numel()
    return v.reshape(shape)


def add_n8(xs: Sequence[Tensor], name: str | None = "AddN") -> Tensor:
    """The sum of one to eight tensors of one shape, from the first to the last."""
    if not 1 <= len(xs) <= 8:
        raise ValueError(f"add_n8: xs: expected 1 to 8 tensors, got {len(xs)}")
    return add_n(xs)


def add_n(xs: Sequence[Tensor], name: str | None = "AddN") -> Tensor:
    """The sum of tensors of one shape, from the first to the last."""
    if not xs or any(x.shape != xs[0].shape for x in xs):
        raise ValueError(f"add_n: xs: expected tensors of one shape, got {[list(x.shape) for x in xs]}")
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


class _Filter(torch.autograd.Function):
    """The gradient is filtered as the values are: scaled, saturated, its infinities and NaN zeros on request."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, saturate: float, zero_infs: bool, zero_nans: bool) -> Tensor:
        ctx.numbers = scale, saturate, zero_infs, zero_nans
        return _filtered(x, scale, saturate, zero_infs, zero_nans)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        return _filtered(dy, *ctx.numbers), None, None, None, None


def _filtered(x: Tensor, scale: float, saturate: float, zero_infs: bool, zero_nans: bool) -> Tensor:
    if zero_infs:
        x = torch.where(x.isinf(), torch.zeros_like(x), x)
    if zero_nans:
        x = torch.where(x.isnan(), torch.zeros_like(x), x)
    x = x * scale
    return x.clamp(-saturate, saturate) if saturate else x


def filter_tensor(
    x: Tensor, scale: float = 1.0, saturate: float = 0.0, zero_infs: bool = False, zero_nans: bool = False
) -> Tensor:
    """x scale, clamped to +-saturate unless that is 0; infinities and NaN become zeros before it on request.

    The gradient goes through the same filter.
    """
    return _Filter.apply(x, scale, saturate, zero_infs, zero_nans)


filter_tensor_op = filter_tensor


def scale_tensor(x: Tensor, scale: float = 1.0) -> Tensor:
    """x scale."""
    return filter_tensor(x, scale)


def assign_add(y: Tensor, x: Tensor, name: str | None = None) -> Tensor:
    """y += x in place; y."""
    return y.add_(x)


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


def float_cast(x: Tensor, dtype: torch.dtype, dx_dtype: torch.dtype | None = None, name: str | None = None) -> Tensor:
    """x as dtype, its gradient rounded to dx_dtype (default: x's own) on the way back."""
    return _FloatCast.apply(x, dtype, dx_dtype or x.dtype)


def dropout(
    x: Tensor, keep_prob: float = 0.8, mask: Tensor | None = None, mask_shape: Sequence[int] | None = None
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
    words = -(-elements // 32)
    weights = torch.exp2(torch.arange(32, device=x.device, dtype=torch.float64))  # exact of whole numbers
    if mask is None:
        kept = torch.rand(words, 32, device=x.device) < keep_prob
        mask = (kept * weights).sum(1).long().int()  # bit 31 is the sign
    if mask.dtype != torch.int32 or mask.shape != (words,):
        raise ValueError(f"dropout: mask: expected {words} int32, got {list(mask.shape)} {mask.dtype}")
    # Bits by division in float64, which is exact: shifts of signed integers have no ONNX form, and the division of
    # integers is exported as one in float32.
    unsigned = mask.double()
    unsigned = torch.where(unsigned < 0, unsigned + 2.0**32, unsigned)
    halves = torch.floor(unsigned[:, None] / weights) / 2
    bits = halves != torch.floor(halves)
    bits = bits.flatten()[:elements].view(shape)
    return torch.where(bits, x / keep_prob, torch.zeros((), dtype=x.dtype, device=x.device)), mask


def concrete_gate(
    loga: Tensor, tempurature: float = 2 / 3, limit_a: float = -0.1, limit_b: float = 1.1, epsilon: float = 1e-6
) -> Tensor:
    """A draw of the hard concrete distribution for each log alpha (Louizos et al., arXiv 1712.01312), in [0, 1]."""
    u = torch.rand_like(loga).clamp(epsilon, 1 - epsilon)
    gate = torch.sigmoid((u.log() - (-u).log1p() + loga) / tempurature)
    return (gate * (limit_b - limit_a) + limit_a).clamp(0, 1)


def concrete_gate_infer(loga: Tensor, limit_a: float = -0.1, limit_b: float = 1.1) -> Tensor:
    """The gate for inference: no draw."""
    return (torch.sigmoid(loga) * (limit_b - limit_a) + limit_a).clamp(0, 1)


def fancy_gather(x: Tensor, idx: Tensor, use_tf: bool = False) -> Tensor:
    """x [*I, J, ...] at idx [*I], indices along J -> [*I, ...]; negative ones read the first."""
    if x.dim() <= idx.dim() or x.shape[: idx.dim()] != idx.shape:
        raise ValueError(f"fancy_gather: idx: expected the first sizes of x {list(x.shape)}, got {list(idx.shape)}")
    at = idx.long().clamp(min=0).reshape(*idx.shape, *[1] * (x.dim() - idx.dim()))
    return x.gather(idx.dim(), at.expand(*idx.shape, 1, *x.shape[idx.dim() + 1 :])).squeeze(idx.dim())


def reduce_max(x: Tensor, axis: int, keepdims: bool = False, use_tf: bool = False) -> Tensor:
    """The largest along one axis; the gradient goes to one of them."""
    return x.max(axis, keepdims).values
