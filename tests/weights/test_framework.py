"""Gradients, compile, export, CUDA graphs, and bad input of the ops on block-sparse weights."""

import pytest
import torch

from sbnet import BlockLayout, blocksparse_matmul, blocksparse_weight_grad, reference
from support.helpers import ACTIVATIONS, assert_bitwise, assert_same_gradients, captured
from support.refusals import OPS, refused, zeros
from support.weight_cases import random_layout


def inputs(layout, device, rows=(2, 5)):
    tensors = (
        torch.randn(*rows, layout.in_features, device=device),
        torch.randn(layout.weight_shape, device=device),
        torch.rand(layout.blocks, device=device) + 0.1,
        torch.randn(layout.out_features, device=device),
    )
    return [t.requires_grad_() for t in tensors]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_and_their_gradients(device, activation):
    """x, weight, gate and bias, once and twice, against PyTorch's own on the dense weight."""
    layout = random_layout(3, 4, 8, 0.6, ragged=3)
    tensors = inputs(layout, device)

    def ours(x, w, g, b):
        return blocksparse_matmul(x, w, layout, g, b, activation)

    def dense(x, w, g, b):
        y = x @ layout.to_dense(w * g[:, None, None]) + b
        return reference.activate(y, activation, 0.01)

    assert_same_gradients(ours, dense, tensors)


def test_gradient_of_the_transposed_product(device):
    layout = random_layout(3, 4, 16, 0.6)
    y, w = torch.randn(7, 64, device=device, requires_grad=True), torch.randn(layout.weight_shape, device=device)
    w.requires_grad_()
    got = torch.autograd.grad(blocksparse_matmul(y, w, layout, transposed=True).square().sum(), (y, w))
    want = torch.autograd.grad((y @ layout.to_dense(w).T).square().sum(), (y, w))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_gradient_of_the_weight_gradient(device):
    layout = random_layout(3, 4, 16, 0.6)
    pairs = [(torch.randn(7, 48, device=device), torch.randn(7, 64, device=device)) for _ in range(3)]
    leaves = [t.requires_grad_() for p in pairs for t in p]
    got = torch.autograd.grad(blocksparse_weight_grad(pairs, layout).square().sum(), leaves)
    want = torch.autograd.grad(layout.from_dense(sum(x.T @ dy for x, dy in pairs)).square().sum(), leaves)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_half_gradients(device):
    layout = random_layout(2, 3, 32, 0.7)
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(9, 64, device=device, dtype=dtype, requires_grad=True)
        w = torch.randn(layout.weight_shape, device=device, dtype=dtype, requires_grad=True)
        blocksparse_matmul(x, w, layout).float().sum().backward()
        assert x.grad.dtype == w.grad.dtype == dtype
        torch.testing.assert_close(x.grad, layout.to_dense(w).sum(1).detach().expand(9, -1), rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(device, dynamic):
    """A layout whose tables are on the device already, and one whose are not."""
    torch._dynamo.reset()
    for warm in (True, False):
        layout = random_layout(3, 4, 8, 0.6)
        x, w, g, b = inputs(layout, device)
        if warm:
            layout.on(x.device)
        compiled = torch.compile(
            lambda x, w, g, b, layout=layout: blocksparse_matmul(x, w, layout, g, b, "relu"),
            fullgraph=True, backend="aot_eager", dynamic=dynamic,
        )  # fmt: skip
        for rows in ((2, 5), (3, 7), (4, 4)):
            x = torch.randn(*rows, layout.in_features, device=device, requires_grad=True)
            got, want = compiled(x, w, g, b), blocksparse_matmul(x, w, layout, g, b, "relu")
            assert_bitwise(got, want)
            grads = [torch.autograd.grad(y.square().sum(), (x, w, g, b)) for y in (got, want)]
            for a, c in zip(*grads, strict=True):
                torch.testing.assert_close(a, c)


@pytest.mark.parametrize("strict", [False, True])
def test_export(device, strict):
    layout = random_layout(3, 4, 8, 0.6)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(layout.weight_shape))

        def forward(self, x):
            return blocksparse_matmul(x, self.weight, layout, activation="gelu")

    layer = Layer().to(device)
    x = torch.randn(5, 24, device=device)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), strict=strict)
    for rows in (5, 9):
        x = torch.randn(rows, 24, device=device)
        assert_bitwise(program.module()(x), layer(x))


def test_autocast(device):
    layout = random_layout(2, 2, 16, 1.0)
    x, w = torch.randn(3, 32, device=device), torch.randn(layout.weight_shape, device=device)
    with torch.autocast(device, torch.bfloat16):
        y = blocksparse_matmul(x, w, layout, bias=torch.zeros(32, device=device))
    assert y.dtype == torch.bfloat16
    assert_bitwise(y, blocksparse_matmul(x.bfloat16(), w.bfloat16(), layout))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_cuda_graph(dtype):
    """Forward and backward, captured; nothing waits for the device."""
    layout = random_layout(4, 4, 32, 0.6)
    x = torch.randn(50, 128, device="cuda", dtype=dtype, requires_grad=True)
    w = torch.randn(layout.weight_shape, device="cuda", dtype=dtype, requires_grad=True)
    gate = torch.rand(layout.blocks, device="cuda")
    bias = torch.randn(128, device="cuda", dtype=dtype)

    def step():
        y = blocksparse_matmul(x, w, layout, gate, bias, "relu")
        return y, *torch.autograd.grad(y.float().square().sum(), (x, w))

    graph, results = captured(step)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        gate[::2] = 0
    graph.replay()
    for got, want in zip(results, step(), strict=True):
        assert_bitwise(got, want)


# ---- bad input
def test_bad_arguments(device):
    layout = random_layout(2, 3, 8, 1.0)
    x, w = zeros(4, 16, device=device), zeros(6, 8, 8, device=device)
    bad = [
        ("layout", (x, w, "layout"), {}), ("x: expected", (x[:, :15], w, layout), {}),
        ("weight: expected", (x, w[:5], layout), {}), ("weight: expected", (x, w[:, :, :7], layout), {}),
        ("weight: expected", (x, w.half(), layout), {}), ("x: expected float32", (x.double(), w.double(), layout), {}),
        ("gate: expected", (x, w, layout, zeros(5, device=device)), {}),
        ("gate: expected", (x, w, layout, zeros(6, 1, device=device)), {}),
        ("bias: expected", (x, w, layout, None, zeros(16, device=device)), {}),
        ("bias: dtype: expected float32, got float64", (x, w, layout, None, zeros(24, device=device).double()), {}),
        ("activation", (x, w, layout, None, None, "tanh"), {}), ("feature_axis", (x, w, layout), {"feature_axis": 2}),
        ("one dimension", (zeros(device=device), w, layout), {}), ("x", (None, w, layout), {}),
    ]  # fmt: skip
    for match, arguments, options in bad:
        refused(match, blocksparse_matmul, *arguments, **options)
    dy = zeros(4, 24, device=device)
    refused("pairs", blocksparse_weight_grad, [], layout)
    refused("pairs: expected", blocksparse_weight_grad, [(x,)], layout)
    refused("dy: expected", blocksparse_weight_grad, [(x, dy[:3])], layout)
    refused("dy: expected", blocksparse_weight_grad, [(x, dy[:, :23])], layout)
    refused("x: expected|dtype", blocksparse_weight_grad, [(x, dy.half())], layout)
    refused("pairs: expected", blocksparse_weight_grad, [(x, dy), (x.half(), dy.half())], layout)


def test_raw_layout_numbers(device):
    layout = random_layout(2, 3, 8, 1.0)
    tables, numbers = layout.on(torch.device(device))
    x, w = zeros(4, 16, device=device), zeros(6, 8, 8, device=device)
    rest = (False, "none", 0.0, False)
    for at in range(9):
        for value in (-1, 2**31, 2**62, -(2**62), 7):
            changed = [*numbers]
            changed[at] = value
            refused("", OPS.blocksparse_matmul, x, w, None, None, tables, changed, *rest)
    refused("layout", OPS.blocksparse_matmul, x, w, None, None, tables, numbers[:8], *rest)
    refused("tables", OPS.blocksparse_matmul, x, w, None, None, tables[:-1], numbers, *rest)
    refused("tables", OPS.blocksparse_matmul, x, w, None, None, tables.long(), numbers, *rest)


def test_raw_tables_of_garbage(device):
    """Numbers that name no block are skipped: nothing is read or written out of bounds (sanitizers watch)."""
    layout = random_layout(3, 4, 16, 1.0)
    tables, numbers = layout.on(torch.device(device))
    own = tables.numel() - sum(numbers[6:])
    numbers = [*numbers[:6], 0, 0, 0]
    x, dy = torch.ones(20, 48, device=device), torch.ones(20, 64, device=device)
    w, gate = torch.ones(layout.weight_shape, device=device), torch.ones(layout.blocks, device=device)
    rest = ("none", 0.0, False)
    for value in (-1, 2**31 - 1, -(2**31), 10**6, 12):
        bad = torch.full((own,), value, dtype=torch.int32, device=device)
        for dtype in (torch.float32, torch.float16):
            args = w.to(dtype), None, None, bad, numbers
            for g in (None, gate):
                OPS.blocksparse_matmul(x.to(dtype), w.to(dtype), g, None, bad, numbers, False, *rest)
                OPS.blocksparse_matmul(dy.to(dtype), *args, True, *rest)
            dw = OPS.blocksparse_weight_grad([x.to(dtype)], [dy.to(dtype)], bad, numbers, False, False)
            if value != 12:
                assert_bitwise(dw, torch.zeros_like(dw))
    if device == "cuda":
        torch.cuda.synchronize()


def test_other_devices_are_refused():
    layout = BlockLayout([[1]], 8)
    x, w = zeros(2, 8), zeros(1, 8, 8)
    tables, numbers = layout.on(torch.device("cpu"))
    with pytest.raises(RuntimeError):
        OPS.blocksparse_matmul(x, w.to("meta"), None, None, tables, numbers, False, "none", 0.0, False)
