"""blocksparse's dense LSTMs by their names, in PyTorch's own ops; `sbnet.nn.BlockSparseLSTM` is block-sparse."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sbnet.weights.norms import layer_norm


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


def fused_lstm_gates(
    c: Tensor, *gates: Tensor, bias: Tensor | None = None, forget_bias: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(c', h') of a step: c' = c sigmoid(f + forget_bias) + sigmoid(i) tanh(u), h' = sigmoid(o) tanh(c').

    c [N, K]; the gates i, u, f, o as [N, 4 K] or four of [N, K]; bias [4 K] is added to the former.
    """
    if bias is not None:
        if len(gates) != 1 or bias.shape != gates[0].shape[1:]:
            raise ValueError(
                f"fused_lstm_gates: bias: expected [4 K] and the gates side by side, got {list(bias.shape)} and "
                f"{len(gates)} tensors"
            )
        gates = (gates[0] + bias,)
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


class FusedBasicLSTMCell(nn.Module):
    """A dense LSTM cell with one kernel [in_features + num_units, 4 num_units] for inputs and state.

    >>> cell = FusedBasicLSTMCell(64, 256)
    >>> h, state = cell(torch.randn(8, 64), (torch.zeros(8, 256), torch.zeros(8, 256)))
    """

    def __init__(self, in_features: int, num_units: int, forget_bias: float = 1.0) -> None:
        super().__init__()
        self.forget_bias = forget_bias
        bound = math.sqrt(6 / (in_features + 5 * num_units))
        self.kernel = nn.Parameter(torch.empty(in_features + num_units, 4 * num_units).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(4 * num_units))

    def forward(self, inputs: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """inputs [N, in_features], state (c, h) of [N, num_units] -> (h', (c', h'))."""
        c, h = state
        gates = torch.cat([inputs, h], 1) @ self.kernel
        c, h = fused_lstm_gates(c, gates, bias=self.bias, forget_bias=self.forget_bias)
        return h, (c, h)


def grouped_lstm(
    inputs: Tensor,
    kernel: Tensor,
    bias: Tensor,
    initial_state: tuple[Tensor, Tensor],
    gain: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A dense LSTM over steps; with `gain` each gate is layer-normalised, with gain and bias.

    inputs [N, T, C], kernel [C + K, 4 K], bias and gain [4 K], initial_state (c, h) of [N, K] -> (h of every step
    [N, T, K], the last (c, h)). Products with the inputs are one for all steps.
    """
    c, h = initial_state
    width = inputs.shape[2]
    outputs = []
    for from_input in (inputs @ kernel[:width]).unbind(1):
        gates = from_input + h @ kernel[width:]
        if gain is not None:
            c, h = fused_lstm_gates(c, layer_norm(gates, gain, bias, segments=4))
        else:
            c, h = fused_lstm_gates(c, gates, bias=bias)
        outputs.append(h)
    return torch.stack(outputs, 1), (c, h)
