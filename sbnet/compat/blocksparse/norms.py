"""blocksparse.norms: normalisations in PyTorch's own ops, computed in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def layer_norm(
    x: Tensor,
    g: Tensor,
    b: Tensor,
    axis: int = 1,
    segments: int = 1,
    epsilon: float = 1e-6,
    relu: bool = False,
    atomics: bool = True,
    bench: int = 0,
    use_tf: bool = False,
) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) g + b over the features, through a ReLU on request.

    axis 0: x [K, ...]; axis 1 (or -1): x [..., K]. g and b hold K numbers each, in any shape. The K features are
    `segments` runs of equal length, each normalised by itself; the variance is the biased one. Halves are computed in
    float32, gradients of g and b with them; the result has x's dtype. The argument order of the first release,
    (x, g, b, axis, epsilon, relu), is told by its float in the fifth place.
    """
    if isinstance(segments, float):
        segments, epsilon, relu = 1, segments, bool(epsilon) if isinstance(epsilon, bool) else relu
    if axis not in (0, 1, -1) or (axis == 1 and x.dim() < 2):
        raise ValueError(f"layer_norm: axis: expected 0 or 1 (the last), got {axis} for {x.dim()} dimensions")
    rows = x.movedim(0, -1) if axis == 0 else x
    features = rows.shape[-1]
    if segments < 1 or features % segments:
        raise ValueError(f"layer_norm: segments: expected a divisor of {features} features, got {segments}")
    for name, v in (("g", g), ("b", b)):
        if v.numel() != features:
            raise ValueError(f"layer_norm: {name}: expected {features} elements, got {list(v.shape)}")
    # In float32 throughout: PyTorch's own op sums the gradients of halves' gain and bias in halves on a CPU.
    wide = torch.promote_types(x.dtype, torch.float32)
    rows, g, b = rows.to(wide), g.reshape(-1).to(wide), b.reshape(-1).to(wide)
    if segments == 1:
        y = F.layer_norm(rows, (features,), g, b, epsilon)
    else:
        runs = rows.unflatten(-1, (segments, features // segments))
        y = torch.addcmul(b, F.layer_norm(runs, runs.shape[-1:], eps=epsilon).flatten(-2), g)
    if relu:
        y = torch.relu(y)
    y = y.to(x.dtype)
    return y.movedim(-1, 0).contiguous() if axis == 0 else y


def batch_norm(x: Tensor, g: Tensor, b: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, variance) of a batch x [N, C, ...] over all but dim 1; g, b [C]; the variance is the biased one."""
    dims = [d for d in range(x.dim()) if d != 1]
    variance, mean = torch.var_mean(x.float(), dims, correction=0)
    return batch_norm_inference(x, g, b, mean, variance, epsilon), mean, variance


def batch_norm_inference(x: Tensor, g: Tensor, b: Tensor, m: Tensor, v: Tensor, epsilon: float = 1e-6) -> Tensor:
    """(x - m) / sqrt(v + epsilon) g + b over dim 1 of x [N, C, ...]; a gradient for every argument."""
    shape = [1, x.shape[1], *([1] * (x.dim() - 2))]
    for name, t in (("g", g), ("b", b), ("m", m), ("v", v)):
        if t.numel() != x.shape[1]:
            raise ValueError(f"batch_norm: {name}: expected {x.shape[1]} elements, got {list(t.shape)}")
    scale = g.float().view(shape) * (v.float().view(shape) + epsilon).rsqrt()
    y = (x.float() - m.float().view(shape)) * scale + b.float().view(shape)
    return y.to(x.dtype)
