"""Signatures and numbers by which code written for a reference would notice a difference."""

import copy
import sys

import numpy as np
import pytest
import torch
from torch import nn

import sbnet.compat.blocksparse as bs
from sbnet.compat import pytorch_block_sparse as pbs
from sbnet.compat.blocksparse import ewops
from sbnet.nn import BlockSparseLinear
from sbnet.weights import patch, prune, register_transformers
from support.helpers import assert_bitwise
from support.refusals import refused

HALVES = [torch.float16, torch.bfloat16]


# ---- signatures of both versions, as positional as code has them
X, V = torch.randn(6, 8), torch.rand(8) + 0.5
BSMM = bs.BlocksparseMatMul([[1, 0], [1, 1]], 8)
CALLS = {
    "add(name=)": (lambda: bs.add(X, V, name="a"), lambda: X + V),
    "relu(name=)": (lambda: bs.relu(X, name="a"), lambda: X.clamp(min=0)),
    "gelu(alpha)": (
        lambda: bs.gelu(X, 0.1),
        lambda: 0.5 * X * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (X + 0.1 * X**3))),
    ),
    "add_n8(name=)": (lambda: bs.add_n8([X, X], name="a"), lambda: X + X),
    "assign_add(name=)": (lambda: bs.assign_add(X.clone(), X, name="a"), lambda: X + X),
    "bias_relu(x, b, -1, True, False, atomics, bench)": (
        lambda: bs.bias_relu(X, V, -1, True, False, True, 0),
        lambda: (X + V).clamp(min=0),
    ),
    "cwise_linear(x, gain, bias, relu, bias_first, use_tf)": (
        lambda: bs.cwise_linear(X, V, V, True, True, False),
        lambda: ((X + V) * V).clamp(min=0),
    ),
    "cwise_linear(gain=, bias= of [1, C])": (
        lambda: bs.conv.cwise_linear(X, gain=V[None], bias=V[None]),
        lambda: X * V + V,
    ),
    "layer_norm(x, g, b, 1, 1e-6, True)": (
        lambda: bs.layer_norm(X, V, V, 1, 1e-6, True),
        lambda: normed(X, 1e-6).mul(V).add(V).clamp(min=0),
    ),
    "layer_norm(x, g, b, 1, 2, 1e-3)": (
        lambda: bs.layer_norm(X, V, V, 1, 2, 1e-3),
        lambda: normed(X.view(6, 2, 4), 1e-3).view(6, 8) * V + V,
    ),
    "layer_norm(g of [1, C])": (lambda: bs.layer_norm(X, V[None], V[None]), lambda: normed(X, 1e-6) * V + V),
    "batch_norm_inference(g of [1, C, 1, 1])": (
        lambda: bs.batch_norm_inference(X, *[V.view(1, 8, 1, 1)] * 4),
        lambda: (X - V) / (V + 1e-6).sqrt() * V + V,
    ),
    "concat4(x0, x1, x2, x3)": (lambda: bs.concat4(*bs.split4(X)), lambda: X),
    "ewops.split4, concat4": (lambda: ewops.concat4(*ewops.split4(X)), lambda: X),
    "identity_init()": (lambda: BSMM.identity_init(), lambda: torch.eye(8) * torch.tensor([1.0, 0, 1])[:, None, None]),
    "identity_init(False)": (lambda: BSMM.identity_init(False), lambda: BSMM.identity_init(1.0)),
    "identity_init(gpu=True)": (lambda: BSMM.identity_init(gpu=True), lambda: BSMM.identity_init(1.0)),
    "l2_normalize(dtype=)": (
        lambda: BSMM.l2_normalize(torch.ones(3, 8, 8).half(), dtype=torch.float32),
        lambda: BSMM.l2_normalize(torch.ones(3, 8, 8)),
    ),
    "SparseProj(nhidden, None, stride, block_size, lut, name)": (
        lambda: bs.SparseProj(64, None, 2, 32, None, "p").gather(torch.eye(64)),
        lambda: torch.eye(64)[::2],
    ),
    "SparseProj(nhidden, nproj=, gather_lut=)": (
        lambda: bs.SparseProj(8, nproj=2, gather_lut=[1, 5]).gather(torch.eye(8)),
        lambda: torch.eye(8)[[1, 5]],
    ),
    "softmax(x, scale, bench)": (lambda: bs.softmax(X, 0.5, 0), lambda: (X * 0.5).softmax(-1)),
    "float_cast(name=)": (lambda: bs.float_cast(X, torch.float16, name="c"), lambda: X.half()),
    "BlocksparseMatMul(..., name=)(x, w, name=, bench=)": (
        lambda: bs.BlocksparseMatMul([[1, 0], [1, 1]], 8, 1, True, "m")(
            torch.eye(16), torch.ones(3, 8, 8), name="y", bench=0
        ),
        lambda: torch.tensor([[1.0, 0], [1, 1]]).repeat_interleave(8, 0).repeat_interleave(8, 1),
    ),
}


def normed(x, epsilon):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + epsilon).sqrt()


@pytest.mark.parametrize("call", CALLS)
def test_signatures(call):
    got, want = (f() for f in CALLS[call])
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want)


def test_dropout_keeps_four_fifths_by_default():
    x = torch.rand(64, 64) + 1
    y, _ = bs.dropout(x)
    assert_bitwise(y, torch.where(y != 0, x / 0.8, torch.zeros(())))
    assert abs(float((y != 0).float().mean()) - 0.8) < 0.03


# ---- dtypes: float32 parameters beside half activations
MIXED = {
    "add": lambda x, v: bs.add(x, v),
    "add, turned": lambda x, v: bs.add(v, x),
    "multiply": lambda x, v: bs.multiply(x, v),
    "maximum": lambda x, v: bs.maximum(x, v),
    "bias_relu": lambda x, v: bs.bias_relu(x, v, relu=True),
    "bias_relu, fast_gelu": lambda x, v: bs.bias_relu(x, v, fast_gelu=True),
    "cwise_linear": lambda x, v: bs.cwise_linear(x, v, v),
    "layer_norm": lambda x, v: bs.layer_norm(x, v, v),
    "fused_lstm_gates": lambda x, v: bs.fused_lstm_gates(x[:, :2], x, bias=v)[1],
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_half_activations_stay_half(device, name, dtype):
    """The result has x's dtype, the gradient of a float32 parameter is float32."""
    x = torch.randn(6, 8, device=device).to(dtype).requires_grad_()
    v = (torch.rand(8, device=device) + 0.5).requires_grad_()
    y = MIXED[name](x, v)
    dx, dv = torch.autograd.grad(y.float().square().sum(), (x, v))
    assert (y.dtype, dx.dtype, dv.dtype) == (dtype, dtype, torch.float32)
    wide = MIXED[name](x.detach().double(), v.detach().double())
    torch.testing.assert_close(y.double(), wide, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("segments", [1, 4])
def test_layer_norm_sums_gradients_in_float32(device, dtype, segments):
    """4096 rows of ones as gradient: sums in halves stop at 256 or 2048. A bias beyond float16 is no infinity."""
    x = torch.randn(4096, 32, device=device).to(dtype)
    g, b = (torch.ones(32, device=device, requires_grad=True) for _ in range(2))
    y = bs.layer_norm(x, g, b, segments=segments)
    dg, db = torch.autograd.grad(y, (g, b), torch.ones_like(y))
    assert y.dtype == dtype
    assert_bitwise(db, torch.full_like(db, 4096.0))
    exact = normed(x.double().view(4096, segments, -1), 1e-6).view(4096, 32).sum(0)
    torch.testing.assert_close(dg.double(), exact, rtol=1e-4, atol=1e-3)
    big = torch.full((32,), 1e5, device=device, requires_grad=True)
    y = bs.layer_norm(x, g, big, segments=segments)
    assert torch.isfinite(torch.autograd.grad(y, big, torch.ones_like(y))[0]).all()


# ---- gradients as the reference defines them
@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_ties_give_the_gradient_to_both(device, name):
    x = torch.tensor([1.0, 2.0, 3.0], device=device, requires_grad=True)
    y = torch.tensor([2.0, 2.0, 2.0], device=device, requires_grad=True)
    dz = torch.tensor([5.0, 7.0, 9.0], device=device)
    dx, dy = torch.autograd.grad(getattr(bs, name)(x, y), (x, y), dz)
    want = ([0.0, 7.0, 9.0], [5.0, 7.0, 0.0]) if name == "maximum" else ([5.0, 7.0, 0.0], [0.0, 7.0, 9.0])
    assert (dx.tolist(), dy.tolist()) == want
    shared = torch.tensor([2.0], device=device, requires_grad=True)
    (ds,) = torch.autograd.grad(getattr(bs, name)(x, shared), shared, dz)
    assert ds.tolist() == [12.0 if name == "maximum" else 16.0]


def test_gradient_of_filter_tensor_is_filtered(device):
    x = torch.ones(5, device=device, requires_grad=True)
    dy = torch.tensor([1.0, -30.0, float("inf"), float("nan"), -float("inf")], device=device)
    (dx,) = torch.autograd.grad(bs.filter_tensor(x, 2.0, 5.0, True, True), x, dy)
    assert dx.tolist() == [2.0, -5.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("order", "forget"), [("iufo", 1.0), ("ifou", 0.0)])
def test_orders_of_lstm_gates(device, order, forget):
    """Version 1.13 and the first release."""
    c, parts = torch.randn(3, 4, device=device), torch.randn(4, 3, 4, device=device)
    named = dict(zip(order, parts, strict=True))
    after = c * torch.sigmoid(named["f"] + forget) + torch.sigmoid(named["i"]) * torch.tanh(named["u"])
    for gates in (parts.unbind(0), (torch.cat(list(parts), 1),)):
        got = bs.fused_lstm_gates(c, *gates, forget_bias=forget, order=order)
        torch.testing.assert_close(got, (after, torch.sigmoid(named["o"]) * torch.tanh(after)))
    refused("order: expected", bs.fused_lstm_gates, c, *parts.unbind(0), order="iuf")


@pytest.mark.parametrize("axis", [0, 1])
def test_gates_without_gradient(device, axis):
    """gate_grad and dw_gated: the four meanings; a closed block's weights learn unless the gradient is gated."""
    bsmm = bs.BlocksparseMatMul([[1, 0, 1], [1, 1, 0]], 8, feature_axis=axis)
    gate = torch.tensor([0.5, 0.0, 2.0, 1.0], device=device)
    x, dy = torch.randn(bsmm.i_shape(5), device=device), torch.randn(bsmm.o_shape(5), device=device)
    w = torch.randn(bsmm.w_shape, device=device)
    full, scale = bsmm.updat(x, dy), gate[:, None, None]
    for gate_grad, dw_gated, want in ((True, False, full * scale), (False, True, full * scale), (False, False, full)):
        leaves = [t.clone().requires_grad_() for t in (x, w, gate)]
        y = bsmm(*leaves[:2], gate=leaves[2], gate_grad=gate_grad, dw_gated=dw_gated)
        torch.testing.assert_close(y, bsmm(x, w * scale), rtol=1e-4, atol=1e-4)
        dx, dw, dg = torch.autograd.grad(y, leaves, dy, allow_unused=True)
        torch.testing.assert_close(dx, bsmm.bprop(dy, w * scale), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(dw, want, rtol=1e-4, atol=1e-4)
        assert (dg is not None) == gate_grad
        if gate_grad:
            torch.testing.assert_close(dg, (full * w).sum((1, 2)), rtol=1e-4, atol=1e-4)


# ---- sums over many products
def test_group_param_grads_round_once(device):
    """512 pairs in bfloat16: the error of one rounding, and none where the result stays in float32."""
    bsmm = bs.BlocksparseMatMul(np.eye(2), 8)
    x, dy = torch.randn(2, 512, 4, 16, device=device).bfloat16().unbind(0)
    pairs = list(zip(x, dy, strict=True))
    exact = bsmm.layout.from_dense(torch.einsum("nrc,nrk->ck", x.double(), dy.double()))

    def error(dw):
        return float(((dw.double() - exact).square().mean() / exact.square().mean()).sqrt())

    assert error(exact.bfloat16()) < 0.0025
    a, b = x.flatten(0, 1).t(), dy.flatten(0, 1)  # PyTorch's product, on a GPU of its tensor cores
    product = torch.mm(a, b, out_dtype=torch.float32) if x.is_cuda else a.float() @ b.float()
    allowed = max(1e-6, 4 * error(bsmm.layout.from_dense(product)))
    for group_size in (1, 8):
        for dw in (bsmm.group_param_grads(pairs, group_size), bs.group_param_grads(pairs, group_size, bsmm=bsmm)):
            assert dw.dtype == torch.bfloat16
            assert error(dw) < 1.1 * error(exact.bfloat16())
        for options in ({"cast32": True}, {"dw_dtype": torch.float32}):
            dw = bsmm.group_param_grads(pairs, group_size, **options)
            assert (dw.dtype, error(dw) < allowed) == (torch.float32, True)
    steps = [bsmm.updat(*pair) for pair in pairs]
    assert error(bs.group_param_grads(steps, cast32=True)) < 0.003, "each step rounded, the sum not"
    assert bs.group_param_grads(steps[0]) is steps[0]
    refused("group_size: expected 1 to 8", bsmm.group_param_grads, pairs, 9)
    refused("dy: expected 4 rows", bsmm.group_param_grads, [(x[0], dy[0, :3]), (x[0, :3], dy[0])] * 8)


def test_dw_dtype_keeps_the_gradient_in_float32(device):
    bsmm = bs.BlocksparseMatMul(np.ones((2, 2)), 8)
    x, dy = torch.randn(2, 64, 16, device=device).bfloat16().unbind(0)
    w = torch.randn(bsmm.w_shape, device=device, requires_grad=True)
    y = bsmm(x, w, dw_dtype=torch.float32)
    assert_bitwise(y, bsmm(x, w.bfloat16()))
    (dw,) = torch.autograd.grad(y, w, dy)
    torch.testing.assert_close(dw.double(), bsmm.layout.from_dense(x.double().T @ dy.double()), rtol=1e-5, atol=1e-5)
    refused("dw_dtype: expected W's own", bsmm, x, w.bfloat16(), dw_dtype=torch.float32)


def test_block_reduced_full_dw_sums_norms(device):
    bsmm = bs.BlocksparseMatMul([[1, 0], [0, 1]], 8)
    pairs = [(torch.randn(5, 16, device=device), torch.randn(5, 16, device=device)) for _ in range(3)]
    want = sum((x.T @ dy).view(2, 8, 2, 8).abs().amax((1, 3)) for x, dy in pairs)
    torch.testing.assert_close(bs.block_reduced_full_dw(pairs, 0.5, "MAX", bsmm=bsmm), want * 0.5)


@pytest.mark.parametrize("shape", [(4, 4), (2, 4), (4, 2)])
def test_ortho_init_of_a_full_layout(shape):
    dense = bs.BlocksparseMatMul(np.ones(shape), 8)
    w = dense.layout.to_dense(dense.ortho_init())
    short = w if w.shape[0] <= w.shape[1] else w.T
    torch.testing.assert_close(short @ short.T, torch.eye(len(short)), rtol=0, atol=1e-5)


def test_recomputable_and_gradients():
    calls = []

    @bs.recomputable
    def block(x):
        calls.append(1)
        return torch.relu(x) * x

    @bs.recomputable("named")
    def other(x, scale=1.0):
        return x * scale

    x = torch.randn(5, requires_grad=True)
    y = block(x, recompute=True)
    (dx,) = bs.gradients(y, [x])
    assert len(calls) == 2
    torch.testing.assert_close(dx, torch.relu(x) * 2)
    assert bs.gradients([other(x, scale=3.0)], x, grad_ys=torch.ones(5))[0].tolist() == [3.0] * 5
    assert bs.gradients(x * 1, [torch.ones(1, requires_grad=True)]) == [None]


# ---- pytorch_block_sparse
@pytest.mark.parametrize("density", [0.3, 0.05, 1.0])
def test_layer_of_torch_nn_linear(density):
    """int(density * blocks) blocks, the dense layer's values there times 1 / sqrt(density), its bias as it is."""
    dense = nn.Linear(96, 64)
    layer = pbs.BlockSparseLinear(0, 0, False, density, torch_nn_linear=dense, block_shape=(16, 16))
    assert layer.block_count == layer.layout.blocks == int(density * 24)
    kept = layer.layout.to_dense(torch.ones_like(layer.weight)).T
    torch.testing.assert_close(layer.to_linear().weight, dense.weight * kept / density**0.5)
    x = torch.randn(3, 96)
    pseudo = pbs.PseudoBlockSparseLinear(layer)
    torch.testing.assert_close(pseudo(x), layer(x), rtol=1e-4, atol=1e-5)
    assert pseudo.density == pytest.approx(layer.density)
    refused("block_shape: expected a square", pbs.BlockSparseLinear, 64, 64, block_shape=(16, 32))
    refused("density: expected 0 to 1", pbs.BlockSparseLinear, 64, 64, density=1.5)


def test_patcher_as_the_reference_has_it(capsys):
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    mp = pbs.BlockSparseModelPatcher()
    assert [entry["regexp"] for entry in mp.get_patchable_layers(model)] == ["0", "2"]
    mp.patch_model(model)
    assert "did not patch anything" in capsys.readouterr().out
    mp.add_pattern("2", {"density": 0.5, "pseudo_linear": True})
    mp.add_pattern("[02]", {"density": 0.5})
    mp.patch_model(model)
    assert [type(m).__name__ for m in model] == ["BlockSparseLinear", "ReLU", "PseudoBlockSparseLinear"]
    mp.add_pattern("1", {"density": 0.5})
    refused("expected an nn.Linear, got 1, a ReLU", mp.patch_model, nn.Sequential(nn.Linear(8, 8), nn.ReLU()))


@pytest.mark.parametrize("distribution", ["uniform", "gaussian"])
def test_sparse_optimizer_fills_new_places(distribution):
    model = nn.Sequential(pbs.BlockSparseLinear(96, 96, density=0.5, block_shape=(16, 16)))
    (layer,) = pbs.SparseOptimizer.sparse_objects(model)
    with torch.no_grad():
        layer.weight.normal_(3.0, 1.0)
    adam = torch.optim.Adam(model.parameters())
    sparse = pbs.SparseOptimizer(
        [layer], lr=0.3, method="magnitude", new_coefficients_scale=0.5, new_coefficients_distribution=distribution
    )
    sparse.attach_optimizer(adam)
    model(torch.randn(4, 96)).sum().backward()
    adam.step()
    before, coords = layer.weight.detach().clone(), layer.coords.clone()
    spread, mean = float(before.std()), float(before.mean())
    sparse.step()
    moved = (layer.coords != coords).any(1)
    assert moved.sum() == int(0.3 * layer.block_count)
    assert_bitwise(layer.weight[~moved], before[~moved])
    fresh = layer.weight[moved].detach()
    if distribution == "uniform":
        assert float(fresh.abs().max()) <= 0.5 * spread
        assert float(fresh.std()) == pytest.approx(spread / 12**0.5, rel=0.1)
    else:
        assert float(fresh.mean()) == pytest.approx(0.5 * mean, rel=0.1)
    assert not adam.state[layer.weight]["exp_avg"][moved].any()
    refused("method: expected magnitude", pbs.SparseOptimizer, [layer], method="random")
    refused("sparse_objects: expected BlockSparseLinear", pbs.SparseOptimizer, [nn.Linear(8, 8)])
    refused("no other group", sparse.add_param_group, {"sparse_objects": [layer]})


# ---- models whose modules read their layers' weights
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("change", ["prune", "patch"])
def test_pytorchs_transformer(device, change, padded):
    """Its fused inference paths read `.weight`: eval mode gives what the layers compute, with padding, too."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).to(device).eval()
    if change == "prune":
        with pytest.warns(UserWarning, match="layers.0.self_attn.out_proj, layers.1.self_attn.out_proj: left dense"):
            prune(model, 0.5, 16)
    else:
        patch(model, {r".*linear[12]": {"density": 0.5, "block_size": 16}})
    assert isinstance(model.layers[1].linear2, BlockSparseLinear)
    assert type(model.layers[0].self_attn.out_proj).__name__ == "NonDynamicallyQuantizableLinear"
    x = torch.randn(2, 7, 64, device=device)
    mask = torch.zeros(2, 7, dtype=torch.bool, device=device)
    mask[1, 4:] = padded
    options = {"src_key_padding_mask": mask} if padded else {}
    dense = copy.deepcopy(model)
    for layer in dense.layers:
        layer.linear1, layer.linear2 = layer.linear1.to_linear(), layer.linear2.to_linear()
    with torch.no_grad():
        got, want = model(x, **options), dense(x, **options)
    torch.testing.assert_close(got[~mask], want[~mask], rtol=1e-4, atol=1e-5)


def test_the_output_projection_of_attention_is_refused():
    model = nn.Sequential(nn.MultiheadAttention(32, 2))
    refused("expected layers that are called, got 0.out_proj", patch, model, {"0.out_proj": {"density": 0.5}})
    mp = pbs.BlockSparseModelPatcher()
    mp.add_pattern("0.out_proj", {"density": 0.5})
    refused("expected layers that are called, got 0.out_proj", mp.patch_model, model)


def test_pruned_hugging_face_models_are_saved_and_loaded(monkeypatch, tmp_path, caplog):
    """By from_pretrained alone; layouts that change before the model is saved are the ones that are loaded."""
    monkeypatch.setitem(sys.modules, "torchvision", None)
    transformers = pytest.importorskip("transformers")
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=100, **config)).eval()
    prune(model, 0.5, 16, exclude="pooler.*")
    dense = model.encoder.layer[0].output.dense
    dense.set_layout(type(dense.layout)(dense.layout.mask().logical_not() | dense.layout.mask(), 16))
    ids = torch.randint(100, (2, 9))
    with torch.no_grad():
        want = model(ids).last_hidden_state
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModel.from_pretrained(tmp_path).eval()
        assert_bitwise(loaded(ids).last_hidden_state, want)
        assert loaded.encoder.layer[0].output.dense.layout == dense.layout
        assert isinstance(loaded.pooler.dense, nn.Linear)
        loaded.save_pretrained(tmp_path / "again")
        assert_bitwise(transformers.AutoModel.from_pretrained(tmp_path / "again")(ids).last_hidden_state, want)
    # A process that does not know of sbnet is told so before it lists the weights that do not fit.
    auto = transformers.quantizers.auto
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "sbnet_blocksparse")
    transformers.logging.enable_propagation()
    with caplog.at_level("WARNING", "transformers"), pytest.raises(RuntimeError):
        transformers.AutoModel.from_pretrained(tmp_path)
    assert "Unknown quantization type, got sbnet_blocksparse" in caplog.text
    assert register_transformers() is type(model.config.quantization_config)
