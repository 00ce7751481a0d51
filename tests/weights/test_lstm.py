"""Block-sparse and dense LSTMs against PyTorch's and plain formulas: values, gradients, compiling, export."""

import copy

import pytest
import torch
from torch import nn

import sbnet
from sbnet.compat.blocksparse import FusedBasicLSTMCell, fused_lstm_gates, grouped_lstm
from sbnet.nn import BlockSparseLSTM, BlockSparseLSTMCell
from support.formulas import check
from support.helpers import assert_as_accurate_as_torch, assert_bitwise


def leaves_of(module):
    return [p for p in module.parameters() if p.requires_grad]


def compared(got, plain, exact):
    for g, p, e in zip(got, plain, exact, strict=True):
        assert_as_accurate_as_torch(g, p, e)


def run(module, x, state):
    """Values, and the gradients of x, of both states and of every parameter."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, *state)]
    y, (h, c) = module(leaves[0], (leaves[1], leaves[2]))
    generator = torch.Generator().manual_seed(1)
    total = sum((t * torch.randn(t.shape, generator=generator).to(t.device, t.dtype)).sum() for t in (y, h, c))
    grads = torch.autograd.grad(total, [*leaves, *leaves_of(module)])
    return [y, h, c, *grads[:3]], grads[3:]


@pytest.mark.parametrize(("layers", "batch_first", "bias"), [(1, False, True), (2, True, True), (1, False, False)])
def test_whole_lstm_equals_pytorchs(device, layers, batch_first, bias):
    """At density 1; the weight gradient of all steps at once is that of each step summed."""
    dense = nn.LSTM(20, 24, layers, bias, batch_first, device=device)
    ours = BlockSparseLSTM.from_dense(dense, 1.0, 8)
    x = torch.randn(5, 3, 20, device=device).transpose(0, 1 if batch_first else 0)
    state = [torch.randn(layers, 3, 24, device=device) for _ in range(2)]
    (got, grads), (plain, dense_grads) = run(ours, x, state), run(dense, x, state)
    exact, wide_grads = run(copy.deepcopy(dense).double(), x.double(), [s.double() for s in state])
    compared(got, plain, exact)
    for name, mine, cell in (("ih", "input", 0), ("hh", "hidden", layers - 1)):
        names = [n for n, _ in dense.named_parameters()]
        at = names.index(f"weight_{name}_l{cell}")
        layer = getattr(ours.cells[cell], mine)
        own = grads[[n for n, _ in ours.named_parameters()].index(f"cells.{cell}.{mine}.weight")]

        def ordered(t, layer=layer):
            i, f, u, o = t.chunk(4)
            return layer.layout.from_dense(torch.cat([i, u, f, o]).t())

        assert_as_accurate_as_torch(own, ordered(dense_grads[at]), ordered(wide_grads[at]))
    y, _ = ours(x)
    torch.testing.assert_close(y, dense(x)[0], rtol=1e-4, atol=1e-5)


def test_sparse_lstm_is_its_cell_step_by_step(device):
    """Values and gradients, one product for all steps against one each; states go in and out."""
    lstm = BlockSparseLSTM(20, 48, density=0.3, block_size=8, input_density=0.7, device=device)
    cell = lstm.cells[0]
    assert cell.hidden.density == pytest.approx(0.3, abs=0.02)
    x = torch.randn(6, 3, 20, device=device)
    y, (h, c) = lstm(x)
    grads = torch.autograd.grad(y.square().sum() + c.sum(), leaves_of(lstm))
    state, outputs = None, []
    for step in x:
        state = cell(step, state)
        outputs.append(state[0])
    torch.testing.assert_close(torch.stack(outputs), y)
    torch.testing.assert_close((h[0], c[0]), state)
    for got, want in zip(
        grads, torch.autograd.grad(torch.stack(outputs).square().sum() + state[1].sum(), leaves_of(cell)), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        first, between = lstm(x[:2])
        second, end = lstm(x[2:], between)
        torch.testing.assert_close(torch.cat([first, second]), y)
        torch.testing.assert_close(end, (h, c))


def test_pruned_cell_keeps_its_blocks(device):
    dense = nn.LSTMCell(16, 32, device=device)
    cell = BlockSparseLSTMCell.from_dense(dense, density=0.5, block_size=8, input_density=0.5)
    kept = cell.hidden.layout.to_dense(cell.hidden.weight).t()
    i, f, u, o = dense.weight_hh.chunk(4)
    whole = torch.cat([i, u, f, o])
    assert_bitwise(kept[kept != 0], whole[kept != 0])
    assert cell.forget_bias == 0
    half = copy.deepcopy(cell).bfloat16()
    h, c = half(torch.randn(2, 16, device=device, dtype=torch.bfloat16))
    assert h.dtype == c.dtype == torch.bfloat16
    other = BlockSparseLSTMCell(16, 32, density=0.9, block_size=8, forget_bias=0.0, device=device)
    other.load_state_dict(cell.state_dict())
    x = torch.randn(2, 16, device=device)
    assert_bitwise(other(x)[0], cell(x)[0])


def test_autocast(device):
    lstm = BlockSparseLSTM(16, 32, block_size=8, device=device)
    x = torch.randn(4, 3, 16, device=device)
    with torch.autocast(device, torch.bfloat16):
        y, _ = lstm(x)
    y.float().sum().backward()
    want = torch.autograd.grad(lstm(x)[0].sum(), lstm.cells[0].hidden.weight)[0]
    assert lstm.cells[0].hidden.weight.grad.dtype == torch.float32
    torch.testing.assert_close(lstm.cells[0].hidden.weight.grad, want, rtol=0.1, atol=0.1)


def test_refuses():
    for lstm in (nn.LSTM(8, 8, bidirectional=True), nn.LSTM(8, 8, 2, dropout=0.1), nn.GRU(8, 8)):
        with pytest.raises(ValueError, match=r"BlockSparseLSTM.from_dense: lstm: expected"):
            BlockSparseLSTM.from_dense(lstm)
    with pytest.raises(TypeError, match=r"expected an nn.LSTMCell, got GRUCell"):
        BlockSparseLSTMCell.from_dense(nn.GRUCell(8, 8))
    with pytest.raises(ValueError, match="num_layers: expected 1 or more"):
        BlockSparseLSTM(8, 8, 0)
    with pytest.raises(ValueError, match="x: expected 3 dimensions"):
        BlockSparseLSTM(8, 8, block_size=8)(torch.randn(2, 8))


def test_compile(device):
    """In one graph, where each step has a weight gradient of its own: the same numbers."""
    torch._dynamo.reset()
    lstm = BlockSparseLSTM(16, 24, 2, block_size=8, device=device)
    compiled = torch.compile(lstm, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 2, 16, device=device)
    got, want = compiled(x)[0], lstm(x)[0]
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(y.square().sum(), leaves_of(lstm)) for y in (got, want)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


class Stepping(nn.Module):
    """A language model's step: bytes and states in, logits and states out."""

    def __init__(self):
        super().__init__()
        self.bytes, self.lstm = nn.Embedding(50, 16), BlockSparseLSTM(16, 32, 2, block_size=8)
        self.logits = sbnet.nn.BlockSparseLinear(32, 50, density=0.5, block_size=8)

    def forward(self, tokens, h, c):
        y, (h, c) = self.lstm(self.bytes(tokens), (h, c))
        return self.logits(y), h, c


def test_exported_lstm_runs_in_onnx_runtime(device, tmp_path):
    """Unrolled: in each layer one product with the inputs of all steps and one with the state a step."""
    pytest.importorskip("onnxruntime")
    from support.export_cases import ops_of
    from support.ort_models import PROVIDER, skip_without

    skip_without(device)

    model = Stepping().to(device).eval()
    inputs = torch.randint(50, (3, 2), device=device), *torch.randn(2, 2, 2, 32, device=device)
    path = sbnet.export.to_onnx(model, inputs, tmp_path / "m.onnx")
    assert ops_of(path).count("blocksparse_matmul") == 2 * (1 + 3) + 1
    for error in sbnet.export.verify(path, model, inputs, [PROVIDER[device]], quiet=True):
        assert error.rms < 1e-5 * error.rms_of_torch, error


# ---- blocksparse's dense ones
def test_fused_basic_cell(device):
    cell = FusedBasicLSTMCell(6, 10, forget_bias=0.5).to(device)
    with torch.no_grad():
        cell.bias.normal_()
    x, c, h = torch.randn(4, 6, device=device), torch.randn(4, 10, device=device), torch.randn(4, 10, device=device)

    def plain(x, c, h, kernel, bias):
        i, u, f, o = (torch.cat([x, h], 1) @ kernel + bias).chunk(4, 1)
        c = c * torch.sigmoid(f + 0.5) + torch.sigmoid(i) * torch.tanh(u)
        return torch.sigmoid(o) * torch.tanh(c), c

    def ours(x, c, h, kernel, bias):
        y, (c, h) = torch.func.functional_call(cell, {"kernel": kernel, "bias": bias}, (x, (c, h)))
        assert y is h
        return y, c

    check(ours, plain, x, c, h, cell.kernel.detach(), cell.bias.detach())


@pytest.mark.parametrize("normalised", [False, True])
def test_grouped_lstm(device, normalised):
    x, c, h = torch.randn(3, 4, 6, device=device), *torch.randn(2, 3, 8, device=device)
    kernel, bias, gain = torch.randn(14, 32, device=device) / 4, *torch.randn(2, 32, device=device)

    def plain(x, c, h, kernel, bias, gain):
        outputs = []
        for t in range(4):
            gates = torch.cat([x[:, t], h], 1) @ kernel
            if normalised:
                runs = gates.unflatten(1, (4, 8))
                runs = (runs - runs.mean(-1, True)) * (runs.var(-1, correction=0, keepdim=True) + 1e-6).rsqrt()
                gates = runs.flatten(1) * gain + bias
            else:
                gates = gates + bias + 0 * gain
            i, u, f, o = gates.chunk(4, 1)
            c = c * torch.sigmoid(f + 1) + torch.sigmoid(i) * torch.tanh(u)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs, 1), c, h

    def ours(x, c, h, kernel, bias, gain):
        y, (c, h) = grouped_lstm(x, kernel, bias, (c, h), gain if normalised else None)
        return y + 0 * gain.sum(), c, h

    check(ours, plain, x, c, h, kernel, bias, gain)
    with pytest.raises(ValueError, match="fused_lstm_gates: bias: expected"):
        fused_lstm_gates(c, *torch.randn(4, 3, 8, device=device), bias=bias)
