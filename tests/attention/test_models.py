"""The older APIs, BlockSparseAttention, Hugging Face models: against reference.block_attention and dense layers."""

import contextlib

import pytest
import torch
from torch import nn

from sbnet import AttentionLayout, block_attention, reference
from sbnet.attention import BlocksparseTransformer, attention_impl, blocksparse_attention_impl, register_attention
from sbnet.benchmarks.harness.nets import torchvision
from sbnet.nn import BlockSparseAttention
from support.attention_cases import make, random_layout
from support.helpers import assert_bitwise
from support.refusals import refused


def heads_of(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        ("all", AttentionLayout.causal()),
        ("local", AttentionLayout.local(32)),
        ("strided", AttentionLayout.strided(32)),
        ("fixed", AttentionLayout.fixed(32, 2, 1, 16)),
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_functions_of_sparse_attention(device, mode, layout, recompute):
    """(B, T, heads * D), each mode, with and without recomputation: values and gradients."""
    q, k, v = (torch.randn(2, 128, 64, device=device, requires_grad=True) for _ in range(3))
    if mode == "fixed":
        got = blocksparse_attention_impl(q, k, v, 4, mode, 32, 16, 2, 1, recompute=recompute)
    else:
        got = attention_impl(q, k, v, 4, mode, 32, recompute=recompute)
        assert_bitwise(got, blocksparse_attention_impl(q, k, v, 4, mode, 32))
    want = reference.block_attention(*(heads_of(t, 4) for t in (q, k, v)), layout).transpose(1, 2).flatten(2)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_functions_of_sparse_attention_refuse():
    q = torch.zeros(1, 48, 64)
    refused("attn_mode", attention_impl, q, q, q, 4, "fixed", 32)
    refused("local_attn_ctx", attention_impl, q, q, q, 4, "local")
    refused("local_attn_ctx", blocksparse_attention_impl, q, q, q, 4, "fixed")
    refused("blocksize", blocksparse_attention_impl, q, q, q, 4, "local", 32, 32)
    refused("multiples of the stride", attention_impl, q, q, q, 4, "strided", 32)


@pytest.mark.parametrize("block", [8, 32])
def test_three_ops(device, block):
    """query_key, masked_softmax, weight_value are block_attention in steps; gradients too; the transposed product."""
    q, k, v, grad = make(device, length=128, dim=32)
    layout = random_layout(2, 128, block, causal=True)
    bst = BlocksparseTransformer(layout, 2, 128, block_size=block)
    w = bst.query_key_op(q, k)
    assert w.shape == (2, bst.blocks, block, block)
    p = bst.masked_softmax(w, 32**-0.5)
    got, want = bst.weight_value_op(p, v), block_attention(q, k, v, layout)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for a, b in zip(*(torch.autograd.grad(y, (q, k, v), grad, retain_graph=True) for y in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    (dv,) = torch.autograd.grad(got, v, grad)
    torch.testing.assert_close(bst.weight_value_transposed_op(p, grad), dv, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("k", [1, 5, 1000])
def test_top_k(device, k):
    q, key, _, _ = (t.detach() for t in make(device, length=64, dim=32))
    layout = AttentionLayout.local(20)
    bst = BlocksparseTransformer(layout, 2, 64, block_size=16)
    got = bst.masked_top_k_softmax(bst.query_key_op(q, key), k, 0.3)
    scores = (q @ key.mT * 0.3).masked_fill(~layout.visible(2, 64, 64).to(device), -torch.inf)
    least = scores.topk(min(k, 64), -1).values[..., -1:]
    want = scores.masked_fill(scores < least, -torch.inf).softmax(-1)
    eye = torch.eye(64, device=device).expand(2, 2, 64, 64)
    torch.testing.assert_close(bst.weight_value_op(got, eye), want, rtol=1e-4, atol=1e-5)


def test_three_ops_refuse():
    refused("block_size", BlocksparseTransformer, AttentionLayout.causal(), 2, 100)
    bst = BlocksparseTransformer(AttentionLayout.causal(), 2, 64)
    refused("q: expected", bst.query_key_op, torch.zeros(1, 3, 64, 16), torch.zeros(1, 2, 64, 16))
    refused("k: expected 1", bst.masked_top_k_softmax, torch.zeros(1, bst.blocks, 32, 32), 0)


def test_layer_of_a_dense_one(device):
    """With a causal layout it is nn.MultiheadAttention with a causal mask."""
    dense = nn.MultiheadAttention(64, 4, batch_first=True, device=device)
    layer = BlockSparseAttention.from_dense(dense, AttentionLayout.causal())
    x = torch.randn(2, 50, 64, device=device)
    mask = torch.ones(50, 50, dtype=torch.bool, device=device).triu(1)
    torch.testing.assert_close(layer(x), dense(x, x, x, attn_mask=mask)[0], rtol=1e-4, atol=1e-5)
    lengths = torch.tensor([50, 20], dtype=torch.int32, device=device)
    padding = torch.arange(50, device=device) >= lengths[:, None]
    layer.layout = AttentionLayout.dense()
    want = dense(x, x, x, key_padding_mask=padding)[0]
    torch.testing.assert_close(layer(x, lengths=lengths), want, rtol=1e-4, atol=1e-5)
    fewer = BlockSparseAttention(64, 4, AttentionLayout.local(8), kv_heads=2, dropout=0.5).to(device)
    assert fewer(x).shape == x.shape
    assert not torch.equal(fewer(x), fewer(x))
    assert_bitwise(fewer.eval()(x), fewer(x))
    refused("num_heads", BlockSparseAttention, 64, 5, AttentionLayout.dense())


def test_hugging_face(device):
    """A small GPT-2 and a small Llama (grouped heads, a cache): a causal layout gives what sdpa gives."""
    with contextlib.suppress(ImportError):  # transformers imports it where it is there
        torchvision()
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "AttentionInterface"):
        pytest.skip("needs a transformers with AttentionInterface")
    register_attention("sbnet_causal", AttentionLayout.causal())
    register_attention("sbnet_local", AttentionLayout.local(8))
    sizes = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    configs = (
        transformers.GPT2Config(vocab_size=50, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0),
        transformers.LlamaConfig(**sizes, num_key_value_heads=2, intermediate_size=64),
    )
    ids = torch.randint(50, (2, 40), device=device)
    for config in configs:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(device).eval()
        want = model(ids).logits
        model.set_attn_implementation("sbnet_causal")
        torch.testing.assert_close(model(ids).logits, want, rtol=1e-3, atol=1e-4)
        start = model(ids[:, :30], use_cache=True)
        rest = model(ids[:, 30:], past_key_values=start.past_key_values)
        torch.testing.assert_close(rest.logits, want[:, 30:], rtol=1e-3, atol=1e-4)
        model.set_attn_implementation("sbnet_local")
        assert not torch.allclose(model(ids).logits, want, rtol=1e-3, atol=1e-4)
