"""An LSTM's gates, and the ReLU of rows: blocksparse.ewops had them in its first release, blocksparse.lstm since."""

from __future__ import annotations

import torch
from torch import Tensor

from sbnet.nn.lstm import lstm_gates


def split4(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[N, 4 K] as four of [N, K]."""
    if x.dim() != 2 or x.shape[1] % 4:
        raise ValueError(f"split4: x: expected [N, 4 K], got {list(x.shape)}")
    i, u, f, o = x.chunk(4, 1)
    return i, u, f, o


def concat4(x0: Tensor, x1: Tensor, x2: Tensor, x3: Tensor) -> Tensor:
    """Four of [N, K] as [N, 4 K]."""
    return torch.cat([x0, x1, x2, x3], 1)


def fused_lstm_gates(
    c: Tensor,
    *args: Tensor,
    bias: Tensor | None = None,
    forget_bias: float = 1.0,
    order: str = "iufo",
    name: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(c', h') of a step: c' = c sigmoid(f + forget_bias) + sigmoid(i) tanh(u), h' = sigmoid(o) tanh(c'), in c's dtype.

    c [N, K]; the gates as [N, 4 K] or four of [N, K]; bias [4 K] is added to the former. `order` names the gates from
    the first to the last: blocksparse has "iufo" and a forget bias of 1 since version 1.13, its first release had
    order="ifou" and forget_bias=0.
    """
    if sorted(order) != sorted("iufo"):
        raise ValueError(f"fused_lstm_gates: order: expected the letters i, u, f and o, got {order!r}")
    if bias is not None:
        if len(args) != 1 or bias.numel() != args[0].shape[-1]:
            raise ValueError(
                f"fused_lstm_gates: bias: expected [4 K] and the gates side by side, got {list(bias.shape)} and "
                f"{len(args)} tensors"
            )
        args = (args[0] + bias.view(-1),)
    if len(args) == 1:
        args = split4(args[0])
    if len(args) != 4 or any(g.shape != c.shape for g in args):
        shapes = [list(g.shape) for g in args]
        raise ValueError(
            f"fused_lstm_gates: gates: expected four of {list(c.shape)}, or them side by side, got {shapes}"
        )
    gates = dict(zip(order, args, strict=True))
    after, h = lstm_gates(c, [gates[letter] for letter in "iufo"], forget_bias)
    return after.to(c.dtype), h.to(c.dtype)


def sparse_relu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """What of each row of x [..., K] exceeds its mean by more than alpha standard deviations (the biased one), less
    that; zeros elsewhere. The gradient passes where the result is not zero and knows nothing of what was subtracted,
    as in blocksparse."""
    variance, mean = torch.var_mean(x.detach().float(), -1, correction=0, keepdim=True)
    return torch.relu(x.float() - (mean + alpha * variance.sqrt())).to(x.dtype)
