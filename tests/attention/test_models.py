"""BlockSparseAttention, Hugging Face models: against reference.block_attention and dense layers."""

import contextlib

import pytest
import torch
from torch import nn

from sbnet import AttentionLayout
from sbnet.attention import register_attention
from sbnet.benchmarks.harness.nets import torchvision
from sbnet.nn import BlockSparseAttention
from support.helpers import assert_bitwise
from support.refusals import refused


def heads_of(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


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
