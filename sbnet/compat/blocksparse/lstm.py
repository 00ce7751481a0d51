"""blocksparse.lstm: dense LSTMs, in PyTorch's own ops; `sbnet.nn.BlockSparseLSTM` is block-sparse."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from sbnet.compat.blocksparse.gates import concat4 as concat4
from sbnet.compat.blocksparse.gates import fused_lstm_gates
from sbnet.compat.blocksparse.gates import sparse_relu as sparse_relu
from sbnet.compat.blocksparse.gates import split4 as split4
from sbnet.compat.blocksparse.norms import layer_norm


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
