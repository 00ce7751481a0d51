"""sparse_attention's functions and blocksparse's BlocksparseTransformer: against reference.block_attention, with
gradients."""

import numpy as np
import pytest
import torch

from sbnet import AttentionLayout, reference
from sbnet.compat.blocksparse import BlocksparseTransformer, bst_conv_layout, bst_deconv_layout
from sbnet.compat.sparse_attention import (
    attention_impl,
    blocksparse_attention_impl,
    get_attn_mask,
    get_blocksparse_obj,
    get_callback,
    merge_heads,
    split_heads,
    strided_transpose,
)
from support.helpers import assert_bitwise
from support.refusals import refused


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
    want = reference.block_attention(*(split_heads(t, 4) for t in (q, k, v)), layout).transpose(1, 2).flatten(2)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_functions_of_sparse_attention_refuse():
    q = torch.zeros(1, 48, 64)
    refused("attn_mode", attention_impl, q, q, q, 4, "fixed", 32)
    refused("local_attn_ctx", attention_impl, q, q, q, 4, "local")
    refused("local_attn_ctx", blocksparse_attention_impl, q, q, q, 4, "fixed")
    refused("blocksize", blocksparse_attention_impl, q, q, q, 4, "local", 32, 32)
    refused("multiples of the stride", blocksparse_attention_impl, q, q, q, 4, "strided", 32, 16)


@pytest.mark.parametrize(
    ("n", "width", "mode"), [(100, 16, "strided"), (64, 8, "all"), (33, 20, "local"), (16, 512, "all")]
)
def test_attention_impl_takes_what_the_dense_one_does(device, n, width, mode):
    """Positions that are no multiple of the stride, and widths of heads that no kernel has."""
    q, k, v = (torch.randn(2, n, 2 * width, device=device, requires_grad=True) for _ in range(3))
    got = attention_impl(q, k, v, 2, mode, 32)
    at = torch.arange(n)
    distance = at[:, None] - at
    seen = {"all": distance >= 0, "local": (distance >= 0) & (distance < 32)}
    seen["strided"] = (distance >= 0) & (distance % 32 == 0)
    assert_bitwise(get_attn_mask(n, mode, 32)[0, 0] > 0, seen[mode])
    wide = [t.detach().double() for t in (q, k, v)]
    left, right, values = (split_heads(t, 2) for t in wide)
    scores = (left @ right.mT / width**0.5).masked_fill(~seen[mode].to(device), -torch.inf)
    want = merge_heads(scores.softmax(-1) @ values)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    again = attention_impl(q, k, v, 2, mode, 32, recompute=True)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (got, again)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("mode", ["all", "local", "strided", "fixed"])
def test_get_blocksparse_obj_in_three_steps(mode):
    """What blocksparse_attention_impl computes, in the reference's own steps."""
    q, k, v = (torch.randn(2, 128, 64) for _ in range(3))
    bst = get_blocksparse_obj(128, 4, mode, 16, 32 if mode == "fixed" else 8, num_verts=2)
    context = 32 if mode == "fixed" else 8
    turned = [strided_transpose(t, 128, 8, 16) if mode == "strided" else t for t in (q, k, v)]
    w = bst.masked_softmax(bst.query_key_op(*turned[:2]), scale=16**-0.5)
    got = bst.weight_value_op(w, turned[2])
    if mode == "strided":
        got = got.unflatten(1, (8, 16)).transpose(1, 2).flatten(1, 2)
    want = blocksparse_attention_impl(q, k, v, 4, mode, context, 16, 2, 1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_get_callback():
    """A diagonal block under "all", the border of the band under "local"."""
    assert_bitwise(torch.from_numpy(get_callback("all")((4, 4), 0, 1, 1, 0)), torch.ones(4, 4).tril().bool())
    assert get_callback("strided")((4, 4), 0, 2, 1, 0).all()
    band = get_callback("local", 4)((4, 4), 0, 2, 1, 0)
    assert_bitwise(torch.from_numpy(band), torch.ones(4, 4).triu(1).bool())
    refused("attn_mode", get_callback, "wide")


def tables(heads, q_blocks, k_blocks, seed=0):
    """[heads, q, k] with as many blocks for every head, and a callback that hides some elements of each."""
    rng = np.random.default_rng(seed)
    per_row = rng.integers(0, k_blocks + 1, q_blocks)
    layout = np.stack([[rng.permutation(np.arange(k_blocks) < n) for n in per_row] for _ in range(heads)])
    hidden = rng.random((heads, q_blocks, k_blocks, 8, 8)) < 0.3
    return layout, lambda shape, h, q, k, b: ~hidden[h, q, k], hidden


def dense(q, k, v, visible, heads, scale):
    """Rows that see nothing are zeros."""
    left, right, values = (split_heads(t, heads) for t in (q, k, v))
    scores = (left @ right.mT * scale).masked_fill(~visible, -torch.inf)
    p = torch.softmax(scores, -1).nan_to_num(0.0)
    return merge_heads(p @ values), p


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_blocksparse_transformer(device, shared, masked):
    """Shapes, blocks and callbacks of the reference; values, gradients and the transposed product."""
    heads = 2
    layout, callback, hidden = tables(1 if shared else heads, 5, 7)
    bst = BlocksparseTransformer(
        layout[0] if shared else layout, 8, heads if shared else None, callback if masked else None
    )
    assert bst.blocks == layout[0].sum()
    assert bst.block_coord(bst.blocks - 1) == tuple(np.argwhere(layout[0])[-1])
    visible = layout[..., None, None] & (~hidden if masked else np.ones((8, 8), bool))
    visible = torch.from_numpy(visible.swapaxes(2, 3).reshape(len(layout), 40, 56)).to(device)
    q, k, v = (torch.randn(3, n, heads * 16, device=device, requires_grad=True) for n in (40, 56, 56))
    w = bst.query_key_op(q, k)
    assert w.shape == (3, heads, bst.blocks, 8, 8)
    p = bst.masked_softmax(w, 0.25)
    got = bst.weight_value_op(p, v)
    want, _ = dense(q, k, v, visible, heads, 0.25)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    direction = torch.randn_like(got)
    grads = [torch.autograd.grad(y, (q, k, v), direction, retain_graph=True) for y in (got, want)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b.nan_to_num(0.0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bst.tn_op(p, direction), grads[0][2], rtol=1e-4, atol=1e-5)
    if masked:
        at, keys = torch.arange(40, device=device)[:, None], torch.arange(56, device=device)
        want, _ = dense(q, k, v, visible & ((keys < 20) | (keys <= at)), heads, 0.25)
        got = bst.weight_value_op(bst.masked_softmax(w, 0.25, autoregress_at_key=20), v)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            top = (split_heads(q, heads) @ split_heads(k, heads).mT).masked_fill(~visible, -torch.inf)
            least = top.topk(5, -1).values[..., -1:]
            want, _ = dense(q, k, v, visible & (top >= least), heads, 0.25)
            got = bst.weight_value_op(bst.masked_top_k_softmax(w, 5, 0.25), v)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    else:
        refused("autoregress_at_key", bst.masked_softmax, w, 1.0, 3)


def test_blocksparse_transformer_refuses():
    ones = np.ones((2, 2))
    refused("heads: expected", BlocksparseTransformer, ones, 8)
    refused("block_size", BlocksparseTransformer, ones, 9, 2)
    refused("as many blocks for every head", BlocksparseTransformer, np.stack([ones, np.eye(2)]), 8)
    bst = BlocksparseTransformer(ones, 8, 2)
    refused("q: expected", bst.query_key_op, torch.zeros(1, 24, 16), torch.zeros(1, 16, 16))
    refused("k: expected 1", bst.masked_top_k_softmax, torch.zeros(1, 2, 4, 8, 8), 0)


def test_layouts_of_convolutions():
    """(layout, callback) as the reference returns them, for BlocksparseTransformer: what the native layouts see."""
    from sbnet.attention import conv_layout, deconv_layout

    for make, native in ((bst_conv_layout, conv_layout), (bst_deconv_layout, deconv_layout)):
        layout, callback = make(8, 8, 3, 3, blk_size=16)
        bst = BlocksparseTransformer(layout, 16, 1, callback)
        q, k, v = (torch.randn(1, 64, 16) for _ in range(3))
        got = bst.weight_value_op(bst.masked_softmax(bst.query_key_op(q, k), 0.25), v)
        want = reference.block_attention(*(t[:, None] for t in (q, k, v)), native(8, 8, 3, 3, block_size=16))
        torch.testing.assert_close(got, want[:, 0], rtol=1e-4, atol=1e-5)
