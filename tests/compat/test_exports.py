"""Everything exports: functions of block-sparse weights and of the compatible modules, as ONNX Runtime runs them."""

import numpy as np
import pytest
import torch
from torch import nn

import sbnet.compat.blocksparse as bs
from sbnet import BlockLayout, blocksparse_weight_grad, export
from sbnet.weights import l2_normalize
from support.weight_cases import random_layout

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

LAYOUT = random_layout(4, 5, 16, ragged=3)
BLOCKS = torch.randn(LAYOUT.weight_shape)
X, Y, V = torch.randn(6, 8), torch.randn(6, 8), torch.rand(8) + 0.5
PLANE = torch.randn(2, 8, 5, 7)
BST = bs.BlocksparseTransformer(np.tril(np.ones((3, 3))), 8, 2, lambda shape, h, q, k, b: np.tril(np.ones(shape)))
MASK = bs.dropout(X, 0.7)[1]
CONV = bs.BlocksparseConv([[range(0, 8), range(0, 4)]], (3, 3), (5, 7))
EDGE = bs.ConvEdgeBias((2, 5, 7, 8), (2, 5, 7, 8), (3, 3, 8, 8))
PROJ = bs.SparseProj(6, nproj=3)


def pairs(*tensors):
    return list(zip(tensors[::2], tensors[1::2], strict=True))


# name: (function, its tensors)
CALLS = {
    "l2_normalize": (lambda w: l2_normalize(w, LAYOUT), [BLOCKS]),
    "l2_normalize, gain": (lambda w, g: l2_normalize(w, LAYOUT, g), [BLOCKS, torch.rand(LAYOUT.out_features)]),
    "to_dense": (LAYOUT.to_dense, [BLOCKS]),
    "from_dense": (LAYOUT.from_dense, [torch.randn(LAYOUT.shape)]),
    "blocksparse_weight_grad": (
        lambda *t: blocksparse_weight_grad(pairs(*t), LAYOUT),
        [torch.randn(9, n) for n in LAYOUT.shape],
    ),
    "blocksparse_weight_grad, eleven pairs": (
        lambda *t: blocksparse_weight_grad(pairs(*t), LAYOUT),
        [torch.randn(9, n) for n in LAYOUT.shape] * 11,
    ),
    "blocksparse_weight_grad, halves to float32": (
        lambda *t: blocksparse_weight_grad(pairs(*t), LAYOUT, dtype=torch.float32),
        [torch.randn(9, n).half() for n in LAYOUT.shape],
    ),
    "BlocksparseConv.l2_normalize": (CONV.l2_normalize, [torch.randn(CONV.f_shape())]),
    "ConvEdgeBias": (EDGE, [torch.randn(2, 5, 7, 8), torch.randn(EDGE.shape), torch.randn(EDGE.shape)]),
    "SparseProj.scatter_mul": (PROJ.scatter_mul, [X, torch.randn(3, 8)]),
    "add, halves and float32": (bs.add, [X.half(), V]),
    "maximum": (bs.maximum, [X, Y]),
    "minimum": (bs.minimum, [X, V]),
    "gelu": (bs.gelu, [X]),
    "bias_relu": (lambda x, b: bs.bias_relu(x, b, fast_gelu=True), [X, V]),
    "cwise_linear": (lambda x, g, b: bs.cwise_linear(x, g, b, True, True), [PLANE, V, V]),
    "filter_tensor": (lambda x: bs.filter_tensor(x, 2.0, 1.5, True, True), [X / (X > -1)]),
    "float_cast": (lambda x: bs.float_cast(x, torch.float16), [X]),
    "dropout, given mask": (lambda x, m: bs.dropout(x, 0.7, m)[0], [X, MASK]),
    "dropout, mask that broadcasts": (lambda x, m: bs.dropout(x, 0.7, m, (6, 1))[0], [X, MASK[:1]]),
    "concrete_gate_infer": (bs.concrete_gate_infer, [X]),
    "sparse_relu": (bs.sparse_relu, [X]),
    "fused_lstm_gates": (lambda c, g: bs.fused_lstm_gates(c, g), [X[:, :2], Y]),
    "layer_norm": (lambda x, g, b: bs.layer_norm(x, g, b, segments=2, relu=True), [X, V, V]),
    "layer_norm, halves": (bs.layer_norm, [X.half(), V, V]),
    "batch_norm": (bs.batch_norm, [PLANE, V, V]),
    "quantize": (
        lambda x: bs.quantize(x, bs.QuantizeSpec(4, 3)), [torch.randn(4000) * 10.0 ** torch.randint(-4, 4, (4000,))]
    ),
    "quantize, powers of two": (lambda x: bs.quantize(x, bs.QuantizeSpec(5, 2)), [2.0 ** torch.arange(-30, 30)]),
    "quantize, no denormal numbers": (lambda x: bs.quantize(x, bs.QuantizeSpec(4, 3, denorm=False)), [X / 50]),
    "softmax": (lambda x: bs.softmax(x, 0.3), [X]),
    "masked_softmax": (lambda x, m: bs.masked_softmax(x, m, 0.3), [X, (Y > 0).float()]),
    "masked_top_k_softmax": (lambda x, m: bs.masked_top_k_softmax(x, 3, m), [X, (Y > -2).float()]),
    "top_k": (lambda x: bs.top_k(x, 3), [X]),
    "rectified_top_k": (lambda x: bs.rectified_top_k(x, 3), [X]),
    "softmax_cross_entropy": (bs.softmax_cross_entropy, [X, torch.arange(6)]),
    "embedding_lookup": (bs.embedding_lookup, [X, torch.tensor([[0, 5], [2, 2]])]),
    "fancy_gather": (bs.fancy_gather, [X, torch.arange(6)]),
    "reduce_max": (lambda x: bs.reduce_max(x, 1), [X]),
    "transpose_0213": (bs.transpose_0213, [PLANE]),
    "BlocksparseTransformer": (
        lambda q, k, v: BST.weight_value_op(BST.masked_softmax(BST.query_key_op(q, k), 0.25), v),
        [torch.randn(2, 24, 32) for _ in range(3)],
    ),
}  # fmt: skip


class Calls(nn.Module):
    """Each function on tensors of its own, side by side: an export takes a second, whatever is in it."""

    def __init__(self, *names):
        super().__init__()
        self.names = names
        self.tensors = tuple(t.clone() for name in names for t in CALLS[name][1])

    def forward(self, *tensors):
        rest, results = list(tensors), []
        for name in self.names:
            function, own = CALLS[name]
            y = function(*[rest.pop(0) for _ in own])
            results += y if isinstance(y, tuple) else [y]
        return tuple(results)

    def owners(self):
        """The name of the function of each result."""
        results = ((name, CALLS[name][0](*CALLS[name][1])) for name in self.names)
        return [name for name, y in results for _ in (y if isinstance(y, tuple) else (y,))]


@pytest.mark.parametrize("part", range(5))
def test_exports(part, tmp_path):
    calls, path = Calls(*list(CALLS)[part::5]), tmp_path / "calls.onnx"
    export.to_onnx(calls, calls.tensors, path)
    session = export.session(path, ["CPUExecutionProvider"])
    inputs = zip(session.get_inputs(), calls.tensors, strict=True)
    got = session.run(None, {i.name: t.numpy() for i, t in inputs})
    for name, ours, plain in zip(calls.owners(), got, calls(*calls.tensors), strict=True):
        result = torch.from_numpy(ours)
        assert result.dtype == plain.dtype, name
        exact = name.startswith(("quantize", "dropout", "to_dense", "from_dense", "top_k", "float_cast"))
        tolerance = 0 if exact else 2e-3 if plain.dtype == torch.float16 else 1e-5
        message = lambda said, name=name: f"{name}: {said}"  # noqa: E731
        torch.testing.assert_close(result, plain, rtol=tolerance, atol=tolerance, equal_nan=True, msg=message)


def test_a_weight_gradient_is_one_node(tmp_path):
    """However many pairs: they are joined row by row."""
    onnx = pytest.importorskip("onnx")
    for name in ("blocksparse_weight_grad", "blocksparse_weight_grad, eleven pairs"):
        calls = Calls(name)
        export.to_onnx(calls, calls.tensors, tmp_path / "call.onnx")
        nodes = [n for n in onnx.load(tmp_path / "call.onnx").graph.node if n.domain == "sbnet"]
        assert [n.op_type for n in nodes] == ["blocksparse_weight_grad"]
    assert isinstance(LAYOUT, BlockLayout)
