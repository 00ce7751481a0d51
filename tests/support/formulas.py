"""Ops in PyTorch against plain formulas, which are their own measure in float64."""

import torch

from support.helpers import assert_as_accurate_as_torch


def gradients(f, leaves):
    y = f(*leaves)
    y = y if isinstance(y, tuple) else (y,)
    torch.manual_seed(1)
    total = sum((t.double() * torch.randn(t.shape, dtype=torch.float64).to(t.device)).sum() for t in y)
    return [*y, *torch.autograd.grad(total, leaves)]


def check(f, want, *tensors):
    """f against `want`, PyTorch's plain formula, which is its own measure in float64: values and gradients."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    wide = [t.double().requires_grad_() for t in tensors]
    for got, plain, exact in zip(gradients(f, leaves), gradients(want, leaves), gradients(want, wide), strict=True):
        assert_as_accurate_as_torch(got.detach(), plain.detach(), exact.detach())
