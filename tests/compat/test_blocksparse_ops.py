"""blocksparse's elementwise ops, norms, LSTM gates and dropout by its names."""

import pytest
import torch

from sbnet.compat.blocksparse import ewops as ew
from sbnet.compat.blocksparse import lstm, norms
from support.formulas import check
from support.helpers import FLOATS, assert_bitwise

ONE = {
    "negative": lambda x: -x, "reciprocal": lambda x: 1 / x, "square": lambda x: x * x, "sqrt": lambda x: x**0.5,
    "exp": torch.exp, "log": torch.log, "sigmoid": lambda x: 1 / (1 + (-x).exp()), "tanh": torch.tanh,
    "relu": lambda x: x.clamp(min=0), "elu": lambda x: torch.where(x > 0, x, torch.expm1(x)),
    "gelu": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "swish": lambda x: x / (1 + (-x).exp()), "fast_gelu": lambda x: x / (1 + (-1.702 * x).exp()),
}  # fmt: skip
TWO = {
    "add": lambda x, y: x + y,
    "multiply": lambda x, y: x * y,
    "subtract": lambda x, y: x - y,
    "divide": lambda x, y: x / y,
    "maximum": lambda x, y: torch.where(x > y, x, y),
    "minimum": lambda x, y: torch.where(x < y, x, y),
}


@pytest.mark.parametrize("name", [*ONE, *TWO])
def test_elementwise(device, name):
    x, y = (torch.rand(9, 33, device=device) + 0.1 for _ in range(2))
    if name not in ("sqrt", "log"):
        x = x * torch.where(torch.rand_like(x) < 0.5, -1.0, 1.0)
    check(getattr(ew, name), {**ONE, **TWO}[name], *((x,) if name in ONE else (x, y)))


def test_bias_relu_and_cwise_linear(device):
    x, a, b = torch.randn(3, 5, 4, 6, device=device), torch.randn(5, device=device), torch.randn(5, device=device)
    wide = (1, 5, 1, 1)
    check(lambda x, b: ew.bias_relu(x, b, axis=1, relu=True), lambda x, b: (x + b.view(wide)).clamp(min=0), x, b)
    check(lambda x, b: ew.bias_relu(x, b, axis=1), lambda x, b: x + b.view(wide), x, b)
    check(
        lambda x, b: ew.bias_relu(x, b, axis=1, fast_gelu=True),
        lambda x, b: (x + b.view(wide)) / (1 + (-1.702 * (x + b.view(wide))).exp()),
        *(x, b),
    )
    with pytest.raises(ValueError, match="expected one of them at most"):
        ew.bias_relu(x, b, 1, True, True)
    check(ew.cwise_linear, lambda x, a, b: x * a.view(wide) + b.view(wide), x, a, b)
    check(
        lambda x, a, b: ew.cwise_linear(x, a, b, relu=True, bias_first=True),
        lambda x, a, b: ((x + b.view(wide)) * a.view(wide)).clamp(min=0),
        *(x, a, b),
    )
    assert_bitwise(ew.cwise_linear(x), x)
    with pytest.raises(ValueError, match="cwise_linear: gain: expected 5 elements, got 4"):
        ew.cwise_linear(x, a[:4])


def test_add_n8(device):
    xs = [torch.randn(7, 5, device=device) for _ in range(8)]
    for count in range(1, 9):
        check(lambda *t: ew.add_n8(t), lambda *t: sum(t), *xs[:count])
    for wrong in ([], [xs[0]] * 9, [xs[0], xs[1][:3]]):
        with pytest.raises(ValueError, match="expected"):
            ew.add_n8(wrong)


def test_filter_tensor(device):
    x = torch.tensor([1.0, -7.0, float("inf"), float("nan"), -float("inf")], device=device)
    assert ew.filter_tensor(x, 2.0, 5.0, True, True).tolist() == [2.0, -5.0, 0.0, 0.0, 0.0]
    assert ew.filter_tensor(x, saturate=3.0, zero_nans=True).tolist() == [1.0, -3.0, 3.0, 0.0, -3.0]
    torch.testing.assert_close(ew.filter_tensor(x), x, rtol=0, atol=0, equal_nan=True)


def test_sparse_relu_and_assign_add(device):
    x = torch.randn(6, 50, device=device, requires_grad=True)
    y = ew.sparse_relu(x, 0.5)
    wide = x.detach().double()
    cut = wide.mean(-1, keepdim=True) + 0.5 * wide.std(-1, correction=0, keepdim=True)
    torch.testing.assert_close(y.double(), (wide - cut).clamp(min=0), rtol=1e-5, atol=1e-6)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert_bitwise(dx, (y > 0).float())
    total = torch.ones(3, device=device)
    assert ew.assign_add(total, total * 2) is total
    assert total.tolist() == [3.0] * 3
    assert_bitwise(ew.scale_tensor(total, 2.0), total * 2)


def test_float_cast(device):
    x = torch.randn(100, device=device, requires_grad=True)
    y = ew.float_cast(x, torch.float16, torch.bfloat16)
    assert y.dtype == torch.float16
    dy = torch.randn(100, device=device).half()
    y.backward(dy)
    assert_bitwise(x.grad, dy.bfloat16().float())
    x.grad = None
    ew.float_cast(x, torch.bfloat16, torch.float8_e4m3fn).backward(dy.bfloat16())
    assert_bitwise(x.grad, dy.bfloat16().to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("shape", [(1023,), (1024,), (63, 63, 63), (64, 64, 64)])
def test_dropout(device, shape):
    """blocksparse's sizes: share kept, the same mask again, masks that broadcast, the gradient."""
    x = torch.randn(shape, device=device, requires_grad=True)
    y, mask = ew.dropout(x, 0.8)
    assert mask.dtype == torch.int32
    assert mask.shape == (-(-x.numel() // 32),)
    assert abs(float((y != 0).float().mean()) - 0.8) < 4 * (0.16 / x.numel()) ** 0.5 + 1e-3
    again, same = ew.dropout(x, 0.8, mask)
    assert same is mask
    assert_bitwise(again, y)
    assert_bitwise(y, torch.where(y != 0, x / 0.8, torch.zeros_like(x)))
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(dx, torch.where(y != 0, dy / 0.8, torch.zeros_like(dy)))
    bits = [int(mask[0]) >> i & 1 for i in range(32)]
    assert bits == (y.flatten()[:32] != 0).int().tolist(), "lowest bit first"
    if len(shape) == 3:
        for part in ((shape[0], 1, shape[2]), (1, shape[1], 1), (1, 1, 1)):
            y, mask = ew.dropout(torch.ones(shape, device=device), 0.5, mask_shape=part)
            assert mask.shape == (-(-part[0] * part[1] * part[2] // 32),)
            kept = (y != 0)[tuple(slice(n) for n in part)]
            assert_bitwise(y != 0, kept.expand(shape))
    with pytest.raises(ValueError, match="dropout: mask: expected"):
        ew.dropout(x, 0.8, mask.long())
    with pytest.raises(ValueError, match="dropout: keep_prob"):
        ew.dropout(x, 0.0)


def test_concrete_gate(device):
    loga = torch.linspace(-6, 6, 4000, device=device, requires_grad=True)
    gate = ew.concrete_gate(loga)
    low, high = gate.detach()[:400].mean(), gate.detach()[-400:].mean()
    assert bool(((gate >= 0) & (gate <= 1)).all())
    assert float(low) < 0.05 < 0.95 < float(high)
    gate.sum().backward()
    assert torch.isfinite(loga.grad).all()
    want = (torch.sigmoid(loga) * 1.2 - 0.1).clamp(0, 1)
    torch.testing.assert_close(ew.concrete_gate_infer(loga), want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("merged", [True, False])
def test_fused_lstm_gates(device, merged, dtype):
    c, x = torch.randn(6, 10, device=device).to(dtype), torch.randn(6, 40, device=device).to(dtype)

    def ours(c, x):
        return lstm.fused_lstm_gates(c, *((x,) if merged else lstm.split4(x)), forget_bias=0.5)

    def plain(c, x):
        i, u, f, o = x[:, :10], x[:, 10:20], x[:, 20:30], x[:, 30:]
        after = c / (1 + (-f - 0.5).exp()) + torch.tanh(u) / (1 + (-i).exp())
        return after, torch.tanh(after) / (1 + (-o).exp())

    check(ours, plain, c, x)
    assert_bitwise(lstm.concat4(*lstm.split4(x)), x)
    with pytest.raises(ValueError, match="fused_lstm_gates: gates"):
        lstm.fused_lstm_gates(c, x[:, :20])


SMALL = [(rows, features) for rows in (4, 64) for features in (31, 32, 33)]
LARGE = [(512, n) for n in (896, 1024, 4096, 8188, 8191, 8192, 8193)] + [(128, n) for n in (32764, 32767, 32768)]


@pytest.mark.parametrize(
    ("rows", "features"),
    [*SMALL, (64, 896), (3, 8193), (4, 32767), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in LARGE)],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_layer_norm(device, axis, rows, features):
    """blocksparse's shapes."""
    x = torch.randn((rows, features) if axis else (features, rows), device=device)
    g, b = torch.randn(features, device=device), torch.randn(features, device=device)
    segments = 7 if features % 7 == 0 else 1
    for relu in (False, True):

        def plain(x, g, b, relu=relu):
            t = (x if axis else x.T).unflatten(-1, (segments, features // segments))
            t = (t - t.mean(-1, keepdim=True)) * (t.var(-1, correction=0, keepdim=True) + 1e-6).rsqrt()
            t = t.flatten(-2) * g + b
            return (t.clamp(min=0) if relu else t) if axis else (t.clamp(min=0) if relu else t).T

        check(lambda x, g, b, relu=relu: norms.layer_norm(x, g, b, axis, segments, relu=relu), plain, x, g, b)
    with pytest.raises(ValueError, match="layer_norm: segments"):
        norms.layer_norm(x, g, b, axis, features + 1)


def test_batch_norm(device):
    x = torch.randn(4, 6, 5, 7, device=device) * 3 + 1
    g, b, m, v = (torch.rand(6, device=device) + 0.5 for _ in range(4))

    def plain(x, g, b):
        m, v = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
        return (x - m.view(6, 1, 1)) / (v + 1e-6).sqrt().view(6, 1, 1) * g.view(6, 1, 1) + b.view(6, 1, 1), m, v

    def inference(x, g, b, m, v):
        return (x - m.view(6, 1, 1)) / (v + 1e-6).sqrt().view(6, 1, 1) * g.view(6, 1, 1) + b.view(6, 1, 1)

    def ours(x, g, b, *rest):  # float64 in, for the check: batch_norm computes in float32
        return norms.batch_norm(x, g, b) if not rest else norms.batch_norm_inference(x, g, b, *rest)

    check(ours, plain, x, g, b)
    check(ours, inference, x, g, b, m, v)
    with pytest.raises(ValueError, match="batch_norm: m: expected"):
        norms.batch_norm_inference(x, g, b, m[:3], v)


def compiled(f, *tensors):
    """f in one graph: the values and gradients that it has uncompiled."""
    torch._dynamo.reset()
    results = []
    for run in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        torch.manual_seed(3)
        y = run(*leaves)
        y = y if isinstance(y, tuple) else (y,)
        total = sum(t.float().square().sum() for t in y)
        results.append((*y, *torch.autograd.grad(total, leaves, allow_unused=True)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("names", [tuple(ONE), tuple(TWO)], ids=["one", "two"])
def test_compile_elementwise(device, names):
    x, y = (torch.rand(9, 33, device=device) + 0.1 for _ in range(2))

    def every(x, y):
        return tuple(getattr(ew, name)(x) if name in ONE else getattr(ew, name)(x, y) for name in names)

    compiled(every, x, y)


def test_compile_the_rest(device):
    x, wide = torch.randn(6, 12, device=device), torch.randn(6, 48, device=device)
    g, b = torch.rand(12, device=device) + 0.5, torch.randn(12, device=device)
    _, mask = ew.dropout(x, 0.7)
    compiled(lambda x, g, b: ew.cwise_linear(ew.bias_relu(x, b, fast_gelu=True), g, b, relu=True), x, g, b)
    compiled(lambda x: ew.filter_tensor(ew.add_n8([x] * 8), 0.5, 3.0, True, True), x)
    compiled(lambda x: ew.dropout(x, 0.7, mask)[0], x)
    compiled(lambda x: (ew.sparse_relu(x), ew.concrete_gate_infer(x)), x)
    compiled(lambda x: ew.float_cast(x, torch.bfloat16, torch.float16), x)
    compiled(lambda c, x: lstm.fused_lstm_gates(c, *lstm.split4(x)), x, wide)
    compiled(lambda c, x: lstm.fused_lstm_gates(c, x), x, wide)
    compiled(lambda x, g, b: (norms.layer_norm(x, g, b, segments=3, relu=True), *norms.batch_norm(x, g, b)), x, g, b)
