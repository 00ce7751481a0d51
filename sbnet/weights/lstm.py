"""blocksparse's LSTM gates by their names, in PyTorch's own ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def split4(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[N, 4 K] as four of [N, K]."""
    if x.dim() != 2 or x.shape[1] % 4:
        raise ValueError(f"split4: x: expected [N, 4 K], got {list(x.shape)}")
    i, u, f, o = x.chunk(4, 1)
    return i, u, f, o


def concat4(xs: Sequence[Tensor]) -> Tensor:
    """Four of [N, K] as [N, 4 K]."""
    if len(xs) != 4:
        raise ValueError(f"concat4: xs: expected 4 tensors, got {len(xs)}")
    return torch.cat(list(xs), 1)


def fused_lstm_gates(c: Tensor, *gates: Tensor, forget_bias: float = 1.0) -> tuple[Tensor, Tensor]:
    """(c', h') of a step: c' = c sigmoid(f + forget_bias) + sigmoid(i) tanh(u), h' = sigmoid(o) tanh(c').

    c [N, K]; the gates i, u, f, o as [N, 4 K] or four of [N, K].
    """
    if len(gates) == 1:
        gates = split4(gates[0])
    if len(gates) != 4 or any(g.shape != c.shape for g in gates):
        shapes = [list(g.shape) for g in gates]
        raise ValueError(
            f"fused_lstm_gates: gates: expected four of {list(c.shape)}, or them side by side, got {shapes}"
        )
    i, u, f, o = gates
    after = c * torch.sigmoid(f + forget_bias) + torch.sigmoid(i) * torch.tanh(u)
    return after, torch.sigmoid(o) * torch.tanh(after)
