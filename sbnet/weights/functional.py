"""What is done to block-sparse weights beside products, in PyTorch's own ops."""

from __future__ import annotations

import torch
from torch import Tensor

from sbnet.ops import BlockLayout
from sbnet.ops.weights.layout import split_blocks
from sbnet.ops.weights.matmul import to_matrix

CHUNK_ELEMENTS = 1 << 24  # of a dense gradient that is there at once


def l2_normalize(weight: Tensor, layout: BlockLayout, gain: Tensor | None = None, epsilon: float = 1e-12) -> Tensor:
    """weight * gain / sqrt(max(sum of squares, epsilon)), the sum over all stored weights of an output feature.

    weight [blocks, bs, bs], gain [K] or None. Computed in float32, returned in weight's dtype. Differentiable.
    """
    columns = layout.index(weight.device)[1].long()  # int64: ONNX scatters and gathers by no other integers
    squares = weight.float().square().sum(1)
    sums = squares.new_zeros(layout.block_columns, layout.block_size).index_add(0, columns, squares)
    scale = sums.clamp(min=epsilon).rsqrt()
    if gain is not None:
        if gain.shape != (layout.out_features,):
            raise ValueError(f"l2_normalize: gain: expected [{layout.out_features}], got {list(gain.shape)}")
        padding = layout.block_columns * layout.block_size - layout.out_features
        scale = scale * torch.nn.functional.pad(gain.float(), (0, padding)).view_as(scale)
    return (weight * scale[columns][:, None, :]).to(weight.dtype)


def block_reduced_full_dw(
    x: Tensor, dy: Tensor, layout: BlockLayout, *, norm: str = "max", feature_axis: int = 1
) -> Tensor:
    """[CB, KB] float32: the norm of every block of the dense gradient x^T dy, stored or not.

    Says where a block would help if it were there. x [..., C] and dy [..., K]; norm "max" or "l2". The dense gradient
    is never there as a whole.
    """
    if norm not in ("max", "l2"):
        raise ValueError(f"block_reduced_full_dw: norm: expected 'max' or 'l2', got {norm!r}")
    left, right = (
        to_matrix("block_reduced_full_dw", "x", x, feature_axis),
        to_matrix("block_reduced_full_dw", "dy", dy, feature_axis),
    )
    for name, rows, features in (("x", left, layout.in_features), ("dy", right, layout.out_features)):
        if rows.shape != (left.shape[0], features):
            raise ValueError(
                f"block_reduced_full_dw: {name}: expected {left.shape[0]} rows of {features} features, got "
                f"{rows.shape[0]} of {rows.shape[1]}"
            )
    size = layout.block_size
    step = max(1, CHUNK_ELEMENTS // (layout.out_features * size)) * size
    parts = []
    for c in range(0, layout.in_features, step):
        blocks = split_blocks(left[:, c : c + step].t() @ right, size).float()
        parts.append(blocks.abs().amax((2, 3)) if norm == "max" else blocks.square().sum((2, 3)).sqrt())
    return torch.cat(parts)


def blocksparse_norm(weight: Tensor, norm: str = "max") -> Tensor:
    """[blocks] float32: the largest magnitude ("max") or the Frobenius norm ("l2") of every block [blocks, bs, bs]."""
    if norm not in ("max", "l2"):
        raise ValueError(f"blocksparse_norm: norm: expected 'max' or 'l2', got {norm!r}")
    wide = weight.float()
    return wide.abs().amax((1, 2)) if norm == "max" else wide.square().sum((1, 2)).sqrt()


def blocksparse_l2_decay(
    weight: Tensor, gate: Tensor | None = None, rate: float = 0.05, epsilon: float = 1e-12
) -> Tensor:
    """Group lasso: every block [blocks, bs, bs] shortened by `rate`, to zero at most; those of gate 0 stay.

    weight max(0, 1 - rate / sqrt(max(sum of squares, epsilon))), the proximal step of rate times the sum of norms.
    """
    squares = weight.float().square().sum((1, 2)).clamp(min=epsilon)
    scale = (1 - rate * squares.rsqrt()).clamp(min=0)
    if gate is not None:
        scale = torch.where(gate.to(scale.device) != 0, scale, torch.ones_like(scale))
    return (weight * scale[:, None, None]).to(weight.dtype)
