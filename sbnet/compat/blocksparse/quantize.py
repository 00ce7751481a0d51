"""Rounding to floats of few bits, as blocksparse does to study number formats."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MANTISSA_BITS = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}


@dataclasses.dataclass(frozen=True)
class QuantizeSpec:
    """A float format: sign, ebits of exponent, fbits of fraction; no bit pattern stands for infinity or NaN.

    Args:
        ebits, fbits: bits of exponent and fraction.
        emax: exponent of the largest numbers; by default that of a symmetric format, 2^(ebits-1) - 1.
        stochastic: round up with the probability of the remainder, else to the nearest, ties away from zero.
        denorm: numbers below the smallest exponent keep its spacing; otherwise they are zeros.
        mode: what `fit` covers: 0 the largest magnitude, 1 the mean magnitude and stdv_mul standard deviations.
        bias_pad: exponents that `fit` leaves free above.
    """

    ebits: int = 4
    fbits: int = 3
    emax: int | None = None
    stochastic: bool = False
    denorm: bool = True
    mode: int = 0
    bias_pad: int = 2
    stdv_mul: float = 4.0

    def __post_init__(self) -> None:
        if not 1 <= self.ebits <= 8 or not 0 <= self.fbits <= 23:
            raise ValueError(f"QuantizeSpec: expected 1 to 8 ebits and 0 to 23 fbits, got {self.ebits}, {self.fbits}")
        if self.emax is None:
            object.__setattr__(self, "emax", 2 ** (self.ebits - 1) - 1)

    @property
    def emin(self) -> int:
        """The smallest exponent of a normal number, no less than float32's."""
        assert self.emax is not None
        return max(self.emax - 2**self.ebits + 2, -126)

    @property
    def largest(self) -> float:
        assert self.emax is not None
        return (2 - 2.0**-self.fbits) * 2.0**self.emax

    def fit(self, x: Tensor) -> QuantizeSpec:
        """The same format with the exponents that x needs; waits for the device. Call it now and then in training."""
        wide = x.detach().float().abs()
        top = wide.mean() + self.stdv_mul * wide.square().mean().sub(wide.mean().square()).clamp(min=0).sqrt()
        largest = float(top if self.mode else wide.max())
        if not 0 < largest < math.inf:
            return self
        return dataclasses.replace(self, emax=min(127, math.frexp(largest)[1] - 1 + self.bias_pad))


def round_to(x: Tensor, spec: QuantizeSpec) -> Tensor:
    """x rounded to the format, in x's dtype; NaN stays, what is too large becomes the largest number."""
    if spec.fbits > MANTISSA_BITS.get(x.dtype, 52):
        raise ValueError(f"quantize: fbits: expected at most {MANTISSA_BITS[x.dtype]} for {x.dtype}, got {spec.fbits}")
    wide = x.double()  # so that no step of the rounding rounds by itself
    # The exponent of the leading bit by a logarithm, which ONNX has, unlike frexp. Just below a power of two it may be
    # that power's, and the result is the same: the nearest number of the format is that power.
    exponent = torch.floor(torch.log2(wide.abs()) + 1e-9)
    step = torch.exp2(exponent.clamp(min=spec.emin) - spec.fbits)  # exact of whole numbers, as pow is not on CUDA
    share = torch.rand_like(wide) if spec.stochastic else 0.5
    size = torch.floor(wide.abs() / step + share) * step
    if not spec.denorm:
        size = torch.where(size < 2.0**spec.emin, torch.zeros_like(size), size)
    size = torch.where(wide.isinf(), torch.full_like(size, spec.largest), size.clamp(max=spec.largest))
    # torch.copysign has no ONNX form.
    return torch.where(wide == 0, wide, torch.where(wide < 0, -size, size)).to(x.dtype)


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: QuantizeSpec, backward: QuantizeSpec) -> Tensor:
        ctx.spec = backward
        return round_to(x, spec)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return round_to(dy, ctx.spec), None, None


def quantize(x: Tensor, qspec: QuantizeSpec, b_qspec: QuantizeSpec | None = None) -> Tensor:
    """x rounded to qspec's format, its gradient to b_qspec's (default: the same), in x's dtype.

    >>> y = quantize(x, QuantizeSpec(ebits=4, fbits=3).fit(x))
    """
    return _Quantize.apply(x, qspec, b_qspec or qspec)


def log_stats(x: Tensor, sat_val: float = 65504.0, ftz_val: float = 2.0**-24) -> dict[str, float]:
    """What blocksparse logs of a tensor: percentages at or beyond sat_val and below ftz_val (zeros not counted), the
    largest, mean and standard deviation of magnitudes. Waits for the device."""
    wide = x.detach().double().abs()
    return {
        "sat_pct": 100 * float((wide >= sat_val).double().mean()),
        "ftz_pct": 100 * float(((wide < ftz_val) & (wide > 0)).double().mean()),
        "max": float(wide.max()),
        "mean": float(wide.mean()),
        "stdv": float(wide.std(correction=0)),
    }
