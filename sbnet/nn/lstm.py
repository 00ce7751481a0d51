"""LSTM layers with block-sparse weights, in place of PyTorch's dense ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sbnet.nn.blocksparse import BlockSparseLinear
from sbnet.ops import BlockLayout, blocksparse_matmul, blocksparse_weight_grad

State = tuple[Tensor, Tensor]


def lstm_gates(c: Tensor, gates: Sequence[Tensor], forget_bias: float = 1.0) -> tuple[Tensor, Tensor]:
    """(c', h') of a step from the gates i, u, f, o: c' = c sigmoid(f + forget_bias) + sigmoid(i) tanh(u), h' =
    sigmoid(o) tanh(c')."""
    i, u, f, o = gates
    after = c * torch.sigmoid(f + forget_bias) + torch.sigmoid(i) * torch.tanh(u)
    return after, torch.sigmoid(o) * torch.tanh(after)


class BlockSparseLSTMCell(nn.Module):
    """nn.LSTMCell whose two weights are block-sparse: a step of gates = x W + b + h V, V and W of blocks.

    Gates are in the order i, u, f, o: c' = c sigmoid(f + forget_bias) + sigmoid(i) tanh(u), h' = sigmoid(o) tanh(c').

    Args:
        input_size, hidden_size, bias: as in nn.LSTMCell; one bias instead of two.
        density, layout: of the recurrent weight [hidden_size, 4 hidden_size], as in `BlockSparseLinear`.
        input_density, input_layout: of the input weight [input_size, 4 hidden_size]; all of it by default.
        block_size: of both.
        forget_bias: added to the forget gate.

    >>> cell = sbnet.nn.BlockSparseLSTMCell(64, 128, density=0.1)
    >>> h, c = cell(torch.randn(8, 64))
    >>> h.shape
    torch.Size([8, 128])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        density: float = 0.25,
        block_size: int = 32,
        layout: Any = None,
        *,
        input_density: float = 1.0,
        input_layout: Any = None,
        forget_bias: float = 1.0,
        allow_tf32: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.forget_bias = input_size, hidden_size, forget_bias
        options: dict[str, Any] = {"allow_tf32": allow_tf32, "device": device, "dtype": dtype}
        self.input = BlockSparseLinear(
            input_size, 4 * hidden_size, bias, input_density, block_size, input_layout, **options
        )
        self.hidden = BlockSparseLinear(hidden_size, 4 * hidden_size, False, density, block_size, layout, **options)

    @classmethod
    def from_dense(
        cls,
        cell: nn.LSTMCell,
        density: float = 0.25,
        block_size: int = 32,
        *,
        input_density: float = 1.0,
        by: str = "magnitude",
    ) -> BlockSparseLSTMCell:
        """The blocks of a trained cell that are kept, with their values; `by` as in `BlockSparseLinear.from_linear`."""
        if not isinstance(cell, nn.LSTMCell):
            raise TypeError(f"{cls.__name__}.from_dense: cell: expected an nn.LSTMCell, got {type(cell).__name__}")
        biases = None if not cell.bias else (cell.bias_ih, cell.bias_hh)
        return cls._of(cell.weight_ih, cell.weight_hh, biases, density, block_size, input_density, by)

    @classmethod
    def _of(
        cls,
        weight_ih: Tensor,
        weight_hh: Tensor,
        biases: Any,
        density: float,
        block: int,
        input_density: float,
        by: str,
    ) -> BlockSparseLSTMCell:
        linears = []
        for weight, added in ((weight_ih, biases), (weight_hh, None)):
            linear = nn.Linear(weight.shape[1], weight.shape[0], added is not None, device="meta")
            linear.weight = nn.Parameter(_reordered(weight))
            if added is not None:
                linear.bias = nn.Parameter(_reordered(added[0] + added[1]))
            linears.append(linear)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.input_size, made.hidden_size, made.forget_bias = weight_ih.shape[1], weight_hh.shape[1], 0.0
        made.input = BlockSparseLinear.from_linear(linears[0], input_density, block, by=by)
        made.hidden = BlockSparseLinear.from_linear(linears[1], density, block, by=by)
        return made

    def forward(self, x: Tensor, state: State | None = None) -> State:
        """x [N, input_size], state (h, c) of [N, hidden_size] or None for zeros -> the next (h, c)."""
        h, c = state if state is not None else zeros(x, x.shape[0], self.hidden_size)
        return self.step(self.input(x), self.hidden(h), c)

    def step(self, from_input: Tensor, from_hidden: Tensor, c: Tensor) -> State:
        """The next (h, c) from both products [N, 4 hidden_size]."""
        c, h = lstm_gates(c, (from_input + from_hidden).chunk(4, -1), self.forget_bias)
        return h, c

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, forget_bias={self.forget_bias}"


class BlockSparseLSTM(nn.Module):
    """nn.LSTM of block-sparse cells. In training the gradient of a recurrent weight is one product over all steps.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first: as in nn.LSTM.
        cell: keyword arguments of `BlockSparseLSTMCell`, of every layer.

    >>> lstm = sbnet.nn.BlockSparseLSTM(64, 128, density=0.1)
    >>> y, (h, c) = lstm(torch.randn(35, 8, 64))  # steps, batch, features
    >>> y.shape
    torch.Size([35, 8, 128])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        **cell: Any,
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"BlockSparseLSTM: num_layers: expected 1 or more, got {num_layers}")
        self.batch_first = batch_first
        self.cells = nn.ModuleList(
            BlockSparseLSTMCell(hidden_size if i else input_size, hidden_size, bias, **cell) for i in range(num_layers)
        )

    @classmethod
    def from_dense(
        cls,
        lstm: nn.LSTM,
        density: float = 0.25,
        block_size: int = 32,
        *,
        input_density: float = 1.0,
        by: str = "magnitude",
    ) -> BlockSparseLSTM:
        """The blocks of a trained nn.LSTM that are kept, with their values."""
        if not isinstance(lstm, nn.LSTM) or lstm.bidirectional or lstm.proj_size or lstm.dropout:
            raise ValueError(
                "BlockSparseLSTM.from_dense: lstm: expected an nn.LSTM of one direction, without projection and "
                f"dropout, got {lstm}"
            )
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.batch_first = lstm.batch_first
        made.cells = nn.ModuleList()
        for i in range(lstm.num_layers):
            inputs, hidden = (getattr(lstm, f"weight_{kind}_l{i}") for kind in ("ih", "hh"))
            biases = [getattr(lstm, f"bias_{kind}_l{i}") for kind in ("ih", "hh")] if lstm.bias else None
            made.cells.append(BlockSparseLSTMCell._of(inputs, hidden, biases, density, block_size, input_density, by))
        return made.train(lstm.training)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """x [T,N,input_size] ([N,T,input_size] with batch_first) and (h, c) of [num_layers,N,hidden_size], or None for
        zeros -> (h of the last layer at every step [T,N,hidden_size], the last (h, c) of every layer)."""
        if x.dim() != 3:
            raise ValueError(f"BlockSparseLSTM: x: expected 3 dimensions, got {x.dim()}")
        steps = x.transpose(0, 1) if self.batch_first else x
        last = []
        for i, cell in enumerate(self.cells):
            assert isinstance(cell, BlockSparseLSTMCell)
            start = (state[0][i], state[1][i]) if state is not None else zeros(x, steps.shape[1], cell.hidden_size)
            steps, end = run_steps(cell, steps, start)
            last.append(end)
        h, c = (torch.stack(t) for t in zip(*last, strict=True))
        return (steps.transpose(0, 1) if self.batch_first else steps), (h, c)


def zeros(x: Tensor, rows: int, features: int) -> State:
    return x.new_zeros(rows, features), x.new_zeros(rows, features)


def run_steps(cell: BlockSparseLSTMCell, x: Tensor, state: State) -> tuple[Tensor, State]:
    """All steps of x [T,N,C]: inputs in one product, and (h at every step, the last (h, c))."""
    h, c = state
    gates, seen = cell.input(x), None
    weight: Tensor = cell.hidden.weight
    # A compiler sees no list that is filled later; there each step's gradient is a product of its own.
    if torch.is_grad_enabled() and weight.requires_grad and not torch.compiler.is_compiling():
        seen = list[Tensor]()
        gates = _WeightOfSteps.apply(gates, weight, cell.hidden.layout, seen, cell.hidden.allow_tf32)
        weight = weight.detach()
    outputs = []
    for from_input in gates.unbind(0):
        if seen is not None:
            seen.append(h.detach())
        product = blocksparse_matmul(h, weight, cell.hidden.layout, allow_tf32=cell.hidden.allow_tf32)
        h, c = cell.step(from_input, product, c)
        outputs.append(h)
    return torch.stack(outputs), (h, c)


class _WeightOfSteps(torch.autograd.Function):
    """gates as they are. Their gradient is that of h V at every step: with the h seen it gives V's gradient at once."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, weight: Tensor, layout: BlockLayout, seen: list[Tensor], allow_tf32: bool
    ) -> Tensor:
        ctx.layout, ctx.seen, ctx.dtype, ctx.allow_tf32 = layout, seen, weight.dtype, allow_tf32
        return gates.view_as(gates)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        h = torch.stack(ctx.seen).to(grad.dtype)
        weight = blocksparse_weight_grad([(h, grad)], ctx.layout, allow_tf32=ctx.allow_tf32)
        return grad, weight.to(ctx.dtype), None, None, None


def _reordered(t: Tensor) -> Tensor:
    """PyTorch's gates i, f, u, o as i, u, f, o, along the first axis."""
    i, f, u, o = t.detach().chunk(4)
    return torch.cat([i, u, f, o])
